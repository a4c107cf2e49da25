"""Names, labels and buckets of the metrics, which dashboards and alerts rely on, all at zero."""

import re
from collections.abc import Sequence

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


# The bounds of each histogram, by which dashboards and alerts select.
BUCKETS: dict[str, Sequence[float]] = {
    "sms_bridge_worker_processing_duration_seconds": WORK,
    "sms_bridge_worker_wait_duration_seconds": [0.1, 1, 10],
    "sms_bridge_worker_queue_age_seconds": AGE,
    "sms_bridge_worker_acceptance_latency_seconds": AGE,
    "sms_bridge_worker_attempts_per_message": [1, 2, 3, 5, 8, 13, 21],
    "sms_bridge_worker_provider_request_duration_seconds": HTTP,
    "sms_bridge_webhook_http_request_duration_seconds": FAST,
    "sms_bridge_webhook_http_request_size_bytes": SIZE,
    "sms_bridge_webhook_signature_age_seconds": [0.5, 1, 5, 10, 30, 60, 120, 300, 600],
    "sms_bridge_webhook_event_lag_seconds": AGE,
    "sms_bridge_amqp_publish_duration_seconds": FAST,
    "sms_bridge_event_loop_lag_seconds": [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5],
}
# The pairs of labels that can come together, where not every pair can.
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
CHECKS = (
    ("valid", "current"),
    ("valid", "previous"),
    *((fault, "none") for fault in ("missing", "malformed", "mismatch", "ambiguous")),
    *((fault, "none") for fault in ("stale", "future")),
)
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


def test_a_process_tells_its_version_and_its_resources(registry: Registry) -> None:
    labels = {"version": "1.2.3", "revision": "abc", "component": "worker"}

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


def test_everything_is_zero(families: dict[str, Metric]) -> None:
    """Every combination of labels is there from the start, at 0.

    Then the first event is an increase. docs/metrics.md, which is generated, lists the labels.
    """
    samples = {name: one.samples for name, one in families.items() if name not in NOT_AT_ZERO}

    assert [name for name, found in samples.items() if not found] == []
    assert [name for name, found in samples.items() if {one.value for one in found} != {0}] == []


@pytest.mark.parametrize(
    ("name", "labels", "pairs"),
    [
        ("worker_messages_processed_total", ("outcome", "reason"), ENDS),
        ("webhook_signature_verifications_total", ("result", "key"), CHECKS),
    ],
)
def test_pairs_of_labels(
    families: dict[str, Metric],
    name: str,
    labels: tuple[str, str],
    pairs: tuple[tuple[str, str], ...],
) -> None:
    samples = families[f"sms_bridge_{name}"].samples

    assert {tuple(one.labels[label] for label in labels) for one in samples} == {*pairs}


def test_buckets_of_histograms(families: dict[str, Metric]) -> None:
    bounds = {
        name: sorted({float(one.labels["le"]) for one in family.samples if "le" in one.labels})
        for name, family in families.items()
        if family.type == "histogram"
    }

    assert bounds == {name: [*buckets, float("inf")] for name, buckets in BUCKETS.items()}


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
