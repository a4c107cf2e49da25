"""What the connections of a listener share: the handler, the limits, the hooks, one buffer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bridge.http.limits import Limits
from bridge.http.messages import Handler, Judge, Response
from bridge.http.occupancy import Eviction

# How much one read takes from the kernel at most.
READ_BYTES: Final = 65536


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a listener calls besides the handler.

    `judge` may refuse a request by its header. `on_refusal` is called for each response that is
    sent without the handler: method and path, None if they were not read, and the response.
    `on_eviction` is called for each connection that was closed to make room.
    """

    judge: Judge = lambda *_: None
    on_refusal: Callable[[str | None, str | None, Response], None] = lambda *_: None
    on_eviction: Callable[[Eviction], None] = lambda _: None


NO_HOOKS: Final = Hooks()


@dataclass(slots=True)
class Service:
    """What all connections of a listener share.

    `date_line` is the Date header of each response; the listener renews it. One `buffer` is enough,
    because what is read is parsed before the next read.
    """

    handler: Handler
    limits: Limits
    hooks: Hooks
    date_line: bytes = b""
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))
