"""To which queue a request is moved."""

from typing import Any

import pytest

from bridge.amqp.properties import Properties
from bridge.config import WorkerSettings
from bridge.worker.sorting.targets import Target, find_target_in
from tests.deliveries import make_delivery

BODY = b'{"to":"+491713920001","from":"Acme","text":"Hi"}'


@pytest.mark.parametrize(
    ("priority", "target"),
    [(None, Target("q.normal", "normal")), (5, Target("q.urgent", "urgent"))],
)
def test_with_priorities_the_class_decides(priority: int | None, target: Target) -> None:
    """The urgent have a queue of their own, and no order."""
    find = find_target_in(WorkerSettings(queue="q", priorities="on"))

    assert find(make_delivery(body=BODY, properties=Properties(priority=priority))) == target


@pytest.mark.parametrize(("key", "queue"), [(None, "q.lane.28"), ("order 8", "q.lane.6")])
def test_with_lanes_the_key_decides(key: str | None, queue: str) -> None:
    """The order is that of the key, or of the number, whatever the class is."""
    find = find_target_in(WorkerSettings(queue="q", ordering="recipient", lanes=32))
    headers: dict[str, Any] = {} if key is None else {"sms-bridge-ordering-key": key}
    properties = Properties(priority=9, headers=headers)

    assert find(make_delivery(body=BODY, properties=properties)) == Target(
        queue, "lane", key or "+491713920001"
    )
