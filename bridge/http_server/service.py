"""What the connections of a listener have in common: who answers, what is taken, who is told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bridge.http_server.limits import Limits
from bridge.http_server.occupancy import Eviction
from bridge.http_server.request import Handler, Judge

# What one read takes; more waits in the kernel.
READ_BYTES: Final = 65536


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a listener asks and tells besides.

    `judge` looks at each header. `on_refusal` hears of what is answered without the handler: method
    and path, if they were read, and the status. `on_eviction` hears of who had to go for another.
    """

    judge: Judge = lambda *_: None
    on_refusal: Callable[[str | None, str | None, int], None] = lambda *_: None
    on_eviction: Callable[[Eviction], None] = lambda _: None


NO_HOOKS: Final = Hooks()


@dataclass(slots=True)
class Service:
    """What all connections of a listener are served with.

    `date_line` is the header of each response; whoever has a clock renews it. They share one
    `buffer`: what is read is parsed before the next read.
    """

    handler: Handler
    limits: Limits
    hooks: Hooks
    date_line: bytes = b""
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))
