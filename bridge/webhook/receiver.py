"""Handles each webhook: receive, verify, name, publish, answer.

The accepting answer (`webhook.answer`, 200 by default) means that the broker has confirmed the
event. The content of an authentic webhook is never a reason to refuse it. A 503 asks the service to
send the webhook again. Each endpoint has its own path, signature scheme and secrets; everything
else is shared.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from bridge.amqp.client import Connection
from bridge.amqp.properties import Properties
from bridge.amqp.publication import ConfirmDeadlines, Publication
from bridge.amqp.publisher import Publisher
from bridge.callback import read_reference
from bridge.config import WebhookSettings
from bridge.errors import InvalidSignatureError, PublishError
from bridge.http.listener_state import Limits
from bridge.http.messages import Headers, Request, Response, ResponseOrFuture, problem
from bridge.telemetry.logs import Log
from bridge.telemetry.trace_context import Span, TraceHeaders, Tracer
from bridge.topology.upkeep import Upkeep
from bridge.webhook.endpoint import RETRY_AFTER_SECONDS, Endpoint
from bridge.webhook.event import UNPARSED, WebhookEvent, as_form, name_event, properties_of
from bridge.webhook.metrics import WebhookMetrics, WebhookOutcome
from bridge.webhook.normalize import EventFields, normalize
from bridge.webhook.publishing import MAX_AT_ONCE, ReceiptAnnouncer, RecentEvents, all_of
from bridge.webhook.recorder import Recorder, Webhook
from bridge.webhook.signatures.verify import Verified, verify
from bridge.webhook.spans import begin_publish, end_publish, publish_in

log = Log(__name__)

# Limit of the remembered unroutable routing keys. Keys beyond it are not logged.
MAX_UNROUTABLE: Final = 100
# Subtracted from the response timeout, to leave time for the response to reach the service.
RESPONSE_RESERVE_SECONDS: Final = 0.1

_NOT_FOUND: Final = problem(404, "nothing is here")
_NOT_ALLOWED: Final = problem(405, "only POST", Allow="POST")
_NOT_ALLOWED_BESIDE_GET: Final = problem(405, "only POST and GET", Allow="POST, GET")
_NOT_ALLOWED_HEALTH: Final = problem(405, "only GET and HEAD", Allow="GET, HEAD")
_HEALTHY: Final = Response(200, for_anybody=True)
_TRY_LATER: Final = problem(503, "try again later", Retry_After=str(RETRY_AFTER_SECONDS))


def webhook_limits(settings: WebhookSettings) -> Limits:
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


def _seconds_for(endpoint: Endpoint, settings: WebhookSettings) -> float:
    """Return the response timeout of an endpoint in seconds, less the reserve."""
    return max(settings.response_seconds(endpoint.settings) - RESPONSE_RESERVE_SECONDS, 0.0)


class Unconfirmed:
    """A webhook whose event is published but not confirmed, and the answer that waits for it."""

    __slots__ = ("answer", "span", "webhook")

    def __init__(self, webhook: Webhook, span: Span) -> None:
        self.webhook = webhook
        self.span = span
        self.answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()


class RefusedError(Exception):
    """Raised to answer a webhook with this response."""

    def __init__(self, response: Response, outcome: WebhookOutcome, why: str | None = None) -> None:
        super().__init__(outcome)
        self.response = response
        self.outcome: WebhookOutcome = outcome
        self.why = why


class Receiver:
    """Answers every request on the public port."""

    def __init__(
        self,
        settings: WebhookSettings,
        *,
        endpoints: Sequence[Endpoint],
        publisher: Publisher,
        upkeep: Upkeep,
        metrics: WebhookMetrics,
        outcome_exchange: str | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._settings = settings
        self._exchange = settings.exchange
        self._upkeep = upkeep
        self._publisher = publisher
        self._metrics = metrics
        self._endpoints = {endpoint.path: endpoint for endpoint in endpoints}
        self.recorder = Recorder(
            metrics, paths=self._endpoints.keys(), health_path=settings.health_path, tracer=tracer
        )
        self._process_id = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._recent = RecentEvents(settings.repeat_window)
        self._receipt_announcer = (
            None
            if outcome_exchange is None
            else ReceiptAnnouncer(outcome_exchange, publisher=publisher, recent=self._recent)
        )
        # By endpoint path. Endpoints with the same timeout share one deadline queue.
        self._response_seconds = {one.path: _seconds_for(one, settings) for one in endpoints}
        lines = {
            seconds: ConfirmDeadlines(seconds, self._on_deadline)
            for seconds in self._response_seconds.values()
        }
        self._unconfirmed = {path: lines[s] for path, s in self._response_seconds.items()}
        self._event_fields = {
            one.path: EventFields(one.settings)
            for one in endpoints
            if not settings.is_raw(one.settings)
        }
        # Routing keys of returned events, until an event with the same key is routed.
        self._unroutable: set[str] = set()
        self._queue_missing = asyncio.Event()

    async def serve(self, connection: Connection) -> None:
        """Declare the topology, then publish on this connection until it ends."""
        await self._upkeep.ensure(connection)
        missing = self._publisher.exchange_missing
        serve = partial(self._upkeep.mend_beside, self._publisher.serve, missing=missing)
        await self._upkeep.mend_beside(serve, connection, self._queue_missing)

    def refused_facts(self) -> list[dict[str, object]]:
        """Describe the endpoints at which all webhooks of the last hour were refused."""
        facts = [endpoint.refused_facts() for endpoint in self._endpoints.values()]
        return [one for one in facts if one is not None]

    # The path of a webhook

    def judge(self, method: str, path: str, headers: Headers) -> Response | None:
        """Refuse a request by its header alone, so that its body is not buffered."""
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            if path != self._settings.health_path:
                return _NOT_FOUND
            return _HEALTHY if method in {"GET", "HEAD"} else _NOT_ALLOWED_HEALTH
        if method != "POST":
            if not endpoint.scheme.takes_get:
                return _NOT_ALLOWED
            if method != "GET":
                return _NOT_ALLOWED_BESIDE_GET
        signature_header = endpoint.signature_header
        # A loop, because a generator is slower, and this runs twice for every webhook.
        for name, _ in headers:
            if name == signature_header:
                return None
        return endpoint.unsigned

    def answer(self, request: Request) -> ResponseOrFuture:
        """Answer a complete request, at once or when the broker has confirmed the event."""
        refused = self.judge(request.method, request.path, request.headers)
        if refused is not None:
            self.recorder.record_refusal(request.method, request.path, refused)
            return refused
        webhook = self.recorder.begin(request, self._endpoints[request.path])
        try:
            if self.recorder.in_flight > self._settings.max_in_flight:
                raise RefusedError(_TRY_LATER, "overloaded")  # noqa: TRY301  caught below
            verified = self._verify(webhook)
            webhook.events = self._read(webhook, verified)
            return self._publish_at_once(webhook) or asyncio.create_task(self._publish(webhook))
        except Exception as error:  # noqa: BLE001  a bug is answered too
            return self._refuse(webhook, error)

    def _verify(self, webhook: Webhook) -> Verified:
        request, endpoint = webhook.request, webhook.endpoint
        self._metrics.http_size.labels(endpoint.path).observe(len(request.body))
        now = time.time()
        try:
            verified = verify(
                endpoint.scheme,
                endpoint.keys,
                request.headers,
                request.body,
                now=now,
                query=request.query,
                method=request.method,
            )
        except InvalidSignatureError as error:
            fault = error.fault
            self._metrics.verifications.labels(fault, "none").inc()
            response = endpoint.note_refused(fault)
            raise RefusedError(response, "invalid_signature", fault) from None
        endpoint.note_verified()
        key = "current" if verified.key_index == 0 else "previous"
        self._metrics.verifications.labels("valid", key).inc()
        if verified.timestamp is not None:
            self._metrics.signature_age.observe(max(0.0, now - verified.timestamp))
        return verified

    def _read(self, webhook: Webhook, verified: Verified) -> list[WebhookEvent]:
        request = webhook.request
        reference = None
        if request.query and webhook.endpoint.signs_query:
            reference = read_reference(request.query)
        if request.method == "GET":
            webhook.request = request = as_form(request)
        content_type = request.header(b"content-type")
        encoding = request.header(b"content-encoding")
        body, endpoint = request.body, webhook.endpoint
        fields = self._event_fields.get(endpoint.path)
        if fields is None:
            settings = endpoint.settings
            return [
                name_event(body, content_type, verified, settings, encoding, reference=reference)
            ]
        now = time.time()
        return normalize(
            body, content_type, verified, fields, encoding, now=now, reference=reference
        )

    def _publish_at_once(self, webhook: Webhook) -> ResponseOrFuture | None:
        """Publish a single event if only its confirm must be awaited; otherwise return None.

        Answers a repeat of a confirmed event at once.
        """
        if len(webhook.events) > 1:
            return None
        event = webhook.events[0]
        has_receipts = self._receipt_announcer is not None and event.receipts
        key = event.repeat_key
        if has_receipts or self._recent.is_in_flight(key):
            return None
        if self._recent.is_remembered(key):
            return self._accepted(webhook, is_new=False)
        span = begin_publish(webhook.span, self._exchange)
        publication = self._publisher.write_at_once(
            event.body,
            exchange=self._exchange,
            routing_key=event.routing_key,
            properties=self._properties(event, span.headers),
        )
        if publication is None:
            return None
        self._recent.follow(key, publication)
        waiting = Unconfirmed(webhook, span)
        line = self._unconfirmed[webhook.endpoint.path]
        line.add(publication, waiting)
        # The confirm may come long after the answer; until then, only the publication is kept.
        publication.when_known(partial(self._on_known, line, publication))
        return waiting.answer

    def _on_known(
        self,
        line: ConfirmDeadlines[Publication, Unconfirmed],
        publication: Publication,
        _is_stored: bool,  # noqa: FBT001
    ) -> None:
        waiting = line.discard(publication)
        if waiting is not None:
            self._settle(waiting, publication.error)

    def _on_deadline(self, publication: Publication, waiting: Unconfirmed) -> None:
        self._settle(waiting, publication.time_out())

    def _settle(self, waiting: Unconfirmed, error: PublishError | None) -> None:
        answer = waiting.answer
        if answer.cancelled():
            # At the end of a drain, `Listener` cancels the answers that are left.
            self.recorder.forget()
            return
        try:
            end_publish(waiting.span, error)
            if error is None:
                response = self._accepted(waiting.webhook, is_new=True)
            else:
                self._note_returned(waiting.webhook.events[0], error)
                response = self._refuse(waiting.webhook, error)
        except Exception as bug:  # noqa: BLE001  a bug is answered too
            answer.set_exception(bug)
        else:
            answer.set_result(response)

    async def _publish(self, webhook: Webhook) -> Response:
        """Publish the events and the outcome events of receipts; return when all are confirmed.

        Waits for room in the publisher, and for an earlier publish of the same event. Publishes
        nothing twice.
        """
        deadline = asyncio.get_running_loop().time() + self._response_seconds[webhook.endpoint.path]
        events, span = webhook.events, webhook.span
        try:
            is_new = await self._publish_all(events, span, deadline)
        except asyncio.CancelledError:
            self.recorder.forget()
            raise
        except Exception as error:  # noqa: BLE001  a bug is answered too
            return self._refuse(webhook, error)
        return self._accepted(webhook, is_new=is_new)

    async def _publish_all(
        self, events: Sequence[WebhookEvent], span: Span, deadline: float
    ) -> bool:
        """Publish events in their order, and their outcome events; return whether any was new.

        An event that cannot be published holds up none of the others: the service may not repeat
        the webhook. Raises the first error at the end.
        """
        if len(events) == 1 and (self._receipt_announcer is None or not events[0].receipts):
            return await self._publish_event(events[0], span, deadline)
        failed: Exception | None = None
        is_new = False
        for begin in range(0, len(events), MAX_AT_ONCE):
            some = events[begin : begin + MAX_AT_ONCE]
            publishes = [self._publish_event(event, span, deadline) for event in some]
            if self._receipt_announcer is not None:
                at, trace = time.time(), span.headers
                publishes += (
                    self._receipt_announcer.publish(event, trace, at=at, deadline=deadline)
                    for event in some
                    if event.receipts
                )
            try:
                is_new |= any(await all_of(*publishes))
            except (PublishError, TimeoutError) as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return is_new

    async def _publish_event(self, event: WebhookEvent, span: Span, deadline: float) -> bool:
        """Publish an event; return whether it was new."""
        try:
            return await publish_in(span, self._exchange, partial(self._write, event, deadline))
        except PublishError as error:
            self._note_returned(event, error)
            raise

    def _write(
        self, event: WebhookEvent, deadline: float, trace: TraceHeaders
    ) -> Coroutine[Any, Any, bool]:
        def write() -> Awaitable[Publication]:
            return self._publisher.write(
                event.body,
                exchange=self._exchange,
                routing_key=event.routing_key,
                properties=self._properties(event, trace),
                deadline=deadline,
            )

        return self._recent.once(event.repeat_key, write, deadline=deadline)

    def _properties(self, event: WebhookEvent, trace: TraceHeaders) -> Properties:
        message_id = f"{self._process_id}-{next(self._numbers)}"
        return properties_of(event, message_id=message_id, trace=trace)

    def _accepted(self, webhook: Webhook, *, is_new: bool) -> Response:
        if not is_new:
            return self.recorder.end(webhook, "duplicate", None, webhook.endpoint.accepted)
        for event in webhook.events:
            if event.routing_key in self._unroutable:
                self._unroutable.discard(event.routing_key)
                log.info(
                    "events_routable",
                    exchange=self._exchange,
                    type=self._metrics.type_label(event.type),
                )
        is_unparsed = all(event.routing_key == UNPARSED for event in webhook.events)
        outcome: WebhookOutcome = "unparsed" if is_unparsed else "published"
        return self.recorder.end(webhook, outcome, None, webhook.endpoint.accepted)

    def _refuse(self, webhook: Webhook, error: Exception) -> Response:
        match error:
            case RefusedError():
                return self.recorder.end(webhook, error.outcome, error.why, error.response)
            case PublishError():
                why = error.why
            case TimeoutError():
                why = "no confirm in time"
            case _:
                log.error("internal_error", cause=error)
                why = "internal_error"
        return self.recorder.end(webhook, "publish_failed", why, _TRY_LATER)

    def _note_returned(self, event: WebhookEvent, error: PublishError) -> None:
        """Trigger a new declaration of the bridge's own queue, and log an unroutable key once."""
        if error.fault != "returned":
            return
        self._queue_missing.set()
        if event.routing_key not in self._unroutable and len(self._unroutable) < MAX_UNROUTABLE:
            self._unroutable.add(event.routing_key)
            log.warning(
                "events_unroutable",
                exchange=self._exchange,
                type=self._metrics.type_label(event.type),
                queue=self._settings.queue,
                remedy="bind a queue to the exchange with routing key #; "
                "`sms-bridge topology declare` creates webhook.queue",
            )
