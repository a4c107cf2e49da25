"""How services sign their webhooks: a scheme is data, a preset or built from the settings."""

import base64
import binascii
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from bridge.config import SignatureSettings
from bridge.config.webhook import (
    Algorithm,
    Encoding,
    SecretEncoding,
    SignaturePreset,
    TimestampUnit,
)
from bridge.errors import ConfigError

# What `signed_content` may hold besides fixed text.
PLACEHOLDER: Final = re.compile(r"\{(body|timestamp|id|url)\}")
DIGEST_BYTES: Final[Mapping[str, int]] = {"sha256": 32, "sha1": 20, "sha384": 48, "sha512": 64}

# A header's name (RFC 9110, 5.6.2), or a key of the kv format.
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VISIBLE: Final = re.compile(r"[!-~]+")
_TOUCHING_ID: Final = re.compile(r"\{id\}\{(?:body|url)\}|\{(?:body|url)\}\{id\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one service signs: all the ways in which services differ.

    Make one with `scheme_from`, which finds contradictions. `url` is what `{url}` stands for,
    without the query. In the kv format `timestamp_from` is a key, or a header if it has a dash.
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
    secret_encoding: SecretEncoding = "utf8"  # noqa: S105  the name of an encoding
    url: str | None = None

    @property
    def has_time_entry(self) -> bool:
        """Whether the timestamp is an entry of the signature header, and has no header itself."""
        source = self.timestamp_from
        return self.format == "kv" and source is not None and "-" not in source

    @property
    def units_per_second(self) -> int:
        """How many of the timestamp's units a second has."""
        return 1000 if self.timestamp_unit == "ms" else 1


PRESETS: Final[Mapping[SignaturePreset, Scheme]] = MappingProxyType(
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
            signed_content="{url}",
        ),
    }
)


def scheme_from(
    settings: SignatureSettings, public_url: str | None, *, endpoint: str = "webhook"
) -> Scheme:
    """Lay the single knobs over the preset; None leaves the preset's value.

    Raises ConfigError with one line for each contradiction; `endpoint` is the key under which the
    settings stand.
    """
    knobs = settings.model_dump(exclude={"preset"}, exclude_none=True)
    scheme = replace(PRESETS[settings.preset], **knobs, url=public_url)
    faults = [
        *_content_faults(scheme),
        *_timestamp_faults(scheme, knobs),
        *_name_faults(scheme),
    ]
    if faults:
        raise ConfigError(*(f"{endpoint}.{fault}" for fault in faults))
    return scheme


def _content_faults(scheme: Scheme) -> Iterator[str]:
    used = set(PLACEHOLDER.findall(scheme.signed_content))
    if set("{}") & set(PLACEHOLDER.sub("", scheme.signed_content)):
        yield (
            "signature.signed_content: holds a brace that is not part of "
            "{body}, {timestamp}, {id} or {url}; take it out"
        )
    if _TOUCHING_ID.search(scheme.signed_content):
        yield (
            "signature.signed_content: needs a fixed character between {id} and the "
            "{body} or {url} beside it, or a part of one could be taken for the other"
        )
    needs = (
        ("timestamp", scheme.timestamp_from, "signature.timestamp_from", "a header or key"),
        ("id", scheme.id_header, "signature.id_header", "the header"),
        ("url", scheme.url, "public_url", "the whole address that the service calls"),
    )
    for name, value, key, remedy in needs:
        if name in used and value is None:
            yield f"{key}: is missing, but the service signs {{{name}}}; set it to {remedy}"
    if "url" in used and scheme.url is not None and not _VISIBLE.fullmatch(scheme.url):
        yield "public_url: must be ASCII, percent-encoded as the service calls it"


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
    time_header = None if scheme.has_time_entry else scheme.timestamp_from
    names = [scheme.header, scheme.id_header, time_header]
    lower = [name.lower() for name in names if name is not None]
    if len(set(lower)) != len(lower):
        yield (
            "signature.header: is also the header of the id or the timestamp, "
            "or these two are one; name different headers"
        )
    named = scheme.format.removeprefix("prefix:").removesuffix("=")
    if named in DIGEST_BYTES and named != scheme.algorithm:
        yield (
            f"signature.format: the prefix says {named}, but the algorithm is "
            f"{scheme.algorithm}; set format to prefix:{scheme.algorithm}="
        )


def decode_secret(scheme: Scheme, secret: str, *, setting: str = "webhook.secrets") -> bytes:
    """Turn a configured secret into the HMAC key.

    Raises ConfigError that names the setting, without the secret in it, when it is empty or not in
    the encoding.
    """
    try:
        key = _secret_bytes(scheme.secret_encoding, secret)
    except ValueError:
        key = b""
    if not key or not secret.strip():
        # Raised out here, because a decoder's error may hold the secret.
        raise ConfigError(
            f"{setting}: the secret is empty or not {scheme.secret_encoding}; correct it, "
            "or say in signature.secret_encoding beside it how it is written"
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
            # Standard Webhooks' own libraries take it without padding, too.
            return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
