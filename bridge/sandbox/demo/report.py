"""The demo's account: tables of expectations and observations, and a check of the metrics."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.table import Table

from bridge.sandbox.demo.traffic import SENT, Observed, PlannedMessage, PlannedWebhook
from bridge.telemetry.scrape import Scrape

PROCESSED: Final = "sms_bridge_worker_messages_processed_total"
IN_PROGRESS: Final = "sms_bridge_worker_messages_in_progress"
EVENTS: Final = "sms_bridge_webhook_events_total"


class DemoReport:
    """The plan, the observations, and the last metrics of both roles."""

    def __init__(
        self, messages: Sequence[PlannedMessage], webhooks: Sequence[PlannedWebhook]
    ) -> None:
        self._messages = messages
        self._webhooks = webhooks
        self.seen = Observed()
        self.worker = self.webhook = self.webhook_before = Scrape()

    def check_metrics(self) -> list[str]:
        """Return a line for each role whose metrics differ from the observations."""
        seen, problems = self.seen, []
        counted = {
            SENT: int(self.worker.total(PROCESSED, outcome="sent")),
            **self.worker.by("reason", PROCESSED, outcome="dead"),
        }
        known = {SENT: len(seen.accepted), **Counter(reason for _, reason in seen.dead)}
        if counted != known:
            problems.append(f"the worker's metrics say {counted}, but the demo saw {known}")
        answers = self._answers()
        counted = self._count_events()
        known = {
            "published": len(seen.events),
            "duplicate": answers[200] - len(seen.events),
            "invalid_signature": answers[401],
        }
        # As counters, in which a missing key is zero.
        if Counter(counted) != Counter(known):
            problems.append(f"the webhook's metrics say {counted}, but the demo saw {known}")
        return problems

    def _answers(self) -> Counter[int | None]:
        return Counter(answer for given in self.seen.answers.values() for answer in given)

    def _count_events(self) -> dict[str, int]:
        """Count the webhooks of this run by outcome; `unparsed` ones were published."""
        counts = Counter(self.webhook.by("outcome", EVENTS))
        counts.subtract(self.webhook_before.by("outcome", EVENTS))
        counts["published"] += counts.pop("unparsed", 0)
        return dict(counts)

    def outbound(self) -> Table:
        seen = self.seen
        ends = Counter(message.expected for message in self._messages)
        dead = Counter(reason for _, reason in seen.dead)
        twice = sum(count > 1 for count in Counter(seen.accepted).values())
        table = Table("queue → SMS", "expected", "seen")
        _add(table, "published", len(self._messages), seen.published)
        _add(table, "accepted by the SMS service", ends[SENT], len(seen.accepted))
        for reason in sorted({*ends, *dead} - {SENT}):
            _add(table, f"dead letter: {reason}", ends[reason], dead[reason])
        _add(table, "sent twice", 0, twice)
        retries = self.worker.by("reason", PROCESSED, outcome="retried")
        told = ", ".join(f"{reason} {count}" for reason, count in sorted(retries.items()))
        table.add_row("retries", "", f"{sum(retries.values()):,} ({told})" if told else "0")
        table.add_row("accepted, per second", "", self._rate())
        return table

    def inbound(self) -> Table:
        expected = Counter(answer for webhook in self._webhooks for answer in webhook.answers)
        events = sum(len(webhook.routing_keys) for webhook in self._webhooks)
        answers = self._answers()
        duplicates = int(self.webhook.total(EVENTS, outcome="duplicate"))
        table = Table("SMS → queue", "expected", "seen")
        _add(table, "webhooks answered 200", expected[200], answers[200])
        _add(table, "forged webhooks answered 401", expected[401], answers[401])
        _add(table, "repeats not published again", expected[200] - events, duplicates)
        _add(table, "events received", events, len(self.seen.events))
        return table

    def _rate(self) -> str:
        times = sorted(self.seen.accepted_at)
        if not times:
            return "0"
        average = len(times) / max(times[-1] - times[0], 1)
        busiest = max(Counter(int(time) for time in times).values())
        return f"{average:,.0f} on average, {busiest:,} in the busiest second"


def _add(table: Table, name: str, expected: int, seen: int) -> None:
    table.add_row(name, f"{expected:,}", f"{seen:,}", style=None if expected == seen else "red")
