"""Records the answers of the public port in metrics, in the log and in spans.

Anyone can cause any number of refusals, so the log aggregates them into few lines with counts.
"""

import time
from collections.abc import Collection
from typing import Final

from bridge.http.listener_state import Eviction
from bridge.http.messages import Request, Response
from bridge.telemetry.log_format import shown_seconds
from bridge.telemetry.logs import CountedLog, Log
from bridge.telemetry.trace_context import Span, Tracer
from bridge.webhook.endpoint import ASK_AGAIN, REFUSED, Endpoint
from bridge.webhook.event import OTHER, UNPARSED, WebhookEvent, trace_of
from bridge.webhook.metrics import UNKNOWN_DELIVERY, WebhookMetrics, WebhookOutcome
from bridge.webhook.spans import begin_webhook, end_webhook

log = Log(__name__)

UNMATCHED: Final = "unmatched"
# Shared no-op span.
_NO_SPAN: Final = Span(())
# Logged as the type of a receipt whose own type is not in the settings.
RECEIPT: Final = "receipt"
# Outcome of a webhook that never reached the receiver, by the status of the response.
_OUTCOME_OF_STATUS: Final[dict[int, WebhookOutcome]] = {
    401: "invalid_signature",
    413: "too_large",
    503: "overloaded",
}
_NOT_ALLOWED_STATUS: Final = 405


class Webhook:
    """One request to an endpoint; `events` is empty until the signature is verified."""

    __slots__ = ("endpoint", "events", "request", "span", "started")

    def __init__(self, request: Request, endpoint: Endpoint, span: Span) -> None:
        self.request = request
        self.endpoint = endpoint
        self.span = span
        self.started = time.perf_counter()
        self.events: list[WebhookEvent] = []


class Recorder:
    """Counts webhooks in flight, and records every answer of the public port."""

    def __init__(
        self,
        metrics: WebhookMetrics,
        *,
        paths: Collection[str],
        health_path: str | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.in_flight = 0
        self._metrics = metrics
        self._paths = paths
        self._health_path = health_path
        self._tracer = tracer
        # With a single endpoint, log lines need not name it.
        self._names_routes = len(paths) > 1
        self._refused = CountedLog(log, "webhook")
        self._evicted = CountedLog(log, "connections_evicted")
        metrics.http_in_flight.set_function(lambda: self.in_flight)

    def begin(self, request: Request, endpoint: Endpoint) -> Webhook:
        """Begin a webhook. The caller must `end` or `forget` it."""
        self.in_flight += 1
        trace = trace_of(request)
        if self._tracer is not None:
            span = begin_webhook(self._tracer, request.method, endpoint.setting, trace)
            return Webhook(request, endpoint, span)
        return Webhook(request, endpoint, Span(trace) if trace else _NO_SPAN)

    def forget(self) -> None:
        """Drop a webhook that will not be answered."""
        self.in_flight -= 1

    def end(
        self, webhook: Webhook, outcome: WebhookOutcome, why: str | None, response: Response
    ) -> Response:
        self.in_flight -= 1
        seconds = time.perf_counter() - webhook.started
        path, status = webhook.endpoint.path, response.status
        trace_id = None
        if not webhook.events:
            self._metrics.events.labels("unknown", outcome).inc()
            self._log_refused(path, outcome, why, status)
        else:
            trace_id = webhook.span.trace_id
            for event in webhook.events:
                self._count_event(event, outcome)
            facts = self._facts(webhook, outcome, why, status, seconds)
            log.info_facts("webhook", facts)
            end_webhook(webhook.span, facts)
        self._count_request(webhook.request.method, path, status)
        self._metrics.http_duration.labels(path).observe(seconds, trace_id)
        return response

    def _count_event(self, event: WebhookEvent, outcome: WebhookOutcome) -> None:
        kind = self._metrics.type_label(event.type)
        if outcome == "published" and event.routing_key == UNPARSED:
            outcome = "unparsed"
        self._metrics.events.labels(kind, outcome).inc()
        if outcome in {"published", "unparsed"}:
            now = time.time()
            self._metrics.last_event.labels(kind).set(now)
            for receipt in event.receipts:
                status = receipt.delivery or UNKNOWN_DELIVERY
                self._metrics.delivery_reports.labels(status).inc()
            if event.signed_at is not None:
                self._metrics.event_lag.labels(kind).observe(max(0.0, now - event.signed_at))

    def _facts(
        self,
        webhook: Webhook,
        outcome: WebhookOutcome,
        why: str | None,
        status: int,
        seconds: float,
    ) -> dict[str, object]:
        event, count = webhook.events[0], len(webhook.events)
        kind = self._metrics.type_label(event.type)
        if event.receipts and kind == OTHER:
            known = webhook.endpoint.receipt_types
            kind = event.type if event.type in known and event.type else RECEIPT
        facts: dict[str, object] = {
            "route": webhook.endpoint.path if self._names_routes else None,
            "outcome": outcome,
            "why": why,
            "status": status,
            "type": kind,
            "event_id": event.event_id,
            "bytes": len(webhook.request.body),
            "seconds": shown_seconds(seconds),
        }
        if count > 1:
            facts |= {"events": count}
        receipts = event.receipts
        if count == 1 and len(receipts) == 1:
            receipt = receipts[0]
            facts |= {
                "delivery": receipt.delivery or UNKNOWN_DELIVERY,
                "message_id": receipt.message_id,
                "provider_id": receipt.provider_id,
                "code": receipt.code,
                "meaning": receipt.meaning,
            }
        elif receipts:
            facts |= {"receipts": sum(len(one.receipts) for one in webhook.events)}
        return facts

    def record_refusal(self, method: str | None, path: str | None, response: Response) -> None:
        """Record a request that was refused by its header, or whose body never arrived."""
        status = response.status
        route = path if path in self._paths else None
        if route is None and path is not None and path == self._health_path:
            self._count_request(method, path, status)
            return
        self._count_request(method, route or UNMATCHED, status)
        if route is None or status == _NOT_ALLOWED_STATUS:
            return
        outcome = _OUTCOME_OF_STATUS.get(status, "incomplete")
        why = None
        if response is REFUSED or response is ASK_AGAIN:
            outcome, why = "invalid_signature", "missing"
            self._metrics.verifications.labels(why, "none").inc()
        self._metrics.events.labels("unknown", outcome).inc()
        self._log_refused(route, outcome, why, status)

    def record_eviction(self, cause: Eviction) -> None:
        """Record a connection that was closed to make room for another."""
        self._metrics.evictions.labels(cause).inc()
        self._evicted.info(cause=cause)

    def flush_log(self) -> None:
        """Log the refusals and evictions that were counted since their last line."""
        self._refused.flush()
        self._evicted.flush()

    def _count_request(self, method: str | None, route: str, status: int) -> None:
        label = "POST" if method == "POST" else "other"
        self._metrics.http_requests.labels(route, label, str(status)).inc()

    def _log_refused(
        self, path: str, outcome: WebhookOutcome, why: str | None, status: int
    ) -> None:
        route = path if self._names_routes else None
        self._refused.info(route=route, outcome=outcome, why=why, status=status)
