"""The reference to a message in the address to which the SMS service reports its delivery.

Some services return nothing of ours in a delivery receipt, but take an address with each message
and send its receipts there. The worker adds the idempotency key to that address, and the webhook
receiver reads it from the receipt again. It trusts the reference only where the service's
signature covers it, so the reference needs no signature of its own.

The query consists of letters, digits, `-`, `_` and one `=`. Every program reads these in the same
way, percent-encoding changes none of them, and no signature scheme uses them as a separator.
"""

import base64
import binascii
import re
import unicodedata
from typing import Final
from urllib.parse import unquote

from bridge.json_pointer import is_id

# Telling, so that it is not mistaken for a parameter of another program.
PARAMETER: Final = "sms-bridge-id"
# Twilio allows 4,000 characters; Telnyx and Plivo document no limit.
MAX_ADDRESS_CHARACTERS: Final = 1000
# Marks a key in base64url; a key that is written as it is cannot begin with it.
_ENCODED: Final = "_"
_PLAIN: Final = re.compile(r"[A-Za-z0-9-][A-Za-z0-9_-]{0,254}")
_REFERENCE: Final = re.compile(rb"(_?)([A-Za-z0-9-][A-Za-z0-9_-]{0,339})")
_ALONE: Final = re.compile(rb"%s=%s" % (PARAMETER.encode(), _REFERENCE.pattern))

# A phone number has 7 to 15 digits (ITU-T E.164) in any grouping, and up to two more as a prefix to
# dial abroad. Digits after a + always count as a phone number.
_NUMBER: Final = re.compile(r"(?:[^0-9A-Za-z]*[0-9]){7,17}[^0-9A-Za-z]*")
PLUS: Final = re.compile(r"\+[0-9]")
_NO_DIGITS: Final = re.compile("[^0-9]")
# The end of a number is the same with a country code, a leading zero, or neither.
_END_DIGITS: Final = 8


def callback_address(url: str, key: str, to: str) -> str:
    """Return the address for the receipts of a message: `url` with the message's key.

    Without the key if it contains a phone number, because addresses are logged by proxies, or if
    the address would be too long. A key is never cut.
    """
    if looks_like_number(key) or _contains_number(key, to):
        return url
    reference = key
    if not _PLAIN.fullmatch(key):
        reference = _ENCODED + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
    address = f"{url}?{PARAMETER}={reference}"
    return address if len(address) <= MAX_ADDRESS_CHARACTERS else url


def reference_in(address: str) -> str | None:
    """Return the key that `callback_address` has put into an address, or None."""
    query = address.partition("#")[0].partition("?")[2]
    return read_reference(query.encode(errors="replace")) if query else None


def read_reference(query: bytes) -> str | None:
    """Return the key in the query of an address; None if there is none, or several."""
    found = [
        value
        for name, _, value in (pair.partition(b"=") for pair in query.split(b"&"))
        if name == PARAMETER.encode()
    ]
    written = _REFERENCE.fullmatch(found[0]) if len(found) == 1 else None
    if written is None:
        return None
    key = written[2].decode()
    if written[1]:
        try:
            key = base64.urlsafe_b64decode(key + "=" * (-len(key) % 4)).decode("ascii")
        except (binascii.Error, UnicodeDecodeError):
            return None
    return key if is_id(key) and not looks_like_number(key) else None


def is_reference(query: bytes) -> bool:
    """Whether a query consists of a reference alone."""
    return _ALONE.fullmatch(query) is not None


def looks_like_number(text: str) -> bool:
    """Whether a text, or what it percent-encodes, is a phone number, or contains one with a +."""
    text = _decoded(text)
    return bool(_NUMBER.fullmatch(text) or PLUS.search(text))


def _contains_number(key: str, to: str) -> bool:
    # Without a + it is a short code, which belongs to no person.
    return to.startswith("+") and to[1:][-_END_DIGITS:] in _NO_DIGITS.sub("", _decoded(key))


def _decoded(text: str) -> str:
    """Undo percent-encoding, and write the digits of all scripts as ASCII.

    A `message_id` that is percent-encoded is percent-encoded once more in its key.
    """
    if "%" not in text:
        return text
    decoded = unquote(text)
    while decoded != text:
        text, decoded = decoded, unquote(decoded)
    return "".join(str(unicodedata.decimal(character, character)) for character in text)
