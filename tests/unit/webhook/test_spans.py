"""The spans of webhooks and events: below what, saying what, and what they keep to themselves."""

import pytest

from bridge.errors import PublishError
from bridge.telemetry.trace_context import TraceHeaders
from bridge.webhook.spans import end_webhook, publish_in
from tests.tracer import Told

FACTS = {
    "route": "/webhooks/AC123",
    "outcome": "published",
    "why": None,
    "status": 200,
    "type": "message.received",
    "event_id": "evt-1",
}


def webhook() -> Told:
    return Told("POST webhook", "server", {})


@pytest.mark.parametrize(("status", "error"), [(200, None), (503, "503")])
def test_a_webhook_ends_with_what_its_line_in_the_log_says(status: int, error: str | None) -> None:
    """Known facts become attributes, but for the path; what has to be repeated is an error."""
    span = webhook()
    end_webhook(span, FACTS | {"status": status})

    assert (span.ended, span.error) == (1, error)
    assert span.attributes == {
        "sms_bridge.outcome": "published",
        "http.response.status_code": status,
        "sms_bridge.type": "message.received",
        "sms_bridge.event_id": "evt-1",
    }


@pytest.mark.parametrize(
    ("error", "word"),
    [(PublishError("nacked", "no"), "nacked"), (TimeoutError(), "timeout")],
    ids=["nacked", "no confirm"],
)
async def test_a_publish_that_fails_says_why(error: Exception, word: str) -> None:
    """The fault of the metrics is the error of the span, and is raised all the same."""
    span = webhook()

    async def publish(_trace: TraceHeaders) -> bool:
        raise error

    with pytest.raises(type(error)):
        await publish_in(span, "sms.inbound", publish)
    assert [one.error for one in span.within] == [word]


async def test_an_event_carries_the_span_of_its_publish() -> None:
    """What is published names the publish's own span, which lasts until the confirm."""
    span, told = webhook(), list[TraceHeaders]()

    async def publish(trace: TraceHeaders) -> bool:
        told.append(trace)
        return True

    is_new = await publish_in(span, "sms.inbound", publish)
    (publishing,) = span.within

    assert is_new
    assert (publishing.name, publishing.kind) == ("publish sms.inbound", "producer")
    assert told == [publishing.headers]
    assert (publishing.ended, publishing.error) == (1, None)
    assert publishing.attributes["messaging.destination.name"] == "sms.inbound"
