"""The publisher without a network: on a wire whose far end is in the test's hands."""

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.frame import marshal, unmarshal
from pamqp.header import ContentHeader

from bridge.amqp import publication
from bridge.amqp.client import Connection
from bridge.amqp.frames import LARGE_BODY_BYTES
from bridge.amqp.properties import ClientProperties, Properties
from bridge.amqp.publication import Publication
from bridge.amqp.publisher import MAX_UNCONFIRMED, MAX_UNWRITTEN_BYTES, Publisher
from bridge.amqp.wire import Demultiplexer, Wire
from bridge.errors import BrokerError, Confirm, PublishError
from bridge.telemetry.metrics import BridgeMetrics, new_registry

CHANNEL = 1
# So long is waited for what comes at once, and so short for what never comes.
GUARD_SECONDS = 60.0
SHORT_SECONDS = 0.01
FRAME_PAYLOAD_BYTES = 4088


@dataclass
class Written:
    """A publish as the broker reads it; its tag is its place in the channel."""

    tag: int
    routing_key: str
    message_id: str | None
    size: int
    body: bytes = b""


class Transport:
    """Where a connection writes to; reads publishes as a broker does."""

    def __init__(self) -> None:
        self.published: list[Written] = []
        self.unwritten_bytes = 0
        self.closing = False
        self._arrived = asyncio.Event()

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.unwritten_bytes

    def write(self, data: bytes) -> None:
        while data:
            used, _, frame = unmarshal(data)
            data = data[used:]
            if isinstance(frame, commands.Basic.Publish):
                assert frame.mandatory
                self.published.append(Written(len(self.published) + 1, frame.routing_key, None, 0))
            elif isinstance(frame, ContentHeader):
                self.published[-1].size = frame.body_size
                self.published[-1].message_id = frame.properties.message_id
            elif isinstance(frame, ContentBody):
                self.published[-1].body += frame.value
        self._arrived.set()

    def writelines(self, pieces: Iterable[bytes | memoryview]) -> None:
        self.write(b"".join(pieces))

    async def until(self, count: int) -> list[Written]:
        async with asyncio.timeout(GUARD_SECONDS):
            while len(self.published) < count:
                self._arrived.clear()
                await self._arrived.wait()
        assert [one.size for one in self.published] == [len(one.body) for one in self.published]
        return self.published


@dataclass
class OpenChannel:
    """What a publisher needs to know of a channel."""

    number: int
    max_content_size: int
    closing: "asyncio.Future[None]"

    @property
    def is_closed(self) -> bool:
        return self.closing.done()


@dataclass
class Far:
    """The broker's end of one connection."""

    connection: Connection
    transport: Transport
    protocol: Any
    closing: "asyncio.Future[None]"
    # Of a broker that cuts what it says anywhere.
    cuts: Callable[[bytes], list[bytes]] = field(default=lambda data: [data])

    def say(self, *frames: bytes) -> None:
        for piece in self.cuts(b"".join(frames)):
            self.protocol.data_received(piece)

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        self.say(marshal(commands.Basic.Ack(tag, multiple), CHANNEL))

    def nack(self, tag: int, *, multiple: bool = False) -> None:
        self.say(marshal(commands.Basic.Nack(tag, multiple, False), CHANNEL))

    def give_back(self, message_id: str | None, body: bytes = b"") -> None:
        header = ContentHeader(
            body_size=len(body), properties=ClientProperties(message_id=message_id)
        )
        parts = [marshal(ContentBody(body[at : at + 2]), CHANNEL) for at in range(0, len(body), 2)]
        back = marshal(commands.Basic.Return(312, "NO_ROUTE", "", "queue"), CHANNEL)
        self.say(back, marshal(header, CHANNEL), *parts)

    def block(self) -> None:
        self.say(marshal(commands.Connection.Blocked("low on memory"), 0))

    def unblock(self) -> None:
        self.say(marshal(commands.Connection.Unblocked(), 0))


def connect(max_content_size: int = FRAME_PAYLOAD_BYTES) -> Far:
    ours, transport = Wire(), Transport()
    ours._transport = cast("asyncio.Transport", transport)
    loop = asyncio.get_running_loop()
    protocol = Demultiplexer(asyncio.StreamReader(loop=loop), ours._takers, lambda: 0.0)
    closing: asyncio.Future[None] = loop.create_future()

    async def open_channel(**_: Any) -> OpenChannel:
        return OpenChannel(CHANNEL, max_content_size, closing)

    connection = SimpleNamespace(
        transport=SimpleNamespace(connection=SimpleNamespace(channel=open_channel)),
        wire=ours,
    )
    return Far(cast("Connection", connection), transport, protocol, closing)


# One for all, because to make them takes longer than to use them.
METRICS = BridgeMetrics(
    new_registry(), component="worker", version="0", revision="0", exchanges=("default",)
)


@asynccontextmanager
async def serving(ours: Publisher, **options: Any) -> AsyncIterator[Far]:
    """Connect a publisher; at the end nothing of what it published may be left."""
    far = connect(**options)
    task = asyncio.create_task(ours.serve(far.connection))
    async with asyncio.timeout(GUARD_SECONDS):
        await ours._main.opened.wait()
    try:
        yield far
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def ours() -> Publisher:
    return Publisher(METRICS, timeout_seconds=GUARD_SECONDS)


@pytest.fixture
async def far(ours: Publisher) -> AsyncIterator[Far]:
    async with serving(ours) as end:
        yield end
    assert ours.unconfirmed == 0


def awaited(ours: Publisher, message_id: str | None) -> "asyncio.Future[Confirm]":
    assert ours._main.channel is not None
    confirm = ours._main.channel.awaited(message_id)
    assert confirm is not None
    return confirm


def publish(
    ours: Publisher, message_id: str | None = None, *, key: str = "queue", **changed: Any
) -> "asyncio.Task[str]":
    timeout_seconds = changed.pop("timeout_seconds", GUARD_SECONDS)
    body = changed.pop("body", b"body")
    properties = Properties(message_id=message_id, **changed)

    async def told() -> str:
        try:
            ours._timeout_seconds = timeout_seconds
            await ours.publish(body, exchange="", routing_key=key, properties=properties)
        except PublishError as error:
            return error.fault
        return "confirmed"

    return asyncio.create_task(told())


async def soon(*tasks: Awaitable[str]) -> list[str]:
    async with asyncio.timeout(GUARD_SECONDS / 2):
        return await asyncio.gather(*tasks)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_one_large_body_at_a_time(ours: Publisher, far: Far) -> None:
    """A large body is written when the one before is stored; what is small waits for none."""
    body = bytes(LARGE_BODY_BYTES + 1)
    first, second = publish(ours, "1", body=body), publish(ours, "2", body=body)
    small = publish(ours, "3")
    written = await far.transport.until(2)
    assert [one.message_id for one in written] == ["1", "3"]

    far.ack(1)
    far.ack(2)
    assert await soon(first, small) == ["confirmed"] * 2
    await far.transport.until(3)
    far.ack(3)

    assert await soon(second) == ["confirmed"]


async def test_a_large_body_has_more_time(ours: Publisher, far: Far) -> None:
    body = bytes(LARGE_BODY_BYTES + 1)
    large = publish(ours, "1", body=body, timeout_seconds=SHORT_SECONDS)
    small = publish(ours, "2", timeout_seconds=SHORT_SECONDS)
    assert await soon(small) == ["timeout"]
    far.ack(1)

    assert await soon(large) == ["confirmed"]
    far.ack(2)


# Each is told its own


def write_at_once(
    ours: Publisher, message_id: str | None = None, body: bytes = b"body", **changed: Any
) -> publication.Publication | None:
    properties = Properties(message_id=message_id, **changed)
    return ours.write_at_once(body, exchange="", routing_key="queue", properties=properties)


async def test_what_is_written_at_once_is_told_when_it_is_known() -> None:
    """Stored or not, each is told its own, and counted once."""
    registry = new_registry()
    metrics = BridgeMetrics(
        registry, component="worker", version="0", revision="0", exchanges=("default",)
    )
    ours = Publisher(metrics, timeout_seconds=GUARD_SECONDS)
    told: list[tuple[str, bool]] = []
    async with serving(ours) as far:
        for name in "ab":
            written = write_at_once(ours, name)
            assert written is not None
            written.when_known(partial(_note, told, name))
        await far.transport.until(2)
        far.nack(2)
        far.ack(1)
        await turns()
        assert written is not None
        with pytest.raises(PublishError):
            await written.stored(asyncio.get_running_loop().time() + SHORT_SECONDS)

    assert told == [("b", False), ("a", True)]
    counted = [
        registry.get_sample_value(
            "sms_bridge_amqp_published_total", {"exchange": "default", "outcome": outcome}
        )
        for outcome in ("confirmed", "nacked")
    ]
    assert counted == [1, 1]


def _note(told: list[tuple[str, bool]], name: str, is_stored: bool) -> None:  # noqa: FBT001
    told.append((name, is_stored))


@pytest.mark.parametrize("kept_by", ["channel", "id", "size", "alarm", "properties"])
async def test_what_has_to_wait_is_not_written_at_once(kept_by: str) -> None:
    """Nothing of it is written: the caller takes the way that waits."""
    ours = Publisher(METRICS, timeout_seconds=GUARD_SECONDS)
    if kept_by == "channel":
        assert write_at_once(ours) is None
        return
    async with serving(ours) as far:
        first = write_at_once(ours, "1")
        if kept_by == "alarm":
            far.block()
        match kept_by:
            case "id":
                second = write_at_once(ours, "1")
            case "size":
                second = write_at_once(ours, "2", bytes(LARGE_BODY_BYTES + 1))
            case "properties":
                second = write_at_once(ours, "2", headers={"x": "x" * FRAME_PAYLOAD_BYTES})
            case _:
                second = write_at_once(ours, "2")
        await turns()
        assert first is not None
        assert second is None
        assert [one.message_id for one in far.transport.published] == ["1"]


async def test_a_broker_without_a_limit_of_frames(ours: Publisher) -> None:
    """Where frames may have any size, which the client library gives below 0, all is one frame."""
    async with serving(ours, max_content_size=-8) as far:
        task = publish(ours, "a", body=b"x" * 300_000)
        (written,) = await far.transport.until(1)
        far.ack(1)

        assert len(written.body) == 300_000
        assert await soon(task) == ["confirmed"]


@dataclass
class Fate:
    """What one publish is, and what becomes of it: when, among all, and whether a moment later."""

    fault: str
    message_id: str | None
    body: bytes
    place: int
    later: bool


FATES = st.builds(
    Fate,
    st.sampled_from(["confirmed", "nacked", "returned", "cancelled", "refused", "timeout"]),
    st.sampled_from([None, "", "same", "other", "a", "b", "c", "d", "e", "ä"]),
    st.binary(max_size=6),
    st.integers(0, 9),
    st.booleans(),
)


@given(fates=st.lists(FATES, max_size=12), size=st.integers(1, 40))
async def test_any_mixture(fates: list[Fate], size: int) -> None:
    """Of any mixture each learns its own, whatever the order, the ids and the cuts are.

    Between them are some that cannot be written, whose tags may not be used up: every confirm
    behind would be another's.
    """
    ours = Publisher(METRICS, timeout_seconds=GUARD_SECONDS)
    async with serving(ours) as far:
        far.cuts = lambda said: [said[at : at + size] for at in range(0, len(said), size)]
        tasks = []
        for number, fate in enumerate(fates):
            # Its fate is written where the broker finds it.
            key = f"{number}" if fate.fault != "refused" else "k" * 300
            tasks.append(publish(ours, fate.message_id, key=key, body=fate.body))
        settled = 0
        await turns()
        while open_ones := far.transport.published[settled:]:
            for one in sorted(open_ones, key=lambda one: fates[int(one.routing_key)].place):
                number = int(one.routing_key)
                fate = fates[number]
                assert (one.message_id, one.body) == (fate.message_id or None, fate.body)
                match fate.fault:
                    case "cancelled":
                        tasks[number].cancel()
                    case "timeout":
                        publication.resolve(awaited(ours, one.message_id), "timeout")
                    case "returned":
                        far.give_back(one.message_id, one.body)
                    case _:
                        pass
                await turns(fate.later)
                (far.nack if fate.fault == "nacked" else far.ack)(one.tag)
            settled += len(open_ones)
            await turns()
        async with asyncio.timeout(GUARD_SECONDS / 2):
            told = await asyncio.gather(*tasks, return_exceptions=True)

        expected = ["error" if one.fault == "refused" else one.fault for one in fates]
        assert [
            "cancelled" if isinstance(one, asyncio.CancelledError) else one for one in told
        ] == expected
        assert ours._main.channel is not None
        assert (ours.unconfirmed, ours._main.channel.unconfirmed) == (0, 0)


# One id at a time


@pytest.mark.parametrize("message_id", ["same", None])
async def test_two_of_one_id_do_not_meet(ours: Publisher, far: Far, message_id: str | None) -> None:
    """The next of an id, or of none, is written when the broker has answered the one before."""
    tasks = [publish(ours, message_id, key=str(n)) for n in range(3)]
    other = publish(ours, "other", key="other")
    await far.transport.until(2)
    await turns()
    assert [one.routing_key for one in far.transport.published] == ["0", "other"]
    far.give_back(message_id or None, b"body")
    far.ack(1)
    await far.transport.until(3)
    far.nack(3)
    await far.transport.until(4)
    far.ack(4)
    far.ack(2)

    assert await soon(*tasks, other) == ["returned", "nacked", "confirmed", "confirmed"]


async def test_waiting_for_an_earlier_one_has_the_same_deadline(ours: Publisher, far: Far) -> None:
    """Who waits for one of the same id is told in time, and has published nothing."""
    first = publish(ours, "same", key="first")
    await far.transport.until(1)
    second = publish(ours, "same", key="second", timeout_seconds=SHORT_SECONDS)
    assert await soon(second) == ["timeout"]
    far.ack(1)

    assert await soon(first) == ["confirmed"]
    await turns()
    assert [one.routing_key for one in far.transport.published] == ["first"]


async def test_cancelled_while_waiting_for_an_earlier_one(ours: Publisher, far: Far) -> None:
    """The earlier one is told its own, and the next in line has its turn."""
    first, second, third = (publish(ours, "same") for _ in range(3))
    await far.transport.until(1)
    await turns()
    second.cancel()
    await turns()
    far.ack(1)
    await far.transport.until(2)
    far.ack(2)

    assert await soon(first, third) == ["confirmed"] * 2
    assert len(far.transport.published) == 2


# Too late


async def test_no_confirm_in_time(ours: Publisher, far: Far) -> None:
    """What times out is told so in time; its late confirm is nobody's and frees its place."""
    late = publish(ours, "a", timeout_seconds=SHORT_SECONDS)
    assert await soon(late) == ["timeout"]
    assert ours.unconfirmed == 1
    again = publish(ours, "a")
    await far.transport.until(2)
    far.ack(1)
    await turns()
    assert not again.done()
    far.ack(2)

    assert await soon(again) == ["confirmed"]
    assert ours.unconfirmed == 0


async def test_a_confirm_that_came_during_a_stall_is_in_time(ours: Publisher, far: Far) -> None:
    """After a stall what the broker has said by then counts, although timers run first."""
    task = publish(ours, "a", timeout_seconds=SHORT_SECONDS)
    await far.transport.until(1)
    late = asyncio.get_running_loop().time() + SHORT_SECONDS
    asyncio.get_running_loop().call_at(late, far.ack, 1)
    time.sleep(2 * SHORT_SECONDS)  # noqa: ASYNC251  a stall

    assert await soon(task) == ["confirmed"]


async def write(ours: Publisher, message_id: str, deadline: float) -> Publication:
    properties = Properties(message_id=message_id)
    return await ours.write(
        b"body", exchange="", routing_key="queue", properties=properties, deadline=deadline
    )


async def test_nothing_is_written_after_the_deadline(ours: Publisher, far: Far) -> None:
    """What comes too late to be in time is refused and not written, be there a channel or not."""
    past = asyncio.get_running_loop().time() - 1
    with pytest.raises(PublishError) as error:
        await write(ours, "a", past)
    with pytest.raises(PublishError):
        await write(Publisher(METRICS, timeout_seconds=GUARD_SECONDS), "b", past)
    await turns()

    assert error.value.fault == "timeout"
    assert (far.transport.published, ours.unconfirmed) == ([], 0)


@pytest.mark.parametrize("fate", ["confirmed", "nacked", "returned", "error"])
async def test_a_late_fate_is_told(ours: Publisher, fate: Confirm) -> None:
    """Who wants to know what became of a publish is told, also after its deadline."""
    told: list[bool] = []
    async with serving(ours) as far:
        late = await write(ours, "a", asyncio.get_running_loop().time() + SHORT_SECONDS)
        late.when_known(told.append)
        with pytest.raises(PublishError) as error:
            await late.stored(asyncio.get_running_loop().time())
        await far.transport.until(1)
        assert (error.value.fault, told, ours.unconfirmed) == ("timeout", [], 1)
        assert not late.is_refused
        match fate:
            case "error":
                far.closing.set_result(None)
            case "nacked":
                far.nack(1)
            case _:
                if fate == "returned":
                    far.give_back("a", b"body")
                far.ack(1)
        await turns(10)

    assert told == [fate == "confirmed"]
    assert late.is_refused == (fate != "confirmed")


async def test_who_waits_again_is_told_and_counted_once() -> None:
    """A time-out is how it counts; the confirm that comes late is success all the same."""
    registry = new_registry()
    metrics = BridgeMetrics(
        registry, component="worker", version="0", revision="0", exchanges=("default",)
    )
    confirm: asyncio.Future[Confirm] = asyncio.get_running_loop().create_future()
    late = Publication(metrics, "default", "queue", confirm, 0.0)
    now = asyncio.get_running_loop().time
    for _ in range(2):
        with pytest.raises(PublishError):
            await late.stored(now())
    confirm.set_result("confirmed")
    await late.stored(now() + GUARD_SECONDS)
    counted = {
        outcome: registry.get_sample_value(
            "sms_bridge_amqp_published_total", {"exchange": "default", "outcome": outcome}
        )
        for outcome in ("timeout", "confirmed")
    }

    assert counted == {"timeout": 1, "confirmed": 0}


async def test_who_gives_one_up_frees_its_id(ours: Publisher, far: Far) -> None:
    """A publish of which nobody wants to know more holds up no other with its id."""
    first = await write(ours, "a", asyncio.get_running_loop().time() + GUARD_SECONDS)
    again = publish(ours, "a")
    await turns()
    ours.abandon("another")
    await turns()
    assert (first.is_refused, again.done()) == (False, False)
    ours.abandon("a")
    await far.transport.until(2)
    far.ack(2, multiple=True)

    assert await soon(again) == ["confirmed"]
    assert first.is_refused
    # Without a connection nothing is in flight.
    Publisher(METRICS, timeout_seconds=GUARD_SECONDS).abandon("a")


async def test_no_timer_outlives_its_publish(ours: Publisher, far: Far) -> None:
    """Nothing is kept of a publish that was confirmed, returned or cancelled, for its deadline."""
    tasks = [publish(ours, name) for name in "abc"]
    await far.transport.until(3)
    traces = [weakref.ref(awaited(ours, name)) for name in "abc"]
    assert len(traces) == 3
    far.give_back("b")
    far.ack(2, multiple=True)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    far.ack(3)
    tasks.clear()
    await turns()
    gc.collect()

    assert [trace() for trace in traces] == [None] * 3


# The connection


async def test_without_a_connection_it_waits_as_long_as_it_may(ours: Publisher) -> None:
    """No connection is a time-out in time, or a publish as soon as there is one."""
    short = publish(ours, "a", timeout_seconds=SHORT_SECONDS)
    long = publish(ours, "b")
    assert await soon(short) == ["timeout"]
    async with serving(ours) as far:
        (written,) = await far.transport.until(1)
        far.ack(1)

        assert written.message_id == "b"
        assert await soon(long) == ["confirmed"]


async def test_the_channel_ends_with_publishes_in_flight(ours: Publisher) -> None:
    """They are told at once; those that wait for their turn, and new ones, go to the next channel.

    Its tags begin anew.
    """
    async with serving(ours) as far:
        tasks = [publish(ours, name) for name in "abc"]
        await far.transport.until(3)
        far.ack(2)
        next_in_line = publish(ours, "a")
        await turns()
        far.closing.set_result(None)

        assert await soon(*tasks) == ["error", "confirmed", "error"]
    assert ours.unconfirmed == 0
    new = publish(ours, "new")
    async with serving(ours) as far:
        await far.transport.until(2)
        far.ack(2, multiple=True)

        assert await soon(next_in_line, new) == ["confirmed"] * 2


async def test_serving_ends_with_its_channel(ours: Publisher) -> None:
    far = connect()
    task = asyncio.create_task(ours.serve(far.connection))
    await ours._main.opened.wait()
    far.closing.set_exception(RuntimeError("closed"))
    with pytest.raises(BrokerError):
        await task
    # Nobody else asks for it, and the loop would complain in the middle of another test.
    assert far.closing.exception() is not None
    late = publish(ours, "a", timeout_seconds=SHORT_SECONDS)

    assert await soon(late) == ["timeout"]
    assert far.transport.published == []


async def test_a_connection_that_ends_as_it_comes(ours: Publisher) -> None:
    """Who is woken for a connection that has ended since is told so, and has published nothing."""
    task = publish(ours, "a")
    await turns()
    # Behind the curtain: what `serve` does when its channel ends before anybody had a turn.
    ours._main.opened.set()

    assert await soon(task) == ["error"]


async def test_a_connection_that_is_closing_takes_nothing(ours: Publisher) -> None:
    """What could not be written is never a success: the end of the channel tells."""
    async with serving(ours) as far:
        far.transport.closing = True
        task = publish(ours, "a")
        await turns()
        assert not task.done()
        far.closing.set_result(None)

        assert await soon(task) == ["error"]
        assert far.transport.published == []


async def test_an_alarm_refuses_at_once(ours: Publisher, far: Far) -> None:
    """While the broker blocks, nothing new is written; what it has may still be confirmed."""
    before = publish(ours, "a")
    await far.transport.until(1)
    far.block()
    assert await soon(publish(ours, "b"), publish(ours, "c")) == ["timeout"] * 2
    far.ack(1)
    assert await soon(before) == ["confirmed"]
    far.unblock()
    after = publish(ours, "d")
    written = await far.transport.until(2)
    far.ack(2)

    assert await soon(after) == ["confirmed"]
    assert [one.message_id for one in written] == ["a", "d"]


async def test_an_alarm_refuses_who_waited_too(ours: Publisher, far: Far) -> None:
    """Whose turn comes while the broker blocks is told at once, and has published nothing."""
    tasks = [publish(ours, "same") for _ in range(2)]
    await far.transport.until(1)
    await turns()
    far.block()
    far.ack(1)

    assert await soon(*tasks) == ["confirmed", "timeout"]
    assert len(far.transport.published) == 1


# Bounds


async def test_too_many_wait_for_the_broker(ours: Publisher, far: Far) -> None:
    """One more than the limit is refused with the reason, and a confirm makes room."""
    tasks = [publish(ours, str(n)) for n in range(MAX_UNCONFIRMED)]
    await far.transport.until(MAX_UNCONFIRMED)
    with pytest.raises(PublishError, match=f"{MAX_UNCONFIRMED} publishes wait") as error:
        await ours.publish(b"", exchange="", routing_key="queue", properties=Properties())
    assert error.value.fault == "error"
    tasks[0].cancel()
    await turns()
    assert await soon(publish(ours, "x")) == ["error"]
    far.ack(1)
    one_more = publish(ours, "y")
    await far.transport.until(MAX_UNCONFIRMED + 1)
    far.ack(MAX_UNCONFIRMED + 1, multiple=True)

    assert await soon(*tasks[1:], one_more) == ["confirmed"] * MAX_UNCONFIRMED


async def test_the_limit_is_for_those_who_waited_too(ours: Publisher) -> None:
    tasks = [publish(ours, str(n)) for n in range(MAX_UNCONFIRMED + 3)]
    await turns()
    async with serving(ours) as far:
        await far.transport.until(MAX_UNCONFIRMED)
        far.ack(MAX_UNCONFIRMED + 3, multiple=True)
        told = await soon(*tasks)

        assert told == ["confirmed"] * MAX_UNCONFIRMED + ["error"] * 3
        assert len(far.transport.published) == MAX_UNCONFIRMED


async def test_a_broker_that_does_not_read(ours: Publisher, far: Far) -> None:
    """Nothing is added to what it has not read of us, once that is much."""
    far.transport.unwritten_bytes = MAX_UNWRITTEN_BYTES
    with pytest.raises(PublishError, match="does not read") as error:
        await ours.publish(b"", exchange="", routing_key="queue", properties=Properties())
    assert error.value.fault == "timeout"
    far.transport.unwritten_bytes -= 1
    task = publish(ours, "a")
    await far.transport.until(1)
    far.ack(1)

    assert await soon(task) == ["confirmed"]


async def test_the_reason_quotes_nothing(ours: Publisher, far: Far) -> None:
    """Why it was refused says what to look at, and holds nothing of the message."""
    assert not far.transport.published
    for text in ("secret" * 50, "secret\ud800"):
        with pytest.raises(PublishError, match="does not fit") as error:
            await ours.publish(
                b"", exchange="", routing_key="queue", properties=Properties(message_type=text)
            )
        assert "secret" not in str(error.value)
