"""Counters and histograms are written as those of prometheus-client."""

import re
from collections.abc import Sequence

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from bridge.telemetry.counters import Counter, Histogram

BUCKETS = (0.005, 0.1, 1.0, 2.5, 10.0)
NEAR_BUCKETS = st.sampled_from(BUCKETS) | st.floats(0, 20)

disable_created_metrics()  # type: ignore[no-untyped-call]


def written(registry: CollectorRegistry) -> tuple[bytes, bytes]:
    return generate_latest(registry), generate_openmetrics(registry)  # type: ignore[no-untyped-call]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e9))))
def test_counter(counts: Sequence[tuple[str, float]]) -> None:
    """A counter is written as the library writes its own."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = Counter("sent_total", "What was sent.", ("kind",), ours)
    own = prometheus_client.Counter("sent_total", "What was sent.", ("kind",), registry=theirs)
    for kind, amount in counts:
        counter.labels(kind).inc(amount)
        own.labels(kind).inc(amount)

    assert written(ours) == written(theirs)


@given(st.lists(st.tuples(st.sampled_from("abc"), NEAR_BUCKETS)))
def test_histogram(values: Sequence[tuple[str, float]]) -> None:
    """A histogram is written as the library writes its own, including values equal to a bound."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("wait_seconds", "A wait.", ("kind",), ours, buckets=BUCKETS)
    own = prometheus_client.Histogram(
        "wait_seconds", "A wait.", ("kind",), buckets=BUCKETS, registry=theirs
    )
    for kind, seconds in values:
        histogram.labels(kind).observe(seconds)
        own.labels(kind).observe(seconds)

    assert written(ours) == written(theirs)


@given(st.lists(st.tuples(NEAR_BUCKETS, st.none() | st.sampled_from(["a" * 32, "b" * 32]))))
def test_exemplars(values: Sequence[tuple[float, str | None]]) -> None:
    """The last trace of each bucket is an exemplar, in the OpenMetrics format only."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("wait_seconds", "A wait.", (), ours, buckets=BUCKETS)
    own = prometheus_client.Histogram("wait_seconds", "A wait.", buckets=BUCKETS, registry=theirs)
    for seconds, trace_id in values:
        histogram.labels().observe(seconds, trace_id)
        own.observe(seconds, None if trace_id is None else {"trace_id": trace_id})

    assert [_without_times(page) for page in written(ours)] == [
        _without_times(page) for page in written(theirs)
    ]
    assert b"trace_id" not in written(ours)[0]


def _without_times(page: bytes) -> bytes:
    return re.sub(rb"(# {.*} \S+) \S+", rb"\1", page)


def test_without_labels() -> None:
    """A metric without labels counts by itself."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    Counter("sent_total", "What was sent.", (), ours).inc()
    Histogram("wait_seconds", "A wait.", (), ours, buckets=BUCKETS).observe(1)
    prometheus_client.Counter("sent_total", "What was sent.", registry=theirs).inc()
    prometheus_client.Histogram(
        "wait_seconds", "A wait.", buckets=BUCKETS, registry=theirs
    ).observe(1)

    assert written(ours) == written(theirs)


def test_a_name_is_taken_once() -> None:
    """Two metrics of one name are refused, as the library refuses them."""
    registry = CollectorRegistry()
    Counter("sent_total", "What was sent.", (), registry)

    with pytest.raises(ValueError, match="Duplicated"):
        Counter("sent_total", "What was sent.", (), registry)


@pytest.mark.parametrize("values", [(), ("a", "b")], ids=["too few", "too many"])
def test_as_many_values_as_labels(values: tuple[str, ...]) -> None:
    """A wrong number of labels raises an error at once."""
    counter = Counter("sent_total", "What was sent.", ("kind",), CollectorRegistry())

    with pytest.raises(ValueError, match="sent_total has 1 labels"):
        counter.labels(*values)
