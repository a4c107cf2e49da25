"""From the services' webhooks to the exchange: receive, verify, name, publish, answer.

`Receiver._accept` is the whole way. 200 means that the broker has confirmed the event. Nothing
authentic is refused for its content; after a 503 the service sends it again. Each endpoint has its
own path, scheme and secrets; all else is one for all.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from bridge.amqp.client import Connection
from bridge.amqp.publication import Publication
from bridge.amqp.publisher import Publisher
from bridge.config import WebhookSettings
from bridge.errors import InvalidSignatureError, PublishError
from bridge.http_server.limits import Limits
from bridge.http_server.request import Request, Response
from bridge.inbound.endpoint import Endpoint
from bridge.inbound.event import OTHER, Event, as_form, name_event, properties_of, trace_of
from bridge.inbound.metrics import UNKNOWN_DELIVERY, EventOutcome, WebhookMetrics
from bridge.inbound.outcomes import ReceiptOutcomes, all_of
from bridge.inbound.refusals import NOT_SIGNED, TRY_LATER, Refusals, RefusedError
from bridge.inbound.repeats import RecentEvents
from bridge.inbound.signature import Verified, verify
from bridge.inbound.spans import WebhookSpans, end_webhook, publish_in
from bridge.logs import Log
from bridge.topology.upkeep import Upkeep
from bridge.tracing.spans import Span
from bridge.tracing.trace_headers import TraceHeaders

log = Log(__name__)

# How many unroutable routing keys are remembered; those of more events are not logged.
MAX_UNROUTABLE: Final = 100
# Kept back from the time for a response, so that it arrives in time.
RESPONSE_RESERVE_SECONDS: Final = 0.1
_OK: Final = Response(200)


def webhook_limits(settings: WebhookSettings) -> Limits:
    """Return the limits of the public port."""
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


class Receiver:
    """Answers the webhooks of every endpoint; `refusals` refuses and counts everything else."""

    def __init__(
        self,
        settings: WebhookSettings,
        *,
        endpoints: Sequence[Endpoint],
        publisher: Publisher,
        upkeep: Upkeep,
        metrics: WebhookMetrics,
        outcome_exchange: str | None = None,
        spans: WebhookSpans | None = None,
    ) -> None:
        self._settings = settings
        self._exchange = settings.exchange
        self._upkeep = upkeep
        self._publisher = publisher
        self._metrics = metrics
        self._spans = spans
        self._endpoints = {endpoint.path: endpoint for endpoint in endpoints}
        self.refusals = Refusals(
            {endpoint.path: endpoint.scheme.header for endpoint in endpoints},
            metrics=metrics,
            get_paths={endpoint.path for endpoint in endpoints if endpoint.scheme.takes_get},
        )
        # Where there is only one, every line of the log is about it.
        self._names_routes = len(endpoints) > 1
        self._in_flight = 0
        self._process_id = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._recent = RecentEvents(settings.repeat_window)
        self._outcomes = (
            None
            if outcome_exchange is None
            else ReceiptOutcomes(outcome_exchange, publisher=publisher, recent=self._recent)
        )
        # Routing keys of events that no queue took, until one with the same key is taken.
        self._unroutable: set[str] = set()
        self._queue_missing = asyncio.Event()
        metrics.http_in_flight.set_function(lambda: self._in_flight)

    async def serve(self, connection: Connection) -> None:
        """Declare the topology and publish on this connection; `Link.run` calls it."""
        await self._upkeep.ensure(connection)
        mending = asyncio.create_task(self._upkeep.mend(connection, self._queue_missing))
        try:
            await self._publisher.serve(connection)
        finally:
            mending.cancel()
            await asyncio.gather(mending, return_exceptions=True)

    async def answer(self, request: Request) -> Response:
        """Answer one request on the public port."""
        refused = self.refusals.judge(request.method, request.path, request.headers)
        if refused is None:
            return await self._receive(request, self._endpoints[request.path])
        self.refusals.count(request.method, request.path, refused.status)
        return refused

    # The straight line

    async def _accept(
        self, request: Request, endpoint: Endpoint, span: Span | None
    ) -> tuple[Event, EventOutcome]:
        """Return the event and its outcome when 200 is the truth; raise RefusedError otherwise."""
        self._metrics.http_size.labels(endpoint.path).observe(len(request.body))
        verified = self._verify(request, endpoint)
        if request.method == "GET":
            request = as_form(request)
        content_type = request.header(b"content-type")
        event = name_event(request.body, content_type, verified, endpoint.settings)
        is_new = await self._publish(event, request, span)
        return event, _outcome(event, is_new=is_new)

    def _verify(self, request: Request, endpoint: Endpoint) -> Verified:
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
            self._metrics.verifications.labels(error.fault, "none").inc()
            raise RefusedError(NOT_SIGNED, "invalid_signature", error.fault) from None
        key = "current" if verified.key_index == 0 else "previous"
        self._metrics.verifications.labels("valid", key).inc()
        if verified.timestamp is not None:
            self._metrics.signature_age.observe(max(0.0, now - verified.timestamp))
        return verified

    async def _publish(self, event: Event, request: Request, span: Span | None) -> bool:
        """Publish an event and what its receipts say, unless that was done before.

        Returns whether any of it was new, when all of it is confirmed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.response_timeout_seconds - RESPONSE_RESERVE_SECONDS
        trace = trace_of(request) if span is None else span.headers
        write = partial(self._publish_event, event, request, deadline)
        publish_event = write(trace) if span is None else publish_in(span, self._exchange, write)
        try:
            if self._outcomes is None or not event.receipts:
                is_new = await publish_event
            else:
                tell = self._outcomes.publish(event, trace, at=time.time(), deadline=deadline)
                is_new = any(await all_of(publish_event, tell))
        except TimeoutError:
            raise RefusedError(TRY_LATER, "publish_failed", "no confirm in time", event) from None
        except PublishError as error:
            if error.fault == "returned":
                self._note_unroutable(event)
            raise RefusedError(TRY_LATER, "publish_failed", error.why, event) from None
        if is_new and event.routing_key in self._unroutable:
            self._unroutable.discard(event.routing_key)
            log.info("events_routable", exchange=self._exchange, type=self._label(event))
        return is_new

    def _publish_event(
        self, event: Event, request: Request, deadline: float, trace: TraceHeaders
    ) -> Coroutine[Any, Any, bool]:
        def write() -> Awaitable[Publication]:
            return self._publisher.write(
                event.body,
                exchange=self._exchange,
                routing_key=event.routing_key,
                properties=properties_of(
                    event,
                    request,
                    message_id=f"{self._process_id}-{next(self._numbers)}",
                    trace=trace,
                ),
                deadline=deadline,
            )

        return self._recent.once(event.repeat_key, write, deadline=deadline)

    def _note_unroutable(self, event: Event) -> None:
        """Have our own queue declared again, and log once that such events find no queue."""
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

    # Around it: the response, metrics and the log

    async def _receive(self, request: Request, endpoint: Endpoint) -> Response:
        started = time.perf_counter()
        self._in_flight += 1
        event: Event | None = None
        span = None if self._spans is None else self._spans.begin(request, endpoint)
        try:
            if self._in_flight > self._settings.max_in_flight:
                raise RefusedError(TRY_LATER, "overloaded")  # noqa: TRY301  as all refusals
            event, outcome = await self._accept(request, endpoint, span)
            why, response = None, _OK
        except RefusedError as refusal:
            event, outcome, why = refusal.event, refusal.outcome, refusal.why
            response = refusal.response
        except Exception:
            log.exception("internal_error")
            outcome, why, response = "publish_failed", "internal_error", TRY_LATER
        finally:
            self._in_flight -= 1
        seconds = time.perf_counter() - started
        self._count_event(event, outcome)
        self._log(event, endpoint, outcome, why, response, seconds, span)
        self.refusals.count_request(request.method, endpoint.path, response.status)
        trace_id = None if span is None or event is None else span.trace_id
        self._metrics.http_duration.labels(endpoint.path).observe(seconds, trace_id)
        return response

    def _count_event(self, event: Event | None, outcome: EventOutcome) -> None:
        kind = "unknown" if event is None else self._label(event)
        self._metrics.events.labels(kind, outcome).inc()
        if event is not None and outcome in {"published", "unparsed"}:
            now = time.time()
            self._metrics.last_event.labels(kind).set(now)
            for receipt in event.receipts:
                status = receipt.delivery or UNKNOWN_DELIVERY
                self._metrics.delivery_reports.labels(status).inc()
            if event.signed_at is not None:
                self._metrics.event_lag.labels(kind).observe(max(0.0, now - event.signed_at))

    def _label(self, event: Event) -> str:
        return event.type if event.type in self._metrics.event_types and event.type else OTHER

    def _log(
        self,
        event: Event | None,
        endpoint: Endpoint,
        outcome: EventOutcome,
        why: str | None,
        response: Response,
        seconds: float,
        span: Span | None,
    ) -> None:
        if event is None:
            self.refusals.log(endpoint.path, outcome, why, response.status)
            return
        facts: dict[str, object] = {
            "route": endpoint.path if self._names_routes else None,
            "outcome": outcome,
            "why": why,
            "status": response.status,
            "type": self._label(event),
            "event_id": event.event_id,
            "bytes": len(event.body),
            "seconds": round(seconds, 4),
        }
        receipt, count = event.receipt, len(event.receipts)
        if receipt is not None:
            facts |= {
                "delivery": receipt.delivery or UNKNOWN_DELIVERY,
                "message_id": receipt.message_id,
                "provider_id": receipt.provider_id,
            }
        elif count:
            facts |= {"receipts": count}
        log.tell("webhook", facts)
        if span is not None:
            end_webhook(span, facts)


def _outcome(event: Event, *, is_new: bool) -> EventOutcome:
    if not is_new:
        return "duplicate"
    return "unparsed" if event.type is None else "published"
