"""Headers of a request, of which those about the signature must be unique."""

from collections.abc import Sequence

from bridge.errors import InvalidSignatureError

# Names are in lower case; repeated headers appear repeatedly.
Given = Sequence[tuple[bytes, bytes]]


def only(given: Given, name: str) -> bytes:
    """Return the value of a header that must occur exactly once.

    Raises InvalidSignatureError if it is missing, repeated or not ASCII.
    """
    wanted = name.lower().encode()
    values = [value for key, value in given if key == wanted]
    if not values:
        raise InvalidSignatureError("missing")
    if len(values) > 1 or not values[0].isascii():
        raise InvalidSignatureError("malformed")
    # Some HTTP parsers keep the white space around a value, which is not part of it.
    return values[0].strip(b" \t")
