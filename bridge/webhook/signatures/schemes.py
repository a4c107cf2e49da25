"""Signature schemes of the services, as data: the known ones, and others built from settings."""

import base64
import binascii
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from bridge.config import SignatureSettings
from bridge.config.webhook import (
    Algorithm,
    Encoding,
    SchemeName,
    SecretEncoding,
    TimestampUnit,
)
from bridge.errors import ConfigError
from bridge.webhook.signatures.forms import PLIVO, TWILIO, Parameters

# Placeholders of `signed_content`.
PLACEHOLDER: Final = re.compile(r"\{(body|body_sha256|timestamp|id|url|nonce|params)\}")
# Bytes of a digest, or of an Ed25519 signature.
DIGEST_BYTES: Final[Mapping[str, int]] = {
    "sha256": 32,
    "sha1": 20,
    "sha384": 48,
    "sha512": 64,
    "ed25519": 64,
}

# A header's name (RFC 9110, 5.6.2), or a key of the kv format.
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TOUCHING_TOKEN: Final = re.compile(
    r"\{(?:id|nonce)\}\{(?:body|body_sha256|url|params|id|nonce)\}"
    r"|\{(?:body|body_sha256|url|params)\}\{(?:id|nonce)\}"
)
_PUBLIC_KEY_BYTES: Final = 32
# Some consoles show a Standard Webhooks secret with the signature version in front.
_VERSIONED: Final = "v1,whsec_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one service signs its webhooks.

    Build one with `scheme_from`, which rejects contradictions. `url` is the value of `{url}`,
    without the query. `timestamp_from` names a header; in the kv format it names a key unless it
    has a dash, and in the jwt format a claim. In the jwt format `signed_content` lists the parts
    whose hashes the token must contain.
    """

    header: str
    algorithm: Algorithm = "sha256"
    encoding: Encoding = "auto"
    format: str = "plain"
    signed_content: str = "{body}"
    timestamp_from: str | None = None
    timestamp_unit: TimestampUnit = "s"
    tolerance_seconds: float = 300.0
    id_header: str | None = None
    nonce_header: str | None = None
    secret_encoding: SecretEncoding = "utf8"  # noqa: S105  the name of an encoding
    url: str | None = None
    # `url` with its port added or removed, for services that sign either.
    other_url: str | None = None
    tries_ports: bool = False
    # The known parameters that `{params}` stands for.
    parameters: Parameters | None = None
    # For tokens: the required issuer, and whether an expiry is required.
    issuer: str | None = None
    expires: bool = False
    # Whether the service also sends GETs, with the data in the query.
    signs_get: bool = False

    @property
    def takes_get(self) -> bool:
        """Whether a GET can be verified: the token must contain the hash of the address."""
        return self.signs_get and self.format == "jwt" and "{url}" in self.signed_content

    @property
    def has_time_entry(self) -> bool:
        """Whether the timestamp is an entry of the signature header, not a header itself."""
        source = self.timestamp_from
        return self.format == "kv" and source is not None and "-" not in source

    @property
    def units_per_second(self) -> int:
        """Units of the timestamp per second."""
        return 1000 if self.timestamp_unit == "ms" else 1


SCHEMES: Final[Mapping[SchemeName, Scheme]] = MappingProxyType(
    {
        "plain": Scheme(header="X-Service-Signature"),
        "github": Scheme(header="X-Hub-Signature-256", encoding="hex", format="prefix:sha256="),
        "stripe": Scheme(
            header="Stripe-Signature",
            encoding="hex",
            format="kv",
            signed_content="{timestamp}.{body}",
            timestamp_from="t",
        ),
        "slack": Scheme(
            header="X-Slack-Signature",
            encoding="hex",
            format="prefix:v0=",
            signed_content="v0:{timestamp}:{body}",
            timestamp_from="X-Slack-Request-Timestamp",
        ),
        "shopify": Scheme(
            header="X-Shopify-Hmac-SHA256", encoding="base64", id_header="X-Shopify-Event-Id"
        ),
        "standard-webhooks": Scheme(
            header="webhook-signature",
            encoding="base64",
            format="list",
            signed_content="{id}.{timestamp}.{body}",
            timestamp_from="webhook-timestamp",
            id_header="webhook-id",
            secret_encoding="whsec",  # noqa: S106  the name of an encoding
        ),
        "twilio": Scheme(
            header="X-Twilio-Signature",
            algorithm="sha1",
            encoding="base64",
            signed_content="{url}{params}",
            parameters=TWILIO,
            # Twilio's own libraries do this, because its backend signs inconsistently.
            tries_ports=True,
        ),
        "telnyx": Scheme(
            header="telnyx-signature-ed25519",
            algorithm="ed25519",
            encoding="base64",
            signed_content="{timestamp}|{body}",
            timestamp_from="telnyx-timestamp",
            secret_encoding="base64",  # noqa: S106  the name of an encoding
        ),
        "vonage": Scheme(header="Authorization", format="jwt", timestamp_from="iat"),
        "messagebird": Scheme(
            header="MessageBird-Signature-JWT",
            format="jwt",
            signed_content="{url}{body}",
            timestamp_from="nbf",
            issuer="MessageBird",
            expires=True,
            signs_get=True,
        ),
        "sinch": Scheme(
            header="x-sinch-webhook-signature",
            encoding="base64",
            signed_content="{body}.{nonce}.{timestamp}",
            timestamp_from="x-sinch-webhook-signature-timestamp",
            nonce_header="x-sinch-webhook-signature-nonce",
        ),
        "plivo": Scheme(
            header="X-Plivo-Signature-V3",
            encoding="base64",
            format="csv",
            signed_content="{url}?{params}.{nonce}",
            nonce_header="X-Plivo-Signature-V3-Nonce",
            parameters=PLIVO,
        ),
        "android-sms-gateway": Scheme(
            header="X-Signature",
            encoding="hex",
            signed_content="{body}{timestamp}",
            timestamp_from="X-Timestamp",
        ),
        # https://docs.bird.com/api/notifications-api/api-reference/webhook-subscriptions/verifying-a-webhook-subscription
        "bird": Scheme(
            header="messagebird-signature",
            encoding="base64",
            signed_content="{timestamp}\n{url}\n{body_sha256}",
            timestamp_from="messagebird-request-timestamp",
            # Bird's retries have the timestamp of the first webhook, for up to a day.
            tolerance_seconds=86400.0,
        ),
    }
)


def scheme_from(
    settings: SignatureSettings, public_url: str | None, *, endpoint: str = "webhook"
) -> Scheme:
    """Build a scheme from the one that `settings.preset` names, and the keys that override it.

    Raises ConfigError with one line for each contradiction. `endpoint` is the key of the settings.
    """
    knobs = settings.model_dump(exclude={"preset"}, exclude_none=True)
    scheme = at_address(replace(SCHEMES[settings.preset], **knobs), public_url)
    faults = [
        *_content_faults(scheme),
        *_format_faults(scheme),
        *_timestamp_faults(scheme, knobs),
        *_name_faults(scheme),
    ]
    if faults:
        raise ConfigError(*(f"{endpoint}.{fault}" for fault in faults))
    return scheme


def at_address(scheme: Scheme, url: str | None) -> Scheme:
    """Return the scheme for webhooks to this address."""
    other = _other_port(url) if scheme.tries_ports and url is not None else None
    return replace(scheme, url=url, other_url=other)


def _other_port(url: str) -> str:
    """Remove the port of an address, or add the default port if it has none."""
    parts = urlsplit(url)
    host, port = parts.netloc, parts.port
    if port is None:
        return parts._replace(netloc=f"{host}:{443 if parts.scheme == 'https' else 80}").geturl()
    return parts._replace(netloc=host.removesuffix(f":{port}")).geturl()


def _content_faults(scheme: Scheme) -> Iterator[str]:
    used = set(PLACEHOLDER.findall(scheme.signed_content))
    if set("{}") & set(PLACEHOLDER.sub("", scheme.signed_content)):
        yield (
            "signature.signed_content: holds a brace that is not part of "
            "{body}, {body_sha256}, {timestamp}, {id}, {nonce}, {url} or {params}; take it out"
        )
    if _TOUCHING_TOKEN.search(scheme.signed_content):
        yield (
            "signature.signed_content: needs a fixed character between {id} or {nonce} "
            "and the placeholder next to it, because the boundary would be ambiguous"
        )
    if "params" in used and scheme.parameters is None:
        yield (
            "signature.signed_content: can hold {params} only with preset twilio or plivo, "
            "whose parameters are known; set that preset"
        )
    needs = (
        ("timestamp", scheme.timestamp_from, "signature.timestamp_from", "a header or key"),
        ("id", scheme.id_header, "signature.id_header", "the header"),
        ("nonce", scheme.nonce_header, "signature.nonce_header", "the header"),
        ("url", scheme.url, "public_url", "the whole address that the service calls"),
    )
    for name, value, key, remedy in needs:
        if name in used and value is None:
            yield f"{key}: is missing, but the service signs {{{name}}}; set it to {remedy}"


def _format_faults(scheme: Scheme) -> Iterator[str]:
    is_token = scheme.format == "jwt"
    if is_token and scheme.algorithm not in {"sha256", "sha384", "sha512"}:
        yield (
            "signature.algorithm: a token is signed with sha256, sha384 or sha512 (HS256 "
            "and so on); set one of them, or another format"
        )
    if is_token and scheme.timestamp_from not in {"iat", "nbf"}:
        yield "signature.timestamp_from: must be iat or nbf if format is jwt"
    if is_token and set(PLACEHOLDER.findall(scheme.signed_content)) - {"body", "url"}:
        yield (
            "signature.signed_content: must be {body} or {url}{body} for a jwt: the token "
            "contains their hashes (payload_hash, url_hash)"
        )
    if is_token and "{body}" not in scheme.signed_content:
        yield (
            "signature.signed_content: needs {body}; without it, a captured token would validate "
            "any body"
        )


def _timestamp_faults(scheme: Scheme, knobs: Collection[str]) -> Iterator[str]:
    source = scheme.timestamp_from
    if source is None:
        for knob in ("timestamp_unit", "tolerance_seconds"):
            if knob in knobs:
                yield (
                    f"signature.{knob}: does nothing without timestamp_from; "
                    "set that too, or leave this out"
                )
        return
    if scheme.format == "jwt":
        return
    if "{timestamp}" not in scheme.signed_content:
        yield (
            "signature.signed_content: must hold {timestamp} when there is a "
            "timestamp_from, or the time could be forged; without a time start from preset plain"
        )
    if not _TOKEN.fullmatch(source):
        yield "signature.timestamp_from: is neither a header name nor a kv key"
    elif scheme.format != "kv" and len(source) <= len("ts"):
        yield (
            "signature.timestamp_from: is a kv key, but the format is not kv; "
            "name a header, or set format: kv"
        )


def _name_faults(scheme: Scheme) -> Iterator[str]:
    is_inside = scheme.has_time_entry or scheme.format == "jwt"
    time_header = None if is_inside else scheme.timestamp_from
    names = [scheme.header, scheme.id_header, scheme.nonce_header, time_header]
    lower = [name.lower() for name in names if name is not None]
    if len(set(lower)) != len(lower):
        yield ("signature.header: signature, id, nonce and timestamp must be in different headers")
    named = scheme.format.removeprefix("prefix:").removesuffix("=")
    if named in DIGEST_BYTES and named != scheme.algorithm:
        yield (
            f"signature.format: the prefix says {named}, but the algorithm is "
            f"{scheme.algorithm}; set format to prefix:{scheme.algorithm}="
        )


def decode_secret(scheme: Scheme, secret: str, *, setting: str = "webhook.secrets") -> bytes:
    """Decode a configured secret into an HMAC key, or into the public key of Ed25519.

    Raises ConfigError that names the setting, never the secret, if it is empty or wrongly encoded.
    """
    if secret.startswith(_VERSIONED):
        raise ConfigError(
            f"{setting}: begins with {_VERSIONED}; leave out the {_VERSIONED[:3]} in front, "
            "which is no part of the secret"
        )
    try:
        key = _secret_bytes(scheme.secret_encoding, secret)
    except ValueError:
        key = b""
    if key and scheme.algorithm == "ed25519" and len(key) != _PUBLIC_KEY_BYTES:
        raise ConfigError(
            f"{setting}: is not an Ed25519 public key of {_PUBLIC_KEY_BYTES} bytes; use the "
            "service's public key, and set signature.secret_encoding to its encoding"
        )
    if not key or not secret.strip():
        # Raised outside the handler, because the decoder's error may contain the secret.
        raise ConfigError(
            f"{setting}: the secret is empty or not {scheme.secret_encoding}; correct it, "
            "or set signature.secret_encoding to its encoding"
        )
    return key


def _secret_bytes(encoding: SecretEncoding, secret: str) -> bytes:
    match encoding:
        case "utf8":
            return secret.encode()
        case "hex":
            return binascii.unhexlify(secret)
        case "base64":
            return base64.b64decode(secret, validate=True)
        case "whsec":
            text = secret.removeprefix("whsec_")
            # The Standard Webhooks libraries accept missing padding.
            return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
