"""Declares metrics on a given registry, and the metrics that both roles have.

Each metric exists at zero for every combination of its label values, which come from closed sets: a
counter that first appears as 1 would fire no alert. `_created` series are left out because they
would double the number of series.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar, get_args

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Gauge,
    disable_created_metrics,
)

from bridge.errors import Confirm, ConnectOutcome
from bridge.memory import read_memory_limit
from bridge.telemetry.counters import Counter, Histogram
from bridge.telemetry.logs import Level
from bridge.telemetry.trace_context import SpanLoss

# Upper bounds of histogram buckets.
FAST_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
AGE_SECONDS: Final = (
    *(0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
    *(1800, 3600, 7200, 21600, 86400),
)
SIZE_BYTES: Final = (256, 1024, 4096, 16384, 65536, 262144, 1048576)
LAG_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)

SECRETS: Final = ("rabbitmq", "sms_api", "webhook")

Registry = CollectorRegistry


def new_registry() -> Registry:
    """Create a registry with the process and interpreter metrics on it."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    return registry


class MetricSet:
    """Declares metrics, and creates the child of every label combination immediately."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def _counter(
        self, name: str, text: str, labels: Sequence[str] = (), values: Iterable[Any] = ()
    ) -> Counter:
        return _at_zero(Counter(name, text, labels, registry=self._registry), values)

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
        histogram = Histogram(name, text, labels, registry=self._registry, buckets=buckets)
        return _at_zero(histogram, values)


_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


def _at_zero(metric: _Metric, values: Iterable[Any]) -> _Metric:
    for value in values:
        metric.labels(*(value if isinstance(value, tuple) else (value,)))
    return metric


class BridgeMetrics(MetricSet):
    """The metrics of both roles."""

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
            "Always 1. The labels name the version and the role.",
            ("version", "revision", "component"),
        )
        self.build_info.labels(version, revision, component).set(1)
        self.connection_up = self._gauge(
            "sms_bridge_amqp_connection_up", "1 while all connections to RabbitMQ are open."
        )
        self.connection_blocked = self._gauge(
            "sms_bridge_amqp_connection_blocked",
            "1 while RabbitMQ blocks publishing because of an alarm.",
        )
        self.connections = self._counter(
            "sms_bridge_amqp_connections_total",
            "Attempts to connect to RabbitMQ, by outcome. `closed_by_broker` counts connections "
            "that were open and then lost.",
            ("outcome",),
            get_args(ConnectOutcome),
        )
        self.published = self._counter(
            "sms_bridge_amqp_published_total",
            "Published messages, by result.",
            ("exchange", "outcome"),
            [(exchange, outcome) for exchange in exchanges for outcome in get_args(Confirm)],
        )
        self.publish_duration = self._histogram(
            "sms_bridge_amqp_publish_duration_seconds",
            "Time from publishing a message to its confirm, in seconds.",
            FAST_SECONDS,
            ("exchange",),
            exchanges,
        )
        self.topology_differences = self._gauge(
            "sms_bridge_topology_differences",
            "Number of arguments of a queue or exchange that differ, or 1 if it does not exist.",
            ("entity",),
            entities,
        )
        self.unconfirmed = self._gauge(
            "sms_bridge_amqp_unconfirmed_messages",
            "Published messages that RabbitMQ has not confirmed yet.",
        )
        self.memory_limit = self._gauge(
            "sms_bridge_memory_limit_bytes",
            "Memory limit of the container, in bytes; +Inf if there is no limit.",
        )
        # The limit may change while a container runs.
        self.memory_limit.set_function(read_memory_limit)
        self.ready = self._gauge("sms_bridge_ready", "1 while /readyz returns 200.")
        self.shutdown_timestamp = self._gauge(
            "sms_bridge_shutdown_timestamp_seconds",
            "Unix time when the process began to drain, or 0 if it has not.",
        )
        self.loop_lag = self._histogram(
            "sms_bridge_event_loop_lag_seconds",
            "Delay with which the event loop runs its timers, in seconds.",
            LAG_SECONDS,
        )
        self.secret_reloads = self._counter(
            "sms_bridge_secret_reloads_total",
            "Changes of secret files, and failures to read them, by outcome.",
            ("secret", "outcome"),
            [(secret, outcome) for secret in SECRETS for outcome in ("changed", "failed")],
        )
        self.secret_last_reload = self._gauge(
            "sms_bridge_secret_last_reload_timestamp_seconds",
            "Unix time when a secret file was last read successfully.",
            ("secret",),
            SECRETS,
        )
        self.log_records = self._counter(
            "sms_bridge_log_records_total",
            "Log lines written, by level.",
            ("level",),
            get_args(Level),
        )
        self.log_lines_dropped = self._counter(
            "sms_bridge_log_lines_dropped_total",
            "Log lines dropped because standard output was blocked or failed.",
        )
        self.spans_dropped = self._counter(
            "sms_bridge_spans_dropped_total",
            "Spans that were not exported, by reason.",
            ("reason",),
            get_args(SpanLoss),
        )
