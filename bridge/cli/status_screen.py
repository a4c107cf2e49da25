"""The lines of `sms-bridge status`: faults first, then queues, workers and webhook receivers."""

import textwrap
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from bridge.cli.output import format_age, format_table, printable

if TYPE_CHECKING:
    from bridge.admin.admin_port import PauseFacts
    from bridge.admin.status.report import ProcessReport, QueueReport, Status, WorkerReport

# The usual width of a terminal: sentences are broken there, on a narrower one earlier.
WIDTH: Final = 80
_UNKNOWN: Final = "-"


class StatusLine(NamedTuple):
    """A line, and whether it is the head of a table, a fault, or neither."""

    text: str
    kind: Literal["head", "wrong", "plain"] = "plain"


def format_status(status: "Status", width: int = WIDTH) -> list[StatusLine]:
    """Write a status as lines, without line breaks or anything else that a terminal obeys.

    Sentences are broken at `width`; tables are as wide as their contents.
    """
    faults = (_wrapped(sentence, width, "wrong") for sentence in _faults(status))
    parts = (
        [_summary(status)],
        [line for lines in faults for line in lines],
        list(_queues(status, width)),
        list(_workers(status)),
        list(_receivers(status)),
    )
    lines: list[StatusLine] = []
    for part in filter(None, parts):
        lines += [StatusLine(""), *part] if lines else part
    return [line._replace(text=printable(line.text)) for line in lines]


def _summary(status: "Status") -> StatusLine:
    rates = status.rates
    if rates is None:
        done = "rates unknown: no worker answers" if not status.workers else "rates not known yet"
        return StatusLine(f"{status.at}  {done}")
    return StatusLine(
        f"{status.at}  {_how_many(len(status.workers))}: "
        f"{rates.sent_per_second:.1f} sent/s, {rates.retried_per_second:.1f} retried/s, "
        f"{rates.dead_per_second:.1f} dead/s"
    )


def _how_many(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _wrapped(
    text: str, width: int, kind: Literal["wrong", "plain"] = "plain"
) -> Iterator[StatusLine]:
    for line in textwrap.wrap(text, width, subsequent_indent="  "):
        yield StatusLine(line, kind)


# Faults


def _faults(status: "Status") -> Iterator[str]:
    broker = status.broker
    if broker.fault is not None:
        yield f"BROKER  {broker.fault}"
    elif broker.stores is False:
        yield (
            "BROKER  takes no messages, as in a memory or disk alarm; look at "
            "rabbitmq-diagnostics check_local_alarms"
        )
    if broker.refused:
        yield (
            f"NO PERMISSION  on {', '.join(broker.refused)}: what waits there is not known; to "
            "read is enough (rabbitmqctl set_permissions)"
        )
    if status.is_paused_by_operator:
        note = status.paused_by_operator
        since = _since(None if note is None else note.since)
        why = "" if note is None or note.reason is None else f": {note.reason}"
        yield f"PAUSED  every worker, by an operator{since}{why}; `sms-bridge resume` ends it"
    yield from _own_pauses(status)
    waits = [worker.retry_after_seconds for _, worker in status.workers]
    slow, of_all = [wait for wait in waits if wait > 0], _how_many(len(waits))
    if slow:
        yield (
            f"SLOWED DOWN  {len(slow)} of {of_all}, by a 429 of the service, for "
            f"{format_age(max(slow))} more"
        )
    if suspecting := sum(worker.outage_suspected is True for _, worker in status.workers):
        yield f"OUTAGE SUSPECTED  {suspecting} of {of_all}, where request after request fails"
    yield from _unanswered(status)


def _own_pauses(status: "Status") -> Iterator[str]:
    from bridge.admin.worker_status import known_reason, meaning_of

    pauses: dict[tuple[str, str | None], list[PauseFacts]] = {}
    for _, worker in status.workers:
        for pause in worker.pauses:
            pauses.setdefault((pause.reason, pause.queue), []).append(pause)
    for (reason, queue), ones in pauses.items():
        # Reported above, whether the broker or only a worker told it.
        if reason == "operator" and status.is_paused_by_operator:
            continue
        first = min(ones, key=lambda pause: pause.since or "")
        answered = f", status {first.status}" if first.status is not None else ""
        answered += f", code {first.code}" if first.code is not None else ""
        known = known_reason(reason)
        meaning = "" if known is None else ": {}; {}".format(*meaning_of(known, queue, first.fault))
        count = f"{len(ones)} of {_how_many(len(status.workers))}"
        yield f"PAUSED  {count}, {reason}{_since(first.since)}{answered}{meaning}"


def _unanswered(status: "Status") -> Iterator[str]:
    for process in status.processes:
        if process.fault is not None:
            where = "" if process.name == process.address else f" ({process.name})"
            yield f"NO ANSWER  {process.address}{where}: {process.fault}"
    consumers = next((one.consumers for one in status.queues if one.role == "requests"), None)
    if status.queues_from != "broker" or consumers is None:
        return
    # A paused worker may be a consumer or not. A consumer that has ended counts until its messages
    # are settled, beside the worker's next consumer, which takes the probe.
    count_twice = sum(bool(worker.pauses and worker.held) for _, worker in status.workers)
    hidden = consumers - len(status.workers) - count_twice
    if consumers == 0 and not status.workers:
        yield "NO WORKER  takes requests: none runs, or each is paused or has no broker"
    elif hidden > 0:
        yield (
            f"NOT SHOWN  {hidden} of {_how_many(consumers)} that consume: name their admin "
            "ports with --admin"
        )


def _since(moment: str | None) -> str:
    return "" if moment is None else f" since {moment} ({_age(moment)})"


def _age(moment: str) -> str:
    return format_age(time.time() - datetime.fromisoformat(moment).timestamp())


# Queues


def _queues(status: "Status", width: int) -> Iterator[StatusLine]:
    source = ""
    if status.queues_from == "workers" and status.queues_at is not None:
        source = f"as a worker saw it {_age(status.queues_at)} ago"
    rows = [
        (queue.name, _number(queue), _count(queue.consumers), _note(status, queue))
        for queue in status.queues
        if queue.role != "retry"
    ]
    yield from _table(("QUEUE", "WAITING", "CONSUMERS", source), rows)
    steps = (
        f"{queue.name.rpartition('.')[2]} {_number(queue)}"
        for queue in status.queues
        if queue.role == "retry"
    )
    yield from _wrapped("on the retry ladder: " + ", ".join(steps), width)
    if (told := status.ladder) is not None and told.not_back:
        text = (
            f"retries since the workers started: {told.stored:,} stored, {told.returned:,} came "
            f"back, {told.not_back:,} did not yet"
        )
        yield from _wrapped(text, width)
    if status.workers:
        counts = sorted(status.dead_letters.by_reason.items(), key=lambda item: -item[1])
        dead = ", ".join(f"{reason} {count:,}" for reason, count in counts)
        yield from _wrapped(f"dead letters since the workers started: {dead or 'none'}", width)


def _note(status: "Status", queue: "QueueReport") -> str:
    if queue.role == "requests" and status.oldest_seconds is not None:
        return f"oldest in hand: {format_age(status.oldest_seconds)}"
    return ""


def _number(queue: "QueueReport") -> str:
    return "missing" if queue.exists is False else _count(queue.ready)


def _count(count: int | None) -> str:
    return _UNKNOWN if count is None else f"{count:,}"


# Processes


def _workers(status: "Status") -> Iterator[StatusLine]:
    rows = [
        (
            process.address,
            _count(worker.held),
            *_rates(worker),
            _ago(worker.last_sent_at),
            _state(process, worker),
        )
        for process, worker in status.workers
    ]
    yield from _table(("WORKER", "HELD", "SENT/S", "RETRY/S", "DEAD/S", "LAST", "STATE"), rows)


def _receivers(status: "Status") -> Iterator[StatusLine]:
    rows = [
        (
            process.address,
            _rate(process.webhook.published_per_second),
            _rate(process.webhook.refused_per_second),
            _rate(process.webhook.failed_per_second),
            _ago(process.webhook.last_event_at),
            _state(process, None),
        )
        for process in status.processes
        if process.webhook is not None
    ]
    yield from _table(("WEBHOOK", "EVENTS/S", "REFUSED/S", "FAILED/S", "LAST", "STATE"), rows)


def _rates(worker: "WorkerReport") -> tuple[str, str, str]:
    if (rates := worker.rates) is None:
        return (_UNKNOWN, _UNKNOWN, _UNKNOWN)
    return (
        _rate(rates.sent_per_second),
        _rate(rates.retried_per_second),
        _rate(rates.dead_per_second),
    )


def _rate(per_second: float | None) -> str:
    return _UNKNOWN if per_second is None else f"{per_second:,.1f}"


def _ago(moment: str | None) -> str:
    return _UNKNOWN if moment is None else _age(moment)


def _state(process: "ProcessReport", worker: "WorkerReport | None") -> str:
    if "not_draining" in process.failing:
        return "draining"
    if not process.is_connected:
        return "no broker"
    if worker is not None and worker.pauses:
        return "paused: " + ", ".join(pause.reason for pause in worker.pauses)
    if process.failing:
        return "not ready: " + ", ".join(process.failing)
    if worker is not None and worker.retry_after_seconds > 0:
        return "slowed down"
    if worker is not None and worker.is_standby is not None:
        return "standing by" if worker.is_standby else "active"
    return "ready"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[StatusLine]:
    """Write a table, with all columns but the first and the last aligned to the right."""
    if not rows:
        return
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    aligned = [
        [row[0], *(row[at].rjust(widths[at]) for at in range(1, len(row) - 1)), row[-1]]
        for row in cells
    ]
    first, *others = format_table(aligned[0], aligned[1:])
    yield StatusLine(first, "head")
    yield from map(StatusLine, others)
