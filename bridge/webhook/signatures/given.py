"""A request's headers, of which a signature may have no two of one name."""

from collections.abc import Sequence

from bridge.errors import InvalidSignatureError

# Names are in lower case; repeated headers are repeated.
Given = Sequence[tuple[bytes, bytes]]


def only(given: Given, name: str) -> bytes:
    """Return the one value of a header.

    Raises InvalidSignatureError when there is none, several, or one that is not ASCII.
    """
    wanted = name.lower().encode()
    values = [value for key, value in given if key == wanted]
    if not values:
        raise InvalidSignatureError("missing")
    if len(values) > 1 or not values[0].isascii():
        raise InvalidSignatureError("malformed")
    # Not every HTTP parser drops the white space around a value, which is no part of it.
    return values[0].strip(b" \t")
