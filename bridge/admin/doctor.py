"""Which checks `sms-bridge check` makes of a set-up, in which order, and how they are run.

With --online it is tried against the real thing, and nothing is changed: no check sends an SMS,
publishes a message, takes one or creates anything. All run at the same time, each with a deadline,
but for those that share the management API.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from bridge.admin.checks.alarms import check_alarms
from bridge.admin.checks.clock import check_brokers_clock
from bridge.admin.checks.connections import connect_to_all, judge_attempts
from bridge.admin.checks.consumers import check_consumers
from bridge.admin.checks.exchanges import check_exchanges
from bridge.admin.checks.open_files import check_open_files
from bridge.admin.checks.permissions import check_permissions
from bridge.admin.checks.queues import check_queues
from bridge.admin.checks.replicas import check_replicas
from bridge.admin.checks.set_up import WAIT_SECONDS, ConnectedBroker, ManagedBroker, SetUp
from bridge.admin.checks.sms_api import (
    check_answers,
    check_sms_api,
    judge_base_url,
    judge_repeats,
)
from bridge.admin.checks.topology import check_topology
from bridge.admin.checks.webhooks import check_webhooks
from bridge.admin.finding import Finding
from bridge.admin.management import open_management
from bridge.config import Role, Settings
from bridge.deadline import Deadline
from bridge.errors import BrokerError, ConfigError

# Every check, in the order in which its findings are printed. A check that fails or times out is
# reported by its name.

# Without --online: these ask nothing of any server.
OFFLINE: Final = (judge_base_url, judge_repeats)
# Then whether each URL of the broker connects; on the first one that does:
ON_THE_BROKER: Final[Mapping[str, Callable[[ConnectedBroker], Awaitable[list[Finding]]]]] = {
    "topology": check_topology,
    "permissions": check_permissions,
    "consumers": check_consumers,
}
# Through its management API, one after the other:
ON_THE_MANAGEMENT_API: Final = (
    check_alarms,
    check_brokers_clock,
    check_queues,
    check_replicas,
    check_exchanges,
)
# Beside the broker:
ELSEWHERE: Final[Mapping[str, Callable[[SetUp], Awaitable[list[Finding]]]]] = {
    "files": check_open_files,
    "API": check_sms_api,
    "answers": check_answers,
    "webhooks": check_webhooks,
}

# What only the management API tells.
_NOT_CHECKED: Final = (
    "limits and policies that drop messages, bindings, alternate exchanges, alarms, replicas"
)


def examine_offline(settings: Settings, roles: Collection[Role]) -> list[Finding]:
    """Say what looks wrong in a configuration with which these roles start."""
    set_up = SetUp(settings=settings, roles=roles)
    return [finding for check in OFFLINE for finding in check(set_up)]


async def examine(
    settings: Settings, roles: Collection[Role], *, management: str | None = None
) -> list[Finding]:
    """Make every check for these roles and return what they found, in a fixed order.

    `management` is the URL of the management API when it is not on the broker's host and usual
    port. Raises ConfigError when a file that a setting names cannot be read.
    """
    set_up = SetUp(settings=settings, roles=roles, management_url=management)
    checks = {name: check(set_up) for name, check in ELSEWHERE.items()}
    return await _run({"broker": _check_broker(set_up), **checks}, WAIT_SECONDS * 3)


async def _check_broker(set_up: SetUp) -> list[Finding]:
    async with contextlib.AsyncExitStack() as stack:
        attempts = await connect_to_all(set_up, stack)
        findings = judge_attempts(attempts)
        broker = next((one.broker for one in attempts if one.broker is not None), None)
        if broker is None:
            return findings
        checks = {name: check(broker) for name, check in ON_THE_BROKER.items()}
        checks["management"] = _check_through_management(broker)
        return findings + await _run(checks, WAIT_SECONDS * 2)


async def _check_through_management(broker: ConnectedBroker) -> list[Finding]:
    set_up = broker.set_up
    async with open_management(set_up.settings.rabbitmq, set_up.management_url) as management:
        subject = f"management {management.url.host}:{management.url.port}"
        managed = ManagedBroker(set_up=set_up, management=management, version=broker.version)
        findings = [Finding(subject, "ok", "answers")]
        try:
            async with Deadline(WAIT_SECONDS):
                for check in ON_THE_MANAGEMENT_API:
                    findings += await check(managed)
        except (BrokerError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            return [
                Finding(
                    subject,
                    "warn",
                    f"{why}; not checked: {_NOT_CHECKED}",
                    "rabbitmq-plugins enable rabbitmq_management, give the user the tag "
                    "`monitoring`, or name it with --management-url",
                )
            ]
        return findings


async def _run(checks: Mapping[str, Awaitable[list[Finding]]], seconds: float) -> list[Finding]:
    """Run checks at the same time; one that fails or times out does not affect the others."""
    results = await asyncio.gather(*(_run_one(*named, seconds) for named in checks.items()))
    return [finding for found in results for finding in found]


async def _run_one(name: str, check: Awaitable[list[Finding]], seconds: float) -> list[Finding]:
    try:
        async with Deadline(seconds):
            return await check
    except ConfigError:
        raise
    except TimeoutError:
        return [Finding(name, "fail", "did not answer in time", "look at it, and run this again")]
    except Exception as error:  # noqa: BLE001  the other checks have something to say
        text = str(error) if isinstance(error, BrokerError) else type(error).__name__
        return [Finding(name, "fail", f"could not be looked at: {text}", "run it again")]
