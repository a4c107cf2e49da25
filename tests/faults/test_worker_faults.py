"""One worker at exact crash points: nothing lost, nothing sent twice, nothing stuck."""

import asyncio
import functools
import gc
import itertools
import json
import os
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pamqp.encode
import pytest
from aio_pika.abc import AbstractIncomingMessage
from pamqp.common import FieldTable
from yarl import URL

from bridge.amqp.connecting import close_quietly, open_connection
from bridge.amqp.properties import Headers
from bridge.errors import BrokerError
from bridge.outbound.adaptive_limit import FIRST_LIMIT
from bridge.outbound.ledger import COMES_AGAIN_SECONDS
from bridge.sandbox.broker import Broker
from bridge.sandbox.faults import Fault
from bridge.sandbox.processes import Child, free_ports, guarded
from tests.addresses import give_addresses, hold_full_port
from tests.alarms import memory_alarm
from tests.faults.amqp_proxy import (
    ACK,
    CHANNEL_CLOSE,
    CHANNEL_OPEN,
    DECLARE,
    DELIVER,
    PUBLISH,
    Method,
    misnumber,
    open_amqp_proxy,
    reset_connection,
)
from tests.faults.bench import (
    CONSUME_LINK,
    PROGRAM,
    PUBLISH_LINK,
    Bench,
    Live,
    Service,
    eventually,
    make_environ,
    make_numbers,
    make_settings,
    open_amqp,
    running,
    unfrozen,
)
from tests.faults.http_proxy import HttpProxy, Point, open_http_proxy

WITH_AND_WITHOUT_IDS = pytest.mark.parametrize("ids", [True, False], ids=["with_id", "without_id"])
NOT_SENT: dict[str, Any] = {"status": 503, "headers": {"Retry-After": "1"}}
REFUSED: dict[str, Any] = {"status": 400}


def once_each(numbers: list[str], fault: dict[str, Any]) -> list[dict[str, Any]]:
    """Make a fault that hits the first POST for each number only."""
    return [{**fault, "to": number, "count": 1} for number in numbers]


def has_taken(bench: Bench, numbers: list[str], count: int) -> bool:
    """Say whether the service has accepted so many messages."""
    return len(bench.service.taken(numbers)) >= count


def has_opened(live: Live, count: int) -> bool:
    """Say whether a bridge has opened so many connections to the broker."""
    return live.metric("sms_bridge_amqp_connections_total", outcome="opened") >= count


# A connection that ends at an exact frame


@WITH_AND_WITHOUT_IDS
async def test_cut_at_the_ack_of_a_sent_message(bench: Bench, *, ids: bool) -> None:
    """Connections cut while the ack of a sent message leaves cost no message and no second POST."""
    async with bench.worker() as live:
        trap = bench.proxy.trap("client", ACK, "cut", nth=20, again=True, link=CONSUME_LINK)
        numbers = await bench.publish(100, ids=ids)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert trap.seen >= 100
        assert bench.extra_posts(numbers) == {}


async def fill_the_rate(bench: Bench, _live: Live) -> None:
    """Use up the rate limit, so that what comes next waits for some seconds."""
    await bench.until_taken(await bench.publish(1))


async def fill_the_slots(bench: Bench, _live: Live) -> None:
    """Take up each slot for some seconds."""
    numbers = make_numbers(FIRST_LIMIT)
    bench.service.misbehave(*({"to": number, "latency_seconds": 3} for number in numbers))
    await bench.publish(numbers)
    await eventually(lambda: len(bench.service.posts(numbers)) == FIRST_LIMIT, what="POSTs")


async def close_the_gate(bench: Bench, live: Live) -> None:
    """Have the service ask for some seconds without requests."""
    numbers = make_numbers(1)
    bench.service.misbehave(*once_each(numbers, {"status": 429, "headers": {"Retry-After": "3"}}))
    await bench.publish(numbers)
    throttled = partial(live.metric, "sms_bridge_worker_throttled_seconds_total")
    await eventually(throttled, what="a wait for the service")


@pytest.mark.parametrize(
    ("hold_up", "changed"),
    [
        pytest.param(
            fill_the_rate, {"worker__rate_limit": {"per_second": 0.25, "burst": 1}}, id="rate"
        ),
        pytest.param(fill_the_slots, {"worker__concurrency": "auto"}, id="slots"),
        pytest.param(close_the_gate, {}, id="gate"),
    ],
)
async def test_cut_while_the_second_of_two_equal_texts_waits(
    bench: Bench, hold_up: Callable[[Bench, Live], Awaitable[None]], changed: dict[str, Any]
) -> None:
    """The same words again, that wait for their turn as the connection ends, are sent as well.

    Takes the seconds that they wait.
    """
    async with bench.worker(**changed) as live:
        (number,) = await bench.publish(1, ids=False)
        await bench.until_taken([number])
        # From here on the broker does not deliver the first of them again.
        await live.worker.consumer.flush()
        await hold_up(bench, live)
        received = partial(live.metric, "sms_bridge_worker_messages_received_total")
        before = received()
        await bench.publish([number], ids=False)
        await eventually(lambda: received() > before, what="the second delivery")
        bench.proxy.cut(CONSUME_LINK)
        await eventually(partial(has_opened, live, 3), what="a new connection")
        await bench.until_settled(live)

        assert len(bench.service.taken([number])) == 2


async def test_cut_on_the_way_of_the_second_of_two_equal_texts(bench: Bench) -> None:
    """What the broker delivered shows which acks it has read: an equal text is another message."""
    number, *others = make_numbers(4)
    async with bench.worker(worker__concurrency=2) as live:
        # The worker never sees it, and it comes again as delivered before.
        trap = bench.proxy.trap("broker", DELIVER, "cut", nth=5, link=CONSUME_LINK)
        for to in (number, *others, number):
            await bench.publish([to], ids=False)
        await eventually(lambda: len(bench.service.taken([number])) == 2, what="both", seconds=10)
        await bench.until_settled(live)

    assert trap.sprung.is_set()
    assert bench.sent_twice(others) == {}
    assert len(bench.service.taken([number])) == 2


@WITH_AND_WITHOUT_IDS
@pytest.mark.parametrize("point", ["confirm", "ack"])
async def test_cut_between_the_confirm_of_a_copy_and_the_ack(
    bench: Bench, point: str, *, ids: bool
) -> None:
    """A message whose retry copy is confirmed and whose own ack is lost goes on as one message."""
    proxy, numbers = bench.proxy, make_numbers(20)
    bench.service.misbehave(*once_each(numbers, NOT_SENT))
    async with bench.worker() as live:
        if point == "ack":
            trap = proxy.trap("client", ACK, "cut", nth=7, again=True, link=CONSUME_LINK)
        else:
            trap = proxy.trap(
                *("broker", ACK, "pass"), link=PUBLISH_LINK, also=lambda: proxy.cut(CONSUME_LINK)
            )
        await bench.publish(numbers, ids=ids)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert trap.sprung.is_set()
        assert set(bench.extra_posts(numbers).values()) == {2}
        assert await bench.dead_letters() == []


async def test_a_copy_that_is_stored_twice_is_tried_once(bench: Bench) -> None:
    """Where a broker that hangs has made two copies of one, the second is dropped unsent."""
    numbers = make_numbers(5)
    bench.service.misbehave(
        *once_each(numbers, {"latency_seconds": 0.5, **NOT_SENT}),
        *once_each(numbers, {"mode": "accept_then_cut"}),
    )
    async with bench.worker(
        rabbitmq__publish_timeout_seconds=0.5, worker__on_uncertain="park"
    ) as live:
        await bench.publish(numbers)
        await eventually(lambda: len(bench.service.posts(numbers)) == 5, what="POSTs")
        bench.proxy.freeze("broker")
        await eventually(lambda: len(live.logged("not_stored")) >= 5, what="late confirms")
        await eventually(lambda: len(live.logged("not_stored")) >= 10, what="second copies")
        bench.proxy.thaw()
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert live.metric("sms_bridge_worker_messages_processed_total", reason="duplicate") >= 5
    assert bench.sent_twice(numbers) == {}
    letters = await bench.dead_letters()
    assert {letter.headers["sms-bridge-reason"] for letter in letters} == {"uncertain"}
    assert len(letters) == 5


async def test_cut_at_the_publish_of_a_dead_letter(bench: Bench) -> None:
    """A dead letter whose connection is cut as it leaves is published again, and once."""
    bench.service.misbehave(REFUSED)
    # One at a time: a cut would take the confirms of those that went before.
    async with bench.worker(worker__concurrency=1) as live:
        trap = bench.proxy.trap("client", PUBLISH, "cut", nth=4, again=True, link=PUBLISH_LINK)
        numbers = await bench.publish(8)
        await eventually(lambda: bench.service.posts(numbers), what="a POST")
        await bench.until_settled(live)

        assert trap.sprung.is_set()
        letters = Counter(letter.message_id for letter in await bench.dead_letters())
        assert letters == Counter(f"id-{number}" for number in numbers)
        assert bench.extra_posts(numbers) == {}


@WITH_AND_WITHOUT_IDS
async def test_channel_closed_by_the_broker(bench: Bench, *, ids: bool) -> None:
    """A channel that the broker closes for a false ack costs no message and no second POST."""
    async with bench.worker() as live:
        trap = bench.proxy.trap("client", ACK, misnumber, nth=5, link=CONSUME_LINK)
        numbers = await bench.publish(30, ids=ids)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert trap.sprung.is_set()
        assert live.metric("sms_bridge_amqp_connections_total", outcome="closed_by_broker") == 1
        assert bench.extra_posts(numbers) == {}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(CHANNEL_OPEN, id="channel_open"),
        pytest.param(DECLARE, id="queue_declare"),
        pytest.param(CHANNEL_CLOSE, id="channel_close"),
    ],
)
async def test_cut_while_queue_lengths_are_read(bench: Bench, method: Method) -> None:
    """A connection that dies while the lengths of queues are read is replaced at once."""
    # Four entities are declared first, and consuming opens one channel more.
    first = 6 if method == CHANNEL_OPEN else 5
    for nth in range(first, first + 4):
        async with running(make_settings(bench.values()), "worker") as live:
            trap = bench.proxy.trap("client", method, "cut", nth=nth, link=CONSUME_LINK)
            await eventually(trap.sprung.is_set, what=f"frame {nth}")
            bench.proxy.traps.clear()
            await eventually(
                partial(has_opened, live, 3),
                what=f"a new connection after a cut at frame {nth}",
                seconds=5,
            )
            await live.until_consuming()


async def test_a_flapping_connection(bench: Bench) -> None:
    """Connections that are reset again and again cost no message and no second POST."""
    bench.service.misbehave({"latency_seconds": 0.1})
    async with bench.worker() as live:
        numbers = await bench.publish(150)
        for _ in range(8):
            await live.until_consuming()
            goal = min(len(bench.service.taken(numbers)) + 5, 150)
            await eventually(partial(has_taken, bench, numbers, goal), what="progress")
            bench.proxy.reset()
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert bench.extra_posts(numbers) == {}


# A broker that is not as it should be


async def test_consumer_cancelled_by_the_deletion_of_its_queue(bench: Bench) -> None:
    """A worker whose queue is deleted says so at once, declares it and consumes again."""
    async with bench.worker() as live:
        await bench.amqp.channel.queue_delete(bench.queue)
        await eventually(
            lambda: live.metric("sms_bridge_worker_consumer_up") == 0,
            what="consumer_up at 0",
            seconds=5,
        )
        await live.until_consuming(seconds=15)

        numbers = await bench.publish(5)
        await bench.until_taken(numbers)
        assert live.logged("consumer_cancelled") == [{"queue": bench.queue}]


async def test_black_holed_broker(bench: Bench) -> None:
    """A broker that is silently gone is noticed; what it sends once more is not sent again.

    In the time that the client library gives it, neither sooner nor later: acks that were written
    meanwhile are remembered for as long (`ledger.unsure_ack_seconds`).
    """
    bench.service.misbehave({"latency_seconds": 0.5})
    async with bench.worker(rabbitmq__heartbeat_seconds=1) as live:
        first = await bench.publish(5, ids=False)
        await eventually(lambda: len(bench.service.posts(first)) == 5, what="5 POSTs")
        bench.proxy.freeze()
        frozen_at = time.monotonic()
        await eventually(lambda: not live.worker.consumer.is_registered, what="a loss")
        silent_seconds = time.monotonic() - frozen_at
        second = await bench.publish(5)
        bench.proxy.thaw()
        await bench.until_taken([*first, *second])
        await bench.until_settled(live)

        assert bench.extra_posts([*first, *second]) == {}
        # The grace is 3 * (1 + 1) s. The last frame came up to a second before, the client looks
        # once in a second, and a busy computer is given three more.
        assert 6 - 1 <= silent_seconds <= 6 + 1 + 3


async def test_memory_alarm_during_a_storm_of_errors(bench: Bench) -> None:
    """What cannot be stored is held, nothing more is taken, and all goes on after the alarm."""
    bench.service.misbehave(NOT_SENT)
    await bench.declare_main()
    numbers = await bench.publish(30)
    async with memory_alarm(bench.broker), bench.worker() as live:
        await eventually(lambda: live.paused == {"broker_blocked"}, what="broker_blocked")
        held = live.metric("sms_bridge_worker_messages_in_progress")
        posts = len(bench.service.posts(numbers))

        assert 0 < held <= 10
        assert posts <= 10
        bench.service.behave()
        await asyncio.to_thread(bench.broker.ctl, "set_vm_memory_high_watermark", "0.6")
        await eventually(lambda: not live.paused, what="resumed")
        await bench.until_taken(numbers)
        await bench.until_settled(live)
        assert bench.sent_twice(numbers) == {}
        assert await bench.dead_letters() == []


def table_of(*entries: bytes) -> bytes:
    """Write a table from its entries."""
    joined = b"".join(entries)
    return struct.pack(">I", len(joined)) + joined


def header(name: str, kind: bytes, value: bytes) -> bytes:
    """Write an entry of a table."""
    return bytes([len(name)]) + name.encode() + kind + value


def text_header(name: str, length: int) -> bytes:
    """Write an entry whose value is a text of so many bytes."""
    return header(name, b"S", struct.pack(">I", length) + b"x" * length)


def nested_table() -> bytes:
    """Write a header `deep` that is a table in a table, a thousand times."""
    inner = table_of()
    for _ in range(1000):
        inner = table_of(header("deep", b"F", inner))
    return inner


# Of 32 bits each: 90 KB, and twice as much if they were written as 64.
FLOATS = table_of(*[b"f" + struct.pack(">f", number % 10) for number in range(18_000)])
# What a frame has beside its ends, the content header, and the flags of the properties.
FRAME_BYTES = 131_072 - 8 - 12 - 2
# The entries of a table, and the names of those that a copy has.
ODD_HEADERS: dict[str, tuple[list[bytes], set[str]]] = {
    "too_deep": ([header("deep", b"F", nested_table())], {"deep"}),
    "floats": ([header("floats", b"A", FLOATS)], {"floats"}),
    "one_too_large": (
        [text_header("small", 10), text_header("large", FRAME_BYTES - 150)],
        {"small"},
    ),
    "ours_too_large": ([text_header("sms-bridge-ordering-key", FRAME_BYTES - 150)], set()),
    # The broker itself adds what makes a copy too large for another one.
    "nearly_too_large": ([text_header("large", FRAME_BYTES - 700)], {"large"}),
}


async def publish_raw(bench: Bench, number: str, table: bytes) -> None:
    """Publish a send request whose headers are these bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pamqp.encode.METHODS, "table", lambda _headers: table)
        await bench.publish([number], headers={"any": 1})


@pytest.mark.parametrize("odd", ODD_HEADERS)
async def test_headers_that_hardly_fit(bench: Bench, odd: str) -> None:
    """A dead letter has its message's headers to the byte, but for those that no frame holds."""
    entries, kept = ODD_HEADERS[odd]
    numbers = make_numbers(1)
    bench.service.misbehave({**REFUSED, "to": numbers[0]})
    async with bench.worker() as live:
        await publish_raw(bench, numbers[0], table_of(*entries))
        await eventually(lambda: bench.service.posts(numbers), what="a POST")
        # The next one waits for nothing.
        await bench.until_taken(await bench.publish(1))
        await bench.until_settled(live)

    (letter,) = await bench.dead_letters()
    named = {entry[1 : 1 + entry[0]].decode(): entry for entry in entries}
    assert letter.headers["sms-bridge-reason"] == "refused"
    assert {name for name in named if name in letter.headers} == kept
    headers = letter.headers
    assert isinstance(headers, Headers)
    assert all(named[name] in headers.written for name in kept)


@pytest.mark.parametrize("odd", ODD_HEADERS)
async def test_headers_that_hardly_fit_are_no_matter_for_retries(bench: Bench, odd: str) -> None:
    """A message with odd headers is sent after two waits on the ladder, and holds up no other."""
    entries, _ = ODD_HEADERS[odd]
    numbers = make_numbers(1)
    bench.service.misbehave(*once_each(numbers, NOT_SENT), *once_each(numbers, NOT_SENT))
    async with bench.worker() as live:
        await publish_raw(bench, numbers[0], table_of(*entries))
        await eventually(lambda: bench.service.posts(numbers), what="a POST")
        await bench.until_taken(await bench.publish(1))
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert len(bench.service.posts(numbers)) == 3


async def test_retry_queue_deleted_by_an_operator(bench: Bench) -> None:
    """A copy that finds no queue is held until the queue is declared again, and then delivered."""
    numbers = make_numbers(5)
    bench.service.misbehave(*once_each(numbers, NOT_SENT))
    async with bench.worker() as live:
        await bench.amqp.channel.queue_delete(f"{bench.queue}.retry.1s")
        await bench.publish(numbers)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert set(bench.extra_posts(numbers).values()) == {2}
        # For a moment after the deletion the broker still routes to the queue, and nacks.
        faults = {entry["fault"] for entry in live.logged("not_stored")} - {"nacked"}
        assert faults == {"returned"}
        assert not live.paused


async def test_dead_letter_queue_that_is_full(bench: Bench) -> None:
    """A dead letter for which there is no room is held until there is."""
    declare = bench.amqp.channel.declare_queue
    full: FieldTable = {"x-max-length": 1, "x-overflow": "reject-publish"}
    for name in (bench.queue, f"{bench.queue}.retry.1s", f"{bench.queue}.retry.2s"):
        await declare(name, durable=True)
    await declare(bench.dead_queue, durable=True, arguments=full)
    bench.service.misbehave(REFUSED)
    async with bench.worker(rabbitmq__topology="off") as live:
        numbers = await bench.publish(3)
        await eventually(lambda: live.paused == {"broker_blocked"}, what="broker_blocked")
        letters: list[AbstractIncomingMessage] = []
        while len(letters) < 3:
            letters += await eventually(bench.dead_letters, what="a dead letter")
        await bench.until_settled(live)

        assert {letter.message_id for letter in letters} == {f"id-{n}" for n in numbers}
        assert await bench.dead_letters() == []
        assert bench.extra_posts(numbers) == {}
        assert not live.paused


@pytest.mark.parametrize("greeted", [False, True], ids=["at_once", "after_the_greeting"])
async def test_connection_reset_in_the_handshake(*, greeted: bool) -> None:
    """A connection that is reset before the login is a refused one, and freezes nothing."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if greeted:
            await reader.readexactly(8)
        reset_connection(writer)

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        url = f"amqp://guest:guest@127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        settings = make_settings({"rabbitmq.url": [url]}).rabbitmq
        async with unfrozen(2):
            with pytest.raises(BrokerError, match="refused"):
                await open_connection(settings, settings.url[0], name="test")


async def test_a_failed_connection_leaves_nothing_to_collect(bench: Bench) -> None:
    """What cannot connect, or is cut, is closed: a finaliser in another thread could not do it."""
    settings = make_settings(bench.values()).rabbitmq
    for spoil in (bench.proxy.refuse, bench.proxy.freeze):
        spoil()
        with pytest.raises(BrokerError):
            await open_connection(
                settings.model_copy(update={"connect_timeout_seconds": 0.2}),
                settings.url[0],
                name="test",
            )
        await bench.proxy.accept()
    bench.proxy.thaw()
    connection = await open_connection(settings, settings.url[0], name="test")
    bench.proxy.freeze()
    await close_quietly(connection)
    bench.proxy.thaw()
    assert connection.is_closed

    # Collected where there is no event loop; an unawaited coroutine fails the test.
    del connection
    await asyncio.to_thread(gc.collect)


async def test_one_of_two_brokers_is_dead(bench: Bench) -> None:
    """Of several URLs the one that works is found, at the start and after a cut."""
    dead = f"amqp://guest:guest@127.0.0.1:{free_ports(1)[0]}/"
    async with bench.worker(rabbitmq__url=[dead, bench.proxy.url]) as live:
        first = await bench.publish(3)
        await bench.until_taken(first)
        bench.proxy.reset()
        await eventually(lambda: not live.worker.consumer.is_registered, what="a loss")
        await live.until_consuming()
        second = await bench.publish(3)
        await bench.until_taken(second)

        assert live.metric("sms_bridge_amqp_connections_total", outcome="refused") >= 1


async def test_silent_addresses_of_names(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first addresses of the broker's and the API's names are silent, all is sent."""
    broker, api = URL(bench.proxy.url), URL(bench.service.url)
    give_addresses(monkeypatch, "broker.test", "127.0.0.2", "127.0.0.1")
    # The stand-in service answers to no other name.
    give_addresses(monkeypatch, "localhost", "127.0.0.2", "127.0.0.1")
    urls = {
        "rabbitmq__url": [str(broker.with_host("broker.test"))],
        "sms_api__base_url": str(api.with_host("localhost")),
    }
    with hold_full_port("127.0.0.2", broker.port or 0), hold_full_port("127.0.0.2", api.port or 0):
        async with bench.worker(**urls) as live:
            numbers = await bench.publish(3)
            await bench.until_taken(numbers)
            await bench.until_settled(live)

            assert live.metric("sms_bridge_amqp_connections_total", outcome="timeout") == 0
    assert bench.extra_posts(numbers) == {}


async def test_broker_password_changed_while_running(bench: Bench, tmp_path: Path) -> None:
    """A new password in the file is used at the next connection, without a restart."""
    username, password = tmp_path / "username", tmp_path / "password"
    username.write_text("rotated\n")
    password.write_text("old password\n")
    permissions = '<<"rotated">>, <<"/">>, <<".*">>, <<".*">>, <<".*">>, <<"test">>'
    make = (
        'rabbit_auth_backend_internal:add_user(<<"rotated">>, <<"old password">>, <<"test">>), '
        f"rabbit_auth_backend_internal:set_permissions({permissions})."
    )
    await asyncio.to_thread(bench.broker.ctl, "eval", make)
    url = bench.proxy.url.replace("guest:guest@", "")
    files: dict[str, Any] = {
        "rabbitmq__username_file": str(username),
        "rabbitmq__password_file": str(password),
    }
    async with bench.worker(rabbitmq__url=[url], **files) as live:
        await asyncio.to_thread(bench.broker.ctl, "change_password", "rotated", "new:p@ss/w%rd")
        bench.proxy.reset()
        await eventually(
            lambda: live.metric("sms_bridge_amqp_connections_total", outcome="auth_failed"),
            what="a refused login",
        )
        password.write_text("new:p@ss/w%rd\n")
        await live.until_consuming()
        numbers = await bench.publish(3)
        await bench.until_taken(numbers)


# An API that is not as it should be


@pytest.fixture
async def api(bench: Bench) -> AsyncIterator[HttpProxy]:
    """Put a proxy in front of the SMS service."""
    async with open_http_proxy(bench.service.url) as proxy:
        yield proxy


@pytest.mark.parametrize(
    ("point", "posts", "taken"),
    [("head", 1, 1), ("body", 2, 2), ("status", 2, 2), ("headers", 1, 1), ("answer", 1, 1)],
)
async def test_api_cuts_the_connection(
    bench: Bench, api: HttpProxy, point: Point, posts: int, taken: int
) -> None:
    """An accepted request is POSTed again, with its key, only when no status line was read."""
    api.cuts = [point]
    async with bench.worker(sms_api__base_url=api.url) as live:
        numbers = await bench.publish(1)
        await bench.until_taken(numbers)
        await eventually(
            lambda: live.metric("sms_bridge_worker_messages_processed_total", outcome="sent"),
            what="settled as sent",
        )

        assert len(bench.service.posts(numbers)) == posts
        keys = [message.idempotency_key for message in bench.service.taken(numbers)]
        assert keys == [f"id-{numbers[0]}"] * taken


OUTAGES: dict[str, dict[str, Any]] = {
    "hang": {"mode": "hang"},
    "error": {"status": 500},
    "accepted": {"mode": "accept_then_cut"},
}


@pytest.mark.parametrize(
    ("kind", "count"), [("hang", 300), ("error", 150), ("refused", 150), ("accepted", 150)]
)
async def test_api_outage(bench: Bench, api: HttpProxy, kind: str, count: int) -> None:
    """An outage costs a handful of dead letters, and its end starts slowly.

    What the service takes without saying so is repeated with its key, no more than allowed.
    """
    await bench.declare_main()
    numbers = await bench.publish(count)
    await _begin_outage(kind, bench, api)
    async with bench.worker(
        worker__outage_after="1s",
        worker__concurrency=50,
        sms_api__base_url=api.url,
        sms_api__timeout_seconds=1,
    ) as live:
        await eventually(lambda: live.paused == {"outage"}, what="paused")
        bench.service.behave()
        await api.accept()
        mended = time.time()
        await eventually(lambda: not live.paused, what="resumed")
        await bench.until_settled(live)

        taken = bench.service.taken(numbers)
        times = [message.received_at for message in taken if message.received_at > mended]
        assert len([moment for moment in times if moment < times[0] + 1]) <= 75
        assert len({message.to for message in taken}) >= count - 5
        assert len(await bench.dead_letters()) <= 5
        if kind == "accepted":
            assert all(message.idempotency_key == f"id-{message.to}" for message in taken)
            assert 1 < max(bench.sent_twice(numbers).values()) <= 3
        else:
            assert bench.sent_twice(numbers) == {}


async def test_what_is_in_flight_when_an_outage_is_seen_burns_nothing(bench: Bench) -> None:
    """Answers that come once the worker is paused cost no attempt; ten had to fail before that."""
    await bench.declare_main()
    numbers = await bench.publish(50)
    bench.service.misbehave(NOT_SENT | {"latency_seconds": 1.5})
    async with bench.worker(
        worker__outage_after="1s", worker__concurrency=50, worker__max_attempts=1
    ) as live:
        await eventually(lambda: live.paused == {"outage"}, what="paused")
        bench.service.behave()
        await bench.until_settled(live)

        assert len(bench.service.taken(numbers)) >= 40
        assert {letter.headers["sms-bridge-reason"] for letter in await bench.dead_letters()} == {
            "exhausted"
        }
        assert bench.sent_twice(numbers) == {}


async def _begin_outage(kind: str, bench: Bench, api: HttpProxy) -> None:
    if kind == "refused":
        await api.refuse()
    else:
        bench.service.misbehave(OUTAGES[kind])


async def test_credentials_rejected_for_a_while(bench: Bench) -> None:
    """A key that is refused for a while costs no message, no attempt and no second sending."""
    await bench.declare_main()
    numbers = await bench.publish(500)
    bench.service.misbehave({"status": 401})
    async with bench.worker(worker__concurrency=50, worker__max_attempts=1) as live:
        await eventually(lambda: live.paused == {"credentials_rejected"}, what="paused")
        before = len(bench.service.posts(numbers))
        await eventually(lambda: len(bench.service.posts(numbers)) > before + 1, what="2 probes")

        assert len(bench.service.posts(numbers)) <= 60
        bench.service.behave()
        await bench.until_taken(numbers)
        await bench.until_settled(live)
        assert await bench.dead_letters() == []
        assert bench.sent_twice(numbers) == {}


async def seconds_to_send(bench: Bench, count: int) -> float:
    """Publish messages one after the other; return how long the slowest took to be accepted."""
    slowest = 0.0
    for number in make_numbers(count):
        published = time.time()
        await bench.publish([number])
        await bench.until_taken([number])
        (message,) = bench.service.taken([number])
        slowest = max(slowest, message.received_at - published)
    return slowest


async def send_until_refused(bench: Bench, count: int) -> None:
    """Send one message after the other until so many are dead: they are the evidence."""
    deadline = time.monotonic() + 30
    while await bench.amqp.count(bench.dead_queue) < count:
        assert await seconds_to_send(bench, 1) < 2.5
        assert time.monotonic() < deadline


@pytest.mark.parametrize("messages", [1, 5])
async def test_a_number_that_is_never_found(bench: Bench, messages: int) -> None:
    """A number that is answered 404 for ever is refused, and holds others up for no longer."""
    (bad,) = make_numbers(1)
    bench.service.misbehave({"to": bad, "status": 404})
    async with bench.worker() as live:
        # Nobody else sends: it cannot be known yet whose fault it is.
        for _ in range(messages):
            await bench.publish([bad], ids=False)
        await eventually(lambda: live.paused == {"misconfigured"}, what="paused")
        assert await bench.amqp.count(bench.dead_queue) == 0
        probed = max(messages, 3) + 2
        await eventually(lambda: len(bench.service.posts([bad])) >= probed, what="probes")

        assert await seconds_to_send(bench, 20) < 2
        await send_until_refused(bench, messages)
        await bench.until_settled(live)
        letters = await bench.dead_letters()
        assert [letter.headers["sms-bridge-reason"] for letter in letters] == ["refused"] * messages
        assert not live.paused


async def test_many_messages_to_a_bad_number(bench: Bench) -> None:
    """Twenty messages to a number that is never found hold up the one behind them for a moment."""
    (bad,) = make_numbers(1)
    bench.service.misbehave({"to": bad, "status": 404})
    async with bench.worker() as live:
        for _ in range(20):
            await bench.publish([bad], ids=False)

        assert await seconds_to_send(bench, 30) < 2.5
        await send_until_refused(bench, 20)
        await bench.until_settled(live)
        letters = await bench.dead_letters()
        assert [letter.headers["sms-bridge-reason"] for letter in letters] == ["refused"] * 20


async def test_numbers_that_are_forbidden_among_others(bench: Bench) -> None:
    """Numbers that are answered 403 are refused while all others are sent without delay."""
    bad = make_numbers(3)
    bench.service.misbehave(*({"to": number, "status": 403} for number in bad))
    async with bench.worker() as live:
        await bench.publish(bad)
        assert await seconds_to_send(bench, 20) < 2
        others = await bench.publish(50)
        await bench.until_taken(others)
        await send_until_refused(bench, len(bad))
        await bench.until_settled(live)

        letters = await bench.dead_letters()
        assert {letter.message_id for letter in letters} == {f"id-{number}" for number in bad}
        assert {letter.headers["sms-bridge-status"] for letter in letters} == {403}
        assert {letter.headers["sms-bridge-attempts"] for letter in letters} == {1}
        assert not live.paused


async def test_first_answer_of_a_fresh_worker_is_403(bench: Bench) -> None:
    """A 403 before anything was accepted holds up nobody."""
    (bad,) = make_numbers(1)
    bench.service.misbehave({"to": bad, "status": 403})
    async with bench.worker() as live:
        await bench.publish([bad])
        await eventually(lambda: bench.service.posts([bad]), what="a POST")

        assert await seconds_to_send(bench, 20) < 2
        await send_until_refused(bench, 1)
        await bench.until_settled(live)
        (letter,) = await bench.dead_letters()
        assert letter.message_id == f"id-{bad}"
        assert not live.paused


@pytest.mark.parametrize("status", [403, 404])
async def test_key_or_path_that_goes_away(bench: Bench, status: int) -> None:
    """A key revoked with 403, or a path that goes away, under load costs no message."""
    await bench.declare_main()
    numbers = await bench.publish(600)
    bench.service.misbehave({"latency_seconds": 0.1})
    async with bench.worker(worker__concurrency=50, worker__max_attempts=1) as live:
        await eventually(partial(has_taken, bench, numbers, 100), what="100 are sent")
        bench.service.misbehave({"status": status, "latency_seconds": 0.1})
        await eventually(lambda: live.paused, what="paused")
        before = len(bench.service.posts(numbers))
        await eventually(lambda: len(bench.service.posts(numbers)) >= before + 3, what="3 probes")
        probed = [post.to for post in bench.service.posts(numbers)[before:]]
        assert len(set(probed)) == len(probed)
        assert live.logged("resumed") == []
        bench.service.behave()
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert await bench.dead_letters() == []
        assert bench.sent_twice(numbers) == {}


async def test_proxy_that_wants_another_login(bench: Bench) -> None:
    """A proxy that answers CONNECT with 407 pauses the worker, and costs no message."""
    heads: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    proxy = await asyncio.start_server(refuse, "127.0.0.1", 0)
    settings: dict[str, Any] = {
        "worker__max_attempts": 1,
        "sms_api__base_url": "https://api.test",
        "sms_api__proxy": f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}",
    }
    async with proxy, bench.worker(**settings) as live:
        await bench.publish(20)
        await eventually(lambda: live.paused == {"credentials_rejected"}, what="paused")
        before = len(heads)
        await eventually(lambda: len(heads) >= before + 2, what="2 probes")

        assert await bench.dead_letters() == []
    assert {head.partition(b" ")[0] for head in heads} == {b"CONNECT"}


@pytest.mark.parametrize("status", [302, 307])
async def test_redirect_is_not_followed(bench: Bench, status: int) -> None:
    """A redirect goes nowhere: nothing reaches its target, and the worker pauses."""
    visits: list[float] = []

    async def visit(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(time.time())
        writer.close()

    async with await asyncio.start_server(visit, "127.0.0.1", 0) as target:
        location = f"http://127.0.0.1:{target.sockets[0].getsockname()[1]}/v1/messages"
        bench.service.misbehave({"status": status, "headers": {"Location": location}})
        async with bench.worker() as live:
            numbers = await bench.publish(5)
            await eventually(lambda: live.paused == {"misconfigured"}, what="paused")
            before = len(bench.service.posts(numbers))
            await eventually(lambda: len(bench.service.posts(numbers)) > before, what="a probe")
            assert await bench.dead_letters() == []
            bench.service.behave()
            await bench.until_taken(numbers)

    assert visits == []


async def test_standard_output_that_nobody_reads(bench: Bench, tmp_path: Path) -> None:
    """A reader of the log that has stopped costs log lines, not a single message."""
    await bench.declare_main()
    log = tmp_path / "log"
    os.mkfifo(log)
    unread = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    with guarded() as guard:
        environ = make_environ(bench.values())
        child = Child([*PROGRAM, "worker"], guard=guard, log=log, environ=environ)
        try:
            await eventually(lambda: bench.amqp.consumers(bench.queue), what="a consumer")
            # A pipe holds 64 KiB, which are some 250 lines.
            numbers = await bench.publish(1000)
            await bench.until_taken(numbers)
            child.ask_to_end()
            await eventually(lambda: child.exit_code == 0, what="a clean end")
        finally:
            child.kill()
            os.close(unread)

    assert bench.extra_posts(numbers) == {}


@pytest.mark.parametrize(
    "policy",
    [{"worker__on_uncertain": "park"}, {"worker__max_uncertain_attempts": 1}],
    ids=["park", "one_attempt"],
)
@pytest.mark.parametrize(
    "fault", [{"status": 500}, {"mode": "accept_then_cut"}], ids=["failed", "accepted"]
)
async def test_last_uncertain_attempt_in_an_outage(
    bench: Bench, policy: dict[str, Any], fault: dict[str, Any]
) -> None:
    """What must not be tried again after an attempt in doubt is POSTed once, in a pause too."""
    await bench.declare_main()
    numbers = await bench.publish(400)
    # Slow enough that the queue outlasts the time after which it counts as an outage.
    bench.service.misbehave({**fault, "latency_seconds": 0.5})
    async with bench.worker(worker__outage_after="1s", worker__concurrency=50, **policy) as live:
        await eventually(lambda: live.paused == {"outage"}, what="paused")
        before = len(bench.service.posts(numbers))
        await eventually(lambda: len(bench.service.posts(numbers)) >= before + 2, what="2 probes")
        assert live.logged("resumed") == []
        bench.service.behave()
        await bench.until_settled(live)

        posts = bench.service.posts(numbers)
        in_doubt = {f"id-{post.to}" for post in posts if post.status != 202}
        letters = await bench.dead_letters()
        assert bench.extra_posts(numbers) == {}
        assert {post.to for post in posts} == set(numbers)
        assert {letter.message_id for letter in letters} == in_doubt
        assert {letter.headers["sms-bridge-reason"] for letter in letters} == {"uncertain"}
        assert len(letters) < len(numbers) / 2


def was_put_off(live: Live, number: str) -> bool:
    """Say whether a message was put off because of a pause."""
    lines = live.logged("delivery")
    return any(x["message_id"].endswith(number[1:]) and x["reason"] == "paused" for x in lines)


async def test_uncertain_attempts_count_in_an_outage(bench: Bench) -> None:
    """What was in flight when an outage was recognised is not POSTed more often than its cap."""
    (in_flight,) = make_numbers(1)
    cut = {"to": in_flight, "mode": "accept_then_cut"}
    away = {"status": 503, "headers": {"Retry-After": "1"}}
    bench.service.misbehave({**cut, "latency_seconds": 3}, away)
    async with bench.worker(
        worker__max_uncertain_attempts=2, worker__outage_after="1s", worker__concurrency=50
    ) as live:
        await bench.publish([in_flight])
        await eventually(lambda: bench.service.posts([in_flight]), what="it is in flight")
        others = await bench.publish(20)
        await eventually(lambda: live.paused == {"outage"}, what="paused")
        assert len(bench.service.posts([in_flight])) == 1
        await eventually(lambda: was_put_off(live, in_flight), what="it is put off")
        assert live.paused
        bench.service.misbehave({**cut, "count": 1})
        await bench.until_taken(others)
        await bench.until_settled(live)

        assert len(bench.service.posts([in_flight])) == 2
        (letter,) = await bench.dead_letters()
        assert letter.headers["sms-bridge-reason"] == "uncertain"


async def test_two_lost_connections_during_one_post(bench: Bench) -> None:
    """However often the connection ends during a POST, it is not repeated; without an id too."""
    bench.service.misbehave({"latency_seconds": 6})
    received = "sms_bridge_worker_messages_received_total"
    async with bench.worker() as live:
        numbers = await bench.publish(5, ids=False)
        await eventually(lambda: len(bench.service.posts(numbers)) == 5, what="5 POSTs")
        for seen in (5, 10):
            bench.proxy.reset()
            await eventually(
                partial(has_received, live, received, seen), what=f"{seen} redeliveries"
            )
        await bench.until_settled(live)

        assert bench.extra_posts(numbers) == {}


@WITH_AND_WITHOUT_IDS
async def test_cut_of_one_of_two_workers(bench: Bench, *, ids: bool) -> None:
    """What one had in flight as its connection ended is sent once more, by the other.

    With a `message_id` both POSTs have one key, by which the service can tell; else they have two.
    """
    bench.service.misbehave({"latency_seconds": 3})
    # It waits for redeliveries that the other one has got.
    async with bench.worker(worker__concurrency=10, worker__shutdown_timeout_seconds=1):
        numbers = await bench.publish(10, ids=ids)
        await eventually(lambda: len(bench.service.posts(numbers)) == 10, what="10 POSTs")
        async with bench.worker(worker__concurrency=10, rabbitmq__url=bench.broker.url) as other:
            bench.proxy.reset()
            await eventually(lambda: len(bench.service.posts(numbers)) == 20, what="20 POSTs")
            await bench.until_settled(other)
            keys = {(post.to, post.idempotency_key) for post in bench.service.posts(numbers)}

            assert bench.extra_posts(numbers) == dict.fromkeys(numbers, 2)
            assert len(keys) == (10 if ids else 20)


def has_received(live: Live, name: str, count: int) -> bool:
    """Say whether so many redeliveries have come."""
    return live.metric(name, redelivered="true") >= count


async def test_no_more_than_concurrency_after_a_pause(bench: Bench) -> None:
    """Requests that are slow over a pause leave no room for more than `worker.concurrency`."""
    await bench.declare_main()
    slow, bad, rest = make_numbers(9), make_numbers(1), make_numbers(20)
    for numbers in (slow, bad, rest):
        await bench.publish(numbers)
    bench.service.misbehave(
        *({"to": n, "latency_seconds": 4, "count": 1} for n in (*slow, *rest)),
        {"to": bad[0], "status": 401, "count": 1},
    )
    async with bench.worker(worker__concurrency=10) as live:
        everybody = [*slow, *bad, *rest]
        await bench.until_taken(everybody, 60)
        await bench.until_settled(live)

        assert live.metric("sms_bridge_worker_provider_requests_total", result="timeout") == 0
        assert len(bench.service.posts(everybody)) == len(everybody) + 1


async def test_the_limit_follows_the_service(bench: Bench) -> None:
    """With `auto` it grows while all is well, a 503 halves it, and everything is sent once."""
    await bench.declare_main()
    numbers = await bench.publish(500)
    bench.service.misbehave({"latency_seconds": 0.3})
    limit = "sms_bridge_worker_concurrency_limit"
    async with bench.worker(worker__concurrency="auto", worker__max_concurrency=16) as live:
        await eventually(lambda: live.metric(limit) == 16, what="a limit that has grown")
        for _ in range(2):
            live.worker._tell_limit()
        assert len(live.logged("concurrency_changed")) == 1
        bench.service.misbehave({"status": 503, "headers": {"Retry-After": "1"}, "count": 1})
        await eventually(lambda: live.metric(limit) <= 8, what="a limit that is halved")
        bench.service.misbehave({"latency_seconds": 0.3})
        await bench.until_taken(numbers, 60)
        await bench.until_settled(live)

        refused = {a.to for a in bench.service.posts(numbers) if a.status == 503}
        assert len(refused) == 1
        assert bench.extra_posts(numbers).keys() == refused
        assert bench.sent_twice(numbers) == {}


async def test_order_is_kept_while_the_limit_moves(bench: Bench) -> None:
    """`ordering: recipient` goes together with `auto`, over a 429, too."""
    await bench.declare_main()
    numbers = make_numbers(20)
    for count in range(5):
        for number in numbers:
            body = {"to": number, "from": "Acme", "text": str(count)}
            await bench.amqp.publish(bench.queue, json.dumps(body).encode())
    bench.service.misbehave({"status": 429, "count": 3}, {"latency_seconds": 0.02})
    async with bench.worker(worker__concurrency="auto", worker__ordering="recipient") as live:
        await eventually(lambda: len(bench.service.taken(numbers)) == 100, what="all are sent")
        await bench.until_settled(live)

    for number in numbers:
        texts = [message.text for message in bench.service.taken([number])]
        assert texts == ["0", "1", "2", "3", "4"]


async def test_a_drain_with_a_limit_that_moves(bench: Bench) -> None:
    """At the end what is in flight is finished, and what only waits goes back, each sent once."""
    await bench.declare_main()
    numbers = await bench.publish(100)
    bench.service.misbehave({"latency_seconds": 0.3})
    for goal in (10, 40):
        async with bench.worker(worker__concurrency="auto") as live:
            enough = functools.partial(has_taken, bench, numbers, goal)
            await eventually(enough, what=f"{goal} are sent")
            assert await live.stop() == 0
    async with bench.worker(worker__concurrency="auto"):
        await bench.until_taken(numbers)

    assert bench.extra_posts(numbers) == {}


async def test_a_probe_that_reaches_nobody_ends_no_pause(bench: Bench, api: HttpProxy) -> None:
    """A probe that finds no service says nothing about the key."""
    await bench.declare_main()
    numbers = await bench.publish(100)
    bench.service.misbehave({"status": 401})
    async with bench.worker(sms_api__base_url=api.url, worker__concurrency=20) as live:
        await eventually(lambda: live.paused == {"credentials_rejected"}, what="paused")
        await api.refuse()
        refused = "sms_bridge_worker_provider_requests_total"
        await eventually(
            lambda: live.metric(refused, result="connection_error") >= 3, what="a refused probe"
        )
        assert live.logged("resumed") == []
        bench.service.behave()
        await api.accept()
        await bench.until_taken(numbers)


async def test_no_delivery_is_held_for_a_long_retry_after(bench: Bench) -> None:
    """While the service wants a wait of minutes everything waits on the ladder."""
    (number,) = make_numbers(1)
    bench.service.misbehave({"status": 429, "headers": {"Retry-After": "900"}})
    async with bench.worker(worker__concurrency=10, worker__ordering="recipient") as live:
        await publish_texts(bench, number, 20)
        await eventually(lambda: live.paused == {"rate_limited"}, what="paused")
        held = "sms_bridge_worker_messages_in_progress"
        await eventually(lambda: live.metric(held) == 0, what="nothing held")

        assert not live.worker.consumer.is_registered


async def test_a_probe_whose_connection_ends_makes_room(bench: Bench) -> None:
    """The next probe goes on with the back-off where the lost one was."""
    bench.service.misbehave({"status": 401})
    async with bench.worker() as live:
        numbers = await bench.publish(3)
        await eventually(lambda: live.paused == {"credentials_rejected"}, what="paused")
        first = len(bench.service.posts(numbers))
        await eventually(lambda: len(bench.service.posts(numbers)) >= first + 2, what="2 probes")
        released = "sms_bridge_worker_messages_processed_total"
        bench.proxy.reset()

        await eventually(
            lambda: live.metric(released, outcome="released") >= 1, what="room", seconds=3
        )
        bench.service.behave()
        await bench.until_taken(numbers)


# A worker that is told to end

SHUTDOWN_SECONDS = 2


@dataclass
class Ending:
    """How one worker process ended after SIGTERM."""

    code: int | None
    seconds: float
    numbers: list[str]
    posts: dict[str, int]
    taken: dict[str, int]
    # Ready in any of its queues once it is gone.
    left: set[str]
    log: str

    @property
    def lost(self) -> set[str]:
        """Numbers that are neither sent nor in a queue."""
        return {*self.numbers} - {*self.taken} - self.left


class Scenario:
    """One worker process, brought into a state and told to end."""

    def __init__(self, bench: Bench, child: Child) -> None:
        self.bench = bench
        self.child = child

    def has_logged(self, event: str) -> bool:
        """Say whether the process has logged an event."""
        assert self.child.exit_code is None, self.child.tail()
        return f'"event":"{event}"' in self.child.log.read_text()

    def count_logged(self, words: str) -> int:
        """Count how often the process has logged these words."""
        return self.child.log.read_text().count(words)

    async def until_logged(self, event: str) -> None:
        """Return when the process has logged an event."""
        await eventually(lambda: self.has_logged(event), what=f"{event}\n{self.child.tail()}")

    async def publish(self, fault: dict[str, Any] | None = None) -> list[str]:
        """Publish three messages whose POSTs meet a fault, and wait until they are POSTed."""
        numbers = make_numbers(3)
        faults = self.bench.service.faults
        faults += [Fault(**fault, to=number) for number in numbers if fault]
        await self.bench.publish(numbers)
        await eventually(lambda: len(self.bench.service.posts(numbers)) >= 3, what="3 POSTs")
        return numbers

    async def end(self, numbers: list[str]) -> Ending:
        """Send SIGTERM, wait for the end, and take stock."""
        bench, started = self.bench, time.monotonic()
        self.child.ask_to_end()
        await eventually(lambda: self.child.exit_code is not None, what=self.child.name)
        seconds = time.monotonic() - started
        bench.proxy.refuse()
        bench.proxy.thaw()
        await eventually(self._is_gone, what="no consumer left")
        return Ending(
            code=self.child.exit_code,
            seconds=seconds,
            numbers=numbers,
            posts=Counter(str(attempt.to) for attempt in bench.service.posts(numbers)),
            taken=Counter(message.to for message in bench.service.taken(numbers)),
            left=await self._left(),
            log=self.child.log.read_text(),
        )

    async def _is_gone(self) -> bool:
        return await self.bench.amqp.consumers(self.bench.queue) == 0

    async def _left(self) -> set[str]:
        ladder = [f"{self.bench.queue}.retry.{step}" for step in ("1m", "2m")]
        messages = [
            message
            for queue in (self.bench.queue, self.bench.dead_queue, *ladder)
            for message in await self.bench.amqp.take_all(queue)
        ]
        return {str(json.loads(message.body)["to"]) for message in messages}


async def end_idle(scenario: Scenario) -> Ending:
    """End a worker that has nothing to do."""
    return await scenario.end([])


async def end_in_flight(scenario: Scenario) -> Ending:
    """End a worker that waits for answers which come in time."""
    return await scenario.end(await scenario.publish({"latency_seconds": 1}))


async def end_paused(scenario: Scenario) -> Ending:
    """End a worker that is paused and holds a probe."""
    numbers = await scenario.publish({"status": 401})
    await scenario.until_logged("paused")
    return await scenario.end(numbers)


async def end_frozen(scenario: Scenario) -> Ending:
    """End a worker whose broker hangs while answers come in."""
    numbers = await scenario.publish({"latency_seconds": 1})
    scenario.bench.proxy.freeze()
    return await scenario.end(numbers)


async def end_frozen_copies(scenario: Scenario) -> Ending:
    """End a worker whose broker hangs while it has retry copies to store."""
    numbers = await scenario.publish({"latency_seconds": 1, **NOT_SENT})
    scenario.bench.proxy.freeze()
    return await scenario.end(numbers)


async def end_away(scenario: Scenario) -> Ending:
    """End a worker whose broker goes away while answers come in."""
    numbers = await scenario.publish({"latency_seconds": 1})
    scenario.bench.proxy.refuse()
    return await scenario.end(numbers)


async def end_cut(scenario: Scenario) -> Ending:
    """End a worker whose connections have just been cut while answers come in."""
    numbers = await scenario.publish({"latency_seconds": 0.3})
    scenario.bench.proxy.reset()
    return await scenario.end(numbers)


async def end_hanging(scenario: Scenario) -> Ending:
    """End a worker whose API does not answer."""
    return await scenario.end(await scenario.publish({"mode": "hang"}))


async def end_blocked(scenario: Scenario) -> Ending:
    """End a worker whose broker stores nothing while it has retry copies to store."""
    # Long enough for the alarm to be on first.
    numbers = await scenario.publish({"latency_seconds": 5, **NOT_SENT})
    async with memory_alarm(scenario.bench.broker):
        await scenario.until_logged("not_stored")
        return await scenario.end(numbers)


async def end_stopped(scenario: Scenario) -> Ending:
    """End a worker whose broker is stopped by SIGSTOP while answers come in."""
    numbers = await scenario.publish({"latency_seconds": 1})
    broker = scenario.bench.broker
    broker.pause()
    resume = asyncio.get_running_loop().call_later(2 * SHUTDOWN_SECONDS + 5, broker.resume)
    try:
        scenario.child.ask_to_end()
        started = time.monotonic()
        await eventually(lambda: scenario.child.exit_code is not None, what="the end")
        seconds = time.monotonic() - started
    finally:
        resume.cancel()
        broker.resume()
    return replace(await scenario.end(numbers), seconds=seconds)


TOGETHER: dict[str, Callable[[Scenario], Awaitable[Ending]]] = {
    "idle": end_idle,
    "in_flight": end_in_flight,
    "paused": end_paused,
    "frozen": end_frozen,
    "frozen_copies": end_frozen_copies,
    "away": end_away,
    "cut": end_cut,
    "hanging": end_hanging,
}
# These are about the broker that all share.
ALONE: dict[str, Callable[[Scenario], Awaitable[Ending]]] = {
    "blocked": end_blocked,
    "stopped": end_stopped,
}


@pytest.fixture(scope="module")
async def endings(
    broker: Broker, service: Service, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ending]:
    """End one worker process in each state, most of them at the same time."""
    service.forget()
    folder = tmp_path_factory.mktemp("drains")
    with guarded() as guard:

        async def play(name: str, end: Callable[[Scenario], Awaitable[Ending]]) -> Ending:
            async with open_amqp_proxy(broker.url) as proxy, open_amqp(broker.url) as amqp:
                bench = Bench(broker, proxy, service, amqp)
                values = bench.values(
                    rabbitmq__publish_timeout_seconds=1,
                    worker__shutdown_timeout_seconds=SHUTDOWN_SECONDS,
                    worker__retry_delays=["1m", "2m"],
                )
                log, environ = folder / f"{name}.log", make_environ(values)
                child = Child([*PROGRAM, "worker"], guard=guard, log=log, environ=environ)
                try:
                    scenario = Scenario(bench, child)
                    await scenario.until_logged("consuming")
                    return await end(scenario)
                finally:
                    child.kill()

        found = await asyncio.gather(*(play(name, end) for name, end in TOGETHER.items()))
        endings = dict(zip(TOGETHER, found, strict=True))
        for name, end in ALONE.items():
            endings[name] = await play(name, end)
        return endings


@pytest.mark.parametrize("state", [*TOGETHER, *ALONE])
async def test_drain_loses_nothing_and_ends_in_time(endings: dict[str, Ending], state: str) -> None:
    """Whatever the state, SIGTERM ends the worker in time; nothing is lost or POSTed twice."""
    ending = endings[state]

    assert ending.seconds < SHUTDOWN_SECONDS + 5
    assert ending.lost == set(), ending.log
    assert max(ending.taken.values(), default=1) == 1
    assert max(ending.posts.values(), default=1) == 1 or state == "paused"


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("idle", 0),
        ("in_flight", 0),
        ("paused", 0),
        ("frozen_copies", 75),
        ("away", 75),
        ("hanging", 75),
        ("blocked", 75),
    ],
)
async def test_drain_says_whether_it_was_cut_off(
    endings: dict[str, Ending], state: str, code: int
) -> None:
    """The exit code is 0 when all that was taken is acked or given back, 75 when it was not."""
    assert endings[state].code == code, endings[state].log


async def test_drain_finishes_what_is_in_flight(endings: dict[str, Ending]) -> None:
    """What is being sent at SIGTERM is sent and acked."""
    ending = endings["in_flight"]

    assert len(ending.taken) == 3
    assert ending.left == set()


async def test_drain_without_a_connection_waits_for_what_comes_again(
    bench: Bench, tmp_path: Path
) -> None:
    """SIGTERM after a loss that took acks along: the worker comes back to ack the redeliveries."""
    await bench.declare_main()
    with guarded() as guard:
        environ = make_environ(bench.values(worker__retry_delays=["1m", "2m"]))
        log = tmp_path / "worker.log"
        child = Child([*PROGRAM, "worker"], guard=guard, log=log, environ=environ)
        try:
            scenario = Scenario(bench, child)
            await scenario.until_logged("consuming")
            lost = bench.proxy.trap("client", ACK, "drop", again=True, link=CONSUME_LINK)
            numbers = await bench.publish(5)
            await eventually(lambda: lost.seen >= 5, what="5 acks")
            bench.proxy.refuse()
            bench.proxy.traps.clear()
            child.ask_to_end()
            # Longer than a broker that is there would take to deliver again.
            asyncio.get_running_loop().call_later(
                COMES_AGAIN_SECONDS + 1, lambda: asyncio.ensure_future(bench.proxy.accept())
            )
            ending = await scenario.end(numbers)
        finally:
            child.kill()

    assert (ending.code, ending.left) == (0, set()), ending.log
    assert set(ending.posts.values()) == {1}


@asynccontextmanager
async def owing_worker(
    bench: Bench, folder: Path, numbers: list[str], *, others: bool
) -> AsyncIterator[Scenario]:
    """Run a worker process that has sent these and cannot ack them: its connection was cut.

    With `others`, another worker has taken what came again. Without, that is still in the queue
    with whatever comes later, because the process cannot connect until `bench.proxy.accept`.
    """
    await bench.declare_main()
    faults = [Fault(to=number, latency_seconds=1.5, count=1) for number in numbers]
    bench.service.faults.extend(faults)
    elsewhere = bench.values(rabbitmq__url=[bench.broker.url])
    with guarded() as guard:
        environ = make_environ(bench.values(worker__retry_delays=["1m", "2m"]))
        child = Child([*PROGRAM, "worker"], guard=guard, log=folder / "a.log", environ=environ)
        try:
            scenario = Scenario(bench, child)
            await scenario.until_logged("consuming")
            await bench.publish(numbers)
            await eventually(lambda: len(bench.service.posts(numbers)) >= 5, what="POSTs")
            bench.proxy.refuse()
            if others:
                async with running(make_settings(elsewhere), "worker"):
                    await bench.until_taken(numbers)
                    await eventually(lambda: len(bench.service.taken(numbers)) == 10, what="all")
            await eventually(lambda: scenario.count_logged('"sent"') >= 5, what="5 sent")
            yield scenario
        finally:
            child.kill()


@WITH_AND_WITHOUT_IDS
async def test_drain_acks_what_has_come_again_before_it(bench: Bench, *, ids: bool) -> None:
    """SIGTERM while redeliveries wait for their own POSTs: they are acked when these end."""
    bench.service.misbehave({"latency_seconds": 4, "count": None})
    async with bench.worker() as live:
        numbers = await bench.publish(3, ids=ids)
        await eventually(lambda: len(bench.service.posts(numbers)) == 3, what="POSTs")
        bench.proxy.reset(CONSUME_LINK)
        received = "sms_bridge_worker_messages_received_total"
        await eventually(lambda: live.metric(received, redelivered="true") == 3, what="again")
        code = await live.stop()

    assert code == 0
    assert len(bench.service.taken(numbers)) == 3
    assert await bench.amqp.take_all(bench.queue) == []


async def test_drain_does_not_wait_for_what_others_have_taken(bench: Bench, tmp_path: Path) -> None:
    """SIGTERM long after a cut ends the worker when nothing comes again for two seconds."""
    numbers = make_numbers(5)
    async with owing_worker(bench, tmp_path, numbers, others=True) as scenario:
        await bench.proxy.accept()
        await eventually(lambda: scenario.count_logged('"consuming"') >= 2, what="a new consumer")
        ending = await scenario.end(numbers)

    assert ending.code == 0, ending.log
    assert ending.seconds < COMES_AGAIN_SECONDS + 2
    assert '"event":"not_redelivered"' in ending.log


async def test_drain_holds_one_message_of_others(bench: Bench, tmp_path: Path) -> None:
    """A worker that waits for what comes again keeps one new message from others, no more."""
    numbers, fresh = make_numbers(5), make_numbers(20)
    async with owing_worker(bench, tmp_path, numbers, others=True) as scenario:
        await bench.publish(fresh)
        scenario.child.ask_to_end()
        await scenario.until_logged("signal")
        await bench.proxy.accept()
        least = len(fresh)
        while scenario.child.exit_code is None:
            least = min(least, await bench.amqp.count(bench.queue))
        ending = await scenario.end(fresh)

    assert least == len(fresh) - 1
    assert (ending.code, ending.posts, ending.left) == (0, {}, {*fresh}), ending.log


async def test_drain_ends_while_messages_of_others_come_again(bench: Bench, tmp_path: Path) -> None:
    """However long the broker delivers again what is not ours, the wait ends, and it is told."""
    numbers, returned = make_numbers(5), make_numbers(50)
    async with owing_worker(bench, tmp_path, numbers, others=True) as scenario:
        await bench.publish(returned)
        held = [await bench.amqp.get(bench.queue) for _ in returned]
        scenario.child.ask_to_end()
        await scenario.until_logged("signal")
        await bench.proxy.accept()
        while scenario.child.exit_code is None:
            if scenario.count_logged('"consuming"') >= 2 and held:
                await held.pop().nack(requeue=True)
            await asyncio.sleep(COMES_AGAIN_SECONDS / 8)
        for message in held:
            await message.nack(requeue=True)
        ending = await scenario.end(returned)

    assert ending.code == 75, ending.log
    assert '"event":"acks_in_doubt"' in ending.log
    assert (ending.posts, ending.left) == ({}, {*returned})
    assert len(held) > 10


async def test_drain_acks_what_comes_again_behind_others(bench: Bench, tmp_path: Path) -> None:
    """What is done is acked even when messages that are not done come again before it."""
    numbers, waiting = make_numbers(5), make_numbers(3)
    await bench.declare_main()
    # Not so far that they would wait on the ladder.
    await bench.publish(waiting, headers={"sms-bridge-not-before": int(time.time()) + 45})
    async with owing_worker(bench, tmp_path, numbers, others=False) as scenario:
        scenario.child.ask_to_end()
        await scenario.until_logged("signal")
        await bench.proxy.accept()
        ending = await scenario.end([*numbers, *waiting])

    assert ending.code == 0, ending.log
    assert ending.left == {*waiting}
    assert all(ending.posts[number] == 1 for number in numbers)


async def test_retries_are_spread(bench: Bench) -> None:
    """Messages that fail at the same moment do not come back at the same moment."""
    numbers = make_numbers(10)
    bench.service.misbehave(*once_each(numbers, {"status": 425}))
    async with bench.worker(worker__retry_delays=["2s"]) as live:
        await bench.publish(numbers)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

    posts = bench.service.posts(numbers)
    again = [post.received_at for post in posts[len(numbers) :]]
    assert max(again) - min(again) > 0.1


def texts_of(bench: Bench, numbers: list[str]) -> list[str]:
    """Return the texts that were accepted for these numbers, in order."""
    return [message.text for message in bench.service.taken(numbers)]


async def publish_texts(bench: Bench, number: str, count: int, *, start: int = 0) -> list[str]:
    """Publish so many numbered texts to one number, in order, and return them."""
    texts = [f"text {place}" for place in range(start, start + count)]
    for text in texts:
        body = json.dumps({"to": number, "from": "Acme", "text": text}).encode()
        await bench.amqp.publish(bench.queue, body, message_id=f"{number} {text}")
    return texts


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"status": 425, "count": 3}, id="retried"),
        pytest.param({"status": 503, "headers": {"Retry-After": "1"}, "count": 2}, id="later"),
        pytest.param({"status": 429, "headers": {"Retry-After": "1"}, "count": 2}, id="slow"),
        pytest.param({"mode": "cut", "count": 2}, id="uncertain"),
    ],
)
async def test_order_is_kept_over_retries(bench: Bench, fault: dict[str, Any]) -> None:
    """With `ordering: recipient` nothing overtakes a message that waits on the ladder."""
    ordered, free = make_numbers(2)
    bench.service.misbehave({**fault, "to": ordered})
    async with bench.worker(worker__ordering="recipient") as live:
        texts = await publish_texts(bench, ordered, 6)
        await bench.publish([free])
        await bench.until_taken([free])
        # On its way from the ladder a message is in no queue for a moment.
        await eventually(lambda: has_taken(bench, [ordered], len(texts)), what="all are sent")
        await bench.until_settled(live)

    assert texts_of(bench, [ordered]) == texts


async def test_followers_come_back_soon_after_their_leader(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind a message on the ladder wait for what is left of its step, not for a whole one.

    It goes up as late as it can here: a message that fails waits a moment before, to be spread.
    """
    monkeypatch.setattr("bridge.outbound.settle.random.uniform", lambda _, most: most)
    (number,) = make_numbers(1)
    bench.service.misbehave({"status": 425, "count": 2})
    async with bench.worker(worker__ordering="recipient", worker__retry_delays=["1s", "8s"]):
        texts = await publish_texts(bench, number, 3)
        await eventually(lambda: has_taken(bench, [number], 3), what="all three")

    sent_at = [message.received_at for message in bench.service.taken([number])]
    assert texts_of(bench, [number]) == texts
    assert sent_at[-1] - sent_at[0] < 4


async def test_order_goes_on_after_a_refused_message(bench: Bench) -> None:
    """A message that is dead no longer holds up those behind it."""
    (number,) = make_numbers(1)
    bench.service.misbehave({"status": 425, "count": 1}, {"status": 400, "count": 1})
    async with bench.worker(worker__ordering="recipient") as live:
        texts = await publish_texts(bench, number, 4)
        await eventually(lambda: has_taken(bench, [number], 3), what="three are sent")
        await bench.until_settled(live)

    assert texts_of(bench, [number]) == texts[1:]


async def test_one_message_of_a_number_at_a_time(bench: Bench) -> None:
    """With `ordering: recipient` a number's POSTs do not overlap; other numbers do not wait."""
    bench.service.misbehave({"latency_seconds": 0.2, "count": None})
    ordered, *others = make_numbers(6)
    async with bench.worker(worker__ordering="recipient") as live:
        await asyncio.gather(publish_texts(bench, ordered, 4), bench.publish(others))
        await bench.until_settled(live)

    starts = [post.received_at for post in bench.service.posts([ordered])]
    assert all(later - earlier >= 0.19 for earlier, later in itertools.pairwise(starts))
    begin = min(starts)
    assert sum(post.received_at < begin + 0.8 for post in bench.service.posts(others)) == 5


async def test_order_is_kept_over_a_lost_connection(bench: Bench) -> None:
    """A message that goes back to the queue comes again ahead of those on the ladder behind it."""
    (number,) = make_numbers(1)
    bench.service.misbehave(
        {"status": 425, "count": 2}, {"status": 429, "headers": {"Retry-After": "3"}, "count": 1}
    )
    async with bench.worker(worker__ordering="recipient") as live:
        texts = await publish_texts(bench, number, 1)
        # One of them is on the ladder when the first is back and held.
        while len(bench.service.posts([number])) < 3:
            texts += await publish_texts(bench, number, 1, start=len(texts))
            await asyncio.sleep(0.2)
        bench.proxy.reset()
        await eventually(lambda: has_taken(bench, [number], len(texts)), what="all are sent")
        await bench.until_settled(live)

    assert texts_of(bench, [number]) == texts


async def test_repeats_of_a_message_to_a_bad_number(bench: Bench) -> None:
    """Repeats of an id whose first is held in a pause leave room for those that end the pause."""
    (bad,) = make_numbers(1)
    bench.service.misbehave({"to": bad, "status": 404})
    async with bench.worker() as live:
        await bench.publish([bad])
        await eventually(lambda: live.paused == {"misconfigured"}, what="paused")
        await bench.publish([bad] * 6)

        assert await seconds_to_send(bench, 5) < 5
        assert live.logged("resumed")


async def test_many_ordered_messages_to_a_bad_number(bench: Bench) -> None:
    """Messages that wait for one to a bad number leave room for those that end the pause."""
    (bad,) = make_numbers(1)
    bench.service.misbehave({"to": bad, "status": 404})
    async with bench.worker(worker__ordering="recipient") as live:
        await publish_texts(bench, bad, 12)
        await eventually(lambda: live.paused == {"misconfigured"}, what="paused")
        await eventually(lambda: len(bench.service.posts([bad])) >= 5, what="probes")

        assert await seconds_to_send(bench, 5) < 5
        assert live.logged("resumed")
