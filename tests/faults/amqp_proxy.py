"""A TCP proxy in front of a broker that fails on demand, and to the frame.

It forwards whole AMQP frames. A `Trap` waits for the nth method frame of a kind and then cuts
the connection, swallows the frame or alters it, so that a crash point needs no luck.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Literal

from yarl import URL

Sender = Literal["client", "broker"]
Method = tuple[int, int]
# Takes the frame and returns what to forward in its place.
Alter = Callable[[bytes], bytes]
Deed = Literal["cut", "cut_after", "drop", "pass"] | Alter

START_OK: Final[Method] = (10, 11)
CHANNEL_OPEN: Final[Method] = (20, 10)
CHANNEL_CLOSE: Final[Method] = (20, 40)
DECLARE: Final[Method] = (50, 10)
CONSUME: Final[Method] = (60, 20)
PUBLISH: Final[Method] = (60, 40)
DELIVER: Final[Method] = (60, 60)
CONFIRM_SELECT_OK: Final[Method] = (85, 11)
# From a client it acks a delivery, from the broker it confirms a publish.
ACK: Final[Method] = (60, 80)
NACK: Final[Method] = (60, 120)

# How the name of the exchange ends over which workers talk, which is no concern of a trap.
_WORKERS: Final = b".workers"
_GREETING_BYTES: Final = 8
_FRAME_HEAD: Final = struct.Struct(">BHL")
_METHOD_FRAME: Final = 1
_READ_BYTES: Final = 65536
_LINGER_NOT: Final = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class Trap:
    """Waits for the nth frame of a kind, on any channel or on one; with `again`, for every nth."""

    sender: Sender
    method: Method
    deed: Deed
    nth: int = 1
    again: bool = False
    link: str = ""
    channel: int | None = None
    also: Callable[[], object] | None = None
    seen: int = 0
    sprung: asyncio.Event = field(default_factory=asyncio.Event)

    def takes(self, pipe: "Pipe", sender: Sender, channel: int, method: Method) -> bool:
        """Count a frame and say whether the trap springs at it."""
        if (sender, method) != (self.sender, self.method) or self.link not in pipe.name:
            return False
        if self.channel not in {None, channel}:
            return False
        self.seen += 1
        hit = self.seen % self.nth == 0 if self.again else self.seen == self.nth
        if hit:
            self.sprung.set()
            if self.also is not None:
                self.also()
        return hit


class Pipe:
    """One connection of a client, and ours to the broker on its behalf."""

    def __init__(self, proxy: "AmqpProxy", client: asyncio.StreamWriter) -> None:
        self.name = ""
        self._proxy = proxy
        self._client = client
        self._broker: asyncio.StreamWriter | None = None

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Forward both ways until either side ends."""
        await self._proxy.wait_until_open("client")
        from_broker, self._broker = await asyncio.open_connection(*self._proxy.target)
        pumps = [
            asyncio.create_task(self._pump("client", reader, self._broker)),
            asyncio.create_task(self._pump("broker", from_broker, self._client)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Close both sides in good order; what was forwarded arrives."""
        for writer in (self._client, self._broker):
            if writer is not None:
                writer.close()

    def cut(self) -> None:
        """Reset the client's side; the broker still reads what was forwarded."""
        reset_connection(self._client)
        if self._broker is not None:
            self._broker.close()

    def reset(self) -> None:
        """Reset both sides; what was not read yet is lost."""
        for writer in (self._client, self._broker):
            if writer is not None:
                reset_connection(writer)

    async def _pump(
        self, sender: Sender, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if sender == "client":
            writer.write(await reader.readexactly(_GREETING_BYTES))
        unread = b""
        while read := await reader.read(_READ_BYTES):
            frames, unread = _split(unread + read)
            for frame in frames:
                await self._proxy.wait_until_open(sender)
                for out, then in self._judge(sender, frame):
                    writer.write(out)
                    if then:
                        self.cut()
                        return
            await writer.drain()

    def _judge(self, sender: Sender, frame: bytes) -> list[tuple[bytes, bool]]:
        """Return what to write for a frame, and whether to cut behind it."""
        kind, channel, _ = _FRAME_HEAD.unpack_from(frame)
        if kind != _METHOD_FRAME:
            return [(frame, False)]
        method = struct.unpack_from(">HH", frame, _FRAME_HEAD.size)
        if (sender, method) == ("client", START_OK):
            self.name = frame.decode("latin-1")
        if (sender, method) == ("client", PUBLISH) and _WORKERS in frame:
            return [(frame, False)]
        for trap in self._proxy.traps:
            if trap.takes(self, sender, channel, (method[0], method[1])):
                return _do(trap.deed, frame)
        return [(frame, False)]


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole frames, and the beginning of the next."""
    frames, start = list[bytes](), 0
    while len(data) - start >= _FRAME_HEAD.size:
        _, _, size = _FRAME_HEAD.unpack_from(data, start)
        end = start + _FRAME_HEAD.size + size + 1
        if end > len(data):
            break
        frames.append(data[start:end])
        start = end
    return frames, data[start:]


def _do(deed: Deed, frame: bytes) -> list[tuple[bytes, bool]]:
    match deed:
        case "pass":
            return [(frame, False)]
        case "drop":
            return []
        case "cut":
            return [(b"", True)]
        case "cut_after":
            return [(frame, True)]
        case alter:
            return [(alter(frame), False)]


def reset_connection(writer: asyncio.StreamWriter) -> None:
    """End a connection by a reset; what was not sent yet is thrown away."""
    opened = writer.get_extra_info("socket")
    if opened is not None:
        with suppress(OSError, ValueError):  # it may be closed already
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    writer.transport.abort()


class AmqpProxy:
    """Forwards to one broker, until told otherwise."""

    def __init__(self, broker_url: str) -> None:
        self._broker_url = URL(broker_url)
        self.target = (self._broker_url.host or "127.0.0.1", self._broker_url.port or 5672)
        self.traps: list[Trap] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._pipes: dict[Pipe, asyncio.Task[None]] = {}
        self._open: dict[Sender, asyncio.Event] = {
            "client": asyncio.Event(),
            "broker": asyncio.Event(),
        }
        self.thaw()

    @property
    def url(self) -> str:
        """The broker's URL, through the proxy."""
        return str(self._broker_url.with_host("127.0.0.1").with_port(self.port))

    @property
    def names(self) -> list[str]:
        """What the open connections are called."""
        return [pipe.name for pipe in self._pipes]

    async def accept(self) -> None:
        """Listen, on the same port each time."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Refuse new connections, and end those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def freeze(self, *senders: Sender) -> None:
        """Forward nothing that these send (default: nobody); connections stay open."""
        for sender in senders or self._open:
            self._open[sender].clear()

    def thaw(self) -> None:
        """Forward again."""
        for gate in self._open.values():
            gate.set()

    def cut(self, link: str = "") -> None:
        """Cut the connections whose name holds `link`."""
        for pipe in [pipe for pipe in self._pipes if link in pipe.name]:
            pipe.cut()

    def reset(self, link: str = "") -> None:
        """Reset the connections whose name holds `link`, both ways."""
        for pipe in [pipe for pipe in self._pipes if link in pipe.name]:
            pipe.reset()

    def trap(
        self,
        sender: Sender,
        method: Method,
        deed: Deed,
        *,
        nth: int = 1,
        again: bool = False,
        link: str = "",
        channel: int | None = None,
        also: Callable[[], object] | None = None,
    ) -> Trap:
        """Set a trap and return it; `also` is called when it springs."""
        trap = Trap(
            sender, method, deed, nth=nth, again=again, link=link, channel=channel, also=also
        )
        self.traps.append(trap)
        return trap

    async def wait_until_open(self, sender: Sender) -> None:
        """Wait while what this side sends is held back."""
        await self._open[sender].wait()

    async def aclose(self) -> None:
        """End everything."""
        self.refuse()
        tasks = [*self._pipes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError
        pipe = Pipe(self, writer)
        self._pipes[pipe] = task
        try:
            await pipe.run(reader)
        except (OSError, asyncio.CancelledError):
            pipe.reset()
        finally:
            del self._pipes[pipe]


@asynccontextmanager
async def open_amqp_proxy(broker_url: str) -> AsyncIterator[AmqpProxy]:
    """Lend a proxy in front of a broker."""
    proxy = AmqpProxy(broker_url)
    await proxy.accept()
    try:
        yield proxy
    finally:
        await proxy.aclose()


def misnumber(frame: bytes) -> bytes:
    """Alter an ack so that it names a delivery that the broker never made."""
    at = _FRAME_HEAD.size + 4
    (tag,) = struct.unpack_from(">Q", frame, at)
    return frame[:at] + struct.pack(">Q", tag + 1_000_000) + frame[at + 8 :]


def refuse(frame: bytes) -> bytes:
    """Alter a confirm so that it is a refusal: `basic.nack` has the same arguments in its place."""
    at = _FRAME_HEAD.size
    return frame[:at] + struct.pack(">HH", *NACK) + frame[at + 4 :]


def confirm_all_so_far(frame: bytes) -> bytes:
    """Alter a confirm so that it is one of everything before it, too."""
    return frame[:-2] + b"\x01" + frame[-1:]
