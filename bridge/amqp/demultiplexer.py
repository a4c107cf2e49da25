"""Distributes the frames of a connection by channel: to a `FrameTaker`, or to aiormq."""

import asyncio
from collections.abc import Callable
from typing import Final

from bridge.amqp.frames import (
    FRAME_END,
    FRAME_HEADER,
    FRAME_OVERHEAD_BYTES,
    FRAME_TYPES,
    HEARTBEAT,
    FrameTaker,
)

# Interval of the heartbeats shown to aiormq while all other frames bypass it.
SIGN_OF_LIFE_SECONDS: Final = 1.0
# Enough bytes of a foreign answer to recognise its protocol.
FOREIGN_BYTES: Final = 8


class Demultiplexer(asyncio.StreamReaderProtocol):
    """Passes each frame to the taker of its channel, else to aiormq's reader."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        takers: dict[int, FrameTaker],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(reader, loop=asyncio.get_running_loop())
        self._clock = clock
        self._takers = takers
        # The beginning of an incomplete frame, and the number of missing bytes.
        self._held: list[bytes] = []
        self._missing_bytes = 0
        self._is_amqp = True
        self.foreign = b""
        self._passed_on_at = self.heard_at = self._clock()

    def data_received(self, data: bytes) -> None:
        """Distribute received frames; keep an incomplete one until its end arrives."""
        self.heard_at = self._clock()
        if self._held:
            self._held.append(data)
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                return
            data = b"".join(self._held)
            self._held.clear()
        if self._is_amqp:
            data = self._sort(data)
        if data:
            self._passed_on_at = self._clock()
            super().data_received(data)

    def pretend(self, data: bytes) -> None:
        """Hand bytes to aiormq that did not come from the broker."""
        super().data_received(data)

    def _sort(self, data: bytes) -> bytes:
        """Return the frames that no taker took."""
        others: list[bytes] = []
        begin = at = end = 0
        while at + FRAME_OVERHEAD_BYTES <= len(data):
            frame_type, channel, size = FRAME_HEADER.unpack_from(data, at)
            end = at + FRAME_OVERHEAD_BYTES + size
            if end > len(data):
                break
            if data[end - 1] != FRAME_END or frame_type not in FRAME_TYPES:
                self._is_amqp = False
                break
            taker = self._takers.get(channel)
            if taker is not None and taker.feed(frame_type, data[at + FRAME_HEADER.size : end - 1]):
                others += [data[begin:at]] if begin < at else []
                begin = end
            at = end
        if at < len(data):
            at = self._hold(data, at, end)
        others.append(data[begin:at])
        return b"".join(others) or self._sign_of_life(at)

    def _hold(self, data: bytes, at: int, end: int) -> int:
        """Keep an incomplete frame; return the offset at which it begins."""
        if self._is_amqp and data[at] in FRAME_TYPES:
            # Without a complete frame header the size is unknown, and any next piece is tried.
            self._held.append(data[at:])
            self._missing_bytes = end - len(data)
            return at
        # Not AMQP frames, for instance the protocol header with which a broker demands another
        # version. aiormq reports it.
        self._is_amqp = False
        self.foreign = data[at : at + FOREIGN_BYTES]
        return len(data)

    def _sign_of_life(self, taken_bytes: int) -> bytes:
        # aiormq closes a connection after three heartbeats without data.
        silent = self._clock() - self._passed_on_at
        return HEARTBEAT if taken_bytes and silent > SIGN_OF_LIFE_SECONDS else b""
