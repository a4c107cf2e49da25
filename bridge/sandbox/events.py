"""The webhooks of a service: its documented examples, told of our messages and numbers."""

import json
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args
from urllib.parse import urlencode

from bridge.config.presets import Preset, documented_webhooks
from bridge.sandbox.answers import like
from bridge.sandbox.messages import Message
from bridge.sandbox.visitors import FORM, JSON
from bridge.webhook.receipts import Delivery


class Event(NamedTuple):
    """The body of a webhook, and its type."""

    body: bytes
    content_type: str


class Events:
    """Writes the webhooks of a preset's service."""

    def __init__(self, preset: Preset) -> None:
        self._is_generic = preset == "generic"
        self._examples = documented_webhooks(preset)

    @property
    def deliveries(self) -> list[Delivery]:
        """What a receipt of the service can say."""
        documented = {one.get("delivery") for one in self._examples}
        return [one for one in get_args(Delivery) if one in documented]

    def reply(self, sender: str, text: str) -> Event:
        """Write what the service sends when a person has written."""
        if self._is_generic:
            # An id, which is not documented, tells two equal replies from one that is repeated.
            data = {"id": f"reply-{uuid.uuid4().hex}", "from": sender, "text": text}
            return Event(_as_json({"type": "message.received", "data": data}), JSON)
        example = next(one for one in self._examples if "delivery" not in one)
        return _write(example, {"number": sender, "text": text})

    def receipt(self, message: Message, delivery: Delivery) -> Event:
        """Write the delivery receipt of a message.

        Raises ValueError when the service is not documented to send any of this kind.
        """
        example = next((one for one in self._examples if one.get("delivery") == delivery), None)
        if example is None:
            raise ValueError(f"the service has no documented receipt that says {delivery}")
        told = {
            "number": message.to,
            "text": message.text,
            "message_id": message.idempotency_key or "",
            "provider_id": message.id,
        }
        return _write(example, told)


def _write(example: Mapping[str, Any], told: Mapping[str, str]) -> Event:
    """Put, in an example, what is told in the places of the values that the example names."""
    new = {}
    # An event without an id of its own has the message's.
    if event_id := example.get("event_id"):
        new[event_id] = like(event_id)
    for name, value in told.items():
        if shown := example.get(name):
            has_plus = name != "number" or shown.startswith("+")
            new[shown] = value if has_plus else value.removeprefix("+")
    body, kind = _fill(example["body"], new), example.get("content_type", JSON)
    return Event(urlencode(body).encode() if kind == FORM else _as_json(body), kind)


def _fill(node: Any, new: Mapping[str, str]) -> Any:  # noqa: ANN401  JSON
    if isinstance(node, dict):
        return {name: _fill(below, new) for name, below in node.items()}
    if isinstance(node, list):
        return [_fill(below, new) for below in node]
    return new.get(node, node) if isinstance(node, str) else node


def _as_json(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()
