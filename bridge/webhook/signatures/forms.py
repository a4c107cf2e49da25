"""Form bodies that are signed as one row of sorted names and values, with nothing between them.

Such a row can be cut in more ways than one: `Body=hi` and `From=+1555` are signed like
`Body=hiFrom+1555`, so one signature would fit forms that mean different things. Whoever has seen a
signed form, or wrote a text in one, could move the cuts. So a form is taken only when the service
could have sent no other one with the same row: each known parameter has values of a known form, so
that a text which holds a parameter's name and a value does not make a row ambiguous by itself.
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

# Of a row that holds more names, or takes more steps to read, nobody could tell in time whether it
# is ambiguous: reading one takes 30 ms at most.
MAX_PLACES: Final = 1000
MAX_STEPS: Final = 20_000


class Value(NamedTuple):
    """The values of a parameter, as patterns: how each begins, and one in its usual whole form."""

    begin: str
    whole: str


_NUMBER: Final = Value(r"[0-9]", r"[0-9]{1,10}")
_AMOUNT: Final = Value(r"[0-9]", r"[0-9]{1,6}(?:\.[0-9]{1,10})?")
_WORD: Final = Value(r"[a-z]", r"[a-z_]{1,20}")
_KIND: Final = Value(r"[a-z]", r"[a-z]+/[a-z0-9.-]{1,40}")
_LINK: Final = Value(r"https?://", r"https?://[A-Za-z0-9._/-]{1,300}")
_SID: Final = Value(r"[A-Z]{2}[0-9A-Za-z]{32}", r"[A-Z]{2}[0-9a-f]{32}")
_UUID: Final = Value(r"[0-9a-f]{8}-[0-9a-f]{4}-", r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# A telephone number, alone or as whatsapp:+15550100. The name of a sender has 11 characters.
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

    `values` has for each name, itself a pattern, what its values look like. `required` is in every
    form, and in each usual one so are `addresses`. Of `texts`, which strangers write, a form has
    one at most; it has addresses of people then.
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
    """Say whether it is the type of an HTML form's body, in whatever character set."""
    return content_type.partition(";")[0].strip().lower() == FORM


def read_form(body: bytes, content_type: str) -> list[tuple[str, str]]:
    """Read a form's names and values, each name once.

    Raises InvalidSignatureError: `missing` when the body is no form, `malformed` when it is one
    that two readers may understand differently.
    """
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
    """Raise InvalidSignatureError `ambiguous` when the row, behind this query, has another reading.

    A long row takes time to read: call this only after the signature is verified.
    """
    form = sorted(pairs)
    row = query.decode() + signed_row(form)
    # One more than is needed to know that there are several.
    readings = list(islice(_Reader(known, row, has_query=bool(query)).readings(), 2))
    if readings and (len(readings) > 1 or readings[0] != (len(query.decode()), form)):
        raise InvalidSignatureError("ambiguous")
    if not readings:
        # A name that is not known yet, or a value that is unusual.
        _check_names(known, dict(form))
        _check_cuts(known, form, query.decode())


def check_no_form(known: Parameters, query: bytes) -> None:
    """Raise InvalidSignatureError when the query could hold the row of a form."""
    if re.search(known.required + known.values[known.required].begin, query.decode()):
        raise InvalidSignatureError("malformed")


# Where a form begins in a row, and its pairs.
_Reading = tuple[int, list[tuple[str, str]]]


class _Seen(NamedTuple):
    """The parameters read so far, as far as they decide which may follow."""

    needed: frozenset[str] = frozenset()
    has_text: bool = False
    is_personal: bool = True


class _Reader:
    """Reads a row as each of the usual forms that it may be: known names with usual values.

    A value other than a text ends where the next name stands that could follow; a text may end at
    any of them.
    """

    def __init__(self, known: Parameters, row: str, *, has_query: bool) -> None:
        self._known = known
        self._row = row
        self._has_query = has_query
        self._needed = frozenset((known.required, *known.addresses))
        self._steps = 0
        # Positions without a reading, so that no position is read twice.
        self._dead: set[tuple[int, str, _Seen]] = set()
        found: dict[int, list[tuple[str, str]]] = {}
        for pattern, name in _finders(known).items():
            for place in pattern.finditer(row):
                found.setdefault(place.start(), []).append((place[1], name))
        if len(found) > MAX_PLACES:
            raise InvalidSignatureError("ambiguous")
        # Where names stand; of each the name, and its pattern.
        self._names = found
        self._places = sorted(found)
        self._behind: dict[str, list[int]] = {}

    def readings(self) -> Iterator[_Reading]:
        """Yield every reading; without a query there is only one place where a form can begin."""
        for begin in self._places if self._has_query else (0,):
            for name, pattern in self._names.get(begin, ()):
                for pairs in self._read(begin, name, pattern, _Seen()):
                    yield begin, pairs

    def _read(
        self, place: int, name: str, pattern: str, seen: _Seen
    ) -> Iterator[list[tuple[str, str]]]:
        """Yield what can be read from a name on."""
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
        """Yield what can be read behind the value of a name; nothing more, at the row's end."""
        if end == len(self._row):
            if seen.needed == self._needed:
                yield []
            return
        for following, pattern in self._names[end]:
            if following > name:
                yield from self._read(end, following, pattern, seen)

    def _ends(self, name: str, begin: int) -> Iterator[int]:
        """Yield where the value of this name may end."""
        places = self._places_behind(name)
        first = bisect_left(places, begin)
        if name in self._known.texts:
            yield from places[first:]
        elif first < len(places):
            yield places[first]
            return
        yield len(self._row)

    def _places_behind(self, name: str) -> list[int]:
        """Return the places where a name stands that could follow this one."""
        if name not in self._behind:
            self._behind[name] = [
                place
                for place in self._places
                if any(following > name for following, _ in self._names[place])
            ]
        return self._behind[name]

    def _take(self, pattern: str, value: str, seen: _Seen) -> _Seen | None:
        """Return what has been seen behind this value; None when it cannot stand here."""
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
    """Refuse a form without the names that a genuine one has."""
    if not re.match(known.values[known.required].begin, values.get(known.required, "")):
        raise InvalidSignatureError("ambiguous")
    texts = [name for name in known.texts if name in values]
    if len(texts) > 1 or (texts and any(name not in values for name in known.addresses)):
        raise InvalidSignatureError("ambiguous")
    behind = [name for name in sorted(values) if texts and name > texts[0]]
    # Every such form has an address, so nothing that a text holds can begin before one.
    if behind and behind[0] not in known.addresses:
        raise InvalidSignatureError("ambiguous")
    for name in behind:
        # It must begin as it is looked for, or a text could hold it unseen.
        found = _starts(known).match(name + values[name])
        is_seen = found is not None and found[1] == name
        if _names(known).fullmatch(name) and not is_seen and name not in known.addresses:
            raise InvalidSignatureError("ambiguous")


def _check_cuts(known: Parameters, form: Sequence[tuple[str, str]], query: str) -> None:
    """Refuse a row in which a known parameter could begin elsewhere than at a cut.

    Names ascend, so behind one, or behind a text before it, none can begin that sorts before it;
    and none that sorts behind the required one can be the first of a form.
    """
    row = query
    cuts: list[tuple[int, str]] = []
    for name, value in form:
        if _names(known).fullmatch(name):
            cuts.append((len(row), name))
        elif (query and not cuts) or not _NEW_NAME.fullmatch(name):
            # Nobody could tell the new name from the end of the query.
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
        # A form has one text: behind its name, that of another can begin no parameter.
        if text is not None and found[1] in known.texts and found.start() > text_at:
            continue
        if found[1] > (name if text is None else min(name, text)):
            raise InvalidSignatureError("ambiguous")


def _check_addresses(
    known: Parameters, row: str, cuts: Sequence[tuple[int, str]], text: tuple[int, int]
) -> None:
    """Refuse a row in which the name of an address stands again behind that address.

    Services have senders that do not begin as a number does: who is called Acme could have written
    a text that ends with an address, and would be taken for a new parameter FromAcme.
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
    """Return what finds every place where a known name stands before what its value begins with."""
    longest_first = sorted(known.values, key=len, reverse=True)
    found = "|".join(f"{name}(?={known.values[name].begin})" for name in longest_first)
    return re.compile(f"(?=({found}))")


@lru_cache(maxsize=16)
def _finders(known: Parameters) -> Mapping[re.Pattern[str], str]:
    """Return for each known name what finds every place where it stands."""
    return {re.compile(f"(?=({name}))"): name for name in known.values}
