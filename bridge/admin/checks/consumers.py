"""Whether anybody takes what waits: the requests, the dead letters, the events."""

from bridge.admin.checks.set_up import ConnectedBroker
from bridge.admin.finding import Finding
from bridge.admin.pausing import explain_paused, find_pause
from bridge.admin.worker_status import UNKNOWN, WorkerStatus, explain_pause, read_worker_status
from bridge.amqp.client import Connection
from bridge.topology.declarations import dead_queue
from bridge.topology.paused_queue import HIDDEN, HIDDEN_REMEDY, HiddenPauseError, paused_queue
from bridge.topology.queue_sizes import read_queue


async def check_consumers(broker: ConnectedBroker) -> list[Finding]:
    """Look at the worker on this computer, and at who consumes the queues of both roles."""
    settings, roles, connection = broker.set_up.settings, broker.set_up.roles, broker.connection
    findings = []
    if "worker" in roles:
        name = settings.worker.queue
        fix = "start a worker; where one runs, its /readyz says why it takes nothing"
        findings.append(_judge_worker(await read_worker_status(settings)))
        findings += await _judge_pause(connection, name)
        findings += await _judge_consumers(connection, name, "nothing is sent", fix)
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
    return Finding("worker", "fail", *explain_pause(status.paused, status.queue, status.fault))


async def _judge_pause(connection: Connection, queue: str) -> list[Finding]:
    try:
        paused = await find_pause(connection, queue)
    except HiddenPauseError:
        text = f"no permission on {paused_queue(queue)}: whether one is on is not known; {HIDDEN}"
        return [Finding("pause", "warn", text, HIDDEN_REMEDY)]
    return [] if paused is None else [Finding("pause", "fail", *explain_paused(queue, paused))]


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


async def _judge_dead_letters(connection: Connection, name: str) -> list[Finding]:
    sizes = await read_queue(connection, name)
    if sizes is None or not sizes.ready:
        return []
    text = f"{sizes.ready} dead letters wait"
    return [Finding(f"queue {name}", "warn", text, "`sms-bridge dlq list` shows them")]
