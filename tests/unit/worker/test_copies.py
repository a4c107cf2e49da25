"""What a request keeps when it is put to the end of its queue, or replayed."""

import pytest

from bridge.amqp.properties import Properties
from bridge.amqp.publisher import USUAL_PROPERTIES_BYTES
from bridge.worker.copies import renewed_properties, replayed_properties


@pytest.mark.parametrize("is_repeated", [True, False])
def test_what_is_renewed_tells_that_it_came_back(*, is_repeated: bool) -> None:
    """The broker tells of a fresh copy neither that somebody had it nor how often it came back."""
    headers = {"x-delivery-count": 4, "x-acquired-count": 9, "own": 1}
    renewed = renewed_properties(
        Properties(message_id="a", headers=headers, priority=3),
        is_repeated=is_repeated,
        max_bytes=USUAL_PROPERTIES_BYTES,
    )

    own = {"sms-bridge-possible-duplicate": True} if is_repeated else {}
    assert renewed.headers == {"own": 1} | own
    assert (renewed.message_id, renewed.priority) == ("a", 3)


def test_a_replay_leaves_out_the_priority_of_earlier_releases() -> None:
    """With that header the message would be invalid again."""
    headers = {"sms-bridge-priority": "urgent", "sms-bridge-dead-at": "2026-01-01", "own": 1}

    assert replayed_properties(Properties(headers=headers)).headers == {"own": 1}
