"""Genuine webhooks of every preset, and their parts."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final
from urllib.parse import quote, quote_plus, urlencode

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bridge.webhook.signatures import schemes
from bridge.webhook.signatures.forms import PLIVO
from bridge.webhook.signatures.schemes import Scheme, at_address
from bridge.webhook.signatures.verify import sign

SCHEMES: Final[Mapping[str, Scheme]] = {
    str(name): at_address(scheme, "https://bridge.example/webhooks")
    for name, scheme in schemes.SCHEMES.items()
}
VISIBLE: Final = [chr(number) for number in range(33, 127)]
# Separators between entries, and prefixes of signatures, by format.
LISTED: Final = {"kv": (",", "v1="), "list": (" ", "v1,")}
# A second secret, as long as a public key.
OLDER_KEY: Final = b"an older key, which is not in use"[:32]
FORM: Final = "application/x-www-form-urlencoded"
JSON: Final = "application/json"
# Lifetime of MessageBird's tokens.
LIFETIME_SECONDS: Final = 60

# A parameter that no preset knows, and the share of forms that have it.
NEW_NAME: Final = "ZNewOne"
_NEW_NAMES: Final = 0.1
# Texts, some of which look like names of parameters.
_WORDS: Final = (
    *("From", "To", "Body lotion", "Text me", "Typewriter", "Units", "Status?", "MediaCount"),
    *("hello", "12345", "+15550100", "From +15550100", "To: 12345", "a=b&c=d", "100%", "%41"),
    *("", " ", "\n", "é✓", "😀", "?", ".", "\0", "Bod", "AC", "whatsapp:", "sid", "To 5pm"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """A received request: headers as the server passes them on, body, query and time."""

    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    query: bytes
    now: float

    def having(self, name: str, *values: bytes) -> "Request":
        """Return the request with these values of a header."""
        key = name.lower().encode()
        others = tuple(header for header in self.headers if header[0] != key)
        return replace(self, headers=(*others, *((key, value) for value in values)))

    def value(self, name: str) -> str:
        """Return the value of a header."""
        return dict(self.headers)[name.lower().encode()].decode()


@dataclass(frozen=True, slots=True)
class Genuine:
    """A genuine request, and how it was made.

    The signature header is `front` plus `text`, the encoded digest. `verifying` is the receiver's
    key.
    """

    scheme: Scheme
    key: bytes
    verifying: bytes
    request: Request
    front: str
    text: str
    digest: bytes

    @property
    def is_form(self) -> bool:
        """Whether the body is a form whose parameters are signed."""
        return self.request.value("content-type").startswith(FORM)

    @property
    def has_time_header(self) -> bool:
        """Whether a header outside the token contains the time."""
        return self.scheme.timestamp_from is not None and self.scheme.format != "jwt"

    def signed(self, text: str) -> Request:
        """Return the request with another encoded digest."""
        value = (self.front + text).encode()
        return self.request.having(self.scheme.header, value)

    def headed(self, value: str) -> Request:
        """Return the request with another signature header."""
        return self.request.having(self.scheme.header, value.encode())

    def spell(self, digest: bytes) -> str:
        """Encode a digest as the scheme does."""
        if self.scheme.format == "jwt":
            return base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if self.scheme.encoding == "base64":
            return base64.b64encode(digest).decode()
        return digest.hex()


def make_genuine(rng: Random, scheme: Scheme) -> Genuine:
    """Generate a key, a body, a time and an id, and sign them."""
    key = verifying = rng.randbytes(rng.randrange(16, 65))
    if scheme.algorithm == "ed25519":
        key = rng.randbytes(32)
        verifying = Ed25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()
    at = rng.randrange(1_000_000_000, 4_000_000_000)
    is_form = scheme.parameters is not None and (scheme.parameters is PLIVO or rng.random() < 0.7)
    body = make_form(rng, scheme) if is_form else _make_body(rng, at)
    query = b"" if scheme.parameters is PLIVO else _make_query(rng)
    content_type = FORM if is_form else JSON
    signed = sign(
        scheme, key, body, now=at, event_id=make_id(rng), query=query, content_type=content_type
    )
    headers = (*signed.headers, ("Content-Type", content_type))
    late = rng.uniform(-1, 1) * scheme.tolerance_seconds
    if scheme.expires:
        late = min(late, LIFETIME_SECONDS)
    raw = tuple((name.lower().encode(), value.encode()) for name, value in headers)
    request = Request(raw, body, signed.query, at + late)
    value = request.value(scheme.header)
    front = _front(scheme, value)
    text = value.removeprefix(front)
    return Genuine(scheme, key, verifying, request, front, text, _read_digest(scheme, text))


def make_form(rng: Random, scheme: Scheme, text: str | None = None) -> bytes:
    """Make a form like the service's for an SMS with this text, or with any text."""
    if text is None:
        text = " ".join(rng.choices(_WORDS, k=rng.randrange(5)))
    sender, own = f"+9995{rng.randrange(10**7):07}", f"+9995{rng.randrange(10**7):07}"
    token = f"{rng.getrandbits(128):032x}"
    fields = {
        "MessageSid": "SM" + token,
        "SmsSid": "SM" + token,
        "SmsMessageSid": "SM" + token,
        "AccountSid": f"AC{rng.getrandbits(128):032x}",
        "ApiVersion": "2010-04-01",
        "From": sender,
        "To": own,
        "Body": text,
        "NumMedia": "0",
        "NumSegments": "1",
        "FromCity": rng.choice(("", "SAN FRANCISCO")),
        "FromCountry": "US",
        "ToZip": "",
        "SmsStatus": "received",
    }
    if scheme.parameters is PLIVO:
        uuid = f"{token[:8]}-{token[8:12]}-{token[12:16]}-{token[16:20]}-{token[20:]}"
        fields = {
            "MessageUUID": uuid,
            "From": sender[1:],
            "To": own[1:],
            "Text": text,
            "Type": "sms",
            "Units": "1",
            "TotalRate": "0.00",
            "TotalAmount": "0.00",
        }
    if rng.random() < _NEW_NAMES:
        fields[NEW_NAME] = "a value"
    pairs = list(fields.items())
    rng.shuffle(pairs)
    return urlencode(pairs, quote_via=quote if rng.random() < 0.5 else quote_plus).encode()


def _read_digest(scheme: Scheme, text: str) -> bytes:
    if scheme.format == "jwt":
        return base64.urlsafe_b64decode(text + "==")
    return base64.b64decode(text) if scheme.encoding == "base64" else bytes.fromhex(text)


def _front(scheme: Scheme, value: str) -> str:
    """Return the signature header before the digest."""
    if scheme.format == "jwt":
        return value[: value.rindex(".") + 1]
    if scheme.format in LISTED:
        mark = LISTED[scheme.format][1]
        return value[: value.index(mark) + len(mark)]
    return "" if scheme.format in {"plain", "csv"} else scheme.format.removeprefix("prefix:")


def _make_body(rng: Random, at: int) -> bytes:
    text = "".join(rng.choices(VISIBLE, k=rng.randrange(1, 40)))
    document = json.dumps({"type": "message.received", "data": {"text": text}}).encode()
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 200))
    # Begins like a signed time, so that a bad split of the content could mistake it for one.
    return document if kind < 3 else b"%d.%s" % (at, document)


def make_id(rng: Random) -> str:
    """Generate an event id."""
    return "msg_" + "".join(rng.choices("abcdefghij0123456789", k=rng.randrange(1, 30)))


def _make_query(rng: Random) -> bytes:
    return b"" if rng.random() < 0.3 else b"tenant=%d&b=2" % rng.randrange(100)
