"""The checks of `sms-bridge check`: the tables that list them, and the code that runs them.

The online checks try the real broker and API and change nothing: no check sends an SMS, publishes
or consumes a message, or creates anything. They run concurrently, each with a deadline; checks
that need the management API run one after the other.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from bridge.admin.checks.broker import (
    check_consumers,
    check_permissions,
    check_topology,
    connect,
)
from bridge.admin.checks.findings import WAIT_SECONDS, CheckedBroker, Finding, SetUp
from bridge.admin.checks.local import (
    check_answers,
    check_webhooks,
    judge_base_url,
    judge_receipts,
    judge_repeats,
)
from bridge.admin.checks.management_api import (
    check_alarms,
    check_brokers_clock,
    check_exchanges,
    check_queues,
    check_replicas,
)
from bridge.admin.checks.sms_api import check_sms_api
from bridge.admin.management import open_management
from bridge.config import Role, Settings
from bridge.deadline import Deadline
from bridge.errors import BrokerError, ConfigError

# Every check, in the order in which the findings are printed. The names are those under which a
# check is reported that fails or times out.

# These need no server, and run without --online too.
OFFLINE: Final = (judge_base_url, judge_repeats, judge_receipts)
# On the first connection to the broker:
ON_THE_BROKER: Final[Mapping[str, Callable[[CheckedBroker], Awaitable[list[Finding]]]]] = {
    "topology": check_topology,
    "permissions": check_permissions,
    "consumers": check_consumers,
}
# Through the broker's management API, one after the other:
ON_THE_MANAGEMENT_API: Final = (
    check_alarms,
    check_brokers_clock,
    check_queues,
    check_replicas,
    check_exchanges,
)
# Independent of the broker:
ELSEWHERE: Final[Mapping[str, Callable[[SetUp], Awaitable[list[Finding]]]]] = {
    "API": check_sms_api,
    "answers": check_answers,
    "webhooks": check_webhooks,
}

# Checks that need the management API.
_NOT_CHECKED: Final = (
    "limits and policies that drop messages, bindings, alternate exchanges, alarms, replicas"
)


def examine_offline(settings: Settings, roles: Collection[Role]) -> list[Finding]:
    """Check a configuration with which these roles can start, without asking a server."""
    set_up = SetUp(settings=settings, roles=roles)
    return [finding for check in OFFLINE for finding in check(set_up)]


async def examine(
    settings: Settings, roles: Collection[Role], *, management: str | None = None
) -> list[Finding]:
    """Run every online check for these roles and return the findings, in a fixed order.

    `management` is the URL of the management API unless that is the broker's host and the usual
    port. Raises ConfigError if a file that a setting names cannot be read.
    """
    set_up = SetUp(settings=settings, roles=roles, management_url=management)
    checks = {name: check(set_up) for name, check in ELSEWHERE.items()}
    return await _run({"broker": _check_broker(set_up), **checks}, WAIT_SECONDS * 3)


async def _check_broker(set_up: SetUp) -> list[Finding]:
    rabbitmq = set_up.settings.rabbitmq
    async with contextlib.AsyncExitStack() as stack:
        opened, findings = await connect(rabbitmq, stack)
        if not opened:
            return findings
        management = open_management(rabbitmq, set_up.management_url)
        broker = CheckedBroker(
            settings=set_up.settings,
            roles=set_up.roles,
            url=opened[0][0],
            connection=opened[0][1],
            management=await stack.enter_async_context(management),
        )
        checks = {name: check(broker) for name, check in ON_THE_BROKER.items()}
        checks["management"] = _check_through_management(broker)
        return findings + await _run(checks, WAIT_SECONDS * 2)


async def _check_through_management(broker: CheckedBroker) -> list[Finding]:
    url = broker.management.url
    subject = f"management {url.host}:{url.port}"
    findings = [Finding(subject, "ok", "answers")]
    try:
        async with Deadline(WAIT_SECONDS):
            for check in ON_THE_MANAGEMENT_API:
                findings += await check(broker)
    except (BrokerError, TimeoutError) as error:
        text = f"{str(error) or 'no answer in time'}; not checked: {_NOT_CHECKED}"
        fix = (
            "rabbitmq-plugins enable rabbitmq_management, give the user the tag `monitoring`, or "
            "name it with --management-url"
        )
        return [Finding(subject, "warn", text, fix)]
    return findings


async def _run(checks: Mapping[str, Awaitable[list[Finding]]], seconds: float) -> list[Finding]:
    """Run checks concurrently; one that fails or times out does not affect the others."""
    results = await asyncio.gather(*(_run_one(*named, seconds) for named in checks.items()))
    return [finding for found in results for finding in found]


async def _run_one(name: str, check: Awaitable[list[Finding]], seconds: float) -> list[Finding]:
    try:
        async with Deadline(seconds):
            return await check
    except ConfigError:
        raise
    except TimeoutError:
        return [Finding(name, "fail", "did not answer in time", "check it, and run this again")]
    except Exception as error:  # noqa: BLE001  the findings of the other checks count
        text = str(error) if isinstance(error, BrokerError) else type(error).__name__
        return [Finding(name, "fail", f"could not be checked: {text}", "run it again")]
