"""Every metric by name, on an injected registry, created at zero for every label combination.

Labels come from closed sets only. A counter that first appears as 1 fires no alert, hence the
zeros; `_created` series would double their number, hence their absence.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Gauge,
    disable_created_metrics,
)

from bridge.instruments import Counter, Histogram

FAST: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
HTTP: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30)
WORK: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
AGE: Final = (
    *(0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
    *(1800, 3600, 7200, 21600, 86400),
)
SIZE: Final = (256, 1024, 4096, 16384, 65536, 262144, 1048576)
SIGNATURE_AGE: Final = (0.5, 1, 5, 10, 30, 60, 120, 300, 600)
LAG: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)
ATTEMPTS: Final = (1, 2, 3, 5, 8, 13, 21)

RETRY_REASONS: Final = (
    *("rate_limited", "server_error", "timeout", "connection_error"),
    *("uncertain", "paused", "ambiguous", "not_before", "ordering"),
)
DEAD_REASONS: Final = (
    *("invalid", "refused", "expired", "exhausted", "uncertain", "internal_error"),
)
PROCESSED: Final = (
    ("sent", "none"),
    *(("retried", reason) for reason in RETRY_REASONS),
    *(("dead", reason) for reason in DEAD_REASONS),
    ("released", "shutdown"),
    ("dropped", "duplicate"),
)
PROVIDER_RESULTS: Final = (
    *("success", "rejected", "unauthorized", "rate_limited"),
    *("server_error", "timeout", "connection_error", "protocol_error"),
)
# Any other status counts as `other`.
PROVIDER_CODES: Final = frozenset(
    (
        *(200, 201, 202, 204, 400, 401, 402, 403, 404, 408, 409),
        *(413, 415, 422, 429, 500, 502, 503, 504),
    )
)
PAUSE_REASONS: Final = (
    *("credentials_rejected", "insufficient_funds", "misconfigured", "tls_failed"),
    *("outage", "rate_limited", "broker_blocked", "operator"),
)
EVENT_OUTCOMES: Final = (
    *("published", "unparsed", "duplicate", "invalid_signature"),
    *("too_large", "incomplete", "overloaded", "publish_failed"),
)
VERIFICATIONS: Final = (
    ("valid", "current"),
    ("valid", "previous"),
    *((fault, "none") for fault in ("missing", "malformed", "mismatch", "stale", "future")),
)
WEBHOOK_CODES: Final = ("200", "400", "401", "404", "405", "408", "413", "431", "503")
CONNECT_OUTCOMES: Final = (
    *("opened", "auth_failed", "refused", "tls_failed", "timeout", "client_unsupported"),
    "closed_by_broker",
)
PUBLISH_OUTCOMES: Final = ("confirmed", "returned", "nacked", "timeout", "error")
SECRETS: Final = ("rabbitmq", "sms_api", "webhook")


Registry = CollectorRegistry


def new_registry() -> Registry:
    """Make a registry with the process and interpreter metrics on it."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    return registry


class _Catalogue:
    """Declares metrics and creates every label combination at once."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def _counter(
        self, name: str, text: str, labels: Sequence[str] = (), values: Iterable[Any] = ()
    ) -> Counter:
        return _at_zero(Counter(name, text, labels, self._registry), values)

    def _gauge(
        self, name: str, text: str, labels: Sequence[str] = (), values: Iterable[Any] = ()
    ) -> Gauge:
        gauge = Gauge(name, text, labels, registry=self._registry)
        # Finding a child costs more than setting it.
        gauge.labels = functools.lru_cache(maxsize=None)(gauge.labels)  # type: ignore[method-assign]
        return _at_zero(gauge, values)

    def _histogram(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        labels: Sequence[str] = (),
        values: Iterable[Any] = (),
    ) -> Histogram:
        histogram = Histogram(name, text, labels, self._registry, buckets=buckets)
        return _at_zero(histogram, values)


_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


def _at_zero(metric: _Metric, values: Iterable[Any]) -> _Metric:
    for value in values:
        metric.labels(*(value if isinstance(value, tuple) else (value,)))
    return metric


class BridgeMetrics(_Catalogue):
    """What both roles have."""

    def __init__(
        self,
        registry: Registry,
        *,
        component: str,
        version: str,
        revision: str,
        exchanges: Sequence[str],
        entities: Sequence[str] = (),
    ) -> None:
        super().__init__(registry)
        self.build_info = self._gauge(
            "sms_bridge_build_info",
            "Always 1; the labels say what is running.",
            ("version", "revision", "component"),
        )
        self.build_info.labels(version, revision, component).set(1)
        self.connection_up = self._gauge(
            "sms_bridge_amqp_connection_up", "1 while every broker connection is open."
        )
        self.connection_blocked = self._gauge(
            "sms_bridge_amqp_connection_blocked", "1 while the broker blocks publishing."
        )
        self.connections = self._counter(
            "sms_bridge_amqp_connections_total",
            "Attempts to connect to the broker, and connections that it closed.",
            ("outcome",),
            CONNECT_OUTCOMES,
        )
        self.published = self._counter(
            "sms_bridge_amqp_published_total",
            "Messages published, by what the broker said.",
            ("exchange", "outcome"),
            [(exchange, outcome) for exchange in exchanges for outcome in PUBLISH_OUTCOMES],
        )
        self.publish_duration = self._histogram(
            "sms_bridge_amqp_publish_duration_seconds",
            "From publishing to the confirm.",
            FAST,
            ("exchange",),
            exchanges,
        )
        self.topology_differences = self._gauge(
            "sms_bridge_topology_differences",
            "Arguments that differ on the broker from what is needed, or 1 for what is missing.",
            ("entity",),
            entities,
        )
        self.unconfirmed = self._gauge(
            "sms_bridge_amqp_unconfirmed_messages", "Published and not confirmed yet."
        )
        self.ready = self._gauge("sms_bridge_ready", "1 while /readyz answers 200.")
        self.shutdown_timestamp = self._gauge(
            "sms_bridge_shutdown_timestamp_seconds", "When the drain began; 0 before."
        )
        self.loop_lag = self._histogram(
            "sms_bridge_event_loop_lag_seconds", "How late the event loop wakes a timer.", LAG
        )
        self.secret_reloads = self._counter(
            "sms_bridge_secret_reloads_total",
            "Secret files read again after a change.",
            ("secret", "outcome"),
            [(secret, outcome) for secret in SECRETS for outcome in ("changed", "failed")],
        )
        self.secret_last_reload = self._gauge(
            "sms_bridge_secret_last_reload_timestamp_seconds",
            "When a secret file was last read with success.",
            ("secret",),
            SECRETS,
        )
        self.log_records = self._counter(
            "sms_bridge_log_records_total",
            "Log lines written.",
            ("level",),
            ("debug", "info", "warning", "error", "critical"),
        )
        self.log_lines_dropped = self._counter(
            "sms_bridge_log_lines_dropped_total",
            "Log lines that found no room, because standard output was not read.",
        )


class WorkerMetrics(_Catalogue):
    """What the worker counts."""

    def __init__(
        self, registry: Registry, *, queue: str, retry_queues: Sequence[str], dead: str
    ) -> None:
        super().__init__(registry)
        self._flow(queue)
        self._provider()
        self._state(queue, retry_queues, dead)

    def _flow(self, queue: str) -> None:
        self.received = self._counter(
            "sms_bridge_worker_messages_received_total",
            "Deliveries from the broker.",
            ("queue", "redelivered"),
            [(queue, "true"), (queue, "false")],
        )
        self.processed = self._counter(
            "sms_bridge_worker_messages_processed_total",
            "What became of each delivery.",
            ("queue", "outcome", "reason"),
            [(queue, *pair) for pair in PROCESSED],
        )
        self.in_progress = self._gauge(
            "sms_bridge_worker_messages_in_progress",
            "Deliveries taken and not settled.",
            ("queue",),
            [queue],
        )
        self.concurrency_limit = self._gauge(
            "sms_bridge_worker_concurrency_limit",
            "How many requests may be in flight at once; worker.concurrency: auto moves it.",
            ("queue",),
            [queue],
        )
        self.processing_duration = self._histogram(
            "sms_bridge_worker_processing_duration_seconds",
            "From delivery to ack.",
            WORK,
            ("queue", "outcome"),
            [(queue, outcome) for outcome in ("sent", "retried", "dead", "released", "dropped")],
        )
        self.queue_age = self._histogram(
            "sms_bridge_worker_queue_age_seconds",
            "From publishing to the first delivery.",
            AGE,
            ("queue",),
            [queue],
        )
        self.acceptance_latency = self._histogram(
            "sms_bridge_worker_acceptance_latency_seconds",
            "From publishing to the API's acceptance.",
            AGE,
            ("queue",),
            [queue],
        )
        self.without_timestamp = self._counter(
            "sms_bridge_worker_messages_without_timestamp_total",
            "First deliveries whose age is unknown, because the publisher set no timestamp.",
            ("queue",),
            [queue],
        )
        self.attempts_per_message = self._histogram(
            "sms_bridge_worker_attempts_per_message",
            "Attempts that a finished request took.",
            ATTEMPTS,
            ("outcome",),
            ("sent", "dead"),
        )
        self.segments = self._counter(
            "sms_bridge_worker_segments_total",
            "SMS segments of the accepted texts.",
            ("encoding",),
            ("gsm7", "ucs2"),
        )

    def _provider(self) -> None:
        self.provider_requests = self._counter(
            "sms_bridge_worker_provider_requests_total",
            "POSTs to the SMS API, by result.",
            ("result",),
            PROVIDER_RESULTS,
        )
        self.provider_responses = self._counter(
            "sms_bridge_worker_provider_responses_total", "Answers, by status.", ("code",)
        )
        self.provider_duration = self._histogram(
            "sms_bridge_worker_provider_request_duration_seconds",
            "How long a POST took.",
            HTTP,
            ("result",),
            PROVIDER_RESULTS,
        )
        self.provider_in_flight = self._gauge(
            "sms_bridge_worker_provider_requests_in_flight", "POSTs that wait for an answer."
        )
        self.throttled = self._counter(
            "sms_bridge_worker_throttled_seconds_total",
            "Time that deliveries waited for their turn.",
            ("cause",),
            ("local_limit", "retry_after"),
        )
        self.paused = self._gauge(
            "sms_bridge_worker_paused",
            "1 while nothing new is taken.",
            ("reason",),
            PAUSE_REASONS,
        )
        self.pauses = self._counter(
            "sms_bridge_worker_pauses_total", "Pauses begun.", ("reason",), PAUSE_REASONS
        )

    def _state(self, queue: str, retry_queues: Sequence[str], dead: str) -> None:
        self.oldest_held = self._gauge(
            "sms_bridge_worker_oldest_held_message_timestamp_seconds",
            "When the oldest unsettled delivery was published; 0 = none.",
            ("queue",),
            [queue],
        )
        self.queue_ready = self._gauge(
            "sms_bridge_worker_queue_messages_ready",
            "Messages ready in a queue. Every replica reports it: use max by (queue).",
            ("queue", "role"),
            [
                (queue, "main"),
                *((name, "retry") for name in retry_queues),
                (dead, "dead_letter"),
            ],
        )
        self.queue_consumers = self._gauge(
            "sms_bridge_worker_queue_consumers", "Consumers of the queue.", ("queue",), [queue]
        )
        self.queue_stats_timestamp = self._gauge(
            "sms_bridge_worker_queue_stats_timestamp_seconds", "When the queues were last read."
        )
        self.consumer_up = self._gauge(
            "sms_bridge_worker_consumer_up",
            "1 while this process is registered as a consumer.",
            ("queue",),
            [queue],
        )
        self.last_delivery = self._gauge(
            "sms_bridge_worker_last_delivery_timestamp_seconds",
            "When the last delivery came in.",
            ("queue",),
            [queue],
        )
        self.last_sent = self._gauge(
            "sms_bridge_worker_last_sent_timestamp_seconds",
            "When the API last accepted a message.",
            ("queue",),
            [queue],
        )
        self.poison_suspected = self._gauge(
            "sms_bridge_worker_protocol_poison_suspected",
            "1 when connections keep dying without a delivery in between.",
        )


class WebhookMetrics(_Catalogue):
    """What the webhook receiver counts."""

    def __init__(
        self,
        registry: Registry,
        *,
        path: str,
        event_types: Sequence[str],
        queues: Sequence[str] = (),
    ) -> None:
        super().__init__(registry)
        self.event_types = frozenset(event_types)
        types = (*event_types, "other", "unknown")
        routes = (path, "unmatched")
        self._http(routes)
        self._events(types)
        self._state(queues)

    def _http(self, routes: Sequence[str]) -> None:
        self.http_requests = self._counter(
            "sms_bridge_webhook_http_requests_total",
            "Requests to the public port.",
            ("route", "method", "code"),
            [(r, method, c) for r in routes for method in ("POST", "other") for c in WEBHOOK_CODES],
        )
        self.http_duration = self._histogram(
            "sms_bridge_webhook_http_request_duration_seconds",
            "From the complete request to its answer; the broker's confirm is inside.",
            FAST,
            ("route",),
            routes,
        )
        self.http_in_flight = self._gauge(
            "sms_bridge_webhook_http_requests_in_flight", "Requests not answered yet."
        )
        self.evictions = self._counter(
            "sms_bridge_webhook_evictions_total",
            "Connections closed to make room for others, by what there was no room for.",
            ("cause",),
            ("connections", "memory"),
        )
        self.http_size = self._histogram(
            "sms_bridge_webhook_http_request_size_bytes",
            "Size of complete bodies.",
            SIZE,
            ("route",),
            routes,
        )

    def _events(self, types: Sequence[str]) -> None:
        self.events = self._counter(
            "sms_bridge_webhook_events_total",
            "What became of each webhook; the type is unknown until the signature is verified.",
            ("event_type", "outcome"),
            [(event_type, outcome) for event_type in types for outcome in EVENT_OUTCOMES],
        )
        self.verifications = self._counter(
            "sms_bridge_webhook_signature_verifications_total",
            "Signature checks; `current` is the first configured secret.",
            ("result", "key"),
            VERIFICATIONS,
        )
        self.signature_age = self._histogram(
            "sms_bridge_webhook_signature_age_seconds",
            "Age of a valid signature's timestamp, where the scheme has one.",
            SIGNATURE_AGE,
        )
        self.event_lag = self._histogram(
            "sms_bridge_webhook_event_lag_seconds",
            "From the signature's timestamp to the broker's confirm.",
            AGE,
            ("event_type",),
            types,
        )
        self.last_event = self._gauge(
            "sms_bridge_webhook_last_event_timestamp_seconds",
            "When an event of the type was last published.",
            ("event_type",),
            types,
        )
        self.delivery_reports = self._counter(
            "sms_bridge_webhook_delivery_reports_total",
            "Delivery events; zero until the service's types are known.",
            ("status",),
            ("delivered", "failed", "expired", "rejected", "unknown"),
        )

    def _state(self, queues: Sequence[str]) -> None:
        self.queue_ready = self._gauge(
            "sms_bridge_webhook_queue_messages_ready",
            "Events ready in our own queue. Every replica reports it: use max by (queue).",
            ("queue",),
            queues,
        )
        self.queue_consumers = self._gauge(
            "sms_bridge_webhook_queue_consumers",
            "Consumers of our own queue.",
            ("queue",),
            queues,
        )
