"""What both `/metrics` say: read, compared with what was seen, shown live and summed up."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.table import Table

from bridge.sandbox.traffic import Request, Seen, Webhook
from bridge.telemetry.scrape import Scrape

PROCESSED: Final = "sms_bridge_worker_messages_processed_total"
IN_PROGRESS: Final = "sms_bridge_worker_messages_in_progress"
EVENTS: Final = "sms_bridge_webhook_events_total"
PERCENTILES: Final = (0.5, 0.9, 0.99)

# A histogram for each line: what it measures, its name, the labels that count.
_LATENCIES: Final[Sequence[tuple[str, str, Mapping[str, str]]]] = (
    ("published to accepted (*)", "sms_bridge_worker_acceptance_latency_seconds", {}),
    (
        "request to the SMS API, accepted",
        "sms_bridge_worker_provider_request_duration_seconds",
        {"result": "success"},
    ),
    (
        "webhook to its answer",
        "sms_bridge_webhook_http_request_duration_seconds",
        {"route": "/webhooks"},
    ),
)
_FOOTNOTE: Final = "(*) AMQP timestamps are whole seconds: up to one second too long"


def percentile(share: float, buckets: Sequence[tuple[float, float]]) -> float:
    """Estimate the value below which a share of the observations lies.

    Inside its bucket it is interpolated; in the last one, which has no upper bound, the lower
    bound is all that is known. NaN when nothing was observed.
    """
    if not buckets or buckets[-1][1] == 0:
        return math.nan
    rank = share * buckets[-1][1]
    lower, below = 0.0, 0.0
    for upper, count in buckets:
        if count >= rank and count > below:
            if math.isinf(upper):
                return lower
            return lower + (upper - lower) * (rank - below) / (count - below)
        lower, below = upper, count
    return lower


def check_worker_metrics(worker: Scrape, seen: Seen) -> list[str]:
    """Say in a line where the worker's metrics tell something else than what was seen."""
    counted = {
        "sent": int(worker.total(PROCESSED, outcome="sent")),
        **worker.by("reason", PROCESSED, outcome="dead"),
    }
    known = {"sent": len(seen.accepted), **Counter(reason for _, reason in seen.dead)}
    return [] if counted == known else [f"the worker's metrics say {counted}, seen were {known}"]


def check_webhook_metrics(webhook: Scrape, seen: Seen, *, before: Scrape) -> list[str]:
    """Say in a line where the webhook's metrics tell something else than what was seen."""
    counted = count_events(webhook, before=before)
    answers = Counter(answer for given in seen.answers.values() for answer in given)
    known = {
        "published": len(seen.events),
        "duplicate": answers[200] - len(seen.events),
        "invalid_signature": answers[401],
    }
    # Counter, so that what is missing on one side counts as zero.
    agree = counted == Counter(known)
    return [] if agree else [f"the webhook's metrics say {dict(counted)}, seen were {known}"]


def count_events(webhook: Scrape, *, before: Scrape) -> Counter[str]:
    """Count the webhooks since `before` by outcome; what went out as `unparsed` was published."""
    counts = Counter(webhook.by("outcome", EVENTS))
    counts.subtract(before.by("outcome", EVENTS))
    counts["published"] += counts.pop("unparsed", 0)
    return counts


def progress_line(seen: Seen, open_requests: int, open_webhooks: int) -> str:
    """Write both directions in one line."""
    return (
        f"published {seen.published:,}, accepted {len(seen.accepted):,}, "
        f"dead-lettered {len(seen.dead):,}, open {open_requests:,} | "
        f"webhooks answered {len(seen.answers):,}, events received {len(seen.events):,}, "
        f"open {open_webhooks:,}"
    )


def live_table(
    worker: Scrape, events: Counter[str], seen: Seen, open_requests: int, open_webhooks: int
) -> Table:
    """Draw both directions side by side; `events` are the webhooks by outcome."""
    outbound = [
        ("published", seen.published),
        ("accepted by the SMS service", len(seen.accepted)),
        ("dead letters", len(seen.dead)),
        ("retries", int(worker.total(PROCESSED, outcome="retried"))),
        ("in progress", int(worker.total(IN_PROGRESS))),
        ("still open", open_requests),
    ]
    inbound = [
        ("webhooks answered", sum(len(answers) for answers in seen.answers.values())),
        ("events published", events["published"]),
        ("repeats, not published again", events["duplicate"]),
        ("forged, refused", events["invalid_signature"]),
        ("received by the subscriber", len(seen.events)),
        ("still open", open_webhooks),
    ]
    table = Table("queue → SMS", "", "SMS → queue", "")
    for (out_name, out_count), (in_name, in_count) in zip(outbound, inbound, strict=True):
        table.add_row(out_name, f"{out_count:>6,}", in_name, f"{in_count:>6,}")
    return table


class Summary:
    """The account of a run that has ended."""

    def __init__(
        self,
        worker: Scrape,
        webhook: Scrape,
        seen: Seen,
        *,
        requests: Sequence[Request],
        webhooks: Sequence[Webhook],
    ) -> None:
        self._worker = worker
        self._webhook = webhook
        self._seen = seen
        self._requests = requests
        self._webhooks = webhooks

    def parts(self) -> Iterator[Table | str]:
        """Draw what became of everything, how fast, and how long it took."""
        yield self._outbound()
        yield self._inbound()
        yield self._latencies()
        yield _FOOTNOTE

    def _outbound(self) -> Table:
        ends = Counter(request.expected for request in self._requests)
        dead = Counter(reason for _, reason in self._seen.dead)
        twice = sum(count > 1 for count in Counter(self._seen.accepted).values())
        table = Table("queue → SMS", "expected", "seen")
        _add(table, "published", len(self._requests), self._seen.published)
        _add(table, "accepted by the SMS service", ends["sent"], len(self._seen.accepted))
        for reason in sorted({*ends, *dead} - {"sent"}):
            _add(table, f"dead letter: {reason}", ends[reason], dead[reason])
        _add(table, "sent twice", 0, twice)
        retries = self._worker.by("reason", PROCESSED, outcome="retried")
        told = ", ".join(f"{reason} {count}" for reason, count in sorted(retries.items()))
        table.add_row("retries", "", f"{sum(retries.values()):,} ({told})" if told else "0")
        table.add_row("accepted, per second", "", self._rate())
        return table

    def _inbound(self) -> Table:
        expected = Counter(answer for webhook in self._webhooks for answer in webhook.answers)
        answers = Counter(answer for given in self._seen.answers.values() for answer in given)
        genuine = sum(webhook.events for webhook in self._webhooks)
        repeats = sum(w.answers.count(200) - w.events for w in self._webhooks)
        duplicates = int(self._webhook.total(EVENTS, outcome="duplicate"))
        table = Table("SMS → queue", "expected", "seen")
        _add(table, "webhooks answered 200", expected[200], answers[200])
        _add(table, "forged webhooks answered 401", expected[401], answers[401])
        _add(table, "repeats not published again", repeats, duplicates)
        _add(table, "events received", genuine, len(self._seen.events))
        return table

    def _latencies(self) -> Table:
        table = Table("seconds", *(f"p{share * 100:g}" for share in PERCENTILES), "count")
        for title, name, labels in _LATENCIES:
            source = self._worker if name.startswith("sms_bridge_worker") else self._webhook
            buckets = source.buckets(name, **labels)
            count = buckets[-1][1] if buckets else 0
            values = (percentile(share, buckets) for share in PERCENTILES)
            texts = (f"{value:.3f}" if count else "-" for value in values)
            table.add_row(title, *texts, f"{count:,.0f}")
        return table

    def _rate(self) -> str:
        moments = sorted(self._seen.accepted_at)
        if not moments:
            return "0"
        average = len(moments) / max(moments[-1] - moments[0], 1)
        busiest = max(Counter(int(moment) for moment in moments).values())
        return f"{average:,.0f} on average, {busiest:,} in the busiest second"


def _add(table: Table, name: str, expected: int, seen: int) -> None:
    table.add_row(name, f"{expected:,}", f"{seen:,}", style=None if expected == seen else "red")
