"""The state of the broker, the workers and the webhook receivers, for `sms-bridge status`.

`StatusReader` asks the broker and the admin ports of all roles at the same time. The models are
the members of `status --json`: None means unknown, times are UTC like `2030-01-31T03:12:00Z`, and
a rate is measured between two readings. No member can hold a phone number, a text or a secret.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, Field

from bridge.admin.admin_port_client import (
    STRANGER,
    AdminPort,
    Client,
    HealthReport,
    Moment,
    PauseFacts,
    WorkerFacts,
    addresses_of,
    open_client,
    read_health,
    read_metrics,
)
from bridge.admin.pausing import find_pause
from bridge.amqp.client import Connection
from bridge.amqp.connecting import close_quietly, open_first_connection
from bridge.config import Settings
from bridge.deadline import Deadline
from bridge.errors import BridgeError, BrokerError
from bridge.telemetry.log_format import utc_text
from bridge.telemetry.scrape import Scrape
from bridge.topology.declarations import dead_queue, request_queues, retry_queue
from bridge.topology.paused_queue import Note
from bridge.topology.queue_sizes import QueueSizes, try_to_read_queue

# Deadlines for each URL of the broker, and then for all requests to it.
CONNECT_SECONDS: Final = 3.0
ANSWER_SECONDS: Final = 5.0
# All are asked at once; the bridge is not made for more pods.
MAX_PORTS: Final = 256
# The time between the two readings of a rate, if there is no earlier reading.
RATE_SECONDS: Final = 1.0


# The models. Their types refuse what no role reports, such as a phone number in place of a label.

Label = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class BrokerReport(BaseModel, frozen=True):
    """The broker. `fault`: why it does not answer. `stores` is False in a memory or disk alarm.

    `refused` lists the queues whose sizes the user is not permitted to know.
    """

    fault: str | None
    stores: bool | None
    refused: Sequence[str] = ()


class QueueReport(BaseModel, frozen=True):
    """A queue with `ready` messages; `delay_seconds` is the delay of a retry queue."""

    name: str
    role: Literal["requests", "retry", "dead_letters", "events"]
    delay_seconds: float | None = None
    exists: bool | None = None
    ready: int | None = None
    consumers: int | None = None


class OperatorPauseReport(BaseModel, frozen=True):
    """The pause of every worker, with the reason and the operator of `sms-bridge pause`."""

    since: str | None
    reason: str | None
    by: str | None = None


class RatesReport(BaseModel, frozen=True):
    """Deliveries per second, by outcome."""

    sent_per_second: Rate
    retried_per_second: Rate
    dead_per_second: Rate


class WorkerReport(BaseModel, frozen=True):
    """One worker, with counts since its start.

    `held` deliveries are not settled; the oldest was published `oldest_seconds` ago. `stored`
    copies went to the retry queues, and `returned` came back to this worker. `is_standby` is None
    if all workers are active.
    """

    queue: str
    pauses: Sequence[PauseFacts]
    outage_suspected: bool
    retry_after_seconds: float
    is_consuming: bool
    is_standby: bool | None = None
    held: Count
    in_flight: Count
    oldest_seconds: Rate | None
    last_sent_at: Moment | None
    rates: RatesReport | None
    sent: Count
    stored: Count = 0
    returned: Count = 0
    retried: Mapping[Label, Count]
    dead: Mapping[Label, Count]


class ReceiverReport(BaseModel, frozen=True):
    """One webhook receiver; `events` counts its webhooks since its start by outcome."""

    last_event_at: Moment | None
    published_per_second: Rate | None
    refused_per_second: Rate | None
    failed_per_second: Rate | None
    events: Mapping[Label, Count]


class ProcessReport(BaseModel, frozen=True):
    """One admin port; if no role answers there, `fault` has the reason.

    `name` is a host name, `address` one of its addresses. `failing`: failed checks of /readyz.
    """

    name: str
    address: str
    fault: str | None
    version: str | None = None
    failing: Sequence[str] = ()
    is_connected: bool | None = None
    worker: WorkerReport | None = None
    webhook: ReceiverReport | None = None


class DeadLettersReport(BaseModel, frozen=True):
    """The waiting dead letters, and by reason those made since the workers started."""

    waiting: int | None
    by_reason: Mapping[str, int]


class LadderReport(BaseModel, frozen=True):
    """Retry copies that the answering workers have stored, and that came back to them.

    The others are in a retry queue or in the queue of requests, or in no queue while RabbitMQ
    cannot move them to a full queue of requests.
    """

    stored: int
    returned: int
    not_back: int


class Status(BaseModel, frozen=True):
    """The whole status.

    `queues_from` names the source of the queues: the broker, or the last reading of a worker at
    `queues_at`. `rates` and `dead_letters` are totals of the answering workers; `oldest_seconds` is
    the age of the oldest message that any of them holds.
    """

    at: str
    broker: BrokerReport
    queues: Sequence[QueueReport]
    queues_from: Literal["broker", "workers"] | None
    queues_at: str | None
    is_paused_by_operator: bool | None
    paused_by_operator: OperatorPauseReport | None
    oldest_seconds: float | None
    rates: RatesReport | None
    dead_letters: DeadLettersReport
    ladder: LadderReport | None = None
    processes: Sequence[ProcessReport]

    @property
    def workers(self) -> list[tuple[ProcessReport, WorkerReport]]:
        return [(one, one.worker) for one in self.processes if one.worker is not None]


# One role's answers

_PROCESSED: Final = "sms_bridge_worker_messages_processed_total"
_LADDER: Final = "sms_bridge_worker_ladder_messages_total"
_EVENTS: Final = "sms_bridge_webhook_events_total"
# Groups of the outcomes of webhooks; repeats are in none of them.
_PUBLISHED: Final = ("published", "unparsed")
_REFUSED: Final = ("invalid_signature", "too_large", "incomplete")
_FAILED: Final = ("publish_failed", "overloaded")
_VERSION: Final = re.compile("[0-9A-Za-z.+!_-]{1,64}")


class Reading(NamedTuple):
    """The answers of a role, with their time by the monotonic clock."""

    at: float
    health: HealthReport
    scrape: Scrape

    def count(self, name: str, **labels: str) -> int:
        return int(self.scrape.total(name, **labels))

    def moment(self, name: str) -> str | None:
        """Return the latest time among the samples with this name."""
        seconds = max((value for _, value in self.scrape.samples(name)), default=0.0)
        return utc_text(seconds) if seconds else None

    def of_queue(self, name: str, queue: str) -> int | None:
        """Return what the worker last read of a queue; None if it does not read that queue."""
        is_watched = any(self.scrape.samples(name, queue=queue))
        return self.count(name, queue=queue) if is_watched else None

    def per_second(
        self, before: "Reading | None", name: str, outcomes: Iterable[str]
    ) -> float | None:
        """Return the rate of these outcomes; None without an earlier reading of this process."""
        start = "process_start_time_seconds"
        if before is None or self.scrape.total(start) != before.scrape.total(start):
            return None
        count = sum(
            self.count(name, outcome=one) - before.count(name, outcome=one) for one in outcomes
        )
        seconds = self.at - before.at
        # There is no rate if no time has passed or a counter has decreased.
        return round(count / seconds, 2) if seconds > 0 and count >= 0 else None


class QueueView(NamedTuple):
    """The queues and an operator's pause, from the broker or a worker's last reading of it.

    `at` is None if the worker has read nothing yet, `is_paused` is None if that is unknown.
    """

    at: str | None
    queues: Sequence[QueueReport]
    is_paused: bool | None = None
    note: Note | None = None


# The report on a process, and its view of the queues if it is a worker.
DescribedProcess = tuple[ProcessReport, QueueView | None]


def describe(
    name: AdminPort,
    address: AdminPort,
    reading: Reading,
    before: Reading | None,
    queues: Sequence[QueueReport],
) -> DescribedProcess:
    """Report on a process; a worker of another queue than the first of `queues` is a fault.

    Raises ValueError, LookupError, OverflowError or OSError for answers that no role gives.
    """
    facts, where = reading.health.worker, {"name": str(name), "address": str(address)}
    if facts is not None and facts.queue != queues[0].name:
        fault = "a worker of another queue answers"
        return ProcessReport(**where, fault=fault), None
    builds = (labels for labels, _ in reading.scrape.samples("sms_bridge_build_info"))
    versions = (labels.get("version", "") for labels in builds)
    is_receiver = any(reading.scrape.samples(_EVENTS))
    report = ProcessReport(
        **where,
        fault=None,
        version=next(filter(_VERSION.fullmatch, versions), None),
        failing=[check for check, result in reading.health.checks.items() if result != "ok"],
        is_connected=reading.scrape.total("sms_bridge_amqp_connection_up") > 0,
        worker=None if facts is None else _describe_worker(facts, reading, before),
        webhook=_describe_receiver(reading, before) if is_receiver else None,
    )
    if facts is None:
        return report, None
    seen = [
        one.model_copy(
            update={
                "ready": reading.of_queue("sms_bridge_worker_queue_messages_ready", one.name),
                "consumers": reading.of_queue("sms_bridge_worker_queue_consumers", one.name),
            }
        )
        for one in queues
    ]
    at = reading.moment("sms_bridge_worker_queue_stats_timestamp_seconds")
    # A worker that is not paused by an operator does not prove that there is no pause.
    is_paused = any(pause.reason == "operator" for pause in facts.pauses) or None
    return report, QueueView(at, seen, is_paused, facts.paused_by_operator)


def _describe_worker(facts: WorkerFacts, reading: Reading, before: Reading | None) -> WorkerReport:
    oldest = reading.scrape.total("sms_bridge_worker_oldest_held_message_timestamp_seconds")
    outcomes = ("sent", "retried", "dead")
    rates = {
        f"{one}_per_second": rate
        for one in outcomes
        if (rate := reading.per_second(before, _PROCESSED, [one])) is not None
    }
    return WorkerReport(
        queue=facts.queue,
        pauses=facts.pauses,
        outage_suspected=facts.outage_suspected,
        retry_after_seconds=facts.retry_after_seconds,
        is_consuming=reading.scrape.total("sms_bridge_worker_consumer_up") > 0,
        is_standby=facts.standby,
        held=reading.count("sms_bridge_worker_messages_in_progress"),
        in_flight=reading.count("sms_bridge_worker_provider_requests_in_flight"),
        oldest_seconds=round(max(0.0, time.time() - oldest), 1) if oldest else None,
        last_sent_at=reading.moment("sms_bridge_worker_last_sent_timestamp_seconds"),
        rates=RatesReport(**rates) if len(rates) == len(outcomes) else None,
        stored=reading.count(_LADDER, event="stored"),
        returned=reading.count(_LADDER, event="returned"),
        sent=reading.count(_PROCESSED, outcome="sent"),
        retried=reading.scrape.by("reason", _PROCESSED, outcome="retried"),
        dead=reading.scrape.by("reason", _PROCESSED, outcome="dead"),
    )


def _describe_receiver(reading: Reading, before: Reading | None) -> ReceiverReport:
    return ReceiverReport(
        last_event_at=reading.moment("sms_bridge_webhook_last_event_timestamp_seconds"),
        published_per_second=reading.per_second(before, _EVENTS, _PUBLISHED),
        refused_per_second=reading.per_second(before, _EVENTS, _REFUSED),
        failed_per_second=reading.per_second(before, _EVENTS, _FAILED),
        events=reading.scrape.by("outcome", _EVENTS),
    )


# The readers


class StatusReader:
    """Reads the status, repeatedly if needed, within a deadline; changes nothing.

    `ports` are the admin ports of all roles; a name stands for all its addresses.
    """

    def __init__(self, settings: Settings, ports: Sequence[AdminPort]) -> None:
        self._queues = list(_queues_of(settings))
        self._ports = ports
        self._readings: dict[AdminPort, Reading] = {}
        shorter = min(CONNECT_SECONDS, settings.rabbitmq.connect_timeout_seconds)
        self._rabbitmq = settings.rabbitmq.model_copy(update={"connect_timeout_seconds": shorter})
        self._broker_seconds = shorter * len(settings.rabbitmq.url) + ANSWER_SECONDS
        # An operator's pause is found by a probe, which is a publish. Requests need a second
        # connection, because an alarm of the broker blocks connections that publish.
        self._asking: Connection | None = None
        self._publishing: Connection | None = None

    async def read(self) -> Status:
        """Read everything; raise BridgeError if there are too many ports.

        The first reading takes `RATE_SECONDS` longer.
        """
        (broker, view), processes = await asyncio.gather(
            self._read_broker(), self._read_processes()
        )
        return put_together(self._queues, broker, view, processes)

    async def aclose(self) -> None:
        """Close the connections to the broker; `read` opens new ones."""
        connections, self._asking, self._publishing = (self._asking, self._publishing), None, None
        for connection in connections:
            if connection is not None:
                await close_quietly(connection)

    async def _read_broker(self) -> tuple[BrokerReport, QueueView | None]:
        try:
            async with Deadline(self._broker_seconds):
                return await self._ask_broker()
        except TimeoutError:
            fault = f"no answer within {self._broker_seconds:g} s"
        except BrokerError as error:
            fault = str(error)
        await self.aclose()
        return BrokerReport(fault=fault, stores=None), None

    async def _ask_broker(self) -> tuple[BrokerReport, QueueView]:
        while True:
            self._asking = await self._connected(self._asking, "status")
            self._publishing = await self._connected(self._publishing, "status publish")
            refused = set[str]()
            sizes = {
                one.name: await try_to_read_queue(self._asking, one.name, refused=refused)
                for one in self._queues
            }
            if refused or any(sizes.values()):
                break
            # Only now it shows if the connection has ended since the last reading.
            if not _is_lost(self._asking):
                raise BrokerError(
                    "it does not answer about the queues; look at its log and its nodes"
                )
        queues = [_as_broker_says(one, sizes[one.name]) for one in self._queues]
        view = QueueView(utc_text(time.time()), queues)
        with suppress(BrokerError):
            paused = await find_pause(
                self._asking, self._queues[0].name, publishing=self._publishing
            )
            note = None if paused is None else paused.note
            view = view._replace(is_paused=paused is not None, note=note)
        # An alarm of the broker is known only after a publish.
        stores = not self._publishing.wire.is_blocked
        return BrokerReport(fault=None, stores=stores, refused=sorted(refused)), view

    async def _connected(self, connection: Connection | None, name: str) -> Connection:
        if connection is not None:
            if not _is_lost(connection):
                return connection
            await close_quietly(connection)
        return await open_first_connection(self._rabbitmq, name=name)

    async def _read_processes(self) -> list[DescribedProcess]:
        names, unknown = await self._look_up()
        self._readings = {at: one for at, one in self._readings.items() if at in names}
        async with open_client() as client:
            if names and not self._readings:
                await asyncio.gather(*(self._read_port(client, *one) for one in names.items()))
                await asyncio.sleep(RATE_SECONDS)
            found = await asyncio.gather(*(self._read_port(client, *one) for one in names.items()))
        return unknown + found

    async def _read_port(
        self, client: Client, address: AdminPort, name: AdminPort
    ) -> DescribedProcess:
        before = self._readings.pop(address, None)
        try:
            health = await read_health(client, address)
            scrape = await read_metrics(client, address)
            reading = Reading(time.monotonic(), health, scrape)
            described = describe(name, address, reading, before, self._queues)
        except BridgeError as error:
            return ProcessReport(name=str(name), address=str(address), fault=str(error)), None
        except (ValueError, LookupError, OverflowError, OSError):
            return ProcessReport(name=str(name), address=str(address), fault=STRANGER), None
        self._readings[address] = reading
        return described

    async def _look_up(self) -> tuple[dict[AdminPort, AdminPort], list[DescribedProcess]]:
        """Return the name of each address, and reports on names without an address."""
        names: dict[AdminPort, AdminPort] = {}
        unknown: list[DescribedProcess] = []
        found = await asyncio.gather(*map(addresses_of, self._ports), return_exceptions=True)
        for name, addresses in zip(self._ports, found, strict=True):
            if isinstance(addresses, BridgeError):
                report = ProcessReport(name=str(name), address=str(name), fault=str(addresses))
                unknown.append((report, None))
            elif isinstance(addresses, BaseException):
                raise addresses
            else:
                names = dict.fromkeys(addresses, name) | names
        if len(names) > MAX_PORTS:
            raise BridgeError(f"--admin: stands for more than {MAX_PORTS} addresses; name fewer")
        return dict(sorted(names.items())), unknown


def _queues_of(settings: Settings) -> Iterator[QueueReport]:
    """Yield the queues to report on, the main queue first."""
    names = request_queues(settings.worker)
    for name in names:
        yield QueueReport(name=name, role="requests")
    for name in names:
        for delay in settings.worker.retry_delays:
            yield QueueReport(name=retry_queue(name, delay), role="retry", delay_seconds=delay)
    yield QueueReport(name=dead_queue(settings.worker.queue), role="dead_letters")
    if settings.webhook.queue is not None:
        yield QueueReport(name=settings.webhook.queue, role="events")


def _is_lost(connection: Connection) -> bool:
    transport = connection.transport
    return transport is None or transport.connection.is_closed


# The status


def put_together(
    queues: Sequence[QueueReport],
    broker: BrokerReport,
    broker_view: QueueView | None,
    described: Sequence[DescribedProcess],
) -> Status:
    """Combine all answers; `queues` is used if no answer has their sizes."""
    processes = [report for report, _ in described]
    workers = [one.worker for one in processes if one.worker is not None]
    views = [view for _, view in described if view is not None]
    view = broker_view or max(
        (view for view in views if view.at), key=lambda one: one.at or "", default=None
    )
    # If the broker does not tell, a worker that is paused by an operator does.
    told = (one for one in (broker_view, *views) if one is not None and one.is_paused is not None)
    pause = next(told, None)
    note = None if pause is None else pause.note
    ages = [one.oldest_seconds for one in workers if one.oldest_seconds is not None]
    stored, returned = sum(one.stored for one in workers), sum(one.returned for one in workers)
    queues = queues if view is None else view.queues
    return Status(
        at=utc_text(time.time()),
        broker=broker,
        queues=queues,
        queues_from=None if view is None else "workers" if broker_view is None else "broker",
        queues_at=None if view is None else view.at,
        is_paused_by_operator=None if pause is None else pause.is_paused,
        paused_by_operator=None
        if note is None
        else OperatorPauseReport(since=note.since_text, reason=note.reason, by=note.by),
        oldest_seconds=max(ages, default=None),
        rates=_sum_rates([one.rates for one in workers if one.rates is not None]),
        dead_letters=DeadLettersReport(
            waiting=next((one.ready for one in queues if one.role == "dead_letters"), None),
            by_reason=dict(sum((Counter(one.dead) for one in workers), Counter())),
        ),
        # The other worker of a returned copy, which stored it, may have ended.
        ladder=LadderReport(stored=stored, returned=returned, not_back=max(0, stored - returned))
        if workers
        else None,
        processes=processes,
    )


def _as_broker_says(queue: QueueReport, sizes: QueueSizes | None) -> QueueReport:
    if sizes is None:
        return queue
    if not sizes.exists:
        return queue.model_copy(update={"exists": False})
    counts = {"exists": True, "ready": sizes.ready, "consumers": sizes.consumers}
    return queue.model_copy(update=counts)


def _sum_rates(rates: Sequence[RatesReport]) -> RatesReport | None:
    if not rates:
        return None
    names = RatesReport.model_fields
    sums = {name: round(sum(getattr(one, name) for one in rates), 2) for name in names}
    return RatesReport(**sums)
