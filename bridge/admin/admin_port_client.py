"""Client of the admin ports of running roles, whose server is `bridge.http.admin_port`.

It resolves addresses, reads /readyz and /metrics, and explains the pauses of workers.
"""

import asyncio
import json
import re
import socket
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal, NamedTuple

import httpx
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from bridge.config import AdminSettings, Settings
from bridge.deadline import Deadline
from bridge.errors import BridgeError
from bridge.telemetry.scrape import Scrape
from bridge.topology.paused_queue import Note, read_body

ANSWER_SECONDS: Final = 2.0
# Far above the size of a worker's /metrics, which is less than 100 kB.
MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
# Where to reach a role that listens on every address.
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
_ADDRESS: Final = re.compile(
    r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\.?))(?::(\d{1,5}))?"
)
_MAX_PORT: Final = 65535
STRANGER: Final = "another program answers there"


class AdminPort(NamedTuple):
    """A port by the name or the address of its host."""

    host: str
    port: int

    def __str__(self) -> str:
        """Write it as in a URL: `10.0.0.7:9090`, `[::1]:9090`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def local_port(settings: AdminSettings) -> AdminPort:
    """Return where a role with these settings listens on this computer."""
    return AdminPort(_LOOPBACK.get(settings.host, settings.host), settings.port)


def parse_admin_port(text: str, default_port: int) -> AdminPort:
    """Read `HOST`, `HOST:PORT`, `[IPV6]:PORT` or an IPv6 address.

    Raises ValueError that names the fault, also if there is no port and no default (0).
    """
    is_bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
    found = _ADDRESS.fullmatch(f"[{text}]" if is_bare_ipv6 else text)
    if found is None or int(found[3] or 0) > _MAX_PORT:
        raise ValueError("must be HOST or HOST:PORT, with an IPv6 address in brackets")
    port = int(found[3] or default_port)
    if port == 0:
        raise ValueError("needs a port, HOST:PORT, because admin.port is 0")
    return AdminPort(found[1] or found[2], port)


async def addresses_of(name: AdminPort) -> list[AdminPort]:
    """Return all addresses of a name, such as that of a headless service.

    Returns IPv6 addresses only if there are no IPv4 ones, because a process may have both. Raises
    BridgeError if there are none.
    """
    loop = asyncio.get_running_loop()
    try:
        async with Deadline(ANSWER_SECONDS):
            found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise BridgeError(f"the name was not resolved within {ANSWER_SECONDS:g} s") from None
    except (OSError, UnicodeError):
        raise BridgeError("the name has no address") from None
    hosts = {(family, str(address[0])) for family, *_, address in found}
    chosen = [host for family, host in hosts if family == socket.AF_INET]
    return [AdminPort(host, name.port) for host in sorted(chosen or (host for _, host in hosts))]


# Models of /readyz


def _read_note(content: object) -> Note | None:
    return read_body(json.dumps(content).encode())


# A word of a closed set, which may be longer in a later version.
Word = Annotated[str, Field(pattern=r"^[a-z][a-z_]{0,39}$")]


def _check_moment(text: str) -> str:
    datetime.fromisoformat(text)
    return text


Moment = Annotated[
    str,
    Field(pattern=r"^(19[7-9]|[2-9]\d\d)\d-\d\d-\d\dT\d\d:\d\d:\d\dZ$"),
    AfterValidator(_check_moment),
]
# Ten years, the longest wait that a service may request.
_MOST_SECONDS: Final = 10 * 366 * 86400


class PauseFacts(BaseModel):
    """One pause of a worker.

    `status` and `code` are from the service's answer that caused it. `queue` and `fault` name the
    queue in which RabbitMQ stores no copy, and how it refuses.
    """

    reason: Word
    since: Moment | None = None
    status: Annotated[int, Field(ge=100, le=999)] | None = None
    code: Annotated[str, Field(pattern="^[!-~]{1,64}$")] | None = None
    queue: Annotated[str, Field(max_length=255)] | None = None
    fault: Word | None = None


class WorkerFacts(BaseModel):
    """The state of a worker. `paused` is the reason of the pause that stops it now."""

    queue: Annotated[str, Field(max_length=255)]
    paused: Word | None = None
    pauses: Annotated[tuple[PauseFacts, ...], Field(max_length=50)] = ()
    paused_by_operator: Annotated[Any, BeforeValidator(_read_note)] = None
    outage_suspected: bool = False
    standby: bool | None = None
    retry_after_seconds: Annotated[float, Field(ge=0, le=_MOST_SECONDS, allow_inf_nan=False)] = 0.0

    @property
    def deciding_pause(self) -> PauseFacts | None:
        """The pause that keeps the worker from sending now."""
        if self.paused is None:
            return None
        known = (one for one in self.pauses if one.reason == self.paused)
        return next(known, PauseFacts(reason=self.paused))


class RefusedEndpoint(BaseModel):
    """An endpoint at which every webhook of the last hour was refused."""

    endpoint: Annotated[str, Field(pattern=r"^webhook(\.endpoints\.\d{1,2})?$")]
    why: Word
    refused: int


class WebhookFacts(BaseModel):
    """The state of a webhook receiver."""

    refused: Annotated[tuple[RefusedEndpoint, ...], Field(max_length=51)] = ()


class HealthReport(BaseModel):
    """The answer of /readyz; `worker` and `webhook` are None if that role does not run there."""

    status: Literal["ok", "failing"]
    checks: Annotated[dict[Word, Literal["ok", "failing"]], Field(max_length=50)]
    worker: WorkerFacts | None = None
    webhook: WebhookFacts | None = None


Client = httpx.AsyncClient


def open_client() -> Client:
    """Open the HTTP client for admin ports; the caller limits the number of requests."""
    limits = httpx.Limits(max_connections=None)
    return Client(trust_env=False, timeout=ANSWER_SECONDS, limits=limits)


async def read_health(client: Client, port: AdminPort) -> HealthReport:
    """Read /readyz; raise BridgeError if there is no answer, or one of another program."""
    try:
        return HealthReport.model_validate_json(await _read(client, port, "/readyz"))
    except ValidationError:
        raise BridgeError(STRANGER) from None


async def read_metrics(client: Client, port: AdminPort) -> Scrape:
    """Read /metrics; raise BridgeError as `read_health` does."""
    try:
        return Scrape((await _read(client, port, "/metrics")).decode())
    except ValueError:
        raise BridgeError(STRANGER) from None


async def _read(client: Client, port: AdminPort, page: str) -> bytes:
    """Read a page within `ANSWER_SECONDS`; raise BridgeError with the reason if that fails."""
    body = bytearray()
    try:
        async with (
            Deadline(ANSWER_SECONDS),
            client.stream("GET", f"http://{port}{page}") as answer,
        ):
            if answer.status_code not in {httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE}:
                raise BridgeError(STRANGER)
            async for part in answer.aiter_raw():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise BridgeError(STRANGER)
    except (TimeoutError, httpx.TimeoutException):
        raise BridgeError(f"no answer within {ANSWER_SECONDS:g} s") from None
    except httpx.ConnectError:
        raise BridgeError("no connection") from None
    except (httpx.HTTPError, httpx.InvalidURL):
        raise BridgeError(STRANGER) from None
    return bytes(body)


# The worker on this computer, and what its pause means

UNKNOWN: Final = (
    "no worker answers on this computer; each worker's /readyz says whether it is paused"
)
_ALARMS: Final = "look at rabbitmq-diagnostics check_alarms"
_BY_ITSELF: Final = "the worker resumes by itself"
# By the reason of a pause: its cause and its remedy.
_MEANINGS: Final[Mapping[str, tuple[str, str]]] = {
    "credentials_rejected": (
        "the SMS API or a proxy refuses the key",
        "replace the key in sms_api.key_file or sms_api.key, or correct the account",
    ),
    "insufficient_funds": ("the account at the SMS service has no credit", "top up the account"),
    "misconfigured": (
        "the SMS API is at another address, or rejects a setting in sms_api",
        (
            "correct sms_api.base_url, or the setting that the service's code is about (the log "
            "line `paused` has it); add a code about single numbers to sms_api.response.errors"
        ),
    ),
    "tls_failed": (
        "TLS with the SMS API fails, or its certificate is not trusted",
        "check sms_api.ca_file and the API's certificate",
    ),
    "outage": ("the SMS API fails for every message", f"{_BY_ITSELF} when it recovers"),
    "rate_limited": ("the SMS API asked for a long wait", f"{_BY_ITSELF} afterwards"),
    "operator": ("somebody ran `sms-bridge pause`", "`sms-bridge resume` ends it"),
}
# `broker_blocked`, by how RabbitMQ refuses to store a copy in a queue.
_REFUSALS: Final[Mapping[str | None, tuple[str, str]]] = {
    "nacked": (
        "RabbitMQ refuses messages for {queue}: it is full, or has no majority of nodes",
        (
            "raise its limit (rabbitmqctl list_queues name messages policy arguments) or empty it, "
            "dead letters with `sms-bridge dlq`; or rabbitmq-queues quorum_status {queue}"
        ),
    ),
    "returned": ("there is no queue {queue}", "`sms-bridge topology declare` makes it"),
    "error": (
        "the connection ended before RabbitMQ stored a message in {queue}",
        "the worker connects again by itself; its log says why",
    ),
}
_UNCONFIRMED: Final = (
    "RabbitMQ confirms no message in {queue}",
    f"{_ALARMS}; or rabbitmq-queues quorum_status {{queue}}",
)


async def read_worker(settings: Settings) -> WorkerFacts | None:
    """Read the state of the worker on this computer; None if none of `worker.queue` answers.

    RabbitMQ cannot tell a paused worker from a missing consumer.
    """
    try:
        async with open_client() as client:
            worker = (await read_health(client, local_port(settings.admin))).worker
    except BridgeError:
        return None
    return worker if worker is not None and worker.queue == settings.worker.queue else None


def explain_pause(pause: PauseFacts) -> tuple[str, str]:
    if pause.reason != "broker_blocked":
        unknown = ("a later version of the bridge has this reason", "look at the worker's log")
        return _MEANINGS.get(pause.reason, unknown)
    if pause.queue is None:
        return "RabbitMQ stores no messages", _ALARMS
    cause, remedy = _REFUSALS.get(pause.fault, _UNCONFIRMED)
    return cause.format(queue=pause.queue), remedy.format(queue=pause.queue)


def explain_local_pause(pause: PauseFacts) -> tuple[str, str]:
    cause, remedy = explain_pause(pause)
    return f"the worker on this computer is paused ({pause.reason}): {cause}", remedy
