"""The autoscaler of the soak decides as KEDA and Kubernetes do."""

from typing import Any

import pytest

from soak.scaling import Autoscaler
from tests.chart.rendering import MINIMAL, Values, merged, nested, of_kind, render

KEDA: Values = {
    "enabled": True,
    "managementUrl": "http://rabbitmq:15672",
    "existingSecret": "monitoring",
    "queueLength": 100,
    "minReplicaCount": 0,
    "maxReplicaCount": 5,
    "cooldownPeriod": 10,
    "behavior": {
        "scaleDown": {
            "stabilizationWindowSeconds": 20,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 30}],
        }
    },
}
# The management API's filter, which matches the main queue and the urgent queue.
BOTH_QUEUES = (
    "?page=1&use_regex=true&pagination=false"
    "&name=%5E%28sms%5C.outbound%7Csms%5C.outbound%5C.urgent%29%24&page_size=100"
)


def autoscaler(*overs: Values, **keda: Any) -> Autoscaler:
    """Make an autoscaler from the rendered chart."""
    values = merged(MINIMAL, nested("worker.keda", KEDA | keda), *overs)
    (scaled,) = of_kind(render(values), "ScaledObject").values()
    return Autoscaler(scaled)


def test_one_message_starts_the_first_worker() -> None:
    """From none to one KEDA decides, by the activation alone."""
    assert autoscaler().decide(0, 0, now=1) == 0
    assert autoscaler().decide(1, 0, now=1) == 1
    assert autoscaler(activationQueueLength=5).decide(5, 0, now=1) == 0
    assert autoscaler(minReplicaCount=2).decide(0, 0, now=1) == 2


@pytest.mark.parametrize(
    ("messages", "replicas", "wanted"),
    [(101, 1, 1), (111, 1, 2), (450, 1, 5), (9_000, 1, 5), (460, 5, 5), (0, 1, 1)],
)
def test_above_one_the_length_decides(messages: int, replicas: int, wanted: int) -> None:
    """So many workers that none has more than its share, none more for a tenth of one."""
    assert autoscaler(minReplicaCount=1).decide(messages, replicas, now=1) == wanted


def test_scaling_down_waits_and_goes_by_steps() -> None:
    """The highest of the window counts, and after it a worker goes in each period."""
    scaler = autoscaler(cooldownPeriod=1_000)
    decided, replicas = [], 5
    for now in range(0, 80, 10):
        replicas = scaler.decide(500 if not now else 90, replicas, now=now)
        decided.append(replicas)

    assert decided == [5, 5, 5, 4, 4, 4, 3, 3]


def test_after_the_cooldown_all_go_at_once() -> None:
    """KEDA takes the last away, however many they are, when the queue has long been empty."""
    scaler = autoscaler()

    assert scaler.decide(250, 3, now=0) == 3
    assert scaler.decide(0, 3, now=10) == 3
    assert scaler.decide(0, 3, now=11) == 0


def test_without_a_minimum_of_none_one_stays() -> None:
    """With a minimum KEDA leaves scaling down to the autoscaler."""
    scaler = autoscaler(minReplicaCount=1)

    assert [scaler.decide(0, 1, now=now) for now in (0, 100, 200)] == [1, 1, 1]


@pytest.mark.parametrize("url", ["http://rabbitmq:15672", "http://rabbitmq:15672/"])
def test_where_it_asks(url: str) -> None:
    """The virtual host is the chart's, whatever the address ends with."""
    asked = autoscaler(managementUrl=url).url

    assert asked == f"http://rabbitmq:15672/api/queues/%2F{BOTH_QUEUES}"


@pytest.mark.parametrize("end", ["", "/"])
def test_a_management_api_below_a_path(end: str) -> None:
    """KEDA takes the last part of a path for a virtual host; the chart keeps it the path's."""
    asked = autoscaler(managementUrl=f"https://proxy.example.com/rabbit{end}").url

    assert asked == f"https://proxy.example.com/rabbit/api/queues/%2F{BOTH_QUEUES}"


def test_what_is_in_flight_counts() -> None:
    """What workers hold counts as long as they have not acked it; a queue that is new has none."""
    counted = {"messages": 7, "messages_ready": 3}
    urgent = {"messages": 2, "messages_ready": 0}

    assert autoscaler().read({"items": [counted, urgent]}) == 9
    assert autoscaler().read({"items": [counted, {"name": "sms.outbound.urgent"}]}) == 7
