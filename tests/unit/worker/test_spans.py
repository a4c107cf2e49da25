"""The spans of deliveries and POSTs: below what, referring to what, saying what."""

from typing import Any

import pytest

from bridge.amqp.properties import Properties
from bridge.config import SmsApiSettings
from bridge.worker.envelope import EARLIER_SPAN
from bridge.worker.fates import Answer, Fate, judge_failure, judge_status
from bridge.worker.spans import WorkerSpans, end_delivery, end_post
from tests.deliveries import make_delivery
from tests.tracer import KeepingTracer, Told

PUBLISHER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
EARLIER = "00-4bf92f3577b34da6a3ce929d0e0e4736-b7ad6b7169203331-01"
FACTS: dict[str, Any] = {
    "message_id": "m-1",
    "outcome": "sent",
    "reason": None,
    "detail": None,
    "status": 202,
    "attempts": 1,
    "waited_seconds": None,
}
ACCEPTED = Answer(Fate.SENT, "success", "accepted", 202)


def spans(tracer: KeepingTracer, **api: Any) -> WorkerSpans:
    settings = {"base_url": "https://api.example.com:8443/v2", "key": "k"} | api
    return WorkerSpans(tracer, queue="q", api=SmsApiSettings.model_validate(settings))


@pytest.mark.parametrize(
    ("headers", "parent", "link"),
    [
        (None, (), ()),
        (
            {"traceparent": PUBLISHER, "tracestate": "a=1"},
            (("traceparent", PUBLISHER), ("tracestate", "a=1")),
            (),
        ),
        (
            {"traceparent": PUBLISHER, EARLIER_SPAN: EARLIER},
            (("traceparent", PUBLISHER),),
            (("traceparent", EARLIER),),
        ),
        ({EARLIER_SPAN: EARLIER}, (("traceparent", EARLIER),), (("traceparent", EARLIER),)),
        ({"traceparent": "junk", EARLIER_SPAN: 1}, (), ()),
    ],
    ids=["alone", "of a publisher", "a copy", "a copy of no publisher's", "junk"],
)
def test_a_delivery_is_below_its_publisher(
    headers: dict[str, Any] | None, parent: object, link: object
) -> None:
    """The publisher's span is the parent, that of the delivery before a link; junk is neither."""
    tracer = KeepingTracer()
    delivery = make_delivery(properties=Properties(headers=headers))
    span = spans(tracer).begin(delivery)

    assert (tracer.spans[0].parent, tracer.spans[0].link) == (parent, link)
    assert (tracer.spans[0].name, tracer.spans[0].kind) == ("process q", "consumer")
    assert delivery.span is span
    assert delivery.trace_id == span.trace_id
    assert delivery.trace == span.headers


def test_a_post_names_host_and_port_alone() -> None:
    """The path may hold an account, and is no attribute; neither is a login."""
    tracer = KeepingTracer()
    post = spans(tracer, path="/accounts/{account}/messages", account="AC123").begin_post(
        make_delivery(), posts_before=0
    )

    assert isinstance(post, Told)
    assert tracer.spans[0].within == [post]
    assert (post.name, post.kind) == ("POST", "client")
    assert post.attributes == {
        "http.request.method": "POST",
        "server.address": "api.example.com",
        "server.port": 8443,
    }


@pytest.mark.parametrize(
    ("answer", "error", "status"),
    [
        (ACCEPTED, None, 202),
        (judge_status(500, retry_after_seconds=None), "500", 500),
        (judge_status(400, retry_after_seconds=None), "400", 400),
        (Answer(Fate.REFUSED, "rejected", "no", 200, code="21211"), "rejected", 200),
        (judge_failure("answer_timeout"), "timeout", None),
        (judge_failure("connect_failed"), "connection_error", None),
    ],
    ids=["sent", "500", "400", "no behind a 200", "time-out", "no connection"],
)
def test_what_an_answer_makes_of_a_post(
    answer: Answer, error: str | None, status: int | None
) -> None:
    """A status of an error is the error, else the word of the metrics; a yes is none."""
    post = Told("POST", "client", {})
    end_post(post, answer)

    assert (post.ended, post.error) == (1, error)
    assert post.attributes.get("http.response.status_code") == status
    assert post.attributes["sms_bridge.result"] == answer.result
    assert post.attributes.get("sms_bridge.code") == answer.code


def test_a_post_that_is_cut_off_is_no_error() -> None:
    """Nobody knows what became of it, and nothing failed."""
    post = Told("POST", "client", {})
    end_post(post, None)

    assert (post.error, post.attributes) == (None, {"sms_bridge.cut_off": True})


def test_a_delivery_ends_with_what_its_line_in_the_log_says() -> None:
    """Known facts become attributes, each wait one of its own."""
    span = Told("process q", "consumer", {})
    end_delivery(span, FACTS | {"waited_seconds": {"rate": 3.1, "slot": 1.5}})

    assert (span.ended, span.error) == (1, None)
    assert span.attributes == {
        "messaging.message.id": "m-1",
        "sms_bridge.outcome": "sent",
        "http.response.status_code": 202,
        "sms_bridge.attempts": 1,
        "sms_bridge.waited_seconds.rate": 3.1,
        "sms_bridge.waited_seconds.slot": 1.5,
    }
