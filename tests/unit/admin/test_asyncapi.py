"""The contract for machines says what is true, and is valid itself."""

import json
from typing import Any
from urllib.parse import urlencode

import jsonschema
import pytest

from bridge.admin.asyncapi import (
    JSON_SCHEMA,
    asyncapi,
    event_schema,
    request_schema,
)
from bridge.admin.message_models import RequestHeaders
from bridge.config import Settings
from bridge.config.presets import PRESETS, Preset, documented_webhooks
from bridge.errors import InvalidMessageError
from bridge.webhook.normalize import EventFields, normalize
from bridge.webhook.signatures.verify import Verified
from bridge.worker import envelope
from bridge.worker.request import parse_request

# What AsyncAPI 3.0 knows: https://www.asyncapi.com/docs/reference/specification/v3.0.0
CHANNEL = {"address", "description", "parameters", "messages", "bindings"}
OPERATION = {"action", "channel", "summary", "reply"}
MESSAGE = {"title", "contentType", "headers", "payload"}


def _document(**sections: dict[str, Any]) -> dict[str, Any]:
    return asyncapi(Settings.model_validate(sections))


def _follow(document: dict[str, Any], reference: str) -> Any:
    found: Any = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for item in value for found in _references(item)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if "$ref" in value else []
    return own + [found for item in value.values() for found in _references(item)]


def test_the_document_has_the_form_of_asyncapi_3() -> None:
    document = _document(
        worker={"outcome_exchange": "sms.outcome"},
        webhook={"endpoints": [{"path": "/twilio", "preset": "twilio"}]},
    )

    assert document["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= document["info"].keys()
    assert all({"host", "protocol"} <= one.keys() for one in document["servers"].values())
    assert all(one.keys() <= CHANNEL for one in document["channels"].values())
    assert all(one.keys() <= OPERATION for one in document["operations"].values())
    assert all(one.keys() <= MESSAGE for one in document["components"]["messages"].values())
    assert {one["action"] for one in document["operations"].values()} == {"send", "receive"}
    assert all(_follow(document, reference) for reference in _references(document))
    for message in document["components"]["messages"].values():
        for part in ("headers", "payload"):
            schema = message.get(part, {})
            # AsyncAPI takes no bare `true` there.
            assert isinstance(schema, dict)
            jsonschema.Draft202012Validator.check_schema(schema)


def test_every_channel_has_the_name_that_is_configured() -> None:
    document = _document(
        rabbitmq={"url": "amqp://user:secret@rabbit.example/tenant"},
        worker={"queue": "out", "retry_delays": ["5s"], "outcome_exchange": "done"},
        webhook={"exchange": "in", "queue": None},
    )
    amqp = {
        name: channel.get("bindings", {}).get("amqp", {})
        for name, channel in document["channels"].items()
    }

    assert {
        name: (one.get("queue") or one.get("exchange") or {}).get("name")
        for name, one in amqp.items()
    } == {
        "sendRequests": "out",
        "deadLetters": "out.dead",
        "retry5s": "out.retry.5s",
        "urgentRequests": "out.urgent",
        "urgentRetry5s": "out.urgent.retry.5s",
        "inboundEvents": "in",
        "outcomes": "done",
        "replies": None,
    }
    assert amqp["sendRequests"]["queue"]["vhost"] == "tenant"
    assert "secret" not in json.dumps(document)


@pytest.mark.parametrize(
    ("request_", "worker"),
    [
        ({"to": "+491713920010", "from": "Acme", "text": "Hi"}, {}),
        ({"to": "+491713920010", "text": "Hi"}, {"default_from": "Acme"}),
        ({"to": "491713920010", "from": "Acme", "text": "Hi"}, {}),
        ({"to": "+491713920010", "from": "Acme", "text": "123456"}, {"max_text_length": 5}),
        ({"to": "+491713920010", "from": "Acme", "text": "Hi", "kind": 1}, {}),
        (
            {"to": "+491713920010", "from": "Acme", "text": "Hi", "kind": 1},
            {"extra_fields": "forward"},
        ),
    ],
)
def test_the_schema_takes_what_the_worker_takes(
    request_: dict[str, Any], worker: dict[str, Any]
) -> None:
    settings = Settings.model_validate({"worker": worker}).worker
    try:
        parse_request(json.dumps(request_).encode(), settings)
    except InvalidMessageError:
        is_taken = False
    else:
        is_taken = True
    validator = jsonschema.Draft202012Validator(request_schema(settings))

    assert validator.is_valid(request_) == is_taken


def test_the_event_schema_is_a_json_schema() -> None:
    schema = event_schema(Settings.model_validate({"webhook": {"event_types": ["a.b"]}}))
    jsonschema.Draft202012Validator.check_schema(schema)

    assert schema["$schema"] == JSON_SCHEMA
    assert schema["properties"]["routing_key"]["examples"] == ["a.b", "other", "unparsed"]


@pytest.mark.parametrize("preset", PRESETS)
def test_examples_of_routing_keys_are_routing_keys(preset: str) -> None:
    endpoint = {"path": "/a", "preset": preset}
    schema = event_schema(Settings.model_validate({"webhook": {"endpoints": [endpoint]}}))
    known = schema["properties"]["routing_key"]

    for example in known["examples"]:
        jsonschema.validate(example, known)
    assert len(known["examples"]) > len({"other", "unparsed"})


@pytest.mark.parametrize(
    ("presets", "content_types"),
    [
        ([], {"application/json"}),
        (["telnyx", "infobip"], {"application/json"}),
        (["twilio", "telnyx"], {"application/json", "application/x-www-form-urlencoded"}),
    ],
)
def test_events_have_the_content_types_of_the_services(
    presets: list[str], content_types: set[str]
) -> None:
    endpoints = [{"path": f"/{preset}", "preset": preset} for preset in presets]
    document = _document(webhook={"endpoints": endpoints, "body": "raw"})
    messages = [
        _follow(document, reference["$ref"])
        for channel in ("inboundEvents", "inboundQueue")
        for reference in document["channels"][channel]["messages"].values()
    ]

    assert {message["contentType"] for message in messages} == content_types


def test_every_header_that_may_be_set_is_described() -> None:
    described = {field.alias for field in RequestHeaders.model_fields.values() if field.alias}

    assert described == {*envelope._SETTINGS}


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "generic"])
def test_documented_webhooks_have_the_form_of_the_schema(preset: Preset) -> None:
    settings = Settings.model_validate({"webhook": {"preset": preset}})
    fields = EventFields(settings.webhook.all_endpoints[0])
    schema = event_schema(settings)
    form = {"$defs": schema["$defs"], **schema["properties"]["body"]}
    payload = asyncapi(settings)["components"]["messages"]["inboundEvent"]["payload"]
    validators = [jsonschema.Draft202012Validator(one) for one in (form, payload)]
    for webhook in documented_webhooks(preset):
        content_type = webhook.get("content_type", "application/json")
        is_form = content_type != "application/json"
        body = (urlencode if is_form else json.dumps)(webhook["body"]).encode()
        for event in normalize(body, content_type, Verified(0, None, None), fields, now=0):
            written = json.loads(event.body)
            for validator in validators:
                validator.validate(written)
                assert not validator.is_valid({**written, "id": None})
