"""Client of the admin ports of running roles: addresses, /readyz and /metrics."""

import asyncio
import json
import re
import socket
from datetime import datetime
from typing import Annotated, Any, Final, Literal, NamedTuple

import httpx
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from bridge.config import AdminSettings
from bridge.deadline import Deadline
from bridge.errors import BridgeError
from bridge.telemetry.scrape import Scrape
from bridge.topology.paused_queue import Note, read_body

ANSWER_SECONDS: Final = 2.0
# Far above a worker's /metrics, which has less than 100 kB.
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

    IPv4 addresses, or IPv6 if there are none, so that a process with both is asked once. Raises
    BridgeError with the reason if there is none.
    """
    loop = asyncio.get_running_loop()
    try:
        async with Deadline(ANSWER_SECONDS):
            found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise BridgeError(f"the name is not looked up within {ANSWER_SECONDS:g} s") from None
    except (OSError, UnicodeError):
        raise BridgeError("the name has no address") from None
    hosts = {family: set[str]() for family in (socket.AF_INET, socket.AF_INET6)}
    for family, *_, address in found:
        if family in hosts:
            hosts[family].add(str(address[0]))
    chosen = hosts[socket.AF_INET] or hosts[socket.AF_INET6]
    return [AdminPort(host, name.port) for host in sorted(chosen)]


# Models of /readyz


def _read_note(content: object) -> Note | None:
    return read_body(json.dumps(content).encode())


# A word of a closed set; a later version may have more words.
_Word = Annotated[str, Field(pattern=r"^[a-z][a-z_]{0,39}$")]
_MOMENT: Final = r"^(19[7-9]|[2-9]\d\d)\d-\d\d-\d\dT\d\d:\d\d:\d\dZ$"
# Ten years: the most that a service may ask for.
_MOST_SECONDS: Final = 10 * 366 * 86400


def _checked_moment(text: str) -> str:
    datetime.fromisoformat(text)
    return text


class PauseFacts(BaseModel):
    """One pause of a worker.

    `status` and `code` are the service's answer that began it. `queue` and `fault`: where RabbitMQ
    does not store a copy, and how it refuses.
    """

    reason: _Word
    since: Annotated[str, Field(pattern=_MOMENT), AfterValidator(_checked_moment)] | None = None
    status: Annotated[int, Field(ge=100, le=999)] | None = None
    code: Annotated[str, Field(pattern="^[!-~]{1,64}$")] | None = None
    queue: Annotated[str, Field(max_length=255)] | None = None
    fault: _Word | None = None


class WorkerFacts(BaseModel):
    """A worker's own facts. `paused` names the pause that decides."""

    queue: Annotated[str, Field(max_length=255)]
    paused: _Word | None = None
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
    why: _Word
    refused: int


class WebhookFacts(BaseModel):
    """A webhook receiver's own facts."""

    refused: Annotated[tuple[RefusedEndpoint, ...], Field(max_length=51)] = ()


class HealthReport(BaseModel):
    """The answer of /readyz; `worker` and `webhook` are None if that role does not run there."""

    status: Literal["ok", "failing"]
    checks: Annotated[dict[_Word, Literal["ok", "failing"]], Field(max_length=50)]
    worker: WorkerFacts | None = None
    webhook: WebhookFacts | None = None


Client = httpx.AsyncClient


def open_client() -> Client:
    """Open the HTTP client for admin ports; the caller bounds how many it asks at once."""
    limits = httpx.Limits(max_connections=None)
    return Client(trust_env=False, timeout=ANSWER_SECONDS, limits=limits)


async def read_health(client: Client, port: AdminPort) -> HealthReport:
    """Read /readyz; raise BridgeError if nothing answers, or another program."""
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
