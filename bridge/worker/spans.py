"""Trace spans of deliveries and of their POSTs, named by OpenTelemetry's semantic conventions.

Attributes hold only what the log line of a delivery may hold. The API's path and the headers are
left out: a path may contain an account or a token.
"""

from collections.abc import Mapping
from typing import Final

from yarl import URL

from bridge.amqp.properties import Properties
from bridge.config import SmsApiSettings
from bridge.telemetry.trace_context import Attributes, Span, TraceHeaders, Tracer, known, read_trace
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import EARLIER_SPAN
from bridge.worker.fates import Answer, Fate

FIRST_ERROR_STATUS: Final = 400


class _Names(dict[str, str]):
    """Attribute names of a delivery's facts: the conventions' if they define one, else our own."""

    def __missing__(self, fact: str) -> str:
        name = self[fact] = f"sms_bridge.{fact}"
        return name


_NAMES: Final = _Names(
    {"message_id": "messaging.message.id", "status": "http.response.status_code"}
)


class WorkerSpans:
    """Starts the spans of one worker's deliveries and POSTs."""

    def __init__(self, tracer: Tracer, *, queue: str, api: SmsApiSettings) -> None:
        self._tracer = tracer
        self._process_name = f"process {queue}"
        self._process: Attributes = {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": queue,
        }
        url = URL(api.base_url or "")
        self._post: Attributes = {
            "http.request.method": "POST",
            "server.address": url.host or "",
            "server.port": url.port or 0,
        }

    def begin(self, delivery: Delivery) -> Span:
        """Start a delivery's span as a child of its publisher's.

        The span of a retry copy links to the previous delivery's span, and continues its trace if
        the publisher started none.
        """
        publisher, earlier = _traces_of(delivery.properties)
        span = delivery.span = self._tracer.begin(
            self._process_name,
            "consumer",
            self._process,
            parent=publisher or earlier,
            link=earlier,
        )
        return span

    def begin_post(self, delivery: Delivery, *, posts_before: int) -> Span:
        """Start the span of one POST, as a child of the delivery's span."""
        resent = delivery.envelope.attempts + posts_before
        facts = {**self._post, "http.request.resend_count": resent} if resent else self._post
        return (delivery.span or self.begin(delivery)).begin("POST", "client", facts)


def end_post(span: Span, answer: Answer | None) -> None:
    """End the span of a POST; `answer` is None if the request was cancelled."""
    if span.trace_id is None:
        return
    if answer is None:
        span.end({"sms_bridge.cut_off": True})
        return
    status = answer.status
    facts = {
        "http.response.status_code": status,
        "sms_bridge.result": answer.result,
        "sms_bridge.code": answer.code,
    }
    is_http_error = status is not None and status >= FIRST_ERROR_STATUS
    error = str(status) if is_http_error else answer.result
    span.end(known(facts), error=None if answer.fate is Fate.SENT else error)


def end_delivery(span: Span, facts: Mapping[str, object]) -> None:
    """End a delivery's span with the facts of its log line."""
    if span.trace_id is None:
        return
    named = {_NAMES[fact]: value for fact, value in known(facts).items()}
    # A span records its duration itself.
    named.pop("sms_bridge.seconds", None)
    waited = facts["waited_seconds"]
    if isinstance(waited, dict):
        named |= {f"sms_bridge.waited_seconds.{cause}": value for cause, value in waited.items()}
    span.end(named, error=str(facts["reason"]) if facts["outcome"] == "dead" else None)


def _traces_of(properties: Properties) -> tuple[TraceHeaders, TraceHeaders]:
    """Return the publisher's trace, and the span of the previous delivery if this is a copy."""
    headers = properties.headers
    if not headers:
        return (), ()
    publisher = read_trace(headers.get("traceparent"), headers.get("tracestate"))
    return publisher, read_trace(headers.get(EARLIER_SPAN), None)
