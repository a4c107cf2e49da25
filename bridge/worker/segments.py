"""Encoding of an SMS text, and the number of segments it takes."""

import re
from collections.abc import Sequence
from typing import Literal

# 3GPP TS 23.038: the basic character set, then the characters that take two places.
_GSM7_BASIC = (
    "@£$¥èéùìòÇ\nØø\rÅåΔ_ΦΓΛΩΠΨΣΘΞÆæßÉ !\"#¤%&'()*+,-./0123456789:;<=>?"
    "¡ABCDEFGHIJKLMNOPQRSTUVWXYZÄÖÑÜ§¿abcdefghijklmnopqrstuvwxyzäöñüà"
)
_GSM7_EXTENSION = "\f^{}\\[~]|€"
_ONE_PLACE_EACH = re.compile(f"[{re.escape(_GSM7_BASIC)}]*")
_GSM7 = re.compile(f"[{re.escape(_GSM7_BASIC + _GSM7_EXTENSION)}]*")


Encoding = Literal["gsm7", "ucs2"]


def count_segments(text: str) -> tuple[Encoding, int]:
    """Return the encoding of a text and the number of its segments.

    A segment of a longer text has less room, because of its header, and no character is split.
    """
    # Fast path: most texts are short and plain, and checking each character is many times slower.
    if len(text) <= 160 and _ONE_PLACE_EACH.fullmatch(text):  # noqa: PLR2004
        return "gsm7", 1
    if _GSM7.fullmatch(text):
        widths = [2 if char in _GSM7_EXTENSION else 1 for char in text]
        return "gsm7", _count_parts(widths, alone=160, part=153)
    widths = [2 if ord(char) > 0xFFFF else 1 for char in text]  # noqa: PLR2004  surrogates
    return "ucs2", _count_parts(widths, alone=70, part=67)


def _count_parts(widths: Sequence[int], *, alone: int, part: int) -> int:
    if sum(widths) <= alone:
        return 1
    parts, used = 1, 0
    for width in widths:
        if used + width > part:
            parts, used = parts + 1, 0
        used += width
    return parts
