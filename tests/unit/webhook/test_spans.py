"""The spans of webhooks and events: below what, saying what, and what they keep to themselves."""

import pytest

from bridge.errors import PublishError
from bridge.telemetry.trace_context import TraceHeaders
from bridge.webhook.spans import begin_webhook, end_webhook, publish_in
from tests.tracer import KeepingTracer, Told

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
FACTS = {
    "route": "/webhooks/AC123",
    "outcome": "published",
    "why": None,
    "status": 200,
    "type": "message.received",
    "event_id": "evt-1",
}


def webhook() -> Told:
    """Make the span of a webhook."""
    return Told("POST webhook", "server", {})


def test_a_webhook_is_below_its_sender() -> None:
    """The endpoint is told by its place in the settings: its path may hold an account."""
    tracer = KeepingTracer()
    begin_webhook(tracer, "POST", "webhook.endpoints.0", (("traceparent", TRACE),))
    (span,) = tracer.spans

    assert (span.name, span.kind) == ("POST webhook.endpoints.0", "server")
    assert span.parent == (("traceparent", TRACE),)
    assert span.attributes == {
        "http.request.method": "POST",
        "url.scheme": "http",
        "sms_bridge.endpoint": "webhook.endpoints.0",
    }


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


async def test_a_repeat_publishes_nothing() -> None:
    """What is published already has no second span."""
    span = webhook()

    async def publish(_trace: TraceHeaders) -> bool:
        return False

    assert not await publish_in(span, "sms.inbound", publish)
    assert [one.ended for one in span.within] == [0]


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
