"""A port that answers HTTP/1.1 to strangers: every wait has a deadline, every count a bound.

The protocol is our own: a general server holds silent and dripping connections for ever, and its
limits count idle sockets. A handler sees complete requests only; the rest is answered here.
"""

import asyncio
import contextlib
import errno
import math
import resource
import select
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, Literal, cast

from bridge.errors import BridgeError
from bridge.http_server.parser import Answer, Judge, Limits, Phase, Request, RequestParser, problem
from bridge.logs import Log

log = Log(__name__)

BACKLOG: Final = 2048
# What one read takes; more waits in the kernel.
READ_BYTES: Final = 65536
# How late a deadline may be noticed.
SWEEP_SECONDS: Final = 0.25
# Turns of the event loop in which every socket is looked at, whichever loop it is.
READ_TURNS: Final = 2
# At the end: for accepting who is in the queue, and for a request that is on its way.
END_SECONDS: Final = 1.0
# After a last answer we go on reading: to close with unread data would reset the connection, and
# the client might never see the answer.
LINGER_SECONDS: Final = 2.0
MAX_LINGER_BYTES: Final = 4 * 1024 * 1024
# Open files; systems commonly allow 1,024 until a process asks for more.
MAX_DESCRIPTORS: Final = 65536

_STATUS_LINES: Final = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
# What a port cannot be taken for: the setting at fault, and what to do.
_BIND_FAULTS: Final = {
    errno.EADDRINUSE: ("port", "it is in use; stop what listens there, or set another port"),
    errno.EACCES: ("port", "this user may not; set a port above 1023"),
}
_NO_ADDRESS: Final = ("host", "this computer has no such address; set one of its own, or 0.0.0.0")
_FULL: Final = problem(503, "too many connections; try again later", Retry_After="5")

# Why a connection had to go: no place for a newcomer, or no room in memory.
Eviction = Literal["connections", "memory"]
Handler = Callable[[Request], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a port asks and tells besides.

    `judge` looks at each header. `on_refusal` hears of what the port answers by itself: method and
    path, if they were read, and the status. `on_eviction` hears of who had to go for another.
    """

    judge: Judge = lambda *_: None
    on_refusal: Callable[[str | None, str | None, int], None] = lambda *_: None
    on_eviction: Callable[[Eviction], None] = lambda _: None


class Listener:
    """One address that accepts connections from `run` to `stop`."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        *,
        section: str,
        host: str,
        port: int,
        drain_timeout_seconds: float = 5,
        hooks: Hooks = Hooks(),
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.hooks = hooks
        self._socket = bind(host, port, settings=f"{section}.")
        self.port: int = self._socket.getsockname()[1]
        self._drain_timeout_seconds = drain_timeout_seconds
        self._is_started = False
        self.has_cut_off = False
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._swept_at = math.inf
        self.connections: set[_Connection] = set()
        # Those that may have to go, each in one of these, the one that came into it first in front:
        # nothing of a request has come; the same, but the client is known for a good one; a request
        # has begun and is not complete. A request that is complete is in none.
        self.silent: dict[_Connection, None] = {}
        self.trusted: dict[_Connection, None] = {}
        self.receiving: dict[_Connection, None] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.held_bytes = 0
        # One for all connections: what is read is parsed before the next read.
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.date = b""

    @property
    def is_stopping(self) -> bool:
        """Whether each answer is the last of its connection."""
        return self._stopping.is_set()

    @property
    def is_accepting(self) -> bool:
        """Whether new connections are taken."""
        return self._is_started and not self.is_stopping

    async def run(self) -> None:
        """Serve until `stop`, then finish the requests that are being answered."""
        loop = asyncio.get_running_loop()
        self._swept_at = loop.time()
        await self._sweep(loop.time())
        server = await loop.create_server(
            lambda: _Connection(self, loop), sock=self._socket, backlog=BACKLOG
        )
        self._is_started = True
        try:
            await self._sweep_until(self._stopping, math.inf)
            await self._accept_queued()
            # Without a turn in between, in which somebody could come who would be reset.
            server.close()
            await _read_all()
            for connection in list(self.connections):
                connection.drain()
            self.check_end()
            await self._sweep_until(self._ended, loop.time() + self._drain_timeout_seconds)
        finally:
            self._stopping.set()
            server.close()
            for connection in list(self.connections):
                connection.abort()
            tasks = list(self.tasks)
            self.has_cut_off = bool(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """Close the port; `run` returns when the open requests are answered or time is up.

        Then `has_cut_off` says whether some were not.
        """
        self._stopping.set()

    async def _accept_queued(self) -> None:
        """Take those whom the kernel has let in: to close the port would reset them."""
        loop = asyncio.get_running_loop()
        queue = select.poll()
        queue.register(self._socket, select.POLLIN)
        deadline = loop.time() + END_SECONDS
        while queue.poll(0) and loop.time() < deadline:  # noqa: ASYNC110  the kernel's queue
            await asyncio.sleep(0)

    async def _sweep_until(self, event: asyncio.Event, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while not event.is_set() and (now := loop.time()) < deadline:
            await self._sweep(now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_SECONDS):
                    await event.wait()

    async def _sweep(self, now: float) -> None:
        """Look at every deadline, which is cheaper than a timer for each connection."""
        self.date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        stalled = now - self._swept_at - SWEEP_SECONDS
        self._swept_at = now
        if stalled > SWEEP_SECONDS:
            # We stood still (a paused machine, no processor time), and nobody could be in time.
            for connection in self.connections:
                connection.deadline += stalled
        late = [c for c in self.connections if c.deadline <= now]
        if late:
            await _read_all()
        for connection in late:
            if connection.deadline <= now:
                connection.expire()

    # What connections call

    def admit(self, connection: "_Connection") -> bool:
        """Take a connection on; when it is one too many, the one that waited longest has to go."""
        if len(self.connections) >= self.limits.max_connections:
            longest = self._find_longest()
            if longest is None:
                return False
            longest.evict("connections")
        self.connections.add(connection)
        return True

    def _find_longest(self) -> "_Connection | None":
        """Find who has waited longest; strangers must not drive out who is known for a good one."""
        first = [next(iter(line)) for line in (self.silent, self.receiving) if line]
        if first:
            return min(first, key=lambda connection: connection.since)
        return next(iter(self.trusted), None)

    def forget(self, connection: "_Connection") -> None:
        """Take a connection off the list."""
        self.connections.discard(connection)
        self.check_end()

    def count(self, size: int) -> None:
        """Count what requests take up; when it is too much, those that began first have to go.

        Only those that are not complete: whoever has sent all is answered.
        """
        self.held_bytes += size
        while size > 0 and self.held_bytes > self.limits.max_buffered_bytes:
            first = next((c for c in self.receiving if c.held_bytes), None)
            if first is None:
                break
            first.evict("memory")

    def check_end(self) -> None:
        """Let `run` return when nothing is left to do."""
        if self.is_stopping and not self.connections and not self.tasks:
            self._ended.set()


async def _read_all() -> None:
    """Have everything read that has come: timers run first, however long ago it came."""
    for _ in range(READ_TURNS):
        await asyncio.sleep(0)


def bind(host: str, port: int, *, settings: str) -> socket.socket:
    """Take a port; `::` takes it for IPv4 too.

    Raises BridgeError that names `host` or `port` with `settings` before it, and the remedy.
    """
    try:
        listening = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
    except (OSError, UnicodeError) as error:
        number = 0 if isinstance(error, UnicodeError) else error.errno or 0
        setting, why = _BIND_FAULTS.get(number, _NO_ADDRESS)
        raise BridgeError(f"{settings}{setting}: cannot listen on {host}:{port}: {why}") from None
    listening.setblocking(False)
    _allow_descriptors()
    return listening


def fit_open_files(limits: Limits, *, reserved: int, setting: str) -> Limits:
    """Lower `max_connections` to what the open files allow, but not below a quarter of these.

    `reserved` are for the rest of the process: without descriptors neither the broker could be
    reached nor the admin port answer. A warning names `setting` and the remedy.
    """
    open_files = _allow_descriptors()
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


def _allow_descriptors() -> int:
    """Ask for as many open files as the system grants; return how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return allowed
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


class _Connection(asyncio.BufferedProtocol):
    """One connection: has its requests answered one by one, and holds the deadlines."""

    def __init__(self, port: Listener, loop: asyncio.AbstractEventLoop) -> None:
        self._port = port
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = RequestParser(port.limits, port.hooks.judge)
        self._task: asyncio.Task[None] | None = None
        # Of the request that is being answered.
        self._request_bytes = 0
        # Read while a request was being answered; parsed after it.
        self._held = b""
        # What all of it takes up.
        self.held_bytes = 0
        # The client does not read its answer, has said all, is told no more.
        self._is_clogged = self._has_eof = self._is_over = False
        # It has been answered, with success.
        self._is_answered = self._is_trusted = False
        self._is_paused = False
        self._lingered_bytes = 0
        self.deadline = math.inf
        # Where the port finds us when somebody has to go, and since when.
        self._line: dict[_Connection, None] | None = None
        self.since = 0.0

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a place, or be turned away."""
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        # Any byte that the client does not take keeps us from answering more.
        self._transport.set_write_buffer_limits(high=0)
        if self._port.admit(self):
            self._start_clock()
            self._line_up()
            return
        self._is_over = True
        self._port.hooks.on_refusal(None, None, _FULL.status)
        self._send(_FULL, keep_alive=False)
        self._transport.close()

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Lend the buffer that all connections share."""
        return self._port.buffer

    def buffer_updated(self, count: int) -> None:
        """Parse what came, or keep it until the request before it is answered."""
        if self._is_over:
            self._lingered_bytes += count
            if self._lingered_bytes > MAX_LINGER_BYTES:
                self.abort()
        elif self._task is not None or self._is_clogged:
            self._is_paused = True
            self._transport.pause_reading()
            self._held += self._port.buffer[:count]
            self._count()
        else:
            self._feed(self._port.buffer[:count])
            self._advance()

    def eof_received(self) -> bool:
        """Stay open for answers that are still to come."""
        self._has_eof = True
        return self._task is not None or self._is_clogged

    def pause_writing(self) -> None:
        """Wait for a client that does not read its answer, but not for long."""
        self._is_clogged = True
        self._start_clock()
        self._line_up()

    def resume_writing(self) -> None:
        """Go on, for the answer was read."""
        self._is_clogged = False
        self._start_clock()
        self._line_up()
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's own
        """Drop what is not complete; a request that is being answered is finished."""
        if not self._is_over and self._parser.phase is Phase.BODY:
            self._tell_refusal(HTTPStatus.BAD_REQUEST)
        self._give_up()
        self._leave()

    # The port's side

    def expire(self) -> None:
        """Say that time is up where somebody may be listening, and close."""
        if self._is_mute:
            self.abort()
        else:
            self._refuse(problem(408, "the request did not arrive in time"))

    def evict(self, cause: Eviction) -> None:
        """Make room at once for somebody else."""
        self._port.hooks.on_eviction(cause)
        if self._is_mute:
            self.abort()
            return
        self._tell_refusal(_FULL.status)
        self._give_up()
        self._leave()
        self._send(_FULL, keep_alive=False)
        self._transport.close()

    def drain(self) -> None:
        """Close soon unless there is something to answer; a request may be on its way.

        On a connection that was silent for long no request is more likely to be than later.
        """
        phase = self._parser.phase
        if self._task is not None or phase is Phase.BODY:
            return
        is_between = phase is Phase.IDLE and self._is_answered and not self._is_clogged
        begin = self.since if is_between else self._loop.time()
        self.deadline = min(self.deadline, begin + END_SECONDS)

    def abort(self) -> None:
        """Close without a word."""
        self._give_up()
        self._leave()
        self._transport.abort()

    @property
    def _is_mute(self) -> bool:
        """Whether a client would not expect, or not read, a word from us."""
        return self._is_over or self._is_clogged or self._parser.phase is Phase.IDLE

    def _line_up(self) -> None:
        """Stand behind those who came into the same line before."""
        port = self._port
        line: dict[_Connection, None] | None
        if self._is_over:
            line = port.silent
        elif self._is_clogged:
            # What it has sent may be complete, but it does not let itself be answered.
            line = port.receiving
        elif self._task is not None or self._parser.requests:
            line = None
        elif self._parser.phase is Phase.IDLE:
            line = port.trusted if self._is_trusted else port.silent
        else:
            line = port.receiving
        if line is self._line:
            return
        self._leave_line()
        if line is not None:
            line[self] = None
            self._line = line
            self.since = self._loop.time()

    def _leave_line(self) -> None:
        if self._line is not None:
            del self._line[self]
            self._line = None

    def _leave(self) -> None:
        self._leave_line()
        self._port.forget(self)

    # The line

    def _feed(self, data: memoryview | bytes) -> None:
        parser = self._parser
        parser.feed(data)
        if parser.has_moved:
            self._start_clock()
            self._line_up()
        self._count()
        if parser.take_continue() and not self._is_over:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _advance(self) -> None:
        """Answer what is next in line, or go on reading."""
        parser = self._parser
        while self._task is None and not self._is_clogged and not self._is_over:
            if parser.requests:
                self._start(parser.requests.popleft())
            elif parser.refusal is not None:
                self._refuse(parser.refusal)
            elif self._held:
                data, self._held = self._held, b""
                self._feed(data)
            elif self._has_eof:
                self._transport.close()
                return
            else:
                self._resume()
                return

    @property
    def _has_more(self) -> bool:
        return bool(self._parser.requests or self._parser.refusal or self._held)

    def _start(self, request: Request) -> None:
        # The handler has its own deadline.
        self.deadline = math.inf
        self._request_bytes = request.size_bytes
        self._task = self._loop.create_task(self._answer(request))
        self._port.tasks.add(self._task)

    async def _answer(self, request: Request) -> None:
        try:
            answer = _FULL if self._is_crowded else await self._port.handler(request)
        except Exception:
            log.exception("internal_error")
            answer = problem(500, "internal error")
        finally:
            if self._task is not None:
                self._port.tasks.discard(self._task)
            self._task = None
            self._request_bytes = 0
            self._count()
            self._port.check_end()
        if answer is _FULL:
            self._port.hooks.on_refusal(request.method, request.path, answer.status)
        if self._is_over:
            return
        is_last = self._has_eof and not self._has_more
        keep_alive = request.keep_alive and not self._port.is_stopping and not is_last
        self._is_answered = True
        self._is_trusted = self._is_trusted or answer.status < HTTPStatus.MULTIPLE_CHOICES
        self._start_clock()
        self._line_up()
        self._send(answer, keep_alive=keep_alive, has_body=request.method != "HEAD")
        if keep_alive:
            self._advance()
        else:
            self._linger()

    @property
    def _is_crowded(self) -> bool:
        """Whether the requests of others that are being answered take up all the memory."""
        port = self._port
        return port.held_bytes - self.held_bytes >= port.limits.max_buffered_bytes

    def _start_clock(self) -> None:
        """Set the deadline of what the client has to do next."""
        limits, phase = self._port.limits, self._parser.phase
        seconds = limits.idle_timeout_seconds
        if not self._is_clogged:
            if self._is_over:
                seconds = LINGER_SECONDS
            elif phase is Phase.BODY:
                seconds = limits.body_timeout_seconds
            elif phase is Phase.IDLE and self._is_answered:
                seconds = limits.keep_alive_seconds
        self.deadline = self._loop.time() + seconds

    def _count(self) -> None:
        """Tell the port what our requests take up, until they are answered."""
        size = 0
        if not self._is_over:
            size = self._parser.held_bytes + len(self._held) + self._request_bytes
        change, self.held_bytes = size - self.held_bytes, size
        self._port.count(change)

    def _send(self, answer: Answer, *, keep_alive: bool, has_body: bool = True) -> None:
        head = [_STATUS_LINES[answer.status], self._port.date]
        head += [f"{name}: {value}\r\n".encode("latin-1") for name, value in answer.headers.items()]
        head.append(b"content-length: %d\r\n" % len(answer.body))
        head.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
        if has_body:
            head.append(answer.body)
        self._transport.write(b"".join(head))

    def _tell_refusal(self, status: int) -> None:
        self._port.hooks.on_refusal(self._parser.method, self._parser.path, status)

    def _refuse(self, answer: Answer) -> None:
        """Answer in the handler's place, and close."""
        self._tell_refusal(answer.status)
        self._send(answer, keep_alive=False)
        self._linger()

    def _linger(self) -> None:
        """Answer nothing more, and let the client read and leave."""
        self._give_up()
        self._start_clock()
        self._line_up()
        if self._has_eof:
            self._transport.close()
        elif not self._transport.is_closing():
            self._resume()
            self._transport.write_eof()

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def _give_up(self) -> None:
        self._is_over = True
        self._held = b""
        self._parser.close()
        self._count()
