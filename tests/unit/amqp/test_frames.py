"""Confirms alone: what the broker says of publishes, made with the client library's own frames."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.frame import marshal, unmarshal
from pamqp.header import ContentHeader

from bridge.amqp.frames import FRAME_HEADER, Confirms, Notices, publish_pieces
from bridge.amqp.properties import ClientProperties, Properties
from bridge.errors import Confirm

CHANNEL = 1
Future = asyncio.Future[Confirm]


def feed(confirms: Confirms | Notices, *frames: bytes) -> list[bool]:
    return [confirms.feed(frame[0], frame[FRAME_HEADER.size : -1]) for frame in frames]


def ack(tag: int, *, multiple: bool = False) -> bytes:
    return marshal(commands.Basic.Ack(tag, multiple), CHANNEL)


def nack(tag: int, *, multiple: bool = False) -> bytes:
    return marshal(commands.Basic.Nack(tag, multiple, False), CHANNEL)


def returned(message_id: str | None, *parts: bytes) -> list[bytes]:
    header = ContentHeader(
        body_size=sum(map(len, parts)), properties=ClientProperties(message_id=message_id)
    )
    return [
        marshal(commands.Basic.Return(312, "NO_ROUTE", "", "queue"), CHANNEL),
        marshal(header, CHANNEL),
        *(marshal(ContentBody(part), CHANNEL) for part in parts),
    ]


def said(waiting: list[Future]) -> list[Confirm | None]:
    return [one.result() if one.done() and not one.cancelled() else None for one in waiting]


def expect(confirms: Confirms, count: int) -> list[Future]:
    return [confirms.expect(str(tag)) for tag in range(1, count + 1)]


async def test_a_confirm_of_nothing_is_nothing() -> None:
    """A tag that was settled already, or was never used, changes nothing."""
    confirms = Confirms()
    waiting = expect(confirms, 2)
    feed(confirms, ack(1), nack(1), nack(1, multiple=True), ack(9), ack(1))

    assert said(waiting) == ["confirmed", None]


async def test_a_return_is_whole_before_it_counts() -> None:
    """Until the last frame of a return nothing is told, and confirms work again behind it."""
    confirms = Confirms()
    waiting = expect(confirms, 2)
    *first, last = returned("1", b"a", b"b")
    feed(confirms, *first)
    before = said(waiting)
    feed(confirms, last, ack(1), nack(2))

    assert before == [None, None]
    assert said(waiting) == ["returned", "nacked"]


async def test_a_return_that_is_interrupted_is_an_error() -> None:
    """An ack between the frames of a return is neither swallowed nor taken for an ack."""
    for cut in (1, 2):
        confirms = Confirms()
        waiting = expect(confirms, 1)
        feed(confirms, *returned("1", b"a")[:cut])
        with pytest.raises(ValueError, match="interrupted"):
            feed(confirms, ack(1))

        assert said(waiting) == [None]


@pytest.mark.parametrize("gives_up", [Future.cancel, lambda one: one.set_result("timeout")])
async def test_what_comes_too_late_is_for_nobody(gives_up: Callable[[Future], object]) -> None:
    """A late ack or return of a message that nobody waits for is nothing, and frees its place."""
    confirms = Confirms()
    waiting = expect(confirms, 3)
    for one in waiting[:2]:
        gives_up(one)
    assert confirms.unconfirmed == 3
    feed(confirms, *returned("1", b"x"), ack(1), nack(2))

    assert said(waiting[2:]) == [None]
    assert confirms.unconfirmed == 1


async def test_a_late_return_never_confirms_the_next_of_its_id() -> None:
    """Whose return it is cannot be told then: the next one is failed, and may be sent again."""
    confirms = Confirms()
    first = confirms.expect("same")
    first.set_result("timeout")
    second = confirms.expect("same")
    await asyncio.sleep(0)
    feed(confirms, *returned("same", b"x"), ack(1), ack(2))

    assert said([second]) == ["returned"]


async def test_the_next_of_an_id_outlives_the_first() -> None:
    """That the first of an id is done, which the loop tells late, does not forget the second."""
    confirms = Confirms()
    first = confirms.expect("same")
    feed(confirms, ack(1))
    second = confirms.expect("same")
    await asyncio.sleep(0)
    feed(confirms, *returned("same"), ack(2))

    assert said([first, second]) == ["confirmed", "returned"]


async def test_the_end_of_the_channel_is_told_to_all() -> None:
    """Whoever still waits learns that no confirm can come; who gave up or knows is left alone."""
    confirms = Confirms()
    waiting = expect(confirms, 4)
    waiting[1].cancel()
    waiting[2].set_result("timeout")
    feed(confirms, ack(1))
    confirms.close()

    assert said(waiting) == ["confirmed", None, "timeout", "error"]
    assert confirms.unconfirmed == 0


async def test_other_frames_are_not_taken() -> None:
    """What says nothing of a publish is the client library's, also in the midst of publishes."""
    confirms = Confirms()
    waiting = expect(confirms, 1)
    others = [
        marshal(commands.Channel.Close(404, "NOT_FOUND", 60, 40), CHANNEL),
        marshal(commands.Channel.Flow(False), CHANNEL),
        marshal(commands.Confirm.SelectOk(), CHANNEL),
        marshal(ContentHeader(body_size=1), CHANNEL),
        marshal(ContentBody(ack(1)), CHANNEL),
    ]

    assert feed(confirms, *others) == [False] * len(others)
    assert said(waiting) == [None]


class CountedWalks(dict[int, tuple[str | None, Future]]):
    """Counts how many keys are looked at."""

    looked_at = 0

    def __iter__(self) -> Iterator[int]:
        for key in super().__iter__():
            self.looked_at += 1
            yield key


async def test_many_open_ones_do_not_slow_a_multiple_down() -> None:
    """An ack looks only at what it settles, however many are open above it."""
    confirms = Confirms()
    waiting = expect(confirms, 4000)
    walks = confirms._waiting = CountedWalks(confirms._waiting)
    feed(confirms, *(ack(tag, multiple=True) for tag in range(10, 101, 10)))

    assert said(waiting[99:101]) == ["confirmed", None]
    assert walks.looked_at < 200


@dataclass
class Fate:
    """What the broker says of a message, when, and whether of all below it at once if it can."""

    told: Confirm
    place: int
    multiple: bool
    parts: list[bytes]


FATES = st.builds(
    Fate,
    st.sampled_from(["confirmed", "nacked", "returned"]),
    st.integers(0, 9),
    st.booleans(),
    st.lists(st.binary(min_size=1, max_size=3), max_size=3),
)


@given(fates=st.lists(FATES, max_size=12))
async def test_any_order_that_a_broker_may_choose(fates: list[Fate]) -> None:
    """Each learns its own, however confirms are merged and in whatever order they come."""
    confirms = Confirms()
    waiting = expect(confirms, len(fates))
    told: list[Confirm | None] = [None] * len(fates)
    unsettled = dict(enumerate(fates, 1))
    for tag, fate in sorted(unsettled.items(), key=lambda item: item[1].place):
        if tag not in unsettled:
            continue
        is_nack = fate.told == "nacked"
        below = [one for one in unsettled if one <= tag]
        alike = all((unsettled[one].told == "nacked") == is_nack for one in below)
        multiple = fate.multiple and alike
        ended = below if multiple else [tag]
        for one in ended:
            told[one - 1] = unsettled[one].told
            if unsettled[one].told == "returned":
                feed(confirms, *returned(str(one), *unsettled[one].parts))
            del unsettled[one]
        feed(confirms, (nack if is_nack else ack)(tag, multiple=multiple))
        assert said(waiting) == told

    assert told == [fate.told for fate in fates]


def test_a_connection_is_open_when_the_broker_says_so() -> None:
    """Nothing before `OpenOk` opens a connection, and the client library hears all of it too."""
    notices = Notices()
    opened = []
    for frame in (commands.Connection.Start(), commands.Connection.Tune()):
        assert feed(notices, marshal(frame, 0)) == [False]
        opened.append(notices.is_open)
    assert feed(notices, marshal(commands.Connection.OpenOk(), 0)) == [False]

    assert (opened, notices.is_open) == ([False, False], True)


def test_reasons_of_the_broker_are_heard() -> None:
    """Why it blocks the connection is told once at each change, and why it closes it is kept."""
    notices, told = Notices(), list[str | None]()
    notices.on_blocked = told.append
    blocked = marshal(commands.Connection.Blocked("low on memory"), 0)
    unblocked = marshal(commands.Connection.Unblocked(), 0)
    closed = marshal(commands.Connection.Close(530, "NOT_ALLOWED - vhost x not found", 10, 40), 0)
    before = notices.closed
    feed(notices, unblocked, blocked, blocked, unblocked, closed)

    assert told == ["low on memory", None]
    assert (before, notices.closed) == (None, (530, "NOT_ALLOWED - vhost x not found"))


def test_notices_that_are_cut_short_are_no_fault() -> None:
    """A notice without its reason is heard without one."""
    notices = Notices()
    notices.feed(1, b"\x00\x0a\x00\x3c")
    notices.feed(1, b"\x00\x0a\x00\x32\x02")

    assert notices.is_blocked
    assert notices.closed == (2, "")


# What is written, and what cannot be


@pytest.mark.parametrize(
    ("exchange", "routing_key", "is_mandatory"),
    [
        ("", "queue", True),
        ("", "amq.rabbitmq.reply-to", False),
        ("", "amq.rabbitmq.reply-to.g1h2AA==", False),
        ("events", "amq.rabbitmq.reply-to.g1h2AA==", True),
    ],
)
def test_all_but_direct_replies_are_mandatory(
    exchange: str, routing_key: str, *, is_mandatory: bool
) -> None:
    """A message that no queue takes comes back, but for a direct reply, which no queue holds."""
    _, channel, publish = unmarshal(write(exchange=exchange, routing_key=routing_key))

    assert channel == CHANNEL
    assert isinstance(publish, commands.Basic.Publish)
    assert (publish.exchange, publish.routing_key) == (exchange, routing_key)
    assert publish.mandatory is is_mandatory


def write(**changed: object) -> bytes:
    values = {"exchange": "", "routing_key": "queue", "properties": Properties()}
    given = {"body": b"", "max_payload_bytes": 100} | values | changed
    body = given.pop("body")
    return b"".join(publish_pieces(CHANNEL, body, **given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {"routing_key": "k" * 256},
        {"routing_key": "ä" * 128},
        {"routing_key": "\ud800"},
        {"exchange": "e" * 256},
        {"properties": Properties(message_type="t" * 256)},
        {"properties": Properties(message_id="i" * 256)},
        {"properties": Properties(headers={"n" * 256: 1})},
        {"properties": Properties(timestamp=datetime(1969, 12, 31, tzinfo=UTC))},
        {"properties": Properties(priority=256)},
        # The header of a message is one frame.
        {"properties": Properties(headers={"long": "x" * 100})},
    ],
    ids=[
        *("routing-key", "its-bytes", "no-unicode", "exchange", "type", "id", "header-name"),
        *("timestamp", "priority", "header-frame"),
    ],
)
def test_what_amqp_cannot_hold_is_refused(changed: dict[str, object]) -> None:
    """A text, number or header that does not fit is a ValueError, before anything is written."""
    write()
    with pytest.raises(ValueError, match=r"."):
        write(**changed)
