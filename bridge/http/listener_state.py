"""The state that all connections of a listener share: limits, hooks, handler, read buffer."""

import resource
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from bridge.http.messages import Handler, Judge, Response
from bridge.telemetry.logs import Log

log = Log(__name__)

# Size of one read from the kernel.
READ_BYTES: Final = 65536
# Number of open files to request; systems commonly allow 1,024 until a process asks for more.
MAX_OPEN_FILES: Final = 65536

# Why a connection was evicted: too many connections, or too much memory in use.
Eviction = Literal["connections", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one listener.

    `max_buffered_bytes` limits the memory of all unanswered requests together, headers included.
    `keep_alive_seconds` is how long a connection may be silent between two requests,
    `idle_timeout_seconds` how long before the first request, within a header, or with an unread
    response.
    """

    max_connections: int
    max_header_bytes: int
    max_headers: int
    max_body_bytes: int
    max_buffered_bytes: int
    idle_timeout_seconds: float
    body_timeout_seconds: float
    keep_alive_seconds: float


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of a listener besides its handler.

    `judge` may refuse a request by its header. `on_refusal` is called for each response that is
    sent without the handler: method and path, None if they were not read, and the response.
    `on_eviction` is called for each connection that was closed to make room.
    """

    judge: Judge = lambda *_: None
    on_refusal: Callable[[str | None, str | None, Response], None] = lambda *_: None
    on_eviction: Callable[[Eviction], None] = lambda _: None


NO_HOOKS: Final = Hooks()


@dataclass(slots=True)
class ListenerState:
    """The state that all connections of a listener share.

    `date_line` is the Date header of each response; the listener renews it. One `buffer` is enough,
    because every read is parsed before the next one.
    """

    handler: Handler
    limits: Limits
    hooks: Hooks
    date_line: bytes = b""
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))


def fit_open_files(limits: Limits, *, reserved: int, setting: str) -> Limits:
    """Lower `max_connections` to the number that the limit of open files permits.

    `reserved` is the number of files that the rest of the process needs: without descriptors it
    could neither reach the broker nor answer on the admin port. At least a quarter of the open
    files is left to connections. A warning names `setting` and the remedy.
    """
    open_files = allow_open_files()
    most = max(open_files - reserved, open_files // 4)
    if limits.max_connections <= most:
        return limits
    log.warning(
        "connections_limited",
        setting=setting,
        wanted=limits.max_connections,
        connections=most,
        open_files=open_files,
        remedy="raise the hard limit of open files (ulimit -Hn, LimitNOFILE), or lower the setting",
    )
    return replace(limits, max_connections=most)


def allow_open_files() -> int:
    """Raise the limit of open files as far as the system permits; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return allowed
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
