"""Asks the admin ports of all roles at once, checks their answers, and adds up the counts."""

import asyncio
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from bridge.admin.admin_port import (
    STRANGER,
    AdminPort,
    Client,
    HealthReport,
    WorkerFacts,
    addresses_of,
    open_client,
    read_health,
    read_metrics,
)
from bridge.admin.status.report import ProcessReport, RatesReport, ReceiverReport, WorkerReport
from bridge.errors import BridgeError
from bridge.telemetry.log_format import utc_text
from bridge.telemetry.scrape import Scrape

# More pods than the bridge is made for.
MAX_PORTS: Final = 256
ASKED_AT_ONCE: Final = 32
# Between the two readings that a rate is made of, if there is no earlier one.
RATE_SECONDS: Final = 1.0

_PROCESSED: Final = "sms_bridge_worker_messages_processed_total"
_LADDER: Final = "sms_bridge_worker_ladder_messages_total"
_EVENTS: Final = "sms_bridge_webhook_events_total"
_QUEUE_READY: Final = "sms_bridge_worker_queue_messages_ready"
# The outcome that is missing is a repeat, which was stored before.
_PUBLISHED: Final = ("published", "unparsed")
_REFUSED: Final = ("invalid_signature", "too_large", "incomplete")
_FAILED: Final = ("publish_failed", "overloaded")

# The year 10000 has no date that others read.
_LAST_MOMENT: Final = 253_402_300_800
# More than was ever counted, and exact as a float.
_MOST: Final = 2**53
_WORD: Final = re.compile("[a-z][a-z0-9_]{0,39}")
_VERSION: Final = re.compile("[0-9A-Za-z.+!_-]{1,64}")
# What is read of /metrics, with the labels that must be there, whose values are words.
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


class Reading(NamedTuple):
    """The answers of a role, and when they came, by the monotonic clock."""

    at: float
    health: HealthReport
    scrape: Scrape

    @property
    def queues_at(self) -> float:
        """When its worker last read the sizes of all queues, in unix seconds; 0 if never."""
        return self.scrape.total("sms_bridge_worker_queue_stats_timestamp_seconds")

    def ready(self, queue: str) -> int | None:
        """Return how many messages its worker saw in a queue; None if it does not watch it."""
        found = self.scrape.samples(_QUEUE_READY, queue=queue)
        return next((int(value) for _, value in found), None)

    def consumers(self, queue: str) -> int | None:
        """Return how many consumers of the queue its worker saw."""
        found = self.scrape.samples("sms_bridge_worker_queue_consumers", queue=queue)
        return next((int(value) for _, value in found), None)


class ProcessReader:
    """Reads, as often as it is asked, the answers of the roles behind these names.

    `readings` are those of the last time, by address.
    """

    def __init__(self, names: Sequence[AdminPort], *, queue: str) -> None:
        self._names = names
        self._queue = queue
        self.readings: Mapping[AdminPort, Reading] = {}

    async def read(self) -> list[ProcessReport]:
        """Report on each address; the first time takes `RATE_SECONDS` longer.

        Raises BridgeError when the names stand for more than `MAX_PORTS` addresses.
        """
        names, unknown = await self._look_up()
        async with open_client() as client:
            if names and not self.readings:
                self.readings = _good(await _ask_all(client, names))
                await asyncio.sleep(RATE_SECONDS)
            answers = await _ask_all(client, names)
        before, self.readings = self.readings, _good(answers)
        return unknown + [
            ProcessReport(name=str(names[at]), address=str(at), fault=answer)
            if isinstance(answer, str)
            else describe(names[at], at, answer, before.get(at), queue=self._queue)
            for at, answer in answers.items()
        ]

    async def _look_up(self) -> tuple[dict[AdminPort, AdminPort], list[ProcessReport]]:
        """Return the first name of each address, and reports on names without an address."""
        names: dict[AdminPort, AdminPort] = {}
        unknown = []
        found = await asyncio.gather(*map(addresses_of, self._names), return_exceptions=True)
        for name, addresses in zip(self._names, found, strict=True):
            if isinstance(addresses, BridgeError):
                fault = str(addresses)
                unknown.append(ProcessReport(name=str(name), address=str(name), fault=fault))
            elif isinstance(addresses, BaseException):
                raise addresses
            else:
                names = dict.fromkeys(addresses, name) | names
        if len(names) > MAX_PORTS:
            raise BridgeError(f"--admin: stands for more than {MAX_PORTS} addresses; name fewer")
        return dict(sorted(names.items())), unknown


async def _ask_all(
    client: Client, addresses: Iterable[AdminPort]
) -> dict[AdminPort, Reading | str]:
    """Return each answer, or why there is none."""
    slots = asyncio.Semaphore(ASKED_AT_ONCE)

    async def ask(address: AdminPort) -> tuple[AdminPort, Reading | str]:
        async with slots:
            try:
                health = await read_health(client, address)
                scrape = await read_metrics(client, address)
                _check_scrape(scrape)
            except BridgeError as error:
                return address, str(error)
            except ValueError:
                return address, STRANGER
            return address, Reading(time.monotonic(), health, scrape)

    return dict(await asyncio.gather(*(ask(address) for address in addresses)))


def _good(answers: Mapping[AdminPort, Reading | str]) -> dict[AdminPort, Reading]:
    return {at: answer for at, answer in answers.items() if isinstance(answer, Reading)}


def _check_scrape(scrape: Scrape) -> None:
    """Raise ValueError for a value or label, among those that are read, that no role has."""
    for name, wanted in _LABELS.items():
        most = _LAST_MOMENT if name.endswith("_timestamp_seconds") else _MOST
        total = 0.0
        for labels, value in scrape.samples(name):
            total += value
            # Every comparison with NaN is false.
            if not (0 <= value < most and total < most):
                raise ValueError(f"{name}: an impossible value")
            if not all(_WORD.fullmatch(labels.get(label, "")) for label in wanted):
                raise ValueError(f"{name}: an impossible label")


def describe(
    name: AdminPort, address: AdminPort, reading: Reading, before: Reading | None, *, queue: str
) -> ProcessReport:
    """Report on a role; a worker of another queue is not the one that was asked for."""
    health, scrape = reading.health, reading.scrape
    facts = health.worker
    if facts is not None and facts.queue != queue:
        fault = "a worker of another queue answers"
        return ProcessReport(name=str(name), address=str(address), fault=fault)
    versions = (labels.get("version", "") for labels, _ in scrape.samples("sms_bridge_build_info"))
    is_receiver = any(True for _ in scrape.samples(_EVENTS))
    return ProcessReport(
        name=str(name),
        address=str(address),
        fault=None,
        version=next(filter(_VERSION.fullmatch, versions), None),
        failing=[check for check, result in health.checks.items() if result != "ok"],
        is_connected=scrape.total("sms_bridge_amqp_connection_up") > 0,
        worker=None if facts is None else _describe_worker(facts, reading, before),
        webhook=_describe_receiver(reading, before) if is_receiver else None,
    )


def _describe_worker(facts: WorkerFacts, reading: Reading, before: Reading | None) -> WorkerReport:
    scrape = reading.scrape
    oldest = scrape.total("sms_bridge_worker_oldest_held_message_timestamp_seconds")
    return WorkerReport(
        queue=facts.queue,
        pauses=facts.all_pauses,
        outage_suspected=facts.outage_suspected,
        retry_after_seconds=facts.retry_after_seconds,
        is_consuming=scrape.total("sms_bridge_worker_consumer_up") > 0,
        is_standby=facts.standby,
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


def _describe_receiver(reading: Reading, before: Reading | None) -> ReceiverReport:
    last = reading.scrape.samples("sms_bridge_webhook_last_event_timestamp_seconds")
    return ReceiverReport(
        last_event_at=_moment(max((value for _, value in last), default=0.0)),
        published_per_second=_per_second(reading, before, _EVENTS, _PUBLISHED),
        refused_per_second=_per_second(reading, before, _EVENTS, _REFUSED),
        failed_per_second=_per_second(reading, before, _EVENTS, _FAILED),
        events=reading.scrape.by("outcome", _EVENTS),
    )


def _rates(reading: Reading, before: Reading | None) -> RatesReport | None:
    sent, retried, dead = (
        _per_second(reading, before, _PROCESSED, [outcome])
        for outcome in ("sent", "retried", "dead")
    )
    if sent is None or retried is None or dead is None:
        return None
    return RatesReport(sent_per_second=sent, retried_per_second=retried, dead_per_second=dead)


def _per_second(
    reading: Reading, before: Reading | None, name: str, outcomes: Iterable[str]
) -> float | None:
    """Return the rate of these outcomes; None without an earlier reading of the same process."""
    start = "process_start_time_seconds"
    if before is None or reading.scrape.total(start) != before.scrape.total(start):
        return None
    count = sum(
        reading.scrape.total(name, outcome=outcome) - before.scrape.total(name, outcome=outcome)
        for outcome in outcomes
    )
    seconds = reading.at - before.at
    # There is no rate if the clock stands still or a counter goes back.
    return round(count / seconds, 2) if seconds > 0 and count >= 0 else None


def _moment(seconds: float) -> str | None:
    return utc_text(seconds) if seconds else None
