"""Names, labels and buckets of the metrics, which dashboards and alerts rely on, all at zero."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from bridge.config import Settings
from bridge.telemetry.metrics import BridgeMetrics, Registry, new_registry
from bridge.topology.declarations import bridge_topology, name_of
from bridge.webhook.metrics import WebhookMetrics
from bridge.worker.metrics import WorkerMetrics
from tests.chart.promql import promtool

BUDGET = 520
QUEUE = "sms.outbound"
RETRY_QUEUES = [f"{QUEUE}.retry.{delay}" for delay in ("5s", "30s", "2m", "10m", "1h")]
DEAD = f"{QUEUE}.dead"
PATH = "/webhooks"
INBOUND = "sms.inbound"
EXCHANGES = ("default", "sms.inbound", "sms.outcome")
TOPOLOGY = bridge_topology(Settings(), ["worker", "webhook"])
ENTITIES = [name_of(entity) for entity in (*TOPOLOGY.declarable, *TOPOLOGY.bindings)]

FAST = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
HTTP = [0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30]
WORK = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]
AGE = [
    *[0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800],
    *[3600, 7200, 21600, 86400],
]
SIZE = [256, 1024, 4096, 16384, 65536, 262144, 1048576]


@dataclass(frozen=True)
class Promise:
    """The documented properties of a metric: kind, labels, all label combinations, buckets."""

    kind: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ((),)
    buckets: tuple[float, ...] = ()


def counter(labels: str = "", *values: Iterable[str]) -> Promise:
    return Promise("counter", tuple(labels.split()), tuple(itertools.product(*values)))


def gauge(labels: str = "", *values: Iterable[str]) -> Promise:
    return Promise("gauge", tuple(labels.split()), tuple(itertools.product(*values)))


def histogram(buckets: Sequence[float], labels: str = "", *values: Iterable[str]) -> Promise:
    names = tuple(labels.split())
    return Promise("histogram", names, tuple(itertools.product(*values)), tuple(buckets))


OUTCOMES = ("sent", "retried", "dead", "released", "dropped")
ENDS = (
    ("sent", "none"),
    ("retried", "rate_limited"),
    ("retried", "server_error"),
    ("retried", "timeout"),
    ("retried", "connection_error"),
    ("retried", "uncertain"),
    ("retried", "paused"),
    ("retried", "ambiguous"),
    ("retried", "singled_out"),
    ("retried", "not_before"),
    ("dead", "invalid"),
    ("dead", "refused"),
    ("dead", "expired"),
    ("dead", "exhausted"),
    ("dead", "uncertain"),
    ("dead", "internal_error"),
    ("released", "stopped"),
    ("released", "connection_lost"),
    ("released", "copy_refused"),
    ("released", "internal_error"),
    ("dropped", "duplicate"),
)
RESULTS = (
    *("success", "rejected", "unauthorized", "rate_limited"),
    *("server_error", "timeout", "connection_error", "protocol_error"),
)
WAIT_CAUSES = (
    *("original", "peers", "order", "due", "slot", "retry_after", "broker", "rate", "probe"),
    *("retry_in_place", "next_try", "jitter", "publish"),
)
STATUSES = (
    *("200", "201", "202", "204", "400", "401", "402", "403", "404", "408", "409"),
    *("413", "415", "422", "429", "500", "502", "503", "504"),
)
PAUSES = (
    *("credentials_rejected", "insufficient_funds", "misconfigured", "tls_failed"),
    *("outage", "rate_limited", "broker_blocked", "operator"),
)
QUEUE_ROLES = ((QUEUE, "main"), *((name, "retry") for name in RETRY_QUEUES), (DEAD, "dead_letter"))
ROUTES = (PATH, "unmatched")
TYPES = ("message.received", "other", "unknown")
EVENTS = (
    *("published", "unparsed", "duplicate", "invalid_signature"),
    *("too_large", "incomplete", "overloaded", "publish_failed"),
)
CHECKS = (
    ("valid", "current"),
    ("valid", "previous"),
    *((fault, "none") for fault in ("missing", "malformed", "mismatch", "ambiguous")),
    *((fault, "none") for fault in ("stale", "future")),
)

WORKER = {
    "messages_received_total": counter("queue redelivered", [QUEUE], ["true", "false"]),
    "messages_processed_total": Promise(
        "counter", ("queue", "outcome", "reason"), tuple((QUEUE, *end) for end in ENDS)
    ),
    "messages_in_progress": gauge("queue", [QUEUE]),
    "concurrency_limit": gauge("queue", [QUEUE]),
    "processing_duration_seconds": histogram(WORK, "queue outcome", [QUEUE], OUTCOMES),
    "wait_duration_seconds": histogram([0.1, 1, 10], "queue cause", [QUEUE], WAIT_CAUSES),
    "queue_age_seconds": histogram(AGE, "queue", [QUEUE]),
    "acceptance_latency_seconds": histogram(AGE, "queue", [QUEUE]),
    "messages_without_timestamp_total": counter("queue", [QUEUE]),
    "ladder_messages_total": counter("queue event", [QUEUE], ["stored", "returned"]),
    "oldest_held_message_timestamp_seconds": gauge("queue", [QUEUE]),
    "attempts_per_message": histogram([1, 2, 3, 5, 8, 13, 21], "outcome", ["sent", "dead"]),
    "provider_responses_total": counter("code", [*STATUSES, "other"]),
    "segments_total": counter("encoding", ["gsm7", "ucs2"]),
    "provider_errors_total": counter("code", ["other"]),
    "provider_pages_total": counter(),
    "provider_requests_total": counter("result", RESULTS),
    "provider_request_duration_seconds": histogram(HTTP, "result", RESULTS),
    "provider_requests_in_flight": gauge(),
    "throttled_seconds_total": counter("cause", ["local_limit", "retry_after"]),
    "paused": gauge("reason", PAUSES),
    "paused_timestamp_seconds": gauge("reason", PAUSES),
    "pauses_total": counter("reason", PAUSES),
    "queue_messages_ready": Promise("gauge", ("queue", "role"), QUEUE_ROLES),
    "queue_consumers": gauge("queue", [QUEUE]),
    "queue_stats_timestamp_seconds": gauge(),
    "active": gauge("queue", [QUEUE]),
    "consumer_up": gauge("queue", [QUEUE]),
    "last_delivery_timestamp_seconds": gauge("queue", [QUEUE]),
    "last_sent_timestamp_seconds": gauge("queue", [QUEUE]),
    "protocol_poison_suspected": gauge(),
    "copies_refused": gauge("queue", [QUEUE]),
    "outage_suspected": gauge(),
    "peers": gauge(),
    "coordination_up": gauge(),
    "redelivery_questions_total": counter("answer", ["unknown", "done", "kept", "none"]),
    "peer_messages_malformed_total": counter(),
}
WEBHOOK = {
    "http_requests_total": counter(
        "route method code",
        ROUTES,
        ["POST", "other"],
        ["200", "400", "401", "404", "405", "408", "413", "431", "503"],
    ),
    "http_request_duration_seconds": histogram(FAST, "route", ROUTES),
    "http_requests_in_flight": gauge(),
    "http_request_size_bytes": histogram(SIZE, "route", ROUTES),
    "evictions_total": counter("cause", ["connections", "memory"]),
    "events_total": counter("event_type outcome", TYPES, EVENTS),
    "signature_verifications_total": Promise("counter", ("result", "key"), CHECKS),
    "signature_age_seconds": histogram([0.5, 1, 5, 10, 30, 60, 120, 300, 600]),
    "event_lag_seconds": histogram(AGE, "event_type", TYPES),
    "last_event_timestamp_seconds": gauge("event_type", TYPES),
    "delivery_reports_total": counter("status", ["delivered", "failed", "pending", "unknown"]),
    "queue_messages_ready": gauge("queue", [INBOUND]),
    "queue_consumers": gauge("queue", [INBOUND]),
}
BOTH = {
    "amqp_connection_up": gauge(),
    "amqp_connection_blocked": gauge(),
    "amqp_connections_total": counter(
        "outcome",
        [
            *("opened", "auth_failed", "refused", "tls_failed", "timeout", "client_unsupported"),
            "closed_by_broker",
        ],
    ),
    "amqp_published_total": counter(
        "exchange outcome", EXCHANGES, ["confirmed", "returned", "nacked", "timeout", "error"]
    ),
    "amqp_publish_duration_seconds": histogram(FAST, "exchange", EXCHANGES),
    "amqp_unconfirmed_messages": gauge(),
    "topology_differences": gauge("entity", ENTITIES),
    "ready": gauge(),
    "shutdown_timestamp_seconds": gauge(),
    "event_loop_lag_seconds": histogram([0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5]),
    "secret_reloads_total": counter(
        "secret outcome", ["rabbitmq", "sms_api", "webhook"], ["changed", "failed"]
    ),
    "secret_last_reload_timestamp_seconds": gauge("secret", ["rabbitmq", "sms_api", "webhook"]),
    "log_records_total": counter("level", ["debug", "info", "warning", "error", "critical"]),
    "log_lines_dropped_total": counter(),
    "spans_dropped_total": counter("reason", ["queue_full", "export_failed"]),
}
PROMISES: dict[str, Promise] = {
    **{f"sms_bridge_worker_{name}": promise for name, promise in WORKER.items()},
    **{f"sms_bridge_webhook_{name}": promise for name, promise in WEBHOOK.items()},
    **{f"sms_bridge_{name}": promise for name, promise in BOTH.items()},
}
# Not at zero: the version that is running, and its memory limit.
NOT_AT_ZERO = {"sms_bridge_build_info", "sms_bridge_memory_limit_bytes"}


def both(registry: Registry, exchanges: Sequence[str] = EXCHANGES) -> BridgeMetrics:
    return BridgeMetrics(
        registry,
        component="worker",
        version="1.2.3",
        revision="abc",
        exchanges=exchanges,
        entities=ENTITIES,
    )


def worker(registry: Registry) -> WorkerMetrics:
    return WorkerMetrics(registry, queue=QUEUE, retry_queues=RETRY_QUEUES, dead=DEAD)


def webhook(registry: Registry) -> WebhookMetrics:
    return WebhookMetrics(
        registry, paths=[PATH], event_types=["message.received"], queues=[INBOUND]
    )


@pytest.fixture
def worker_registry() -> Registry:
    registry = new_registry()
    both(registry, ["default"])
    worker(registry)
    return registry


@pytest.fixture
def webhook_registry() -> Registry:
    registry = new_registry()
    both(registry, [INBOUND])
    webhook(registry)
    return registry


@pytest.fixture(scope="module")
def registry() -> Registry:
    """Provide the registry of a process with both roles that has just started."""
    whole = new_registry()
    both(whole)
    worker(whole)
    webhook(whole)
    return whole


@pytest.fixture(scope="module")
def families(registry: Registry) -> dict[str, Metric]:
    text = generate_latest(registry).decode()
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in parse_text(text)
        if family.name.startswith("sms_bridge_")
    }


def series(registry: Registry) -> list[str]:
    text = generate_latest(registry).decode()
    return [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]


# --- Series --------------------------------------------------------------------------------------


def test_series_of_a_role(worker_registry: Registry, webhook_registry: Registry) -> None:
    """A worker and a receiver keep within their budget of series."""
    assert max(len(series(one)) for one in (worker_registry, webhook_registry)) < BUDGET


def test_no_series_twice(registry: Registry) -> None:
    """No series is repeated, which a scraper would refuse."""
    names = series(registry)

    assert len(names) == len(set(names))


def test_no_created_series(registry: Registry) -> None:
    """There are no `_created` series in either format, which would double the counters."""
    assert "_created" not in text_of(registry) + openmetrics_of(registry)


# --- Names ---------------------------------------------------------------------------------------


def test_metrics_are_as_documented(families: dict[str, Metric], registry: Registry) -> None:
    labels = {"version": "1.2.3", "revision": "abc", "component": "worker"}

    assert set(families) == {*PROMISES, *NOT_AT_ZERO}
    assert registry.get_sample_value("sms_bridge_build_info", labels) == 1
    for others in ("process_", "python_"):
        assert any(name.startswith(others) for name in series(registry))


@pytest.mark.slow
def test_names_pass_promtool(registry: Registry) -> None:
    """Prometheus' own check of names, units and help texts finds nothing."""
    checked = promtool("check", "metrics", given=text_of(registry))

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def openmetrics_of(registry: Registry) -> str:
    written: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
    return written.decode()


def text_of(registry: Registry) -> str:
    return generate_latest(registry).decode()


# --- Labels and buckets --------------------------------------------------------------------------


def combinations(family: Metric, promise: Promise) -> set[tuple[str, ...]]:
    return {
        tuple(sample.labels.get(label, "?") for label in promise.labels)
        for sample in family.samples
        if set(sample.labels) - {"le"} == set(promise.labels)
    }


@pytest.mark.parametrize(("name", "promise"), PROMISES.items(), ids=PROMISES)
def test_everything_is_zero(families: dict[str, Metric], name: str, promise: Promise) -> None:
    """A metric has its documented kind, labels and buckets, and every combination starts at 0.

    Then the first event is an increase.
    """
    samples = families[name].samples
    bounds = {sample.labels["le"] for sample in samples if "le" in sample.labels}

    assert families[name].type == promise.kind
    assert {frozenset(sample.labels) - {"le"} for sample in samples} == {frozenset(promise.labels)}
    assert combinations(families[name], promise) == set(promise.values)
    assert {sample.value for sample in samples} == {0}
    if promise.kind == "histogram":
        assert sorted(map(float, bounds)) == [*promise.buckets, float("inf")]


# --- Other settings ------------------------------------------------------------------------------


def test_names_of_the_settings_are_the_labels() -> None:
    """Queues, paths and types of the settings are the label values."""
    registry = new_registry()
    WorkerMetrics(registry, queue="q", retry_queues=["q.retry.1s"], dead="q.dead")
    WebhookMetrics(registry, paths=["/in", "/other"], event_types=["a", "b"])
    text = generate_latest(registry).decode()
    values = {
        label: set(re.findall(f'{label}="([^"]*)"', text))
        for label in ("queue", "route", "event_type")
    }

    assert values == {
        "queue": {"q", "q.retry.1s", "q.dead"},
        "route": {"/in", "/other", "unmatched"},
        "event_type": {"a", "b", "other", "unknown"},
    }


def test_built_in_event_types_can_be_configured() -> None:
    registry = new_registry()
    WebhookMetrics(registry, paths=[PATH], event_types=["other", "message.received"])
    names = series(registry)

    assert len(names) == len(set(names))


def test_default_settings_are_the_ones_of_these_tests() -> None:
    settings = Settings.model_validate({})

    assert (settings.worker.queue, settings.webhook.path, settings.webhook.event_types) == (
        QUEUE,
        PATH,
        ("message.received",),
    )
    assert settings.webhook.queue == INBOUND
