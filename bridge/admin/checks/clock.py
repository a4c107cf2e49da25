"""Whether this computer's clock agrees with those of the broker and the SMS API."""

from typing import Final

from bridge.admin.checks.set_up import ManagedBroker
from bridge.admin.finding import Finding

MAX_SKEW_SECONDS: Final = 5.0


async def check_brokers_clock(broker: ManagedBroker) -> list[Finding]:
    """Compare the clocks, by the Date of the management API's last answer."""
    return judge_clock("broker", broker.management.clock_skew_seconds)


def judge_clock(whose: str, skew_seconds: float | None) -> list[Finding]:
    """Warn when the other clock is too far ahead (above zero) or behind; None is not known."""
    if skew_seconds is None:
        return []
    if abs(skew_seconds) <= MAX_SKEW_SECONDS:
        return [Finding("clock", "ok", f"agrees with {whose}'s")]
    where = "behind" if skew_seconds > 0 else "ahead of"
    text = (
        f"{abs(skew_seconds):.0f} s {where} {whose}'s: expiries, ages and signed webhooks "
        "are judged wrongly"
    )
    return [Finding("clock", "warn", text, "synchronise it (NTP)")]
