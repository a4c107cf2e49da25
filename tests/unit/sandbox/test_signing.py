"""The sandbox signs as the service does, and tells the bridge what verifies it."""

import time

import pytest
import yaml

from bridge.config import Settings
from bridge.config.presets import PRESETS, Preset
from bridge.errors import ConfigError, InvalidSignatureError
from bridge.sandbox.configuration import write_configuration
from bridge.sandbox.events import Event, Events
from bridge.sandbox.signing import Signer
from bridge.webhook.endpoint import Endpoint
from bridge.webhook.signatures.verify import Verified, verify

URL = "http://127.0.0.1:8080/webhooks/it"


def endpoint_of(preset: Preset, signer: Signer) -> Endpoint:
    """Make the bridge's endpoint of what the sandbox prints."""
    written = write_configuration(preset, "http://127.0.0.1:8025", signer, has_key=False)
    (settings,) = Settings.model_validate(yaml.safe_load(written)).webhook.all_endpoints
    return Endpoint(settings)


def check(endpoint: Endpoint, signer: Signer, event: Event, *, forged: bool = False) -> Verified:
    """Verify, as the bridge does, what the sandbox sends of an event."""
    signed = signer(event.body, content_type=event.content_type, forged=forged)
    headers = [(name.lower().encode(), value.encode()) for name, value in signed.headers]
    headers.append((b"content-type", event.content_type.encode()))
    now = time.time()
    return verify(endpoint.scheme, endpoint.keys, headers, event.body, now=now, query=signed.query)


@pytest.mark.parametrize(
    ("preset", "query"),
    # Plivo's scheme cannot tell a query from a form.
    [
        (name, query)
        for name in PRESETS
        for query in ("", "?a=1")
        if not (query and name == "plivo")
    ],
)
def test_what_is_printed_verifies_what_is_sent(preset: Preset, query: str) -> None:
    """The endpoint that the sandbox prints takes its webhooks, and no forged one."""
    signer = Signer(preset, URL + query, None)
    endpoint, event = endpoint_of(preset, signer), Events(preset).reply("+491713920000", "Ja!")

    assert check(endpoint, signer, event).key_index == 0
    assert query[1:].encode() in signer(event.body, content_type=event.content_type).query
    with pytest.raises(InvalidSignatureError, match="mismatch"):
        check(endpoint, signer, event, forged=True)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "telnyx"])
def test_the_users_secret_is_used_and_not_shown(preset: Preset) -> None:
    """A secret that is given signs, and the configuration says whose it is in its place."""
    secret = "the-secret-that-the-user-has-given"
    signer, event = Signer(preset, URL, secret), Events(preset).reply("+491713920000", "Ja!")
    endpoint = endpoint_of(preset, signer)
    shown = [one.current for one in endpoint.secrets]
    endpoint.keys = [secret.encode()]

    assert shown == ["what --webhook-secret says"]
    assert check(endpoint, signer, event).key_index == 0


def test_a_public_key_cannot_be_signed_with() -> None:
    """Telnyx has the private key alone, so that the sandbox makes a pair of its own."""
    with pytest.raises(ConfigError, match=r"^--webhook-secret: telnyx signs with a pair of keys"):
        Signer("telnyx", URL, "a-secret")
