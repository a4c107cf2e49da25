"""Reads form bodies that are signed as a row: their sorted names and values, concatenated.

The row has no separators, so forms with different meanings can have the same row and the same
signature: the parameters `Body=hi` and `From=+1555` make the same row as the one parameter
`Body=hiFrom+1555`. An attacker with a signed form, or with a text of theirs in one, could split the
row differently. Therefore a form is
accepted only if the service could have sent no other form with the same row. The values of each
known parameter have a known pattern, so a text that contains the name and value of a parameter does
not by itself make a row ambiguous.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple
from urllib.parse import parse_qsl

from bridge.errors import InvalidSignatureError

# More than any of these services sends, even with ten media files.
MAX_PARAMETERS: Final = 200
# Three times the longest text with all bytes percent-encoded. A form is decoded before its
# signature is checked, and decoding this many bytes blocks the event loop for about 10 ms.
MAX_SIGNED_FORM_BYTES: Final = 65536

FORM: Final = "application/x-www-form-urlencoded"
# A percent sign without two hex digits (RFC 3986, 2.1): decoders differ about it.
_LOOSE_PERCENT: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
# The form of a parameter name that is not known yet.
_NEW_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

# A row with more names, or with more steps to read, counts as ambiguous. These limits bound the
# time to read a row to 30 ms.
MAX_PLACES: Final = 1000
MAX_STEPS: Final = 20_000


class Value(NamedTuple):
    """Patterns of a parameter's values: how each value begins, and the usual whole value."""

    begin: str
    whole: str


_NUMBER: Final = Value(r"[0-9]", r"[0-9]{1,10}")
_AMOUNT: Final = Value(r"[0-9]", r"[0-9]{1,6}(?:\.[0-9]{1,10})?")
_WORD: Final = Value(r"[a-z]", r"[a-z_]{1,20}")
_KIND: Final = Value(r"[a-z]", r"[a-z]+/[a-z0-9.-]{1,40}")
_LINK: Final = Value(r"https?://", r"https?://[A-Za-z0-9._/-]{1,300}")
_SID: Final = Value(r"[A-Z]{2}[0-9A-Za-z]{32}", r"[A-Z]{2}[0-9a-f]{32}")
_UUID: Final = Value(r"[0-9a-f]{8}-[0-9a-f]{4}-", r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# A phone number, alone or as in whatsapp:+15550100. A sender's name has at most 11 characters.
_PERSON: Final = r"(?:[a-z]+:)?\+?[0-9]{3,15}"
_ADDRESS: Final = Value(
    r"(?:[a-z]+:)?(?:\+[0-9]{3}|[0-9]{5})", rf"{_PERSON}|[A-Za-z0-9][A-Za-z0-9 _-]{{0,10}}"
)
_PLACE: Final = Value("", r"[^0-9+:\x00-\x1f]{0,60}")
_COUNTRY: Final = Value("", r"(?:[A-Z]{2})?")
_POSTCODE: Final = Value("", r"[0-9A-Z -]{0,12}")
_TEXT: Final = Value("", "(?s:.*)")


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """The parameters that a service is known to send.

    `values` maps each name, itself a pattern, to the patterns of its values. Every form has the
    parameter `required`, and a usual form also has all `addresses`. `texts` are written by
    strangers. A form has at most one of them, and then its addresses are phone numbers.
    """

    required: str
    values: Mapping[str, Value]
    texts: Collection[str]
    addresses: Collection[str] = ("From", "To")


# https://www.twilio.com/docs/messaging/guides/webhook-request
TWILIO: Final = Parameters(
    required="AccountSid",
    values=MappingProxyType(
        {
            "AccountSid": _SID,
            "ApiVersion": Value("[0-9]", r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
            "Body": _TEXT,
            "ErrorCode": _NUMBER,
            "From": _ADDRESS,
            "FromCity": _PLACE,
            "FromCountry": _COUNTRY,
            "FromState": _PLACE,
            "FromZip": _POSTCODE,
            "MediaContentType[0-9]+": _KIND,
            "MediaUrl[0-9]+": _LINK,
            "MessageSid": _SID,
            "MessageStatus": _WORD,
            "MessagingServiceSid": _SID,
            "NumMedia": _NUMBER,
            "NumSegments": _NUMBER,
            "OptOutType": Value(r"(?:HELP|START|STOP)", r"(?:HELP|START|STOP)"),
            "RawDlrDoneDate": _NUMBER,
            "SmsMessageSid": _SID,
            "SmsSid": _SID,
            "SmsStatus": _WORD,
            "To": _ADDRESS,
            "ToCity": _PLACE,
            "ToCountry": _COUNTRY,
            "ToState": _PLACE,
            "ToZip": _POSTCODE,
        }
    ),
    texts=frozenset({"Body"}),
)
_PLIVO_STATUS: Final = r"(?:queued|sent|failed|delivered|undelivered|read)"
_PLIVO_TYPE: Final = r"(?:sms|mms|whatsapp)"
# https://docs.plivo.com/docs/messaging/api/message/handling-incoming
# https://docs.plivo.com/docs/messaging/api/message/message-status-callbacks
PLIVO: Final = Parameters(
    required="MessageUUID",
    values=MappingProxyType(
        {
            "Body": _TEXT,
            "ErrorCode": _NUMBER,
            "From": _ADDRESS,
            "MCC": _NUMBER,
            "MNC": _NUMBER,
            "Media[0-9]+": _LINK,
            "MediaCount": _NUMBER,
            "MessageUUID": _UUID,
            "ParentMessageUUID": _UUID,
            "PowerpackUUID": Value("", rf"(?:{_UUID.whole})?"),
            "Sequence": _NUMBER,
            "Status": Value(_PLIVO_STATUS, _PLIVO_STATUS),
            "Text": _TEXT,
            "To": _ADDRESS,
            "TotalAmount": _AMOUNT,
            "TotalRate": _AMOUNT,
            "Type": Value(_PLIVO_TYPE, _PLIVO_TYPE),
            "Units": _NUMBER,
            "requester_ip": Value(r"[0-9a-f]", r"[0-9a-f.:]{3,45}"),
        }
    ),
    texts=frozenset({"Body", "Text"}),
)


def is_form_type(content_type: str) -> bool:
    """Whether a content type is that of an HTML form, in any character set."""
    return content_type.partition(";")[0].strip().lower() == FORM


def read_form(body: bytes, content_type: str) -> list[tuple[str, str]]:
    """Parse a form into names and values; each name must occur once.

    Raises InvalidSignatureError: `missing` if the body is not a form, `malformed` if two parsers
    may read it differently.
    """
    if not is_form_type(content_type):
        raise InvalidSignatureError("missing")
    # In another character set, the decoded values would differ from the signed ones.
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
    """Return the signed row: sorted names and values, concatenated."""
    return "".join(name + value for name, value in sorted(pairs))


def check_row(known: Parameters, pairs: Sequence[tuple[str, str]], query: bytes) -> None:
    """Raise InvalidSignatureError `ambiguous` if the row, after this query, has another reading.

    Reading a long row takes time: call this only after the signature is verified.
    """
    form = sorted(pairs)
    row = query.decode() + signed_row(form)
    # Two readings suffice to show that the row is ambiguous.
    readings = list(islice(_RowReader(known, row, has_query=bool(query)).readings(), 2))
    if readings and (len(readings) > 1 or readings[0] != (len(query.decode()), form)):
        raise InvalidSignatureError("ambiguous")
    if not readings:
        # The form has an unknown name or an unusual value.
        _check_names(known, dict(form))
        _check_cuts(known, form, query.decode())


def check_no_form(known: Parameters, query: bytes) -> None:
    """Raise InvalidSignatureError if the query could contain the row of a form."""
    if re.search(known.required + known.values[known.required].begin, query.decode()):
        raise InvalidSignatureError("malformed")


# The position at which a form begins in a row, and its pairs.
_Reading = tuple[int, list[tuple[str, str]]]


class _Seen(NamedTuple):
    """State of the parameters read so far, which decides what may follow."""

    needed: frozenset[str] = frozenset()
    has_text: bool = False
    is_personal: bool = True


class _RowReader:
    """Reads a row as every usual form that it may be: known names with usual values.

    A text may end at any later position of a name that could follow it; another value ends at the
    first of these positions.
    """

    def __init__(self, known: Parameters, row: str, *, has_query: bool) -> None:
        self._known = known
        self._row = row
        self._has_query = has_query
        self._needed = frozenset((known.required, *known.addresses))
        self._steps = 0
        # States that lead to no reading, so that none is tried twice.
        self._dead: set[tuple[int, str, _Seen]] = set()
        found: dict[int, list[tuple[str, str]]] = {}
        for pattern, name in _finders(known).items():
            for place in pattern.finditer(row):
                found.setdefault(place.start(), []).append((place[1], name))
        if len(found) > MAX_PLACES:
            raise InvalidSignatureError("ambiguous")
        # By position in the row, the known names found there, each with its pattern.
        self._names = found
        self._places = sorted(found)
        self._behind: dict[str, list[int]] = {}

    def readings(self) -> Iterator[_Reading]:
        """Yield every reading; without a query, a form can begin only at the start of the row."""
        for begin in self._places if self._has_query else (0,):
            for name, pattern in self._names.get(begin, ()):
                for pairs in self._read(begin, name, pattern, _Seen()):
                    yield begin, pairs

    def _read(
        self, place: int, name: str, pattern: str, seen: _Seen
    ) -> Iterator[list[tuple[str, str]]]:
        """Yield every list of pairs that can be read from this name to the end of the row."""
        state = (place, name, seen)
        if state in self._dead:
            return
        has_any = False
        begin = place + len(name)
        for end in self._ends(name, begin):
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise InvalidSignatureError("ambiguous")
            value = self._row[begin:end]
            after = self._take(pattern, value, seen)
            for rest in () if after is None else self._follow(name, end, after):
                has_any = True
                yield [(name, value), *rest]
        if not has_any:
            self._dead.add(state)

    def _follow(self, name: str, end: int, seen: _Seen) -> Iterator[list[tuple[str, str]]]:
        """Yield every list of pairs that can follow a value; an empty one at the row's end."""
        if end == len(self._row):
            if seen.needed == self._needed:
                yield []
            return
        for following, pattern in self._names[end]:
            if following > name:
                yield from self._read(end, following, pattern, seen)

    def _ends(self, name: str, begin: int) -> Iterator[int]:
        """Yield the positions at which the value of this name may end."""
        places = self._places_behind(name)
        first = bisect_left(places, begin)
        if name in self._known.texts:
            yield from places[first:]
        elif first < len(places):
            yield places[first]
            return
        yield len(self._row)

    def _places_behind(self, name: str) -> list[int]:
        """Return the positions of all names that could follow this one."""
        if name not in self._behind:
            self._behind[name] = [
                place
                for place in self._places
                if any(following > name for following, _ in self._names[place])
            ]
        return self._behind[name]

    def _take(self, pattern: str, value: str, seen: _Seen) -> _Seen | None:
        """Return the state after this value; None if the value is not possible here."""
        known = self._known
        is_text, is_address = pattern in known.texts, pattern in known.addresses
        if is_text and (seen.has_text or not seen.is_personal):
            return None
        if not is_text and not re.fullmatch(known.values[pattern].whole, value):
            return None
        is_personal = seen.is_personal
        if is_address and not re.fullmatch(_PERSON, value):
            if seen.has_text:
                return None
            is_personal = False
        needed = seen.needed | {pattern} if pattern in self._needed else seen.needed
        return _Seen(needed, seen.has_text or is_text, is_personal)


def _check_names(known: Parameters, values: Mapping[str, str]) -> None:
    """Refuse a form whose parameters differ from those of any genuine form."""
    if not re.match(known.values[known.required].begin, values.get(known.required, "")):
        raise InvalidSignatureError("ambiguous")
    texts = [name for name in known.texts if name in values]
    if len(texts) > 1 or (texts and any(name not in values for name in known.addresses)):
        raise InvalidSignatureError("ambiguous")
    behind = [name for name in sorted(values) if texts and name > texts[0]]
    # A form with a text also has addresses. A parameter between the text and the first address
    # could be a part of the text.
    if behind and behind[0] not in known.addresses:
        raise InvalidSignatureError("ambiguous")
    for name in behind:
        # The value must begin with its pattern; otherwise the search for names would also miss this
        # parameter inside a text.
        found = _starts(known).match(name + values[name])
        is_seen = found is not None and found[1] == name
        if _names(known).fullmatch(name) and not is_seen and name not in known.addresses:
            raise InvalidSignatureError("ambiguous")


def _check_cuts(known: Parameters, form: Sequence[tuple[str, str]], query: str) -> None:
    """Refuse a row in which a known parameter could also begin at another position.

    A cut is a position at which a known parameter of the form begins: `BodyhiFrom+15550100`, the
    row of `Body=hi` and `From=+15550100`, has the cuts 0 (`Body`) and 6 (`From`).

    The names in a row are sorted. No parameter can begin after a name, or after a text before that
    name, if it sorts before it. The first parameter of a form cannot sort after the required one.
    """
    row = query
    cuts: list[tuple[int, str]] = []
    for name, value in form:
        if _names(known).fullmatch(name):
            cuts.append((len(row), name))
        elif (query and not cuts) or not _NEW_NAME.fullmatch(name):
            # The new name could not be separated from the end of the query.
            raise InvalidSignatureError("ambiguous")
        row += name + value
    offsets = [offset for offset, _ in cuts]
    text_at, text = next(((at, name) for at, name in cuts if name in known.texts), (-1, None))
    if text is not None:
        _check_addresses(known, row, cuts, (text_at, text_at + len(text + dict(form)[text])))
    for found in _starts(known).finditer(row):
        place = bisect_right(offsets, found.start()) - 1
        offset, name = cuts[place] if place >= 0 else (-1, "")
        if (offset, name) == (found.start(), found[1]) or 0 < found.start() - offset < len(name):
            continue
        if found.start() < len(query) and found[1] > known.required:
            continue
        # A form has only one text, so the name of another text cannot begin a parameter after it.
        if text is not None and found[1] in known.texts and found.start() > text_at:
            continue
        if found[1] > (name if text is None else min(name, text)):
            raise InvalidSignatureError("ambiguous")


def _check_addresses(
    known: Parameters, row: str, cuts: Sequence[tuple[int, str]], text: tuple[int, int]
) -> None:
    """Refuse a row in which the name of an address occurs again after that address.

    Some senders are names, which do not begin like a number. A sender named Acme could write a text
    that ends with an address, so that the real sender would be read as a new parameter FromAcme.
    """
    offsets = {offset for offset, _ in cuts}
    begin, end = text
    for offset, name in cuts:
        if name in known.addresses:
            for place in re.finditer(name, row[offset + 1 :]):
                again = offset + 1 + place.start()
                if again not in offsets and not begin < again < end:
                    raise InvalidSignatureError("ambiguous")


@lru_cache(maxsize=16)
def _names(known: Parameters) -> re.Pattern[str]:
    return re.compile("|".join(known.values))


@lru_cache(maxsize=16)
def _starts(known: Parameters) -> re.Pattern[str]:
    """Return a pattern that finds each known name which is followed by the start of its value."""
    longest_first = sorted(known.values, key=len, reverse=True)
    found = "|".join(f"{name}(?={known.values[name].begin})" for name in longest_first)
    return re.compile(f"(?=({found}))")


@lru_cache(maxsize=16)
def _finders(known: Parameters) -> Mapping[re.Pattern[str], str]:
    """Return, for each known name, a pattern that finds all its positions."""
    return {re.compile(f"(?=({name}))"): name for name in known.values}
