"""What the worker on this computer says of itself, for the commands that wait for one."""

import asyncio
from typing import Any, Final, NamedTuple, assert_never, get_args

import httpx

from bridge.config import Settings
from bridge.outbound.fates import PauseReason

ANSWER_SECONDS: Final = 2.0
# Where to reach a role that listens on every address.
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
UNKNOWN: Final = "no worker answers on this computer; whether one is paused, its own /readyz says"


class WorkerStatus(NamedTuple):
    """What a worker says of itself: why it is paused, None when it is not."""

    paused: PauseReason | None


async def read_worker_status(settings: Settings) -> WorkerStatus | None:
    """Ask the worker on `admin.port` of this computer whether it is paused, and why.

    None when that cannot be known: no worker of `worker.queue` answers there within
    `ANSWER_SECONDS`. RabbitMQ does not know; a paused worker is at most no consumer there.
    """
    admin = settings.admin
    host = _LOOPBACK.get(admin.host, admin.host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{admin.port}/readyz"
    try:
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            httpx.AsyncClient(trust_env=False, timeout=ANSWER_SECONDS) as client,
        ):
            answer = (await client.get(address)).json()
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError):
        return None
    return _read(answer, settings.worker.queue)


def _read(answer: Any, queue: str) -> WorkerStatus | None:  # noqa: ANN401  JSON of whoever listens
    worker = answer.get("worker") if isinstance(answer, dict) else None
    if not isinstance(worker, dict) or worker.get("queue") != queue:
        return None
    reason = worker.get("paused")
    return WorkerStatus(reason) if reason is None or reason in get_args(PauseReason) else None


def explain_pause(reason: PauseReason) -> tuple[str, str]:
    """Say what a pause is for, and what to do."""
    cause, remedy = _meaning_of(reason)
    return f"the worker on this computer is paused ({reason}): {cause}", remedy


def _meaning_of(reason: PauseReason) -> tuple[str, str]:
    match reason:
        case "credentials_rejected":
            remedy = "replace what sms_api.key_file or sms_api.key holds, or correct the account"
            return "the SMS API or a proxy refuses the key", remedy
        case "insufficient_funds":
            return "the SMS API wants money", "top the account up"
        case "misconfigured":
            remedy = (
                "correct sms_api.base_url, or what the service's code is about: the log's line "
                "`paused` has it"
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
            return "RabbitMQ stores nothing", "look at rabbitmq-diagnostics check_local_alarms"
        case "operator":
            return "somebody said `sms-bridge pause`", "`sms-bridge resume` ends it"
        case _:
            assert_never(reason)
