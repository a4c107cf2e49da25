"""Form bodies that are signed as one row of sorted names and values, with nothing between them.

Such a row can be cut in more ways than one: `Body=hi` and `From=+1555` are signed like
`Body=hiFrom+1555`, so one signature would fit forms that mean different things. Whoever has seen a
signed form, or wrote a text in one, could move the cuts. So a form is taken only when none of the
parameters that the service is known to send could begin anywhere but where the form has it.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final
from urllib.parse import parse_qsl

from bridge.errors import InvalidSignatureError
from bridge.inbound.headers import Given, only

# More than any of these services sends, ten media files and all.
MAX_PARAMETERS: Final = 200
# Three times the longest text with every byte of it percent-encoded. A form is decoded before its
# signature is checked, and decoding so many takes some 10 ms, in which nothing else is answered.
MAX_SIGNED_FORM_BYTES: Final = 65536

FORM: Final = "application/x-www-form-urlencoded"
# RFC 3986, 2.1: decoders differ about every other percent sign.
_LOOSE_PERCENT: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
# A name that the service has come up with since.
_NEW_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

_NUMBER: Final = r"[0-9]"
_WORD: Final = r"[a-z]"
_LINK: Final = r"https?://"
_SID: Final = r"[A-Z]{2}[0-9A-Za-z]{32}"
_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-"
# A telephone number, alone or as whatsapp:+15550100.
_ADDRESS: Final = r"(?:[a-z]+:)?(?:\+[0-9]{3}|[0-9]{5})"
_ANY: Final = ""


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """The parameters that a service is known to send.

    `values` has for each name, itself a pattern, how its value begins. `required` is in every
    form. Of `texts`, which strangers write, a form has one at most, and then all of `addresses`.
    """

    required: str
    values: Mapping[str, str]
    texts: Collection[str]
    addresses: Collection[str] = ("From", "To")


# https://www.twilio.com/docs/messaging/guides/webhook-request
TWILIO: Final = Parameters(
    required="AccountSid",
    values=MappingProxyType(
        {
            "AccountSid": _SID,
            "ApiVersion": _NUMBER,
            "Body": _ANY,
            "ErrorCode": _NUMBER,
            "From": _ADDRESS,
            "FromCity": _ANY,
            "FromCountry": _ANY,
            "FromState": _ANY,
            "FromZip": _ANY,
            "MediaContentType[0-9]+": _WORD,
            "MediaUrl[0-9]+": _LINK,
            "MessageSid": _SID,
            "MessageStatus": _WORD,
            "MessagingServiceSid": _SID,
            "NumMedia": _NUMBER,
            "NumSegments": _NUMBER,
            "SmsMessageSid": _SID,
            "SmsSid": _SID,
            "SmsStatus": _WORD,
            "To": _ADDRESS,
            "ToCity": _ANY,
            "ToCountry": _ANY,
            "ToState": _ANY,
            "ToZip": _ANY,
        }
    ),
    texts=frozenset({"Body"}),
)
# https://docs.plivo.com/docs/messaging/api/message/handling-incoming
# https://docs.plivo.com/docs/messaging/api/message/message-status-callbacks
PLIVO: Final = Parameters(
    required="MessageUUID",
    values=MappingProxyType(
        {
            "Body": _ANY,
            "ErrorCode": _NUMBER,
            "From": _ADDRESS,
            "MCC": _NUMBER,
            "MNC": _NUMBER,
            "Media[0-9]+": _LINK,
            "MediaCount": _NUMBER,
            "MessageUUID": _UUID,
            "ParentMessageUUID": _UUID,
            "PowerpackUUID": _ANY,
            "Sequence": _NUMBER,
            "Status": r"(?:queued|sent|failed|delivered|undelivered|read)",
            "Text": _ANY,
            "To": _ADDRESS,
            "TotalAmount": _NUMBER,
            "TotalRate": _NUMBER,
            "Type": r"(?:sms|mms|whatsapp)",
            "Units": _NUMBER,
            "requester_ip": r"[0-9a-f]",
        }
    ),
    texts=frozenset({"Body", "Text"}),
)


def is_form_type(content_type: str) -> bool:
    """Say whether it is the type of an HTML form's body, in whatever character set."""
    return content_type.partition(";")[0].strip().lower() == FORM


def read_form(body: bytes, given: Given) -> list[tuple[str, str]]:
    """Read a form's names and values, each name once.

    Raises InvalidSignatureError: `missing` when the body is no form, `malformed` when it is one
    that two readers may understand differently.
    """
    content_type = only(given, "content-type").decode()
    if not is_form_type(content_type):
        raise InvalidSignatureError("missing")
    # In another character set the values would be others than those that are signed.
    options = content_type.lower().split(";")[1:]
    if any(option.strip() not in {"", "charset=utf-8"} for option in options):
        raise InvalidSignatureError("malformed")
    if len(body) > MAX_SIGNED_FORM_BYTES or _LOOSE_PERCENT.search(body) or not body.isascii():
        raise InvalidSignatureError("malformed")
    try:
        pairs = parse_qsl(
            body.decode(),
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=MAX_PARAMETERS,
        )
    except ValueError:
        raise InvalidSignatureError("malformed") from None
    if len({name for name, _ in pairs}) != len(pairs):
        raise InvalidSignatureError("malformed")
    return pairs


def signed_row(pairs: Sequence[tuple[str, str]]) -> str:
    """Return the row that is signed."""
    return "".join(name + value for name, value in sorted(pairs))


def check_row(known: Parameters, pairs: Sequence[tuple[str, str]], query: bytes) -> None:
    """Raise InvalidSignatureError when the row, behind this query, could be cut in another way.

    To search a long row takes time: only for who has signed it.
    """
    ordered = sorted(pairs)
    _check_names(known, dict(ordered))
    row = query.decode()
    cuts: list[tuple[int, str]] = []
    for name, value in ordered:
        latest = cuts[-1][1] if cuts else ""
        if _names(known).fullmatch(name):
            cuts.append((len(row), name))
        elif (query and not latest) or not _NEW_NAME.fullmatch(name):
            # Nobody could tell the new name from the end of the query.
            raise InvalidSignatureError("malformed")
        row += name + value
    _check_cuts(known, row, cuts)


def check_no_form(known: Parameters, query: bytes) -> None:
    """Raise InvalidSignatureError when the query could hold the row of a form."""
    if re.search(known.required + known.values[known.required], query.decode()):
        raise InvalidSignatureError("malformed")


def _check_names(known: Parameters, values: Mapping[str, str]) -> None:
    """Refuse a form without the names that a genuine one has."""
    if not re.match(known.values[known.required], values.get(known.required, "")):
        raise InvalidSignatureError("malformed")
    texts = [name for name in known.texts if name in values]
    if len(texts) > 1 or (texts and any(name not in values for name in known.addresses)):
        raise InvalidSignatureError("malformed")
    behind = [name for name in sorted(values) if texts and name > texts[0]]
    # Every such form has an address, so nothing that a text holds can begin before one.
    if behind and behind[0] not in known.addresses:
        raise InvalidSignatureError("malformed")
    for name in behind:
        # It must begin as it is looked for, or a text could hold it unseen.
        found = _starts(known).match(name + values[name])
        is_seen = found is not None and found[1] == name
        if _names(known).fullmatch(name) and not is_seen and name not in known.addresses:
            raise InvalidSignatureError("malformed")


def _check_cuts(known: Parameters, row: str, cuts: Sequence[tuple[int, str]]) -> None:
    """Refuse a row in which a known parameter could begin elsewhere than at a cut.

    Names ascend, so behind one, or behind a text before it, none can begin that sorts before it.
    """
    offsets = [offset for offset, _ in cuts]
    text = next((name for _, name in cuts if name in known.texts), None)
    for found in _starts(known).finditer(row):
        place = bisect_right(offsets, found.start()) - 1
        offset, name = cuts[place] if place >= 0 else (-1, "")
        if (offset, name) == (found.start(), found[1]) or 0 < found.start() - offset < len(name):
            continue
        # A form has one text: the name of another can begin no parameter.
        if text is not None and found[1] in known.texts:
            continue
        if found[1] > (name if text is None else min(name, text)):
            raise InvalidSignatureError("malformed")


@lru_cache(maxsize=16)
def _names(known: Parameters) -> re.Pattern[str]:
    return re.compile("|".join(known.values))


@lru_cache(maxsize=16)
def _starts(known: Parameters) -> re.Pattern[str]:
    """Return what finds every place where a known name stands before what its value begins with."""
    longest_first = sorted(known.values, key=len, reverse=True)
    found = "|".join(f"{name}(?={known.values[name]})" for name in longest_first)
    return re.compile(f"(?=({found}))")
