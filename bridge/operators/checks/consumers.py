"""Whether anybody takes what waits: the requests, the dead letters, the events."""

from bridge.amqp.client import Connection
from bridge.operators.checks.set_up import ConnectedBroker
from bridge.operators.finding import Finding
from bridge.operators.pausing import explain_paused, find_pause
from bridge.operators.worker_status import UNKNOWN, WorkerStatus, explain_pause, read_worker_status
from bridge.topology.declarations import dead_queue, normal_queue, queues_behind, urgent_queue
from bridge.topology.queue_sizes import read_queue


async def check_consumers(broker: ConnectedBroker) -> list[Finding]:
    """Look at the worker on this computer, and at who consumes the queues of both roles."""
    settings, roles, connection = broker.set_up.settings, broker.set_up.roles, broker.connection
    findings = []
    if "worker" in roles:
        name = settings.worker.queue
        fix = "start a worker; where one runs, its /readyz says why it takes nothing"
        findings.append(_judge_worker(await read_worker_status(settings)))
        if (paused := await find_pause(connection, name)) is not None:
            findings.append(Finding("pause", "fail", *explain_paused(name, paused)))
        findings += await _judge_consumers(connection, name, "nothing is sent", fix)
        behind = queues_behind(settings.worker)
        for one in behind:
            findings += await _judge_consumers(connection, one, "nothing of it is sent", fix)
        if not behind:
            findings += await _judge_left_behind(connection, name)
        findings += await _judge_dead_letters(connection, dead_queue(name))
    if "webhook" in roles and settings.webhook.queue is not None:
        fix = "subscribe to it, or set webhook.queue to null when subscribers have their own queues"
        name = settings.webhook.queue
        findings += await _judge_consumers(connection, name, "events pile up", fix)
    return findings


def _judge_worker(status: WorkerStatus | None) -> Finding:
    if status is None:
        return Finding("worker", "ok", UNKNOWN)
    if status.paused is None:
        return Finding("worker", "ok", "that on this computer is not paused")
    return Finding("worker", "fail", *explain_pause(status.paused))


async def _judge_consumers(
    connection: Connection, name: str, what_happens: str, fix: str
) -> list[Finding]:
    sizes = await read_queue(connection, name)
    if sizes is None or not sizes.exists:
        return []
    subject = f"queue {name}"
    if not sizes.consumers:
        text = f"nobody consumes it, so {what_happens}; {sizes.ready} messages wait"
        return [Finding(subject, "warn", text, fix)]
    return [Finding(subject, "ok", f"{sizes.consumers} consumers, {sizes.ready} messages wait")]


async def _judge_left_behind(connection: Connection, queue: str) -> list[Finding]:
    """Tell of the queues of priorities that are switched off again."""
    findings = []
    for name in (urgent_queue(queue), normal_queue(queue)):
        sizes = await read_queue(connection, name)
        if sizes is not None and sizes.exists:
            text = f"is left from worker.priorities: on; {sizes.ready} messages wait"
            fix = "workers that may read it empty it; delete it then"
            findings.append(Finding(f"queue {name}", "warn", text, fix))
    return findings


async def _judge_dead_letters(connection: Connection, name: str) -> list[Finding]:
    sizes = await read_queue(connection, name)
    if sizes is None or not sizes.ready:
        return []
    text = f"{sizes.ready} dead letters wait"
    return [Finding(f"queue {name}", "warn", text, "`sms-bridge dlq list` shows them")]
