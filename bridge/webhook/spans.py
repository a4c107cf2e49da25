"""Spans of webhooks and of the events published for them, named by OpenTelemetry's conventions.

Only verified webhooks become spans, so that strangers cannot write into traces. Attributes hold
the same facts as the log line of a webhook, except the path, which may contain an account.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from bridge.errors import PublishError
from bridge.telemetry.trace_context import Span, TraceHeaders, Tracer, known

FIRST_FAULT_STATUS: Final = 500
# The status has its own name in the conventions, and a span has a duration of its own.
_LEFT_OUT: Final = frozenset(("route", "seconds", "status"))


def begin_webhook(tracer: Tracer, method: str, endpoint: str, parent: TraceHeaders) -> Span:
    """Begin the span of a request; a span that is never ended is not exported."""
    attributes = {
        "http.request.method": method,
        "url.scheme": "http",
        "sms_bridge.endpoint": endpoint,
    }
    return tracer.begin(f"{method} {endpoint}", "server", attributes, parent=parent)


def begin_publish(webhook_span: Span, exchange: str) -> Span:
    """Begin the span of a publish, which lasts until the confirm."""
    if webhook_span.trace_id is None:
        return webhook_span
    attributes = {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": exchange,
    }
    return webhook_span.begin(f"publish {exchange}", "producer", attributes)


def end_publish(span: Span, error: Exception | None) -> None:
    """End the span of a publish, with the error of a failed one."""
    if error is None:
        span.end({})
    else:
        span.end({}, error=error.fault if isinstance(error, PublishError) else "timeout")


async def publish_in(
    webhook_span: Span, exchange: str, publish: Callable[[TraceHeaders], Awaitable[bool]]
) -> bool:
    """Publish an event in a span of its own; a repeat, which is not published, gets no span."""
    span = begin_publish(webhook_span, exchange)
    try:
        is_new = await publish(span.headers)
    except (PublishError, TimeoutError) as error:
        end_publish(span, error)
        raise
    if is_new:
        end_publish(span, None)
    return is_new


def end_webhook(span: Span, facts: Mapping[str, object]) -> None:
    """End the span of a verified webhook, with the facts of its log line."""
    if span.trace_id is None:
        return
    named = {f"sms_bridge.{name}": value for name, value in facts.items() if name not in _LEFT_OUT}
    status = facts["status"]
    named["http.response.status_code"] = status
    is_fault = isinstance(status, int) and status >= FIRST_FAULT_STATUS
    span.end(known(named), error=str(status) if is_fault else None)
