"""The service's webhooks: written from its documented examples, signed, and posted."""

import asyncio
import base64
import json
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args
from urllib.parse import urlencode, urlsplit

import httpx
import yaml

from bridge.config import EndpointSettings, SmsApiSettings
from bridge.config.presets import Preset, documented_webhooks, needed_settings
from bridge.errors import ConfigError
from bridge.sandbox.records import AcceptedMessage
from bridge.sandbox.service import FORM, JSON, like
from bridge.webhook.receipts import DeliveryState
from bridge.webhook.signatures.ed25519 import make_pair
from bridge.webhook.signatures.schemes import Scheme, decode_secret, scheme_from
from bridge.webhook.signatures.verify import Signed, sign

MAX_WEBHOOKS_IN_FLIGHT: Final = 50
# Longer than the receiver's own deadline.
WEBHOOK_TIMEOUT_SECONDS: Final = 30
_SECRET_BYTES: Final = 32


class WebhookContent(NamedTuple):
    """The body of a webhook, its content type, and the query that came with the message."""

    body: bytes
    content_type: str
    query: bytes = b""


def documented_deliveries(preset: Preset) -> list[DeliveryState]:
    documented = {example.get("delivery") for example in documented_webhooks(preset)}
    return [delivery for delivery in get_args(DeliveryState) if delivery in documented]


def write_reply(preset: Preset, sender: str, text: str) -> WebhookContent:
    if preset == "generic":
        # The id, which is not documented, distinguishes two equal replies from a repeat.
        data = {"id": f"reply-{uuid.uuid4().hex}", "from": sender, "text": text}
        return WebhookContent(_as_json({"type": "message.received", "data": data}), JSON)
    example = next(one for one in documented_webhooks(preset) if "delivery" not in one)
    return _fill_example(example, {"number": sender, "text": text})


def write_receipt(
    preset: Preset, message: AcceptedMessage, delivery: DeliveryState
) -> WebhookContent:
    """Write the delivery receipt of a message; raise ValueError if the service documents none."""
    examples = documented_webhooks(preset)
    example = next((one for one in examples if one.get("delivery") == delivery), None)
    if example is None:
        raise ValueError(f"the service documents no receipt for {delivery}")
    values = {
        "number": message.to,
        "text": message.text,
        "message_id": message.idempotency_key or "",
        "provider_id": message.id,
        "callback": message.callback or "",
    }
    query = urlsplit(message.callback or "").query
    return _fill_example(example, values)._replace(query=query.encode())


def _fill_example(example: Mapping[str, Any], values: Mapping[str, str]) -> WebhookContent:
    """Replace the number, the text and the ids, which an example names, wherever they occur."""
    new = {}
    # Events without their own id have that of the message.
    if event_id := example.get("event_id"):
        new[event_id] = like(event_id)
    for name, value in values.items():
        if shown := example.get(name):
            has_plus = name != "number" or shown.startswith("+")
            new[shown] = value if has_plus else value.removeprefix("+")
    body, kind = _replace(example["body"], new), example.get("content_type", JSON)
    return WebhookContent(urlencode(body).encode() if kind == FORM else _as_json(body), kind)


def _replace(node: Any, new: Mapping[str, str]) -> Any:  # noqa: ANN401  JSON
    if isinstance(node, dict):
        return {name: _replace(below, new) for name, below in node.items()}
    if isinstance(node, list):
        return [_replace(below, new) for below in node]
    return new.get(node, node) if isinstance(node, str) else node


def _as_json(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


class Signer:
    """Signs webhooks to one URL, with a random secret if `secret` is None.

    `shown_secret` is then the secret, or the public key, that the receiver needs. Raises
    ConfigError if the URL or the secret does not fit the service.
    """

    def __init__(self, preset: Preset, url: str, secret: str | None) -> None:
        check_url(url)
        self.url = url
        self._preset = preset
        address = urlsplit(url)
        self._path = address.path or "/"
        self._query = address.query.encode()
        endpoint = EndpointSettings.model_validate({"path": self._path, "preset": preset})
        # If the preset has no scheme, the sandbox signs like a proxy in front of the receiver.
        self._scheme_name = None if endpoint.knows_signature else endpoint.signature.preset
        public_url = address._replace(query="", fragment="").geturl()
        self._scheme = scheme_from(endpoint.signature, public_url)
        # Whether the receiver needs the address, to verify it or to give it to the service.
        placeholders = SmsApiSettings.model_validate({"preset": preset}).request.placeholders
        is_needed = "{url}" in self._scheme.signed_content or "callback" in placeholders
        self._public_url = public_url if is_needed else None
        self.shown_secret: str | None = None
        if self._scheme.algorithm == "ed25519":
            if secret is not None:
                raise ConfigError(
                    f"--webhook-secret: {preset} signs with a key pair, which the sandbox "
                    "generates; leave it out"
                )
            self._key, public = make_pair()
            self._wrong_key, _ = make_pair()
            self.shown_secret = base64.b64encode(public).decode()
            return
        if secret is None:
            secret = self.shown_secret = _make_secret(self._scheme)
        self._key = decode_secret(self._scheme, secret, setting="--webhook-secret")
        self._wrong_key = secrets.token_bytes(_SECRET_BYTES)

    def sign(self, content: WebhookContent, *, forged: bool = False) -> Signed:
        """Return the headers and the query of a webhook; a forged one is signed with another key.

        Raises InvalidSignatureError if the scheme cannot sign the content unambiguously.
        """
        return sign(
            self._scheme,
            self._wrong_key if forged else self._key,
            content.body,
            now=time.time(),
            event_id=uuid.uuid4().hex,
            query=content.query or self._query,
            content_type=content.content_type,
        )

    def settings_to_copy(self, sandbox_url: str, *, has_key: bool) -> str:
        """Return the settings of the bridge for this sandbox, as YAML.

        Values that the sandbox does not check are placeholders. Secrets that the user has given,
        among them the key if `has_key`, are not printed.
        """
        api: dict[str, Any] = {"preset": self._preset, "base_url": sandbox_url}
        needed = needed_settings(self._preset)
        if "account" in needed:
            api["account"] = "any-account"
        if "auth.username" in needed:
            api["auth"] = {"username": "any-user"}
        api["key"] = "the value of --key" if has_key else "any-key"
        endpoint: dict[str, Any] = {"path": self._path, "preset": self._preset}
        if self._scheme_name is not None:
            endpoint["signature"] = {"preset": self._scheme_name}
        if self._public_url is not None:
            endpoint["public_url"] = self._public_url
        endpoint["secrets"] = [self.shown_secret or "the value of --webhook-secret"]
        settings = {"sms_api": api, "webhook": {"endpoints": [endpoint]}}
        return yaml.safe_dump(settings, sort_keys=False)


def _make_secret(scheme: Scheme) -> str:
    key = secrets.token_bytes(_SECRET_BYTES)
    match scheme.secret_encoding:
        case "utf8" | "hex":
            return key.hex()
        case "base64":
            return base64.b64encode(key).decode()
        case "whsec":
            return f"whsec_{base64.b64encode(key).decode()}"


def check_url(url: str) -> None:
    try:
        parsed = httpx.URL(url)
        is_usable = parsed.scheme in {"http", "https"} and bool(parsed.host)
    except httpx.InvalidURL:
        is_usable = False
    if not is_usable:
        raise ConfigError("--webhook-url: must look like http://127.0.0.1:8080/webhooks")


class WebhookSender:
    """Posts signed webhooks to the URL of its signer."""

    def __init__(self, signer: Signer) -> None:
        self.url = signer.url
        self._signer = signer
        self._in_flight = asyncio.Semaphore(MAX_WEBHOOKS_IN_FLIGHT)
        self._client = httpx.AsyncClient(trust_env=False, timeout=WEBHOOK_TIMEOUT_SECONDS)

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, content: WebhookContent, *, repeat: int, forged: bool) -> list[int | None]:
        """Post a webhook `repeat` times; return the statuses, None for no answer in time.

        Raises InvalidSignatureError as `Signer.sign` does.
        """
        signed = self._signer.sign(content, forged=forged)
        url = httpx.URL(self.url).copy_with(query=signed.query or None)
        headers = [("Content-Type", content.content_type), *signed.headers]
        posts = (self._post(url, content.body, headers) for _ in range(repeat))
        return await asyncio.gather(*posts)

    async def _post(
        self, url: httpx.URL, body: bytes, headers: Sequence[tuple[str, str]]
    ) -> int | None:
        async with self._in_flight:
            try:
                # httpx limits the time of each read, this limits the total.
                async with asyncio.timeout(WEBHOOK_TIMEOUT_SECONDS):
                    response = await self._client.post(url, content=body, headers=[*headers])
            except (httpx.HTTPError, TimeoutError):
                return None
            return response.status_code
