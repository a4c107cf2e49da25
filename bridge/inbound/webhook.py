"""From the service's webhooks to the exchange: receive, verify, name, publish, answer.

`Receiver._accept` is the whole line. 200 means that the broker has confirmed the event; nothing
that is authentic is ever refused.
"""

import asyncio
import hashlib
import itertools
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from bridge.amqp.client import Connection
from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publication, Publisher
from bridge.config import WebhookSettings
from bridge.credentials import Credential
from bridge.errors import InvalidSignatureError, PublishError
from bridge.http_server.limits import Limits
from bridge.http_server.occupancy import Eviction
from bridge.http_server.request import Headers, Request, Response, problem
from bridge.inbound.metrics import WebhookMetrics
from bridge.inbound.schemes import Scheme, decode_secret
from bridge.inbound.signature import Verified, verify
from bridge.logs import CountedLog, Log
from bridge.pointers import NOT_JSON, find_id, read_document
from bridge.topology.upkeep import Upkeep
from bridge.trace import read_trace

log = Log(__name__)

EVENT_ID: Final = "sms-bridge-event-id"
BODY_SHA256: Final = "sms-bridge-body-sha256"
UNPARSED: Final = "unparsed"
OTHER: Final = "other"
UNMATCHED: Final = "unmatched"
MAX_TYPE_BYTES: Final = 255
MAX_RECENT_EVENTS: Final = 100_000
# Routing keys that are told to find no queue; more are not told.
MAX_UNROUTABLE: Final = 100
RETRY_AFTER_SECONDS: Final = 5
# Of the response budget, so that the answer itself arrives inside it.
ANSWER_SECONDS: Final = 0.1
# What became of a webhook that the listener refused, by status.
_REFUSALS: Final = {401: "invalid_signature", 413: "too_large", 503: "overloaded"}
_REPEAT_KEY_BYTES: Final = 16
_OK: Final = Response(200)
_NOT_FOUND: Final = problem(404, "nothing is here")
_NOT_ALLOWED: Final = problem(405, "only POST", Allow="POST")
_NOT_SIGNED: Final = problem(401, "the signature is not valid")
_ROUTING_KEY: Final = re.compile(r"(?=.{1,120}\Z)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class Event(NamedTuple):
    """One verified webhook. `type` is None when the body is no object with a string `type`."""

    body: bytes
    is_json: bool
    type: str | None
    routing_key: str
    sha256: str
    event_id: str | None
    signed_at: float | None

    @property
    def repeat_key(self) -> bytes | None:
        """What a repeat has in common with the first; None where a repeat cannot be told.

        The id alone would not do: several events may speak of one message, and an id that is
        not signed could be swapped. A digest of both takes a third of their memory.
        """
        if self.event_id is None:
            return None
        both = f"{self.sha256} {self.event_id}".encode()
        return hashlib.blake2b(both, digest_size=_REPEAT_KEY_BYTES).digest()


def webhook_limits(settings: WebhookSettings) -> Limits:
    """Say what the public port takes."""
    return Limits(
        max_connections=settings.max_connections,
        max_header_bytes=settings.max_header_bytes,
        max_headers=settings.max_headers,
        max_body_bytes=settings.max_body_bytes,
        max_buffered_bytes=settings.max_buffered_bytes,
        idle_timeout_seconds=settings.idle_timeout_seconds,
        body_timeout_seconds=settings.body_timeout_seconds,
        keep_alive_seconds=settings.keep_alive_seconds,
    )


class _Refusal(Exception):  # noqa: N818  an answer, not a fault of ours
    """Ends the line early with an answer; `event` is None as long as nothing is verified."""

    def __init__(
        self, answer: Response, outcome: str, why: str | None = None, event: Event | None = None
    ) -> None:
        super().__init__(outcome)
        self.answer = answer
        self.outcome = outcome
        self.why = why
        self.event = event


class Receiver:
    """Responses the service's webhooks."""

    def __init__(
        self,
        settings: WebhookSettings,
        *,
        scheme: Scheme,
        secrets: Sequence[Credential],
        publisher: Publisher,
        upkeep: Upkeep,
        metrics: WebhookMetrics,
    ) -> None:
        self._settings = settings
        self._path = settings.path
        self._exchange = settings.exchange
        self._upkeep = upkeep
        self._scheme = scheme
        self._signature_header = scheme.header.lower().encode()
        self._secrets = secrets
        self._keys: list[bytes] = []
        self._publisher = publisher
        self._metrics = metrics
        self._in_flight = 0
        self._process_id = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._recent = RecentEvents(settings.repeat_window)
        # Routing keys of events that no queue took, until one with the same key is taken.
        self._unroutable: set[str] = set()
        self._queue_missing = asyncio.Event()
        # Of what strangers can cause.
        self._refused = CountedLog(log, "webhook")
        self._evicted = CountedLog(log, "connections_evicted")
        self.read_secrets()
        metrics.http_in_flight.set_function(lambda: self._in_flight)

    def read_secrets(self) -> None:
        """Take the secrets as they are now, after a change of their files."""
        self._keys = [decode_secret(self._scheme, secret.current) for secret in self._secrets]

    async def serve(self, connection: Connection) -> None:
        """Declare the topology and publish on this connection; `Link.run` calls it."""
        await self._upkeep.settle(connection)
        mending = asyncio.create_task(self._upkeep.mend(connection, self._queue_missing))
        try:
            await self._publisher.serve(connection)
        finally:
            mending.cancel()
            await asyncio.gather(mending, return_exceptions=True)

    async def answer(self, request: Request) -> Response:
        """Response one request on the public port."""
        refused = self.judge(request.method, request.path, request.headers)
        if refused is None:
            return await self._receive(request)
        self.count_refusal(request.method, request.path, refused.status)
        return refused

    def judge(self, method: str, path: str, headers: Headers) -> Response | None:
        """Refuse what its header alone shows to be no webhook, so that strangers buffer nothing."""
        if path != self._path:
            return _NOT_FOUND
        if method != "POST":
            return _NOT_ALLOWED
        # No generator: every webhook comes by here twice.
        for name, _ in headers:
            if name == self._signature_header:
                return None
        return _NOT_SIGNED

    def count_refusal(self, method: str | None, path: str | None, status: int) -> None:
        """Count what was refused for its header, or because no whole request came."""
        is_ours = path == self._path
        label = "POST" if method == "POST" else "other"
        route = self._path if is_ours else UNMATCHED
        self._metrics.http_requests.labels(route, label, str(status)).inc()
        if not is_ours or status == _NOT_ALLOWED.status:
            return
        outcome = _REFUSALS.get(status, "incomplete")
        self._metrics.events.labels("unknown", outcome).inc()
        why = None
        if status == _NOT_SIGNED.status:
            why = "missing"
            self._metrics.verifications.labels(why, "none").inc()
        self._refused.info(outcome=outcome, why=why, status=status)

    def count_eviction(self, cause: Eviction) -> None:
        """Count a connection that had to go for another."""
        self._metrics.evictions.labels(cause).inc()
        self._evicted.info(cause=cause)

    def flush_log(self) -> None:
        """Log what strangers have done since the last line about it."""
        self._refused.flush()
        self._evicted.flush()

    # The straight line

    async def _accept(self, request: Request) -> tuple[Event, str]:
        """Return the event and its outcome when 200 is the truth; raise _Refusal otherwise."""
        self._metrics.http_size.labels(self._path).observe(len(request.body))
        verified = self._verify(request)
        event = self._name(request.body, verified)
        is_new = await self._publish(request, event)
        return event, _outcome(event, is_new=is_new)

    def _verify(self, request: Request) -> Verified:
        now = time.time()
        try:
            verified = verify(
                self._scheme,
                self._keys,
                request.headers,
                request.body,
                now=now,
                query=request.query,
            )
        except InvalidSignatureError as error:
            self._metrics.verifications.labels(error.fault, "none").inc()
            raise _Refusal(_NOT_SIGNED, "invalid_signature", error.fault) from None
        key = "current" if verified.key_index == 0 else "previous"
        self._metrics.verifications.labels("valid", key).inc()
        if verified.timestamp is not None:
            self._metrics.signature_age.observe(max(0.0, now - verified.timestamp))
        return verified

    def _name(self, body: bytes, verified: Verified) -> Event:
        document = read_document(body)
        kind = document.get("type") if isinstance(document, dict) else None
        event_id = verified.event_id or find_id(document, self._settings.event_id_pointers)
        return Event(
            body=body,
            is_json=document is not NOT_JSON,
            type=kind if isinstance(kind, str) else None,
            routing_key=_routing_key(kind),
            sha256=hashlib.sha256(body).hexdigest(),
            event_id=event_id,
            signed_at=verified.timestamp,
        )

    async def _publish(self, request: Request, event: Event) -> bool:
        """Publish an event unless it was before; return whether it was new."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.response_timeout_seconds - ANSWER_SECONDS

        def write() -> Awaitable[Publication]:
            return self._publisher.write(
                event.body,
                exchange=self._exchange,
                routing_key=event.routing_key,
                properties=self._properties(event, request),
                deadline=deadline,
            )

        try:
            is_new = await self._recent.once(event.repeat_key, write, deadline=deadline)
        except TimeoutError:
            raise _Refusal(_try_later(), "publish_failed", "no confirm in time", event) from None
        except PublishError as error:
            if error.fault == "returned":
                self._note_unroutable(event)
            # Its text names the routing key, which may be any text that the service sent.
            why = "no queue takes it" if error.fault == "returned" else str(error)
            raise _Refusal(_try_later(), "publish_failed", why, event) from None
        if is_new and event.routing_key in self._unroutable:
            self._unroutable.discard(event.routing_key)
            log.info("events_routable", exchange=self._exchange, type=self._label(event))
        return is_new

    def _note_unroutable(self, event: Event) -> None:
        """Have our own queue declared again, and say once that such events find no queue."""
        self._queue_missing.set()
        if event.routing_key not in self._unroutable and len(self._unroutable) < MAX_UNROUTABLE:
            self._unroutable.add(event.routing_key)
            log.warning(
                "events_unroutable",
                exchange=self._exchange,
                type=self._label(event),
                queue=self._settings.queue,
                remedy="bind a queue to it with #: sms-bridge topology declare makes webhook.queue",
            )

    def _properties(self, event: Event, request: Request) -> Properties:
        headers: dict[str, Any] = {BODY_SHA256: event.sha256}
        if event.event_id is not None:
            headers[EVENT_ID] = event.event_id
        trace = read_trace(request.header(b"traceparent"), request.header(b"tracestate"))
        headers |= dict(trace)
        return Properties(
            content_type=(
                "application/json" if event.is_json else _short(request.header(b"content-type"))
            ),
            content_encoding=_short(request.header(b"content-encoding")),
            delivery_mode=2,
            message_type=_short(event.type),
            timestamp=datetime.now(UTC),
            # Unique for each publish: a returned message is told by it.
            message_id=f"{self._process_id}-{next(self._numbers)}",
            headers=headers,
        )

    # The answers around it

    async def _receive(self, request: Request) -> Response:
        started = time.perf_counter()
        self._in_flight += 1
        event: Event | None = None
        try:
            if self._in_flight > self._settings.max_in_flight:
                raise _Refusal(_try_later(), "overloaded")  # noqa: TRY301  as all refusals
            event, outcome = await self._accept(request)
            why, answer = None, _OK
        except _Refusal as refusal:
            event, outcome, why = refusal.event, refusal.outcome, refusal.why
            answer = refusal.answer
        except Exception:
            log.exception("internal_error")
            outcome, why, answer = "publish_failed", "internal_error", _try_later()
        finally:
            self._in_flight -= 1
        seconds = time.perf_counter() - started
        self._count_event(event, outcome)
        self._log(event, outcome, why, answer, seconds)
        self._metrics.http_requests.labels(self._path, "POST", str(answer.status)).inc()
        self._metrics.http_duration.labels(self._path).observe(seconds)
        return answer

    def _count_event(self, event: Event | None, outcome: str) -> None:
        kind = "unknown" if event is None else self._label(event)
        self._metrics.events.labels(kind, outcome).inc()
        if event is not None and outcome in {"published", "unparsed"}:
            now = time.time()
            self._metrics.last_event.labels(kind).set(now)
            if event.signed_at is not None:
                self._metrics.event_lag.labels(kind).observe(max(0.0, now - event.signed_at))

    def _label(self, event: Event) -> str:
        return event.type if event.type in self._metrics.event_types and event.type else OTHER

    def _log(
        self, event: Event | None, outcome: str, why: str | None, answer: Response, seconds: float
    ) -> None:
        if event is None:
            # Anybody can have as many of these as he likes.
            self._refused.info(outcome=outcome, why=why, status=answer.status)
            return
        log.info(
            "webhook",
            outcome=outcome,
            why=why,
            status=answer.status,
            type=self._label(event),
            event_id=event.event_id,
            bytes=len(event.body),
            seconds=round(seconds, 4),
        )


class RecentEvents:
    """Lets an event through once: repeats wait for the first, and are remembered for a while.

    What has no confirm by its deadline keeps its place: the broker may store it yet, so the event
    is published anew only when the broker has refused it or its channel has ended. Bounded in
    number and time: by the publisher while the broker has not answered, by us from then on. An
    event without a key is let through each time.
    """

    def __init__(self, window_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_seconds = window_seconds
        self._clock = clock
        self._in_flight: dict[object, asyncio.Future[bool]] = {}
        self._published: OrderedDict[object, float] = OrderedDict()

    async def once(
        self, key: object, write: Callable[[], Awaitable[Publication]], *, deadline: float
    ) -> bool:
        """Publish with `write()` unless that was done for this key; return whether it was done now.

        Raises PublishError, or TimeoutError when an earlier one with the key has no confirm by the
        deadline, a time of the event loop.
        """
        if key is None:
            publication = await write()
            await publication.stored(deadline)
            return True
        while (earlier := self._in_flight.get(key)) is not None:
            async with asyncio.timeout_at(deadline):
                if await asyncio.shield(earlier):
                    return False
        published_at = self._published.get(key)
        if published_at is not None and self._clock() - published_at < self._window_seconds:
            return False
        await self._first(key, write, deadline)
        return True

    async def _first(
        self, key: object, write: Callable[[], Awaitable[Publication]], deadline: float
    ) -> None:
        self._in_flight[key] = asyncio.get_running_loop().create_future()
        try:
            publication = await write()
        except BaseException:
            self._end(key, is_stored=False)
            raise
        publication.when_known(lambda is_stored: self._end(key, is_stored=is_stored))
        await publication.stored(deadline)

    def _end(self, key: object, *, is_stored: bool) -> None:
        if is_stored:
            self._remember(key)
        self._in_flight.pop(key).set_result(is_stored)

    def _remember(self, key: object) -> None:
        now = self._clock()
        self._published[key] = now
        self._published.move_to_end(key)
        while len(self._published) > MAX_RECENT_EVENTS or (
            now - next(iter(self._published.values())) >= self._window_seconds
        ):
            self._published.popitem(last=False)


def _routing_key(kind: object) -> str:
    """Return the type when it may be a routing key, else `other` or `unparsed`."""
    if not isinstance(kind, str):
        return UNPARSED
    return kind if _ROUTING_KEY.fullmatch(kind) else OTHER


def _outcome(event: Event, *, is_new: bool) -> str:
    if not is_new:
        return "duplicate"
    return "unparsed" if event.type is None else "published"


def _try_later() -> Response:
    return problem(503, "try again later", Retry_After=str(RETRY_AFTER_SECONDS))


def _short(text: str | None) -> str | None:
    """Cut a text to what fits an AMQP short string, at a whole character."""
    if text is None:
        return None
    encoded = text.encode("utf-8", "replace")[:MAX_TYPE_BYTES]
    return encoded.decode("utf-8", "ignore")
