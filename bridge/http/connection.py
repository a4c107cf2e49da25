"""The server's side of one connection: reads requests, answers them in order, sets deadlines.

The handler gets complete requests only; invalid and incomplete ones are refused here. A connection
only stores its deadline: the listener checks all deadlines four times a second, which is cheaper
than a timer for each connection.
"""

import asyncio
import math
from functools import partial
from http import HTTPStatus
from typing import Final, cast

from bridge.http.listener_state import Eviction, ListenerState
from bridge.http.messages import Request, Response, problem, render
from bridge.http.occupancy import Occupancy
from bridge.http.parser import BODY, IDLE, RequestParser
from bridge.telemetry.logs import Log

log = Log(__name__)

# How long a silent connection stays open when the listener stops: a request may be under way.
END_SECONDS: Final = 1.0
# Bounds of reading after the last response: closing with unread data would reset the connection,
# and the client might never see the response.
LINGER_SECONDS: Final = 2.0
MAX_LINGER_BYTES: Final = 4 * 1024 * 1024

# Recorded for a request whose client has disconnected; it is never sent.
_CUT_OFF: Final = Response(HTTPStatus.BAD_REQUEST)
_FULL: Final = problem(503, "too many connections; try again later", Retry_After="5")


class ServerConnection(asyncio.BufferedProtocol):
    """One client connection; answers its requests one by one, and sets its deadline."""

    def __init__(
        self,
        shared: ListenerState,
        occupancy: "Occupancy[ServerConnection]",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._shared = shared
        self._occupancy = occupancy
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = RequestParser(shared.limits, shared.hooks.judge)
        # The request that is being answered.
        self._request: Request | None = None
        # Bytes that arrived while a request was being answered; they are parsed after it.
        self._unparsed = b""
        # The memory of all its requests, as last reported to the occupancy.
        self.held_bytes = 0
        # In this order: the client does not read its response; it has sent its last byte; it gets
        # no more responses.
        self._is_clogged = self._has_eof = self._is_over = False
        # Whether any request was answered, and whether any was answered with success.
        self._is_answered = self._is_trusted = False
        self._is_paused = False
        self._lingered_bytes = 0
        self.deadline = math.inf
        # The eviction queue that it is in (see `Occupancy`), and the event loop time when it
        # joined.
        self._line: dict[ServerConnection, None] | None = None
        self.since = 0.0

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start reading, or refuse the connection if there is no room for it."""
        # uvloop's transports do not inherit from asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        # The next request is not answered until the client has read the whole response.
        self._transport.set_write_buffer_limits(high=0)
        if self._occupancy.admit(self):
            self._start_clock()
            self._line_up()
            return
        self._is_over = True
        self._shared.hooks.on_refusal(None, None, _FULL)
        self._send(_FULL, keep_alive=False)
        self._transport.close()

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Return the buffer that all connections share."""
        return self._shared.buffer

    def buffer_updated(self, count: int) -> None:
        """Parse received bytes, or keep them until the earlier request is answered."""
        if self._is_over:
            self._lingered_bytes += count
            if self._lingered_bytes > MAX_LINGER_BYTES:
                self.abort()
        elif self._request is not None or self._is_clogged:
            self._is_paused = True
            self._transport.pause_reading()
            self._unparsed += self._shared.buffer[:count]
            self._count()
        else:
            self._feed(self._shared.buffer[:count])
            self._advance()

    def eof_received(self) -> bool:
        """Stay open while a response is pending."""
        self._has_eof = True
        return self._request is not None or self._is_clogged

    def pause_writing(self) -> None:
        """Wait, with a deadline, for a client that does not read its response."""
        self._is_clogged = True
        self._start_clock()
        self._line_up()

    def resume_writing(self) -> None:
        """Continue after the client has read its response."""
        self._is_clogged = False
        self._start_clock()
        self._line_up()
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's own
        """Drop an incomplete request; a request that is being answered is still finished."""
        if not self._is_over and self._parser.phase is BODY:
            self._report_refusal(_CUT_OFF)
        self._give_up()
        self._leave()

    # Called by the listener

    def expire(self) -> None:
        """Close because the deadline has passed, with 408 if a request has begun."""
        if self._is_mute:
            self.abort()
        else:
            self._refuse(problem(408, "the request did not arrive in time"))

    def evict(self, cause: Eviction) -> None:
        """Close at once to make room for another connection."""
        self._shared.hooks.on_eviction(cause)
        if self._is_mute:
            self.abort()
            return
        self._report_refusal(_FULL)
        self._give_up()
        self._leave()
        self._send(_FULL, keep_alive=False)
        self._transport.close()

    def drain(self) -> None:
        """Close within `END_SECONDS`, unless there is a request to answer.

        The delay is for a request that may be under way. Between two requests the time that the
        connection has already been silent counts, so it is closed at once if that is long enough.
        """
        phase = self._parser.phase
        if self._request is not None or phase is BODY:
            return
        is_between = phase is IDLE and self._is_answered and not self._is_clogged
        begin = self.since if is_between else self._loop.time()
        self.deadline = min(self.deadline, begin + END_SECONDS)

    def abort(self) -> None:
        """Close at once, without a response."""
        self._give_up()
        self._leave()
        self._transport.abort()

    @property
    def _is_mute(self) -> bool:
        """Whether the client expects no response, or would not read it."""
        return self._is_over or self._is_clogged or self._parser.phase is IDLE

    def _line_up(self) -> None:
        """Join the end of the eviction queue for its state, unless it is in that queue already."""
        occupancy = self._occupancy
        line: dict[ServerConnection, None] | None
        if self._is_over:
            line = occupancy.silent
        elif self._is_clogged:
            # It may have sent a whole request, but it does not read the response.
            line = occupancy.receiving
        elif self._request is not None or self._parser.requests:
            line = None
        elif self._parser.phase is IDLE:
            line = occupancy.trusted if self._is_trusted else occupancy.silent
        else:
            line = occupancy.receiving
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
        self._occupancy.forget(self)

    # From bytes to responses

    def _feed(self, data: memoryview | bytes) -> None:
        parser = self._parser
        parser.feed(data)
        if parser.has_moved:
            if not parser.requests:  # A complete request is answered now.
                self._start_clock()
            self._line_up()
        self._count()
        if parser.take_continue() and not self._is_over:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _advance(self) -> None:
        """Answer the next request, or resume reading."""
        parser = self._parser
        while self._request is None and not self._is_clogged and not self._is_over:
            if parser.requests:
                self._start(parser.requests.popleft())
            elif parser.refusal is not None:
                self._refuse(parser.refusal)
            elif self._unparsed:
                data, self._unparsed = self._unparsed, b""
                self._feed(data)
            elif self._has_eof:
                self._transport.close()
                return
            else:
                self._resume()
                return

    @property
    def _has_more(self) -> bool:
        return bool(self._parser.requests or self._parser.refusal or self._unparsed)

    def _start(self, request: Request) -> None:
        # The handler has its own deadline.
        self.deadline = math.inf
        self._request = request
        try:
            is_crowded = self._occupancy.is_crowded_for(self)
            answer = _FULL if is_crowded else self._shared.handler(request)
        except Exception as bug:  # noqa: BLE001  any bug
            answer = _internal_error(bug)
        if isinstance(answer, Response):
            self._respond(request, answer)
            return
        self._occupancy.answers.add(answer)
        answer.add_done_callback(partial(self._on_answer, request))

    def _on_answer(self, request: Request, answer: "asyncio.Future[Response]") -> None:
        self._occupancy.answers.discard(answer)
        if answer.cancelled():
            self.abort()
        else:
            bug = answer.exception()
            self._respond(request, answer.result() if bug is None else _internal_error(bug))
            self._advance()
        self._occupancy.end_if_empty()

    def _respond(self, request: Request, response: Response) -> None:
        self._request = None
        self._count()
        if response is _FULL:
            self._shared.hooks.on_refusal(request.method, request.path, response)
        if self._is_over:
            return
        is_last = self._has_eof and not self._has_more
        keep_alive = request.keep_alive and not self._occupancy.is_draining and not is_last
        self._is_answered = True
        if response.status < HTTPStatus.MULTIPLE_CHOICES and not response.for_anybody:
            self._is_trusted = True
        self._start_clock()
        self._line_up()
        self._send(response, keep_alive=keep_alive, has_body=request.method != "HEAD")
        if not keep_alive:
            self._linger()

    def _start_clock(self) -> None:
        limits, phase = self._shared.limits, self._parser.phase
        seconds = limits.idle_timeout_seconds
        if not self._is_clogged:
            if self._is_over:
                seconds = LINGER_SECONDS
            elif phase is BODY:
                seconds = limits.body_timeout_seconds
            elif phase is IDLE and self._is_answered:
                seconds = limits.keep_alive_seconds
        self.deadline = self._loop.time() + seconds

    def _count(self) -> None:
        """Report to the occupancy how much memory the unanswered requests use."""
        size = 0
        if not self._is_over:
            size = self._parser.held_bytes + len(self._unparsed)
            if self._request is not None:
                size += self._request.size_bytes
        change, self.held_bytes = size - self.held_bytes, size
        self._occupancy.count(change)

    def _send(self, response: Response, *, keep_alive: bool, has_body: bool = True) -> None:
        date_line = self._shared.date_line
        self._transport.write(render(response, date_line, keep_alive=keep_alive, has_body=has_body))

    def _report_refusal(self, response: Response) -> None:
        self._shared.hooks.on_refusal(self._parser.method, self._parser.path, response)

    def _refuse(self, response: Response) -> None:
        """Answer without calling the handler, and close."""
        self._report_refusal(response)
        self._send(response, keep_alive=False)
        self._linger()

    def _linger(self) -> None:
        """Send no more responses, but give the client time to read the last one."""
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
        self._unparsed = b""
        self._parser.close()
        self._count()


def _internal_error(bug: BaseException) -> Response:
    log.error("internal_error", cause=bug)
    return problem(500, "internal error")
