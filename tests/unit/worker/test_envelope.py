"""What a message's properties and headers say, and what the copies that replace it keep."""

import copy
import json
import re
import string
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.amqp.properties import (
    NAMES,
    ClientProperties,
    Properties,
    as_facts,
    write_properties,
)
from bridge.amqp.publisher import USUAL_PROPERTIES_BYTES
from bridge.errors import InvalidMessageError
from bridge.worker.copies import copy_properties, moved_properties, replayed_properties
from bridge.worker.envelope import (
    POSSIBLE_DUPLICATE,
    SCHEDULED_AT,
    Envelope,
    bare_envelope,
    read_envelope,
    read_moment,
)
from bridge.worker.fates import DeadReason, RetryReason
from bridge.worker.outcomes import Dead, Retried

NOW = 1_800_000_000.0
PUBLISHED = datetime(2027, 1, 1, tzinfo=UTC)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANARY = "Canary7"

EXPIRES_AT = "sms-bridge-expires-at"
NOT_BEFORE = "sms-bridge-not-before"
ON_UNCERTAIN = "sms-bridge-on-uncertain"
ORDERING_KEY = "sms-bridge-ordering-key"
FIRST_DELIVERED_AT = "sms-bridge-first-delivered-at"


def message(**properties: Any) -> Properties:
    return Properties(**properties)


def read(properties: Properties, *, now: float = NOW) -> Envelope:
    """Read a message's properties, as they are read at a delivery."""
    return read_envelope(properties, bare_envelope(properties, now=now))


def read_header(name: str, value: object) -> Envelope:
    return read(message(headers={name: value}))


def replaced(
    properties: Properties,
    *,
    envelope: Envelope | None = None,
    reason: DeadReason | RetryReason = "server_error",
    detail: str = "the SMS API answered 500",
    status: int | None = 500,
    code: str | None = None,
    meaning: str | None = None,
    dead: bool = False,
    max_bytes: int = USUAL_PROPERTIES_BYTES,
) -> Properties:
    return copy_properties(
        properties,
        envelope or read(properties),
        Dead(cast("DeadReason", reason), detail, status, code=code, meaning=meaning)
        if dead
        else Retried(cast("RetryReason", reason), 5, detail, status, code=code, meaning=meaning),
        queue="q",
        max_bytes=max_bytes,
    )


def headers_of(properties: Properties) -> dict[str, Any]:
    assert properties.headers is not None
    return properties.headers


# --- The key -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message_id", "key"),
    [
        ("a%2fb!~", "a%2fb!~"),
        ("x" * 255, "x" * 255),
        ("a\n\x7f b", "a%0A%7F%20b"),
        ("a/b?c=d&e+f é", "a/b?c=d&e+f%20%C3%A9"),
        ("a%20 b", "a%2520%20b"),
        ("\u00a0😀", "%C2%A0%F0%9F%98%80"),
        # Bytes that are no UTF-8 come as lone surrogates.
        ("a\udcffb", "a%FFb"),
    ],
)
def test_an_id_is_the_key_as_far_as_it_is_visible_ascii(message_id: str, key: str) -> None:
    """Any other id is percent-encoded as UTF-8, so that it can stand in a header."""
    assert read(message(message_id=message_id)).key == key


ODD_IDS = st.text(st.sampled_from("a% 2C0é"), min_size=1, max_size=8)


@given(one=ODD_IDS, other=ODD_IDS)
def test_keys_tell_any_ids_apart(one: str, other: str) -> None:
    """Ids with blanks, percent signs and what looks like an escape have one key each."""
    keys = [read(message(message_id=name)).key for name in (one, other)]

    assert (keys[0] == keys[1]) == (one == other)


@pytest.mark.parametrize(("length", "key_length"), [(42, 252), (43, 64), (127, 64)])
def test_a_key_has_at_most_255_characters(length: int, key_length: int) -> None:
    """A longer one is its SHA-256 in hexadecimal, for the same id the same."""
    keys = {read(message(message_id="é" * length)).key for _ in range(2)}

    assert {len(key) for key in keys} == {key_length}
    assert len(keys) == 1


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=80))
def test_key_is_the_same_on_every_delivery(message_id: str) -> None:
    """The same id gives the same key, of visible ASCII, on every delivery and every copy."""
    properties = message(message_id=message_id)
    key = read(properties).key

    assert read(replaced(properties)).key == key
    assert set(key) <= set(string.printable) - set(string.whitespace)


@pytest.mark.parametrize("message_id", [None, ""], ids=["none", "empty"])
def test_message_without_id_gets_a_key_of_its_own(message_id: str | None) -> None:
    """It is random, because equal words are two messages, and stays the same on copies."""
    properties = message(message_id=message_id)
    envelope = read(properties)

    assert len({read(properties).key for _ in range(100)}) == 100
    assert read(replaced(properties, envelope=envelope)).key == envelope.key


# --- Moments -------------------------------------------------------------------------------------


MOMENTS: dict[str, tuple[object, float]] = {
    "seconds": (1_900_000_000, 1_900_000_000.0),
    "fraction": (1_900_000_000.25, 1_900_000_000.25),
    "zero": (0, 0.0),
    "text": ("1900000000", 1_900_000_000.0),
    "bytes": (b"1900000000", 1_900_000_000.0),
    "AMQP timestamp": (datetime.fromtimestamp(1_900_000_000, UTC), 1_900_000_000.0),
    "RFC 3339": ("2030-03-17T17:46:40Z", 1_900_000_000.0),
    "offset": ("2030-03-17T19:46:40+02:00", 1_900_000_000.0),
    "negative offset": ("2030-03-17T12:16:40-05:30", 1_900_000_000.0),
    "nanoseconds": ("2030-03-17T17:46:40.250000000Z", 1_900_000_000.25),
    "blank for T": ("2030-03-17 17:46:40Z", 1_900_000_000.0),
    "unknown local offset": ("2030-03-17T17:46:40-00:00", 1_900_000_000.0),
}


@pytest.mark.parametrize(("value", "seconds"), MOMENTS.values(), ids=MOMENTS)
def test_moment(value: object, seconds: float) -> None:
    """Expiry and earliest time are unix seconds or RFC 3339."""
    assert read_header(EXPIRES_AT, value).expires_at == seconds
    assert read_header(NOT_BEFORE, value).not_before == seconds


NO_MOMENTS: dict[str, object] = {
    "words": f"tomorrow {CANARY}",
    "empty": "",
    "no zone": "2030-03-17T17:46:40",
    "no such day": "2030-02-30T00:00:00Z",
    "negative": -1,
    "milliseconds": 1_900_000_000_000_000,
    "infinite": float("inf"),
    "not a number": float("nan"),
    "two points": "1.2.3",
    "Arabic digits": "١٩٠٠",
    "truth": True,
    "table": {"at": 1},
    "broken bytes": b"\xff",
}


# --- Expiry --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [None, -2, 2])
def test_expiration_counts_from_the_first_delivery(hours: int | None) -> None:
    """AMQP's own expiry does not depend on the publisher's clock, which may be hours off."""
    claimed = None if hours is None else datetime.fromtimestamp(max(0, NOW + hours * 3600), UTC)
    properties = message(expiration="1500", timestamp=claimed)

    assert read(properties, now=NOW).expires_at == NOW + 1.5


@pytest.mark.parametrize(("header", "expected"), [(1, 1), (5, 2)], ids=["header", "property"])
def test_earlier_expiry_counts(header: int, expected: int) -> None:
    """With both kinds of expiry the earlier one counts."""
    properties = message(expiration="2000", headers={EXPIRES_AT: NOW + header})

    assert read(properties).expires_at == NOW + expected


@pytest.mark.parametrize("expiration", ["soon", "-1", "1.5", "1 000", "٣", "1s"])
def test_expiration_that_cannot_be_read(expiration: str) -> None:
    """An expiration that is no number makes the message invalid, and the property is named."""
    with pytest.raises(InvalidMessageError, match=r"^expiration: "):
        read(message(expiration=expiration))


def test_expiry_does_not_move() -> None:
    """An expiry without a timestamp is that of the first delivery on every later one."""
    copied = message(expiration="1500")
    for number in range(5):
        copied = replaced(copied, envelope=read(copied, now=NOW + number * 100))

    assert read(copied, now=NOW + 999).expires_at == NOW + 1.5


# --- Age -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "age_starts_at"),
    [
        (PUBLISHED, PUBLISHED.timestamp()),
        (datetime.fromtimestamp(NOW + 7200, UTC), NOW),
        (None, NOW),
    ],
    ids=["timestamp", "of the future", "none"],
)
def test_age_counts_from_the_timestamp(published: datetime | None, age_starts_at: float) -> None:
    """Without one of the past it counts from the first delivery, which copies remember."""
    properties = message(timestamp=published)
    copied = replaced(properties, envelope=read(properties, now=NOW))

    assert read(copied, now=NOW + 500).age_starts_at == age_starts_at


@pytest.mark.parametrize(
    ("seconds_ahead", "is_believed"),
    [(-60, True), (0, True), (4, True), (7200, False), (-400 * 86_400, False), (-NOW, False)],
)
def test_a_timestamp_that_cannot_be_true(seconds_ahead: float, *, is_believed: bool) -> None:
    """One of the future, of 1970 or of years ago says nothing of latency."""
    claimed = datetime.fromtimestamp(NOW + seconds_ahead, UTC)
    envelope = read(message(timestamp=claimed), now=NOW)

    assert envelope.dated_at == (claimed.timestamp() if is_believed else None)
    # Copies come later, and are judged as the first delivery was.
    copied = replaced(message(timestamp=claimed), envelope=envelope)
    assert read(copied, now=NOW + 10_000).dated_at == envelope.dated_at


# --- Other headers -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["retry", "park"])
def test_on_uncertain(value: str) -> None:
    """A message can say what is to become of it when it may have been sent."""
    assert read_header(ON_UNCERTAIN, value).on_uncertain == value


UNREADABLE: dict[str, Iterable[object]] = {
    EXPIRES_AT: NO_MOMENTS.values(),
    NOT_BEFORE: NO_MOMENTS.values(),
    ON_UNCERTAIN: ["", "RETRY", f"drop {CANARY}", 1, True, ["park"], b"\xff"],
    ORDERING_KEY: ["", 17, ["a"], True],
    "sms-bridge-attempts": ["1", -1, 1.0, True, None],
    "sms-bridge-uncertain-attempts": ["1", -1, 1.0, True, None],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in UNREADABLE.items() for value in values],
    ids=repr,
)
def test_header_that_cannot_be_read(name: str, value: object) -> None:
    """It makes the message invalid, and the header is named."""
    with pytest.raises(InvalidMessageError, match=rf"^{name}: must be "):
        read_header(name, value)


# --- Headers that nobody reads --------------------------------------------------------------------


def test_the_priority_of_earlier_releases() -> None:
    """It makes the message invalid: sent as an ordinary one, an urgent message could be late."""
    with pytest.raises(InvalidMessageError, match=r"^sms-bridge-priority: .*urgent queue"):
        read_header("sms-bridge-priority", "urgent")


MISSPELT: dict[str, str] = {
    "sms-bridge-expire-at": EXPIRES_AT,
    "SMS-Bridge-Expires-At": EXPIRES_AT,
    "sms-bridge-on-uncertian": ON_UNCERTAIN,
}


@pytest.mark.parametrize(("name", "nearest"), MISSPELT.items(), ids=MISSPELT)
def test_misspelt_header(name: str, nearest: str) -> None:
    """A header to us that nobody reads makes the message invalid; the nearest name is told."""
    with pytest.raises(InvalidMessageError) as caught:
        read_header(name, CANARY)

    assert str(caught.value) == f"{name}: is unknown; did you mean {nearest}?"


@pytest.mark.parametrize(
    "rest",
    ["", "491713920001", "ttl\n", "é", "x" * 100],
    ids=["empty", "number", "line break", "not ASCII", "long"],
)
def test_odd_header_is_not_quoted(rest: str) -> None:
    """A name that may be a number or a text itself is refused, and not told."""
    with pytest.raises(InvalidMessageError) as caught:
        read_header("sms-bridge-" + rest, 1)

    assert re.fullmatch(
        r"(sms-bridge-|a header sms-bridge-\.\.\.): is unknown; did you mean sms-bridge-[a-z-]+\?",
        str(caught.value),
    )


@pytest.mark.parametrize(
    "name", ["sms-bridge", "sms-bridgehead", "x-sms-bridge-expire-at", "smsbridge-expire-at", ""]
)
def test_header_of_others(name: str) -> None:
    """What does not begin as ours do is no affair of ours."""
    assert read_header(name, 1).expires_at is None


OF_EVENTS = ("event-id", "body-sha256", "delivery", "provider-id", "message-id", "code")


@pytest.mark.parametrize("name", OF_EVENTS)
def test_header_that_is_ours_elsewhere(name: str) -> None:
    """Who passes on the headers of an inbound event, or of another service's shape, may."""
    assert read_header(f"sms-bridge-{name}", "x").key


def test_retry_copy_of_another_version() -> None:
    """A copy from the ladder is not refused for what another version of the bridge wrote there."""
    copied = replaced(message())
    copied.headers = headers_of(copied) | {"sms-bridge-of-tomorrow": 1}

    assert read(copied).attempts == 0


@pytest.mark.parametrize("move", [replayed_properties, Properties.copy], ids=["replay", "shovel"])
def test_misspelt_dead_letter_that_is_moved_back(
    move: Callable[[Properties], Properties],
) -> None:
    """A misspelt expiry is as wrong when its dead letter is moved back to the queue."""
    properties = message(headers={"sms-bridge-expire-at": NOW + 1})
    envelope = bare_envelope(properties, now=NOW)
    letter = replaced(properties, envelope=envelope, reason="invalid", status=None, dead=True)

    with pytest.raises(InvalidMessageError, match=f"did you mean {EXPIRES_AT}"):
        read(move(letter))


@pytest.mark.parametrize("move", [replayed_properties, Properties.copy], ids=["replay", "shovel"])
def test_dead_letter_that_is_moved_back_is_known(
    move: Callable[[Properties], Properties],
) -> None:
    """What the bridge wrote on a dead letter is no unknown header when it is moved back."""
    own = {EXPIRES_AT: NOW, NOT_BEFORE: NOW, ON_UNCERTAIN: "park", ORDERING_KEY: "k"}
    letter = replaced(replaced(message(headers=own)), dead=True)

    assert read(move(letter)).on_uncertain == "park"


def test_dead_letter_can_go_back_to_an_older_version() -> None:
    """An older version refuses headers of our prefix that it does not know."""
    known = (
        *("reason", "detail", "attempts", "uncertain-attempts", "first-delivered-at", "copies"),
        *("expires-at", "scheduled-at", "status", "code", "dead-at", "queue", "earlier-span"),
        "possible-duplicate",
    )
    properties = message(message_id="m", headers={EXPIRES_AT: NOW})
    envelope = read(properties)._replace(scheduled_at=NOW, has_been_copied=True)
    outcome = Dead("uncertain", "the SMS API answered 500", 500, code="c")
    letter = copy_properties(
        properties,
        envelope,
        outcome,
        queue="q",
        max_bytes=USUAL_PROPERTIES_BYTES,
        span=(("traceparent", TRACEPARENT),),
    )
    ours = {name for name in headers_of(letter) if name.startswith("sms-bridge-")}

    assert TRACEPARENT in headers_of(letter).values()
    assert ours == {f"sms-bridge-{name}" for name in known}


@pytest.mark.parametrize("value", [1_900_000_000_000, "1900000000000", 1.9e12], ids=repr)
@pytest.mark.parametrize("header", [EXPIRES_AT, NOT_BEFORE])
def test_moment_in_milliseconds_is_told(header: str, value: object) -> None:
    """A moment that looks like milliseconds is refused with that hint."""
    with pytest.raises(InvalidMessageError, match=f"^{header}: .* looks like milliseconds$"):
        read_header(header, value)


HEADER_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=10)
    | st.binary(max_size=10)
    | st.datetimes(timezones=st.just(UTC))
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)
OUR_HEADERS = st.sampled_from(
    [
        *(EXPIRES_AT, NOT_BEFORE, ON_UNCERTAIN, ORDERING_KEY, FIRST_DELIVERED_AT),
        *("sms-bridge-attempts", "sms-bridge-uncertain-attempts", "sms-bridge-copies"),
        *("sms-bridge-dead-at", "sms-bridge-status", "traceparent", "tracestate", "x-death"),
    ]
)
ANY_HEADERS = st.dictionaries(OUR_HEADERS, HEADER_VALUES)


@given(headers=ANY_HEADERS)
def test_any_headers_can_be_settled(headers: dict[str, Any]) -> None:
    """Whatever the headers hold, enough is known of the message to dead-letter it."""
    properties = message(headers=headers)
    envelope = bare_envelope(properties, now=NOW)

    assert replaced(properties, envelope=envelope, reason="invalid", dead=True).headers


@given(value=st.text(min_size=3, max_size=10).map(lambda text: CANARY + text))
@pytest.mark.parametrize("name", [EXPIRES_AT, NOT_BEFORE, ON_UNCERTAIN])
def test_refusal_holds_no_value(name: str, value: str) -> None:
    """The refusal names the header and never what stands in it."""
    with pytest.raises(InvalidMessageError) as caught:
        read_header(name, value)

    assert CANARY not in str(caught.value)


# --- Trace ---------------------------------------------------------------------------------------


def test_trace_stays_on_copies() -> None:
    """A retry belongs to the same trace."""
    copied = replaced(message(headers={"traceparent": TRACEPARENT, "tracestate": "a=1"}))

    assert dict(read(copied).trace) == {"traceparent": TRACEPARENT, "tracestate": "a=1"}


def test_broken_trace_is_no_fault_of_the_message() -> None:
    """A broken trace header does not keep a message from being sent."""
    assert read_header("traceparent", "broken").trace == ()


# --- Copies --------------------------------------------------------------------------------------

KEPT: dict[str, object] = {
    "content_type": "application/json",
    "content_encoding": "utf-8",
    "priority": 5,
    "correlation_id": "c-1",
    "reply_to": "replies",
    "message_id": "m-1",
    "timestamp": PUBLISHED,
    "message_type": "request",
    "app_id": "shop",
}


@pytest.mark.parametrize("dead", [False, True], ids=["retry", "dead"])
def test_copy_has_what_the_publisher_set(*, dead: bool) -> None:
    """A copy has the properties of the original, and its headers of any type."""
    own = {"tenant": "t-1", "x-number": 5, "nested": {"a": [1, 2]}, "none": None}
    copied = replaced(message(**KEPT, headers=own), dead=dead)

    assert {name: getattr(copied, name) for name in KEPT} == KEPT
    assert {name: headers_of(copied)[name] for name in own} == own


def test_headers_to_us_go_last() -> None:
    """Before a header that speaks to the bridge, every other one is left out."""
    own = {"tenant": ["é" * 100, b"\xff"], ORDERING_KEY: "x" * 1000, ON_UNCERTAIN: "park"}
    copied = replaced(message(headers=own))
    fits = len(write_properties(copied))
    left = [
        {name for name in own if name in headers_of(replaced(message(headers=own), max_bytes=most))}
        for most in (fits, fits - 1, fits - 300)
    ]

    assert left == [{*own}, {ORDERING_KEY, ON_UNCERTAIN}, {ON_UNCERTAIN}]


LONGEST: dict[str, Any] = {
    name: "x" * 255
    for name in NAMES
    # No client may set a cluster's id.
    if ClientProperties.amqp_type(name) == "shortstr" and name not in {"expiration", "cluster_id"}
}


@given(
    headers=st.dictionaries(st.text(max_size=30), st.text(max_size=3000), max_size=5),
    ordering_key=st.text(min_size=1, max_size=9000),
)
def test_copy_fits_the_smallest_frame(headers: dict[str, Any], ordering_key: str) -> None:
    """Whatever a message brings, its copy fits a frame of 4,096 bytes, the least in AMQP."""
    most = 4096 - 8 - 12
    own = {**headers, ORDERING_KEY: ordering_key, EXPIRES_AT: NOW + 1}
    properties = message(headers=own, **LONGEST, timestamp=PUBLISHED, priority=1)
    copied = replaced(
        properties,
        envelope=bare_envelope(properties, now=NOW)._replace(expires_at=NOW + 1),
        detail="x" * 600,
        dead=True,
        max_bytes=most,
    )

    assert len(write_properties(copied)) <= most
    assert headers_of(copied)["sms-bridge-reason"] == "server_error"


@pytest.mark.parametrize("name", ["user_id", "expiration"])
@pytest.mark.parametrize("dead", [False, True], ids=["retry", "dead"])
def test_property_that_would_hurt_is_dropped(name: str, *, dead: bool) -> None:
    """A copy lacks the properties with which the broker would refuse or drop it."""
    assert getattr(replaced(message(**{name: "100"}), dead=dead), name) is None


OF_THE_BROKER = (
    *("CC", "BCC", "x-death", "x-first-death-queue", "x-last-death-reason", "x-delivery-count"),
    *("x-acquired-count", "x-received-from", "x-original-cc", "x-shovelled", "x-invalid-headers"),
    *("x-opt-deaths", "x-stream-filter-value"),
)


@pytest.mark.parametrize("copied", [replaced, partial(replaced, dead=True), moved_properties])
def test_headers_that_the_broker_reads_are_dropped(
    copied: Callable[[Properties], Properties],
) -> None:
    """No copy has a header by which the broker would route it, or describes its history."""
    theirs = dict.fromkeys(OF_THE_BROKER, "other")
    headers = headers_of(copied(message(headers=theirs | {"x-own": 1, "cc": 1})))

    assert {*OF_THE_BROKER, "x-own", "cc"} & set(headers) == {"x-own", "cc"}


@pytest.mark.parametrize(
    ("reply_to", "kept"),
    [("amq.rabbitmq.reply-to", None), ("amq.rabbitmq.reply-to.g2dk", "amq.rabbitmq.reply-to.g2dk")],
)
def test_direct_reply_that_the_broker_refuses_is_dropped(reply_to: str, kept: str | None) -> None:
    """The bare name of a direct reply closes the channel of a copy; an address behind it stays."""
    assert replaced(message(reply_to=reply_to)).reply_to == kept


@pytest.mark.parametrize("mode", [None, 1, 2])
def test_copy_is_persistent(mode: int | None) -> None:
    """A copy survives a restart of the broker, whatever the original did."""
    assert replaced(message(delivery_mode=mode)).delivery_mode == 2


def test_original_is_not_changed() -> None:
    """The properties of the delivery stay as they are; it may have to be copied again."""
    properties = message(
        message_id="m", user_id="u", expiration="5", delivery_mode=1, headers={"CC": ["a"], "b": 1}
    )
    before = copy.deepcopy(as_facts(properties))
    replaced(properties, dead=True)

    assert as_facts(properties) == before


def test_error_code_goes_with_its_status() -> None:
    """A copy has code and meaning of the last answer: none of an earlier one, and no second."""
    first = replaced(message(), status=429, code="20429", meaning="too many requests")
    unanswered = replaced(first, status=None)
    other = replaced(first, status=400, code="21211")
    without = replaced(first, status=500)
    said = [
        tuple(headers_of(copy).get(f"sms-bridge-{name}") for name in ("code", "meaning"))
        for copy in (first, unanswered, other, without)
    ]
    full = ("20429", "too many requests")

    assert said == [full, full, ("21211", None), (None, None)]


OF_THE_BRIDGE = ("status", "meaning", *OF_EVENTS)


@pytest.mark.parametrize("dead", [False, True], ids=["retry", "dead"])
@pytest.mark.parametrize("status", [None, 500])
def test_no_publisher_speaks_for_the_service(status: int | None, *, dead: bool) -> None:
    """A header of the bridge's own that a publisher wrote is on none of the copies."""
    forged = {f"sms-bridge-{name}": "of a publisher" for name in OF_THE_BRIDGE}
    headers = headers_of(replaced(message(headers=forged | {"x-own": 1}), status=status, dead=dead))

    assert "of a publisher" not in headers.values()
    assert headers["x-own"] == 1


def test_dead_letter_that_is_moved_back_forgets_its_last_answer() -> None:
    """In its new life it has no status and no code until there is an answer again."""
    letter = replaced(message(), status=400, code="21211", meaning="no number", dead=True)
    headers = headers_of(replaced(letter, status=None))

    assert {"sms-bridge-status", "sms-bridge-code", "sms-bridge-meaning"}.isdisjoint(headers)


def test_copy_counts() -> None:
    """A copy remembers the attempts that its envelope counts."""
    envelope = read(message())._replace(attempts=3, uncertain_attempts=2)
    later = read(replaced(message(), envelope=envelope))

    assert (later.attempts, later.uncertain_attempts) == (3, 2)


def test_a_mark_of_a_repeated_copy_is_of_that_copy_alone() -> None:
    """The copy after it is another one; so is what an operator sends again."""
    marked = replaced(message(), envelope=read(message())._replace(has_been_copied=True))
    after = replaced(marked, envelope=read(marked))

    assert (marked.headers or {})[POSSIBLE_DUPLICATE] is True
    assert POSSIBLE_DUPLICATE not in (after.headers or {})
    assert POSSIBLE_DUPLICATE not in (replayed_properties(marked).headers or {})


def test_copy_keeps_the_time_of_its_turn() -> None:
    """The time that the limit of its sender gave it stays with a message, until it is settled."""
    envelope = read(message())._replace(scheduled_at=NOW + 90)
    waiting = replaced(message(), envelope=envelope)
    gone = replaced(waiting, envelope=read(waiting)._replace(scheduled_at=None))

    assert (read(waiting).scheduled_at, read(gone).scheduled_at) == (NOW + 90, None)
    assert SCHEDULED_AT not in (replayed_properties(waiting).headers or {})


def test_copies_are_told_apart() -> None:
    """Each copy of a message has the next number."""
    first = message(message_id="m")
    second = replaced(first)

    assert [read(properties).copies for properties in (first, second, replaced(second))] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize("length", [500, 501])
def test_detail_is_cut(length: int) -> None:
    """A detail has at most 500 characters."""
    copied = replaced(message(), detail="é" * length)

    assert headers_of(copied)["sms-bridge-detail"] == "é" * min(length, 500)


def test_hundred_copies_do_not_grow() -> None:
    """The headers of the hundredth copy are no more and no longer than those of the first."""
    properties = message(message_id="m", expiration="900000000", headers={"tenant": "t"})
    first = replaced(properties)
    last = first
    for _ in range(99):
        last = replaced(last)
    names, size = set(headers_of(last)), len(json.dumps(last.headers))

    assert names == set(headers_of(first))
    assert size <= len(json.dumps(first.headers)) + 10


@given(
    headers=ANY_HEADERS,
    expiration=st.none() | st.integers(0, 10**11).map(str) | st.text(max_size=8),
)
def test_what_can_be_read_can_be_read_again(
    headers: dict[str, Any], expiration: str | None
) -> None:
    """Any headers make an envelope or an invalid message; its copy is as valid as it is."""
    properties = message(headers=headers, expiration=expiration, message_id="m")
    try:
        envelope = read(properties)
    except InvalidMessageError:
        return
    again = read(replaced(properties, envelope=envelope))

    assert [again.expires_at, again.not_before] == pytest.approx(
        [envelope.expires_at, envelope.not_before], abs=0.001
    )


# --- Dead letters that come back -----------------------------------------------------------------


def test_moved_message_keeps_what_does_no_harm() -> None:
    """What is published again as it is loses what would refuse, drop or reroute it."""
    moved = moved_properties(
        message(
            message_id="m",
            user_id="u",
            expiration="60000",
            delivery_mode=1,
            headers={
                "CC": ["a"],
                "BCC": ["b"],
                "x-delivery-count": 3,
                "tenant": "t",
                "sms-bridge-reason": "refused",
            },
        )
    )
    headers = dict(headers_of(moved))
    expires_at = read_header(EXPIRES_AT, headers.pop(EXPIRES_AT)).expires_at

    assert (moved.user_id, moved.expiration) == (None, None)
    assert (moved.message_id, moved.delivery_mode) == ("m", 2)
    assert headers == {"tenant": "t", "sms-bridge-reason": "refused"}
    assert expires_at == pytest.approx(time.time() + 60, abs=30)


@pytest.mark.parametrize("header", [1_000_000_000, "soon"])
def test_moved_message_keeps_its_header_of_the_expiry(header: object) -> None:
    """An earlier time stays, and so does text that makes the message invalid."""
    kept = moved_properties(message(expiration="60000", headers={EXPIRES_AT: header}))

    assert headers_of(kept) == {EXPIRES_AT: header}


def test_moved_message_keeps_the_earlier_expiry() -> None:
    """The property wins over a header with a later time, as it does when the message is sent."""
    in_an_hour = time.time() + 3600
    moved = moved_properties(message(expiration="60000", headers={EXPIRES_AT: in_an_hour}))
    expires_at = read_header(EXPIRES_AT, headers_of(moved)[EXPIRES_AT]).expires_at

    assert expires_at == pytest.approx(time.time() + 60, abs=30)
    assert headers_of(moved_properties(message())) == {}


@pytest.mark.parametrize(
    ("headers", "moment"),
    [({"at": NOW}, NOW), ({"at": "soon"}, None), ({}, None)],
    ids=["moment", "no moment", "missing"],
)
def test_moment_for_people(headers: dict[str, Any], moment: float | None) -> None:
    """Whoever looks at a dead letter gets its moments, or none where they cannot be read."""
    assert read_moment(headers, "at") == moment


def moved_back() -> Properties:
    """Make a message that died after six attempts and was moved back by hand."""
    envelope = Envelope(
        key="m",
        message_id="m",
        published_at=None,
        first_delivered_at=NOW,
        attempts=6,
        uncertain_attempts=3,
        copies=5,
    )
    return replaced(message(message_id="m"), envelope=envelope, reason="exhausted", dead=True)


def test_dead_letter_that_is_moved_back_starts_anew() -> None:
    """A dead letter that somebody moves back has all its attempts again, with the same key."""
    again = read(moved_back(), now=NOW + 500)

    assert (again.key, again.attempts, again.uncertain_attempts) == ("m", 0, 0)
    assert again.first_delivered_at == NOW + 500
    # The deduplicator tells the copy from the letter by it.
    assert again.copies == 6


def test_retry_of_a_moved_letter_is_no_dead_letter() -> None:
    """The next copy of a letter that was moved back counts on, and does not start anew again."""
    properties = moved_back()
    envelope = read(properties)
    copied = replaced(properties, envelope=envelope._replace(attempts=1))

    assert read(copied).attempts == 1


def test_moved_letter_with_spoilt_counts_starts_anew() -> None:
    """What an operator's tool did to the old counts does not matter."""
    properties = moved_back()
    headers_of(properties)["sms-bridge-attempts"] = "6"

    assert read(properties).attempts == 0
