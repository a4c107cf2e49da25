"""What one reading of a role's admin port means, beside the one before it. Pure."""

import re
import time
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from bridge.admin.admin_port import AdminPort, Health, WorkerFacts
from bridge.admin.status.report import Pause, Process, Rates, Receiver, Worker
from bridge.telemetry.log_format import utc_text
from bridge.telemetry.scrape import Scrape

_PROCESSED: Final = "sms_bridge_worker_messages_processed_total"
_LADDER: Final = "sms_bridge_worker_ladder_messages_total"
_EVENTS: Final = "sms_bridge_webhook_events_total"
_QUEUE_READY: Final = "sms_bridge_worker_queue_messages_ready"
# Outcomes of a webhook; the one that is missing is a repeat, which was stored before.
_PUBLISHED: Final = ("published", "unparsed")
_REFUSED: Final = ("invalid_signature", "too_large", "incomplete")
_FAILED: Final = ("publish_failed", "overloaded")


# The year 10000 has no date that others read.
_LAST_MOMENT: Final = 253_402_300_800
# More than was ever counted, and exact as a float.
_MOST: Final = 2**53
_WORD: Final = re.compile("[a-z][a-z0-9_]{0,39}")
_VERSION: Final = re.compile("[0-9A-Za-z.+!_-]{1,64}")
# What is read of /metrics, with the labels that have to be there, whose values are words.
_LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    _PROCESSED: ("outcome", "reason"),
    _EVENTS: ("outcome",),
    _QUEUE_READY: (),
    "process_start_time_seconds": (),
    "sms_bridge_amqp_connection_up": (),
    "sms_bridge_webhook_last_event_timestamp_seconds": (),
    "sms_bridge_worker_consumer_up": (),
    "sms_bridge_worker_last_sent_timestamp_seconds": (),
    "sms_bridge_worker_messages_in_progress": (),
    "sms_bridge_worker_oldest_held_message_timestamp_seconds": (),
    "sms_bridge_worker_provider_requests_in_flight": (),
    "sms_bridge_worker_queue_consumers": (),
    "sms_bridge_worker_queue_stats_timestamp_seconds": (),
}


def check_scrape(scrape: Scrape) -> None:
    """Raise ValueError for a value or a label that no role has, of what is read here."""
    for name, wanted in _LABELS.items():
        most = _LAST_MOMENT if name.endswith("_timestamp_seconds") else _MOST
        total = 0.0
        for labels, value in scrape.samples(name):
            total += value
            # Of NaN every comparison is false.
            if not (0 <= value < most and total < most):
                raise ValueError(f"{name}: an impossible value")
            if not all(_WORD.fullmatch(labels.get(label, "")) for label in wanted):
                raise ValueError(f"{name}: an impossible label")


class Reading(NamedTuple):
    """What a role said, and when, by the monotonic clock."""

    at: float
    health: Health
    scrape: Scrape

    @property
    def queues_at(self) -> float:
        """When its worker last read the sizes of all its queues, in unix seconds; 0 if never."""
        return self.scrape.total("sms_bridge_worker_queue_stats_timestamp_seconds")

    def ready(self, queue: str) -> int | None:
        """How many messages its worker saw in a queue; None for one that it does not look at."""
        found = next(iter(self.scrape.samples(_QUEUE_READY, queue=queue)), None)
        if found is None:
            return None
        return int(found[1])

    def consumers(self, queue: str) -> int | None:
        """How many consumers of the queue its worker saw."""
        found = self.scrape.samples("sms_bridge_worker_queue_consumers", queue=queue)
        return next((int(value) for _, value in found), None)


def describe(
    name: AdminPort, address: AdminPort, reading: Reading, before: Reading | None, *, queue: str
) -> Process:
    """Say who answers there; a worker of another queue is not the one that was asked for."""
    health, scrape = reading.health, reading.scrape
    facts = health.worker
    if facts is not None and facts.queue != queue:
        fault = "a worker of another queue answers"
        return Process(name=str(name), address=str(address), fault=fault)
    is_receiver = any(True for _ in scrape.samples(_EVENTS))
    versions = [
        version
        for labels, _ in scrape.samples("sms_bridge_build_info")
        if _VERSION.fullmatch(version := labels.get("version", ""))
    ]
    return Process(
        name=str(name),
        address=str(address),
        fault=None,
        version=next(iter(versions), None),
        failing=[check for check, result in health.checks.items() if result != "ok"],
        is_connected=scrape.total("sms_bridge_amqp_connection_up") > 0,
        worker=None if facts is None else _describe_worker(facts, reading, before),
        webhook=_describe_receiver(reading, before) if is_receiver else None,
    )


def _describe_worker(facts: WorkerFacts, reading: Reading, before: Reading | None) -> Worker:
    scrape = reading.scrape
    oldest = scrape.total("sms_bridge_worker_oldest_held_message_timestamp_seconds")
    return Worker(
        queue=facts.queue,
        pauses=[Pause(**pause.model_dump()) for pause in facts.all_pauses],
        outage_suspected=facts.outage_suspected,
        retry_after_seconds=facts.retry_after_seconds,
        is_consuming=scrape.total("sms_bridge_worker_consumer_up") > 0,
        held=int(scrape.total("sms_bridge_worker_messages_in_progress")),
        in_flight=int(scrape.total("sms_bridge_worker_provider_requests_in_flight")),
        oldest_seconds=round(max(0.0, time.time() - oldest), 1) if oldest else None,
        last_sent_at=_moment(scrape.total("sms_bridge_worker_last_sent_timestamp_seconds")),
        rates=_rates(reading, before),
        stored=int(scrape.total(_LADDER, event="stored")),
        returned=int(scrape.total(_LADDER, event="returned")),
        sent=int(scrape.total(_PROCESSED, outcome="sent")),
        retried=scrape.by("reason", _PROCESSED, outcome="retried"),
        dead=scrape.by("reason", _PROCESSED, outcome="dead"),
    )


def _describe_receiver(reading: Reading, before: Reading | None) -> Receiver:
    scrape = reading.scrape
    last = scrape.samples("sms_bridge_webhook_last_event_timestamp_seconds")
    return Receiver(
        last_event_at=_moment(max((value for _, value in last), default=0.0)),
        published_per_second=_per_second(reading, before, _EVENTS, _PUBLISHED),
        refused_per_second=_per_second(reading, before, _EVENTS, _REFUSED),
        failed_per_second=_per_second(reading, before, _EVENTS, _FAILED),
        events=scrape.by("outcome", _EVENTS),
    )


def _rates(reading: Reading, before: Reading | None) -> Rates | None:
    sent, retried, dead = (
        _per_second(reading, before, _PROCESSED, [outcome])
        for outcome in ("sent", "retried", "dead")
    )
    if sent is None or retried is None or dead is None:
        return None
    return Rates(sent_per_second=sent, retried_per_second=retried, dead_per_second=dead)


def _per_second(
    reading: Reading, before: Reading | None, name: str, outcomes: Iterable[str]
) -> float | None:
    """Return how often these outcomes came about; None without an earlier reading of it."""
    if before is None or _started_at(reading) != _started_at(before):
        return None
    count = sum(
        reading.scrape.total(name, outcome=outcome) - before.scrape.total(name, outcome=outcome)
        for outcome in outcomes
    )
    seconds = reading.at - before.at
    # Without a sane clock, or with counters that go back, there is no rate.
    return round(count / seconds, 2) if seconds > 0 and count >= 0 else None


def _started_at(reading: Reading) -> float:
    return reading.scrape.total("process_start_time_seconds")


def _moment(seconds: float) -> str | None:
    return utc_text(seconds) if seconds else None
