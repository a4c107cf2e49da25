"""The pause of the worker on this computer: its cause and remedy, for commands that wait."""

from typing import Final, NamedTuple, assert_never, cast, get_args

from bridge.admin.admin_port import local_port, open_client, read_health
from bridge.config import Settings
from bridge.errors import BridgeError
from bridge.worker.fates import PauseReason

UNKNOWN: Final = "no worker answers on this computer; whether one is paused, its own /readyz says"


_LOOK_AT_ALARMS: Final = "look at rabbitmq-diagnostics check_local_alarms"


class WorkerStatus(NamedTuple):
    """Why a worker is paused; None if it is not.

    `queue` and `fault`: where RabbitMQ does not store a copy, and how it refuses.
    """

    paused: PauseReason | None
    queue: str | None = None
    fault: str | None = None


async def read_worker_status(settings: Settings) -> WorkerStatus | None:
    """Ask the worker on `admin.port` of this computer whether it is paused, and why.

    None if no worker of `worker.queue` answers there in time. RabbitMQ cannot tell either: to it, a
    paused worker is at most a missing consumer.
    """
    try:
        async with open_client() as client:
            health = await read_health(client, local_port(settings.admin))
    except BridgeError:
        return None
    worker = health.worker
    if worker is None or worker.queue != settings.worker.queue:
        return None
    if worker.paused is None:
        return WorkerStatus(None)
    reason = known_reason(worker.paused)
    if reason is None:
        return None
    pause = next((one for one in worker.all_pauses if one.reason == reason), None)
    return WorkerStatus(reason) if pause is None else WorkerStatus(reason, pause.queue, pause.fault)


def known_reason(word: str) -> PauseReason | None:
    """Return the word as a reason; None if only a later version has it."""
    return cast(PauseReason, word) if word in get_args(PauseReason) else None


def explain_pause(
    reason: PauseReason, queue: str | None = None, fault: str | None = None
) -> tuple[str, str]:
    """Return why the worker on this computer is paused, and the remedy."""
    cause, remedy = meaning_of(reason, queue, fault)
    return f"the worker on this computer is paused ({reason}): {cause}", remedy


def meaning_of(
    reason: PauseReason, queue: str | None = None, fault: str | None = None
) -> tuple[str, str]:
    """Return the cause of a pause, and the remedy.

    `queue` and `fault`: where RabbitMQ does not store a copy, and how it refuses.
    """
    match reason:
        case "credentials_rejected":
            remedy = "replace what sms_api.key_file or sms_api.key holds, or correct the account"
            return "the SMS API or a proxy refuses the key", remedy
        case "insufficient_funds":
            return "the SMS API wants money", "top the account up"
        case "misconfigured":
            remedy = (
                "correct sms_api.base_url, or what the service's code is about: the log's line "
                "`paused` has it; one about single numbers belongs into sms_api.response.errors"
            )
            return "the SMS API is elsewhere, or refuses what sms_api says", remedy
        case "tls_failed":
            remedy = "check sms_api.ca_file and its certificate"
            return "no trusted connection to the SMS API", remedy
        case "outage":
            remedy = "the worker goes on by itself once it does not"
            return "the SMS API fails for everything", remedy
        case "rate_limited":
            return "the SMS API asked for a long wait", "the worker goes on by itself after it"
        case "broker_blocked":
            return _meaning_of_unstored(queue, fault)
        case "operator":
            return "somebody said `sms-bridge pause`", "`sms-bridge resume` ends it"
        case _:
            assert_never(reason)


def _meaning_of_unstored(queue: str | None, fault: str | None) -> tuple[str, str]:
    if queue is None:
        # A worker of an earlier version.
        return "RabbitMQ stores nothing", _LOOK_AT_ALARMS
    match fault:
        case "nacked":
            cause = f"RabbitMQ refuses to store in {queue}: it is full, or has no majority of nodes"
            remedy = (
                "raise its limit (rabbitmqctl list_queues name messages policy arguments) or empty "
                f"it, dead letters with `sms-bridge dlq`; or rabbitmq-queues quorum_status {queue}"
            )
            return cause, remedy
        case "returned":
            return f"there is no queue {queue}", "`sms-bridge topology declare` makes it"
        case "error":
            return (
                f"the connection ended before RabbitMQ stored in {queue}",
                "the worker connects again by itself; its log says why",
            )
        case _:
            return (
                f"RabbitMQ confirms nothing in {queue}",
                f"{_LOOK_AT_ALARMS}; or rabbitmq-queues quorum_status {queue}",
            )
