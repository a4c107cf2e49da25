"""The worker on this computer, for commands that wait for it; what a pause means and its remedy."""

from collections.abc import Mapping
from typing import Final

from bridge.admin.admin_port import PauseFacts, WorkerFacts, local_port, open_client, read_health
from bridge.config import Settings
from bridge.errors import BridgeError

UNKNOWN: Final = "no worker answers on this computer; the /readyz of each says whether it is paused"
_ALARMS: Final = "look at rabbitmq-diagnostics check_local_alarms"
_BY_ITSELF: Final = "the worker goes on by itself"
# By the reason of a pause: its cause and its remedy.
_MEANINGS: Final[Mapping[str, tuple[str, str]]] = {
    "credentials_rejected": (
        "the SMS API or a proxy refuses the key",
        "replace what sms_api.key_file or sms_api.key holds, or correct the account",
    ),
    "insufficient_funds": ("the SMS API wants money", "top the account up"),
    "misconfigured": (
        "the SMS API is elsewhere, or refuses what sms_api says",
        (
            "correct sms_api.base_url, or what the service's code is about: the log line `paused` "
            "has it; a code about single numbers belongs into sms_api.response.errors"
        ),
    ),
    "tls_failed": (
        "no trusted connection to the SMS API",
        "check sms_api.ca_file and the API's certificate",
    ),
    "outage": ("the SMS API fails for every message", f"{_BY_ITSELF} when it recovers"),
    "rate_limited": ("the SMS API asked for a long wait", f"{_BY_ITSELF} after it"),
    "operator": ("somebody ran `sms-bridge pause`", "`sms-bridge resume` ends it"),
}
# `broker_blocked`, by how RabbitMQ refuses to store a copy in a queue.
_REFUSALS: Final[Mapping[str | None, tuple[str, str]]] = {
    "nacked": (
        "RabbitMQ refuses to store in {queue}: it is full, or has no majority of nodes",
        (
            "raise its limit (rabbitmqctl list_queues name messages policy arguments) or empty it, "
            "dead letters with `sms-bridge dlq`; or rabbitmq-queues quorum_status {queue}"
        ),
    ),
    "returned": ("there is no queue {queue}", "`sms-bridge topology declare` makes it"),
    "error": (
        "the connection ended before RabbitMQ stored in {queue}",
        "the worker connects again by itself; its log says why",
    ),
}
_UNCONFIRMED: Final = (
    "RabbitMQ confirms nothing in {queue}",
    f"{_ALARMS}; or rabbitmq-queues quorum_status {{queue}}",
)


async def read_worker(settings: Settings) -> WorkerFacts | None:
    """Ask the worker on `admin.port` of this computer for its facts.

    None if no worker of `worker.queue` answers there in time. To RabbitMQ, a paused worker is at
    most a missing consumer.
    """
    try:
        async with open_client() as client:
            worker = (await read_health(client, local_port(settings.admin))).worker
    except BridgeError:
        return None
    return worker if worker is not None and worker.queue == settings.worker.queue else None


def explain_pause(pause: PauseFacts) -> tuple[str, str]:
    """Return the cause of a pause, and the remedy."""
    if pause.reason != "broker_blocked":
        unknown = ("a later version of the bridge has this reason", "look at the worker's log")
        return _MEANINGS.get(pause.reason, unknown)
    if pause.queue is None:
        return "RabbitMQ stores nothing", _ALARMS
    cause, remedy = _REFUSALS.get(pause.fault, _UNCONFIRMED)
    return cause.format(queue=pause.queue), remedy.format(queue=pause.queue)


def explain_local_pause(pause: PauseFacts) -> tuple[str, str]:
    """Return why the worker on this computer is paused, and the remedy."""
    cause, remedy = explain_pause(pause)
    return f"the worker on this computer is paused ({pause.reason}): {cause}", remedy
