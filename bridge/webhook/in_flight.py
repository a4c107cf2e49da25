"""Webhooks in flight: their number, and the metrics, log line and span of each answer."""

import time
from typing import Final

from bridge.http.messages import Request, Response
from bridge.telemetry.log_format import shown_seconds
from bridge.telemetry.logs import Log
from bridge.telemetry.trace_context import Span
from bridge.webhook.endpoint import Endpoint
from bridge.webhook.event import OTHER, Event, trace_of
from bridge.webhook.metrics import UNKNOWN_DELIVERY, EventOutcome, WebhookMetrics
from bridge.webhook.refusals import Refusals
from bridge.webhook.spans import WebhookSpans, end_webhook

log = Log(__name__)

# Shared no-op span.
_NO_SPAN: Final = Span(())
# Logged as the type of a receipt whose own type is not in the settings.
RECEIPT: Final = "receipt"


class Webhook:
    """One request to an endpoint; `event` is set when the signature is verified."""

    __slots__ = ("endpoint", "event", "request", "span", "started")

    def __init__(self, request: Request, endpoint: Endpoint, span: Span) -> None:
        self.request = request
        self.endpoint = endpoint
        self.span = span
        self.started = time.perf_counter()
        self.event: Event | None = None


class InFlight:
    """Counts webhooks in flight, and records each answer in metrics, log and span.

    With `names_routes`, log lines name the endpoint.
    """

    def __init__(
        self,
        metrics: WebhookMetrics,
        refusals: Refusals,
        spans: WebhookSpans | None,
        *,
        names_routes: bool,
    ) -> None:
        self.count = 0
        self._metrics = metrics
        self._refusals = refusals
        self._spans = spans
        self._names_routes = names_routes
        metrics.http_in_flight.set_function(lambda: self.count)

    def begin(self, request: Request, endpoint: Endpoint) -> Webhook:
        """Begin a webhook. The caller must `end` or `forget` it."""
        self.count += 1
        spans = self._spans
        if spans is not None:
            return Webhook(request, endpoint, spans.begin(request, endpoint))
        trace = trace_of(request)
        return Webhook(request, endpoint, Span(trace) if trace else _NO_SPAN)

    def forget(self) -> None:
        """Drop a webhook that will not be answered."""
        self.count -= 1

    def end(
        self, webhook: Webhook, outcome: EventOutcome, why: str | None, response: Response
    ) -> Response:
        """Record the answer to a webhook, and return it."""
        self.count -= 1
        seconds = time.perf_counter() - webhook.started
        event, path, status = webhook.event, webhook.endpoint.path, response.status
        trace_id = None
        if event is None:
            self._metrics.events.labels("unknown", outcome).inc()
            self._refusals.log(path, outcome, why, status)
        else:
            trace_id = webhook.span.trace_id
            kind = self._metrics.type_label(event.type)
            self._count_event(event, kind, outcome)
            shown = kind
            if event.receipts and kind == OTHER:
                known = webhook.endpoint.receipt_types
                shown = event.type if event.type in known and event.type else RECEIPT
            facts = self._facts(event, shown, path, outcome, why, status, seconds)
            log.info_facts("webhook", facts)
            end_webhook(webhook.span, facts)
        self._refusals.count_request(webhook.request.method, path, status)
        self._metrics.http_duration.labels(path).observe(seconds, trace_id)
        return response

    def _count_event(self, event: Event, kind: str, outcome: EventOutcome) -> None:
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
        event: Event,
        kind: str,
        path: str,
        outcome: EventOutcome,
        why: str | None,
        status: int,
        seconds: float,
    ) -> dict[str, object]:
        facts: dict[str, object] = {
            "route": path if self._names_routes else None,
            "outcome": outcome,
            "why": why,
            "status": status,
            "type": kind,
            "event_id": event.event_id,
            "bytes": len(event.body),
            "seconds": shown_seconds(seconds),
        }
        receipt, count = event.receipt, len(event.receipts)
        if receipt is not None:
            facts |= {
                "delivery": receipt.delivery or UNKNOWN_DELIVERY,
                "message_id": receipt.message_id,
                "provider_id": receipt.provider_id,
                "code": receipt.code,
            }
        elif count:
            facts |= {"receipts": count}
        return facts
