"""The types and rules that all checks share."""

import ssl
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from pydantic import SecretStr

from bridge.admin.management import Management
from bridge.amqp.client import Connection
from bridge.amqp.connecting import version_of
from bridge.config import Role, Settings
from bridge.topology.declarations import Topology, bridge_topology

# The deadline of each wait, unless it has a shorter one.
WAIT_SECONDS: Final = 15.0
MAX_SKEW_SECONDS: Final = 5.0
# A certificate that expires sooner is a warning.
SHORT_DAYS: Final = 14
_DAY_SECONDS: Final = 86400

CheckResult = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check. `fail`: it cannot work, or loses messages. `fix`: the remedy."""

    subject: str
    result: CheckResult
    text: str
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """The settings, and the roles that will start with them.

    `management_url` is None if the management API is on the broker's host and the usual port.
    """

    settings: Settings
    roles: Collection[Role]
    management_url: str | None = None

    @property
    def topology(self) -> Topology:
        return bridge_topology(self.settings, self.roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBroker(SetUp):
    """A set-up with a connection to its broker, and a client of the management API."""

    url: SecretStr
    connection: Connection
    management: Management

    @property
    def version(self) -> tuple[int, ...]:
        """RabbitMQ's version, such as (4, 0, 5)."""
        return version_of(self.connection)


def judge_certificate(subject: str, certificate: dict[str, Any]) -> Finding:
    """Warn of a certificate that expires within `SHORT_DAYS`."""
    ends = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    days = (ends - time.time()) / _DAY_SECONDS
    day = datetime.fromtimestamp(ends, UTC).date()
    if days < SHORT_DAYS:
        text = f"its certificate expires in {max(0, int(days))} days, on {day}"
        return Finding(subject, "warn", text, "renew it")
    return Finding(subject, "ok", f"its certificate is valid until {day}")


def judge_clock(whose: str, skew_seconds: float | None) -> list[Finding]:
    """Warn if the clock of `whose` is too far ahead of ours (above zero) or behind it."""
    if skew_seconds is None:
        return []
    if abs(skew_seconds) <= MAX_SKEW_SECONDS:
        return [Finding("clock", "ok", f"agrees with the clock of {whose}")]
    where = "behind" if skew_seconds > 0 else "ahead of"
    text = (
        f"{abs(skew_seconds):.0f} s {where} the clock of {whose}: expiries, ages and "
        "signed webhooks are judged wrongly"
    )
    return [Finding("clock", "warn", text, "synchronise it (NTP)")]
