"""Whether what is published to an exchange reaches a queue that keeps it."""

from typing import Any

import pytest

from bridge.admin.checks.management_api import judge_bindings
from bridge.topology.queue_facts import QueueFacts


@pytest.mark.parametrize(
    ("bound", "result"),
    [
        ([], "fail"),
        ([{"durable": False}], "fail"),
        ([{"auto_delete": True}, {"exclusive": True}], "fail"),
        ([{}, {"durable": False}], "warn"),
        ([{"arguments": {"x-expires": 5}}], "fail"),
        ([{}, {}], "ok"),
    ],
    ids=str,
)
def test_events_need_a_queue_that_lasts(bound: list[dict[str, Any]], result: str) -> None:
    queues = {f"q{n}": QueueFacts(name=f"q{n}", **given) for n, given in enumerate(bound)}

    assert judge_bindings("x", queues).result == result
