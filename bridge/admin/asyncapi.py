"""The machine-readable contract of messages: their JSON Schemas, and an AsyncAPI 3.0 document.

Both are made from the models and the effective configuration, with its names and limits.
"""

from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel
from yarl import URL

from bridge import __version__
from bridge.admin.message_models import (
    DeadLetterHeaders,
    EventBody,
    EventHeaders,
    InboundEvent,
    NormalizedEvent,
    OutcomeBody,
    RequestHeaders,
)
from bridge.config import Settings, WorkerSettings
from bridge.config.presets import documented_webhooks
from bridge.topology.declarations import dead_queue, retry_queues
from bridge.webhook.event import OTHER, UNPARSED, routing_key_of
from bridge.worker.request import OpenSendRequest, SendRequest

FORM: Final = "application/x-www-form-urlencoded"
JSON_SCHEMA: Final = "https://json-schema.org/draft/2020-12/schema"


def request_schema(settings: WorkerSettings) -> dict[str, Any]:
    model = OpenSendRequest if settings.extra_fields == "forward" else SendRequest
    schema = _schema(model)
    schema["properties"]["text"]["maxLength"] = settings.max_text_length
    if settings.default_from is None:
        schema["required"] = ["to", "from", "text"]
        schema["properties"]["from"].pop("default", None)
    else:
        schema["properties"]["from"]["default"] = settings.default_from
    return schema


def event_schema(settings: Settings) -> dict[str, Any]:
    """Make the JSON Schema of an inbound event's message: body, headers, properties, key."""
    schema, webhook = _schema(InboundEvent), settings.webhook
    keys = [
        routing_key_of(kind, one) for one in webhook.all_endpoints for kind in webhook.types_of(one)
    ]
    schema["properties"]["routing_key"]["examples"] = [*dict.fromkeys([*keys, OTHER, UNPARSED])]
    # Defined even if no endpoint publishes it, so that subscribers can be written against it.
    normalized = _without_null(_schema(NormalizedEvent))
    schema["$defs"] |= normalized.pop("$defs") | {"NormalizedEvent": normalized}
    bodies = [] if not _publishes(settings, raw=False) else [{"$ref": "#/$defs/NormalizedEvent"}]
    if _publishes(settings, raw=True):
        bodies += [{"$ref": "#/$defs/EventBody"}, {}]
    schema["properties"]["body"] = {"anyOf": bodies}
    return {"$schema": JSON_SCHEMA, **schema}


def _publishes(settings: Settings, *, raw: bool) -> bool:
    """Whether an endpoint publishes raw, or normalized events."""
    webhook = settings.webhook
    return any(webhook.is_raw(one) == raw for one in webhook.all_endpoints)


def _without_null(schema: Any) -> Any:  # noqa: ANN401  JSON
    """Change a schema of optional members so that they are left out, and never null."""
    if isinstance(schema, list):
        return [_without_null(item) for item in schema if item != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    found = {name: _without_null(item) for name, item in schema.items()}
    if "default" in found and found["default"] is None:
        del found["default"]
    if len(found.get("anyOf", ())) == 1:
        found |= found.pop("anyOf")[0]
    return found


def asyncapi(settings: Settings) -> dict[str, Any]:
    """Make the AsyncAPI document of every queue and exchange, seen from the bridge."""
    channels = _channels(settings)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "sms-bridge",
            "version": __version__,
            "description": "The bridge between RabbitMQ and an SMS service.",
            "license": {"name": "MIT"},
        },
        "defaultContentType": "application/json",
        "servers": _servers(settings),
        "channels": channels,
        "operations": _operations(channels),
        "components": {"messages": _messages(settings)},
    }


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema(ref_template="#/$defs/{model}")


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Inline the definitions, because references in AsyncAPI start at the document's root."""
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:  # noqa: ANN401  JSON
        if isinstance(value, list):
            return [inline(item) for item in value]
        if not isinstance(value, dict):
            return value
        reference = value.get("$ref", "")
        if reference.startswith("#/$defs/"):
            return inline(definitions[reference.removeprefix("#/$defs/")])
        return {name: inline(item) for name, item in value.items()}

    inlined: dict[str, Any] = inline(schema)
    return inlined


def _servers(settings: Settings) -> dict[str, Any]:
    servers = {}
    for number, secret in enumerate(settings.rabbitmq.url, 1):
        url = URL(secret.get_secret_value())
        port = url.port or (5671 if url.scheme == "amqps" else 5672)
        servers[f"rabbitmq{number}"] = {
            "host": f"{url.host}:{port}",
            "pathname": f"/{url.path.removeprefix('/')}",
            "protocol": url.scheme,
            "protocolVersion": "0.9.1",
        }
    return servers


def _channels(settings: Settings) -> dict[str, Any]:
    worker, webhook = settings.worker, settings.webhook
    how = "Publish to the default exchange with this routing key, persistent, with a message_id."
    events = ("inboundEvent", "inboundForm") if _takes_forms(settings) else ("inboundEvent",)
    # By the name of a channel: the queue, its messages and its description.
    queues: dict[str, tuple[str, Sequence[str], str]]
    queues = {"sendRequests": (worker.queue, ("sendRequest",), f"Requests to send. {how}")}
    queues["deadLetters"] = (
        dead_queue(worker.queue),
        ("deadLetter",),
        "Requests that were given up, with the original body and the reason in a header.",
    )
    if worker.urgent_queue is not None:
        text = f"Requests that overtake the others, such as one-time codes. {how}"
        queues["urgentRequests"] = (worker.urgent_queue, ("sendRequest",), text)
    for name, origin in retry_queues(worker).items():
        kind = "retry" if origin == worker.queue else "urgentRetry"
        text = "Requests that wait for their next attempt. Internal."
        queues[f"{kind}{name.rpartition('.')[2]}"] = (name, ("sendRequest",), text)
    if webhook.queue is not None:
        queues["inboundQueue"] = (webhook.queue, events, "Every inbound event.")
    text = "Verified webhooks; the routing key is the event's type. Bind a queue to it."
    exchanges = {"inboundEvents": (webhook.exchange, events, text)}
    if worker.outcome_exchange is not None:
        text = "The outcome of each request; the routing key is `sent`, `dead`, or from a delivery "
        text += "receipt `delivered` or `undelivered`."
        exchanges["outcomes"] = (worker.outcome_exchange, ("outcome",), text)
    vhost = URL(settings.rabbitmq.url[0].get_secret_value()).path.removeprefix("/") or "/"
    channels = {name: _queue(*queue, vhost) for name, queue in queues.items()}
    channels |= {name: _exchange(*exchange, vhost) for name, exchange in exchanges.items()}
    # Only the request knows the address: its reply_to.
    channels["replies"] = {
        "address": None,
        "description": "The outcome, to the queue that a request names in reply_to, with its "
        "correlation_id. A repeat of a message_id that was sent is answered too.",
        "messages": _message_references("outcome"),
    }
    return channels


def _queue(name: str, messages: Sequence[str], text: str, vhost: str) -> dict[str, Any]:
    queue = {"name": name, "durable": True, "exclusive": False, "autoDelete": False, "vhost": vhost}
    return {
        "address": name,
        "description": text,
        "messages": _message_references(*messages),
        "bindings": {"amqp": {"is": "queue", "queue": queue, "bindingVersion": "0.3.0"}},
    }


def _exchange(name: str, messages: Sequence[str], text: str, vhost: str) -> dict[str, Any]:
    exchange = {
        "name": name,
        "type": "topic",
        "durable": True,
        "autoDelete": False,
        "vhost": vhost,
    }
    return {
        "address": "{routingKey}",
        "description": text,
        "parameters": {"routingKey": {"description": "the AMQP routing key"}},
        "messages": _message_references(*messages),
        "bindings": {"amqp": {"is": "routingKey", "exchange": exchange, "bindingVersion": "0.3.0"}},
    }


def _message_references(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/messages/{name}"} for name in names}


def _takes_forms(settings: Settings) -> bool:
    """Whether an endpoint publishes the forms of a service as they are."""
    webhook = settings.webhook
    presets = {one.preset for one in webhook.all_endpoints if webhook.is_raw(one)}
    return any(
        one.get("content_type") == FORM for name in presets for one in documented_webhooks(name)
    )


def _operations(channels: dict[str, Any]) -> dict[str, Any]:
    operations: dict[str, Any] = {
        "takeSendRequests": {
            "action": "receive",
            "channel": {"$ref": "#/channels/sendRequests"},
            "summary": "Send an SMS.",
            "reply": {
                "address": {
                    "location": "$message.header#/reply_to",
                    "description": "the AMQP property reply_to",
                },
                "channel": {"$ref": "#/channels/replies"},
            },
        }
    }
    sent = {
        "deadLetters": "Give up a request.",
        "inboundEvents": "Publish a webhook.",
        "outcomes": "Publish the outcome of a request.",
    }
    for name, summary in sent.items():
        if name in channels:
            operations[f"publish{name[0].upper()}{name[1:]}"] = {
                "action": "send",
                "channel": {"$ref": f"#/channels/{name}"},
                "summary": summary,
            }
    return operations


def _event_bodies(settings: Settings) -> list[Any]:
    bodies: list[Any] = []
    if _publishes(settings, raw=False):
        bodies.append(_inlined(_without_null(_schema(NormalizedEvent))))
    if _publishes(settings, raw=True):
        bodies += [_schema(EventBody), True]
    return bodies


def _messages(settings: Settings) -> dict[str, Any]:
    request = _inlined(request_schema(settings.worker))
    event_headers = _inlined(_schema(EventHeaders))
    form = {
        "title": "Inbound form",
        "contentType": FORM,
        "headers": event_headers,
        "payload": {"type": "string", "description": "The webhook's form, byte for byte."},
    }
    forms = {"inboundForm": form} if _takes_forms(settings) else {}
    return forms | {
        "sendRequest": {
            "title": "Send request",
            "contentType": "application/json",
            "headers": _inlined(_schema(RequestHeaders)),
            "payload": request,
        },
        "deadLetter": {
            "title": "Dead letter",
            "headers": _inlined(_schema(DeadLetterHeaders)),
            "payload": {"description": "the published body, which need not be a send request"},
        },
        "inboundEvent": {
            "title": "Inbound event",
            "contentType": "application/json",
            "headers": event_headers,
            "payload": _inlined({"anyOf": _event_bodies(settings)}),
        },
        "outcome": {
            "title": "Outcome",
            "contentType": "application/json",
            "payload": _inlined(_schema(OutcomeBody)),
        },
    }
