"""The metrics of the webhook receiver, and the measurement of its own queue."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from bridge.amqp.client import Connection
from bridge.errors import SignatureFault
from bridge.http.listener_state import Eviction
from bridge.telemetry.metrics import AGE_SECONDS, FAST_SECONDS, SIZE_BYTES, MetricSet, Registry
from bridge.topology.queue_sizes import QueueSizes, QueueWatch
from bridge.webhook.receipts import DeliveryState

_Serve = Callable[[Connection], Coroutine[Any, Any, None]]

# Outcome of a webhook.
WebhookOutcome = Literal[
    "published",
    "unparsed",
    "duplicate",
    "invalid_signature",
    "too_large",
    "incomplete",
    "overloaded",
    "publish_failed",
]
# Bucket bounds; they include the default tolerance, 300 s.
SIGNATURE_AGE_SECONDS: Final = (0.5, 1, 5, 10, 30, 60, 120, 300, 600)
VERIFICATIONS: Final[Sequence[tuple[str, str]]] = (
    ("valid", "current"),
    ("valid", "previous"),
    *((fault, "none") for fault in get_args(SignatureFault)),
)
# Delivery state of a receipt whose status is not in the settings.
UNKNOWN_DELIVERY: Final = "unknown"
# Every status with which the public port answers.
WEBHOOK_CODES: Final = ("200", "400", "401", "404", "405", "408", "413", "431", "503")


class WebhookMetrics(MetricSet):
    """The metrics of the webhook receiver."""

    def __init__(
        self,
        registry: Registry,
        *,
        paths: Sequence[str],
        event_types: Sequence[str],
        queues: Sequence[str] = (),
        health_path: str | None = None,
    ) -> None:
        super().__init__(registry)
        self.event_types = frozenset(event_types)
        types = (*event_types, "other", "unknown")
        health = () if health_path is None else (health_path,)
        self._http((*paths, *health, "unmatched"))
        self._events(types)
        self._signatures()
        self._state(queues)

    def type_label(self, event_type: str | None) -> str:
        """Return the label of an event's type: `other` unless it is in `webhook.event_types`."""
        return event_type if event_type in self.event_types and event_type else "other"

    def _http(self, routes: Sequence[str]) -> None:
        self.http_requests = self._counter(
            "sms_bridge_webhook_http_requests_total",
            "Requests to the public port, by path, method and status.",
            ("route", "method", "code"),
            [(r, method, c) for r in routes for method in ("POST", "other") for c in WEBHOOK_CODES],
        )
        self.http_duration = self._histogram(
            "sms_bridge_webhook_http_request_duration_seconds",
            "Time from the end of a request to its answer, in seconds, including the confirm.",
            FAST_SECONDS,
            ("route",),
            routes,
        )
        self.http_in_flight = self._gauge(
            "sms_bridge_webhook_http_requests_in_flight",
            "Requests to the public port that have not been answered yet.",
        )
        self.evictions = self._counter(
            "sms_bridge_webhook_evictions_total",
            "Connections closed to make room for others, by the limit that was reached.",
            ("cause",),
            get_args(Eviction),
        )
        self.http_size = self._histogram(
            "sms_bridge_webhook_http_request_size_bytes",
            "Size of completely received request bodies, in bytes.",
            SIZE_BYTES,
            ("route",),
            routes,
        )

    def _events(self, types: Sequence[str]) -> None:
        self.events = self._counter(
            "sms_bridge_webhook_events_total",
            "Events, by type and outcome. A refused webhook counts as one event of type `unknown`.",
            ("event_type", "outcome"),
            [(event_type, outcome) for event_type in types for outcome in get_args(WebhookOutcome)],
        )
        self.event_lag = self._histogram(
            "sms_bridge_webhook_event_lag_seconds",
            "Time from the timestamp in the signature to RabbitMQ's confirm, in seconds.",
            AGE_SECONDS,
            ("event_type",),
            types,
        )
        self.last_event = self._gauge(
            "sms_bridge_webhook_last_event_timestamp_seconds",
            "Unix time when the receiver last published an event of this type.",
            ("event_type",),
            types,
        )
        self.delivery_reports = self._counter(
            "sms_bridge_webhook_delivery_reports_total",
            "Delivery receipts, by state. `unknown` means that no setting lists the status.",
            ("status",),
            (*get_args(DeliveryState), UNKNOWN_DELIVERY),
        )

    def _signatures(self) -> None:
        self.verifications = self._counter(
            "sms_bridge_webhook_signature_verifications_total",
            "Signature checks, by result and secret. `current` is the first configured secret.",
            ("result", "key"),
            VERIFICATIONS,
        )
        self.signature_age = self._histogram(
            "sms_bridge_webhook_signature_age_seconds",
            "Age of the timestamps in valid signatures, in seconds, if the scheme has timestamps.",
            SIGNATURE_AGE_SECONDS,
        )

    def _state(self, queues: Sequence[str]) -> None:
        self.queue_ready = self._gauge(
            "sms_bridge_webhook_queue_messages_ready",
            "Events waiting in webhook.queue. Every replica reports the same: use max by (queue).",
            ("queue",),
            queues,
        )
        self.queue_consumers = self._gauge(
            "sms_bridge_webhook_queue_consumers",
            "Consumers of webhook.queue.",
            ("queue",),
            queues,
        )


def watched(serve: _Serve, queue: str | None, metrics: WebhookMetrics) -> _Serve:
    """Wrap `serve` so that the size of the bridge's own queue is measured while it runs.

    The queue receives every event. Without a consumer it grows until a resource alarm of the broker
    blocks both directions.
    """
    if queue is None:
        return serve

    def note(found: Mapping[str, QueueSizes]) -> None:
        for name, sizes in found.items():
            metrics.queue_ready.labels(name).set(sizes.ready)
            metrics.queue_consumers.labels(name).set(sizes.consumers)

    watch = QueueWatch(note)

    async def serve_and_watch(connection: Connection) -> None:
        watching = asyncio.create_task(watch.watch(connection, (queue,)))
        try:
            await serve(connection)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    return serve_and_watch
