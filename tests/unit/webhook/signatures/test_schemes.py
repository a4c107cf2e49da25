"""Schemes made of settings: presets, single knobs, contradictions, secrets."""

from dataclasses import replace
from typing import Any

import pytest

from bridge.config import SignatureSettings
from bridge.config.webhook import SchemeName
from bridge.errors import ConfigError
from bridge.webhook.signatures.schemes import SCHEMES, at_address, decode_secret, scheme_from

KEY = b"test_secret_key"
URL = "https://mycompany.com/myapp.php"
PLAIN = SCHEMES["plain"]
SLACK = SCHEMES["slack"]

# --- Settings ------------------------------------------------------------------------------------


def signature_settings(**knobs: Any) -> SignatureSettings:
    return SignatureSettings.model_validate(knobs)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_preset_is_without_contradiction(name: SchemeName) -> None:
    """A preset alone is a whole scheme; only `twilio` needs the public URL too."""
    assert scheme_from(signature_settings(preset=name), URL) == at_address(SCHEMES[name], URL)


def test_a_knob_goes_over_the_preset() -> None:
    """A single knob replaces the preset's value and leaves the rest, null leaves it all."""
    changed = signature_settings(
        preset="slack", header="X-Mine", tolerance_seconds="1m", algorithm=None
    )

    assert scheme_from(changed, None) == replace(SLACK, header="X-Mine", tolerance_seconds=60.0)


CONTRADICTIONS = {
    "time from nowhere": ({"signed_content": "{timestamp}.{body}"}, "timestamp_from: is missing"),
    "id from nowhere": ({"signed_content": "{id}.{body}"}, "id_header: is missing"),
    "no URL": ({"preset": "twilio"}, "webhook.public_url: is missing"),
    "nonce from nowhere": ({"signed_content": "{body}.{nonce}"}, "nonce_header: is missing"),
    "nonce against the body": (
        {"signed_content": "{body}{nonce}", "nonce_header": "X-Nonce"},
        "signed_content: needs a fixed character between {id} or {nonce}",
    ),
    "nonce in the header of the id": (
        {
            "signed_content": "{body}.{id}.{nonce}",
            "id_header": "X-One",
            "nonce_header": "X-One",
        },
        "header: signature, id, nonce and timestamp must",
    ),
    "parameters that nobody knows": (
        {"signed_content": "{url}{params}"},
        "signed_content: can hold {params} only with preset",
    ),
    "token by an algorithm without a token": (
        {"preset": "vonage", "algorithm": "sha1"},
        "algorithm: a token is signed with",
    ),
    "token with another claim": (
        {"preset": "vonage", "timestamp_from": "exp"},
        "timestamp_from: must be iat or nbf",
    ),
    "token without a time": ({"format": "jwt"}, "timestamp_from: must be iat or nbf"),
    "token of an address alone": (
        {"preset": "vonage", "signed_content": "{url}"},
        "signed_content: needs {body}",
    ),
    "token of an id": (
        {"preset": "vonage", "signed_content": "{body}.{timestamp}"},
        "signed_content: must be {body} or {url}{body} for a jwt",
    ),
    "unknown placeholder": ({"signed_content": "{body}{salt}"}, "signed_content: holds a brace"),
    "id against the body": (
        {"signed_content": "{id}{body}", "id_header": "X-Id"},
        "signed_content: needs a fixed character between {id}",
    ),
    "id against the URL": (
        {"signed_content": "{body}.{url}{id}", "id_header": "X-Id"},
        "signed_content: needs a fixed character between {id}",
    ),
    "unsigned time": ({"timestamp_from": "X-Time"}, "signed_content: must hold {timestamp}"),
    "kv key elsewhere": ({"preset": "stripe", "format": "plain"}, "timestamp_from: is a kv key"),
    "not a name": (
        {"preset": "slack", "timestamp_from": "X Time"},
        "timestamp_from: is neither a header name nor a kv key",
    ),
    "tolerance of nothing": ({"tolerance_seconds": 60}, "tolerance_seconds: does nothing"),
    "unit of nothing": ({"timestamp_unit": "ms"}, "timestamp_unit: does nothing"),
    "kv key of two letters elsewhere": (
        {"preset": "slack", "timestamp_from": "ts"},
        "timestamp_from: is a kv key",
    ),
    "one header for signature and time": (
        {"preset": "slack", "timestamp_from": "x-slack-signature"},
        "header: signature, id, nonce and timestamp must",
    ),
    "another prefix": (
        {"preset": "github", "algorithm": "sha512"},
        "format: the prefix says sha256, but the algorithm is sha512",
    ),
}


@pytest.mark.parametrize(("knobs", "expected"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_contradictions_stop_the_start(knobs: dict[str, Any], expected: str) -> None:
    """Knobs that cannot work together are one readable line that names the key."""
    with pytest.raises(ConfigError) as caught:
        scheme_from(signature_settings(**knobs), URL if "{url}" in str(knobs) else None)

    assert len(caught.value.faults) == 1
    assert caught.value.faults[0].startswith("webhook.")
    assert expected in caught.value.faults[0]


@pytest.mark.parametrize(
    "knobs",
    [
        {"preset": "stripe", "header": "T"},
        {"preset": "slack", "signed_content": "X{timestamp}:{body}X"},
    ],
    ids=["a kv key like a header", "letters around"],
)
def test_what_only_looks_like_a_contradiction_is_taken(knobs: dict[str, Any]) -> None:
    """A key inside the header is no header, and fixed text may be any but a brace."""
    scheme = scheme_from(signature_settings(**knobs), None)

    assert all(getattr(scheme, knob) == value for knob, value in knobs.items() if knob != "preset")


def test_every_contradiction_is_told_at_once() -> None:
    """All faults come in one go, a line each."""
    knobs = signature_settings(signed_content="{id}.{timestamp}.{url}.{body}")

    with pytest.raises(ConfigError) as caught:
        scheme_from(knobs, None)

    assert len(caught.value.faults) == 3


# --- Secrets -------------------------------------------------------------------------------------

SECRETS = {
    "utf8": ("utf8", "schlüssel", "schlüssel".encode()),
    "hex": ("hex", "00FFa0", b"\x00\xff\xa0"),
    "base64": ("base64", "dGVzdF9zZWNyZXRfa2V5", KEY),
    "whsec": ("whsec", "whsec_dGVzdF9zZWNyZXRfa2V5", KEY),
    "whsec without padding": ("whsec", "whsec_dGVzdF9zZWNyZXRfa2V5MQ", KEY + b"1"),
    "whsec without its prefix": ("whsec", "dGVzdF9zZWNyZXRfa2V5", KEY),
}


@pytest.mark.parametrize(("encoding", "secret", "key"), SECRETS.values(), ids=SECRETS.keys())
def test_secrets_are_decoded(encoding: Any, secret: str, key: bytes) -> None:
    """A secret becomes the key in the way that the scheme says."""
    assert decode_secret(replace(PLAIN, secret_encoding=encoding), secret) == key


BAD_SECRETS = {
    "empty": ("utf8", ""),
    "lone surrogate": ("utf8", "hush\ud800"),
    "nothing behind whsec_": ("whsec", "whsec_"),
    "whsec with garbage": ("whsec", "whsec_hush!!!!"),
    "odd hex": ("hex", "hush5"),
    "base64 with garbage": ("base64", "hush!!!!"),
    "base64 without padding": ("base64", "aHVzaA"),
    "base64 that is not ASCII": ("base64", "hushé"),
}


@pytest.mark.parametrize(("encoding", "secret"), BAD_SECRETS.values(), ids=BAD_SECRETS.keys())
def test_a_bad_secret_stops_the_start(encoding: Any, secret: str) -> None:
    """A secret that is empty or not decodable is an error that does not hold it."""
    with pytest.raises(ConfigError) as caught:
        decode_secret(replace(PLAIN, secret_encoding=encoding), secret)

    assert str(caught.value).startswith("webhook.secrets: ")
    assert not secret.strip() or secret not in repr(caught.value)
    assert caught.value.__context__ is None


def test_a_public_key_has_its_length() -> None:
    """What is not an Ed25519 public key stops the start, without the key in the error."""
    scheme = SCHEMES["telnyx"]

    assert decode_secret(scheme, "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE=") == b"A" * 32
    with pytest.raises(ConfigError, match=r"^webhook\.secrets: is not an Ed25519 public key"):
        decode_secret(scheme, "QUFB")


@pytest.mark.parametrize("name", ["standard-webhooks", "plain"])
def test_a_versioned_secret_is_told(name: Any) -> None:
    """Some consoles show `v1,whsec_...`, of which the version is no part of the secret."""
    with pytest.raises(ConfigError) as caught:
        decode_secret(at_address(SCHEMES[name], URL), "v1,whsec_Y2FuYXJ5LTRiMTc=", setting="s")

    assert str(caught.value).startswith("s: begins with v1,whsec_; leave out the v1, in front")
    assert "Y2FuYXJ5" not in str(caught.value)
