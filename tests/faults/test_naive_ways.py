"""What goes wrong when it is done the naive way, and does not when it is done ours.

The naive ways are a few lines with the libraries alone, as one writes them at first.
"""

import asyncio
import itertools
import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import aio_pika
import aiormq
import httpx
import pamqp.decode
import pamqp.encode
import pytest
import tenacity
import uvicorn
from aio_pika.abc import AbstractIncomingMessage
from pydantic import SecretStr
from starlette.types import Receive, Scope, Send

from bridge.amqp.properties import ClientProperties, Properties
from bridge.amqp.publisher import Publisher
from bridge.config import RabbitMQSettings, SmsApiSettings, WorkerSettings
from bridge.errors import AttemptError, PublishError
from bridge.sandbox.processes import free_ports
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from bridge.topology.declarations import worker_topology
from bridge.worker.fates import Answer, Fate
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.request import SendRequest
from bridge.worker.service.connection import Reply
from bridge.worker.service.sender import Sender
from bridge.worker.service.shape import shape_from
from bridge.worker.service.transport import open_transport
from tests.deliveries import make_delivery
from tests.faults.bench import (
    CONSUME_LINK,
    Amqp,
    Bench,
    Live,
    eventually,
    make_numbers,
    open_amqp,
    open_link,
    post_event,
)

QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
NOT_SENT: dict[str, Any] = {"status": 503, "headers": {"Retry-After": "1"}}
Handle = Callable[[AbstractIncomingMessage], Awaitable[None]]


@asynccontextmanager
async def naive_client(bench: Bench) -> AsyncIterator[aio_pika.abc.AbstractRobustConnection]:
    """Connect as the documentation of aio-pika does, through the proxy."""
    url = f"{bench.proxy.url}?name=naive&reconnect_interval=0.2"
    loop = asyncio.get_running_loop()
    handler = loop.get_exception_handler()
    # What it leaves unawaited is not the test's business.
    loop.set_exception_handler(lambda *_: None)
    connection = await aio_pika.connect_robust(url, timeout=5)
    try:
        yield connection
    finally:
        loop.set_exception_handler(handler)
        closing = asyncio.ensure_future(connection.close())
        await asyncio.wait({closing}, timeout=3)
        closing.cancel()


@asynccontextmanager
async def naive_consumer(
    bench: Bench, handle: Handle, *, prefetch: int = 10
) -> AsyncIterator[aio_pika.abc.AbstractRobustChannel]:
    """Consume the main queue in the callback style."""
    async with naive_client(bench) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=prefetch)
        queue = await channel.declare_queue(bench.queue, durable=True, arguments=QUORUM)
        await queue.consume(handle)
        yield channel


def naive_sender(bench: Bench, client: httpx.AsyncClient) -> Handle:
    """POST what a message holds, then ack it."""

    async def handle(message: AbstractIncomingMessage) -> None:
        headers = {"Authorization": "Bearer an-api-key"}
        url = f"{bench.service.url}/v1/messages"
        (await client.post(url, content=message.body, headers=headers)).raise_for_status()
        await message.ack()

    return handle


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Lend an HTTP client."""
    async with httpx.AsyncClient(trust_env=False, timeout=10) as ours:
        yield ours


@pytest.fixture
async def publisher(bench: Bench) -> AsyncIterator[Publisher]:
    """Run our publisher on a connection of its own."""
    metrics = BridgeMetrics(
        new_registry(), component="worker", version="0", revision="0", exchanges=("default",)
    )
    ours = Publisher(metrics, timeout_seconds=3)
    async with open_link(bench, "publish") as connection:
        serving = asyncio.create_task(ours.serve(connection))
        yield ours
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def declare_ladder(amqp: Amqp, name: str, arguments: dict[str, Any]) -> None:
    """Declare a main queue and a retry queue that leads back to it after two seconds."""
    declare = amqp.channel.declare_queue
    await declare(name, durable=True, arguments=QUORUM)
    back: dict[str, Any] = {
        "x-message-ttl": 2000,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": name,
    }
    await declare(f"{name}.retry", durable=True, arguments={**back, **arguments})


def _kind(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what makes a retry queue safe."""
    kind = {"x-queue-type", "x-dead-letter-strategy", "x-overflow"}
    return {name: value for name, value in arguments.items() if name in kind}


async def test_retry_queues_survive_a_restart(bench: Bench) -> None:
    """Messages whose wait ends while the broker is down are all there afterwards.

    A classic retry queue, and a quorum queue without at-least-once dead-lettering, lose some when
    the broker loses a race at its start, which is up to it. Takes a start of the broker.
    """
    rungs = worker_topology(WorkerSettings(queue=bench.queue, retry_delays=(2.0,))).queues
    ours = next(queue for queue in rungs if queue.name.endswith(".retry.2s"))

    assert await _restart(bench, _kind(ours.arguments), 50) >= 50


async def test_a_retry_finds_its_queue_without_a_leader(bench: Bench) -> None:
    """A copy whose wait ends while its queue is down arrives once the broker has asked again."""
    worker = worker_topology(WorkerSettings(queue=bench.queue, retry_delays=(2.0,)))
    rung = next(queue for queue in worker.queues if queue.name.endswith(".retry.2s"))
    id_of_queue = f"{{'%2F_{bench.queue}', node()}}"
    async with open_amqp(bench.broker.url) as amqp:
        await declare_ladder(amqp, bench.queue, _kind(rung.arguments))
        await amqp.publish(f"{bench.queue}.retry", b"")
        await asyncio.to_thread(
            bench.broker.ctl, "eval", f"ra:stop_server(quorum_queues, {id_of_queue})."
        )
        await asyncio.sleep(2.5)  # until its time is up
        await asyncio.to_thread(
            bench.broker.ctl, "eval", f"ra:restart_server(quorum_queues, {id_of_queue})."
        )
        await eventually(lambda: _is_through(amqp, bench.queue, 1), what="it has arrived")


async def _restart(bench: Bench, arguments: dict[str, Any], count: int) -> int:
    """Kill the broker while messages wait on a retry queue; return how many are there again."""
    async with open_amqp(bench.broker.url) as amqp:
        await declare_ladder(amqp, bench.queue, arguments)
        await asyncio.to_thread(bench.broker.flush)
        await asyncio.gather(*(amqp.publish(f"{bench.queue}.retry", b"") for _ in range(count)))
    bench.broker.kill()
    await asyncio.sleep(2.2)  # until the time of all is up
    await asyncio.to_thread(bench.broker.start)
    async with open_amqp(bench.broker.url) as amqp:
        await eventually(
            lambda: _is_through(amqp, bench.queue, count), what=f"all {count} are back"
        )
        return await amqp.count(bench.queue)


async def _is_through(amqp: Amqp, name: str, count: int) -> bool:
    return await amqp.count(name) >= count


async def test_connection_death_does_not_cancel_the_post(
    bench: Bench, client: httpx.AsyncClient
) -> None:
    """aio-pika cancels its callback in the middle of the POST; ours goes on and is not repeated."""
    bench.service.misbehave({"latency_seconds": 0.5})
    async with naive_consumer(bench, naive_sender(bench, client)):
        naive = await bench.publish(1)
        await eventually(lambda: bench.service.posts(naive), what="the POST")
        bench.proxy.cut("naive")
        await eventually(lambda: len(bench.service.posts(naive)) == 2, what="a second POST")
    async with bench.worker() as live:
        ours = await bench.publish(1)
        await eventually(lambda: bench.service.posts(ours), what="the POST")
        bench.proxy.cut(CONSUME_LINK)
        await bench.until_taken(ours)
        await bench.until_settled(live)

    assert len(bench.service.posts(ours)) == 1
    assert len(bench.service.taken(ours)) == 1


async def test_broker_kill_costs_no_message_and_no_post(
    bench: Bench, client: httpx.AsyncClient
) -> None:
    """A killed broker makes callbacks POST again what was in flight; ours does not.

    Takes a start of the broker.
    """
    bench.service.misbehave({"latency_seconds": 0.3})
    ours = Bench(bench.broker, bench.proxy, bench.service, bench.amqp)
    async with naive_consumer(bench, naive_sender(bench, client)), ours.worker() as live:
        await asyncio.to_thread(bench.broker.flush)
        naive, numbers = await bench.publish(60), await ours.publish(120)
        await eventually(lambda: len(bench.service.taken(numbers)) > 30, what="some are sent")
        bench.broker.kill()
        await asyncio.to_thread(bench.broker.start)
        await ours.until_taken(numbers)
        await bench.until_taken(naive)
        async with open_amqp(bench.broker.url) as amqp:
            ours.amqp = amqp
            await ours.until_settled(live)

    assert ours.extra_posts(numbers) == {}
    assert bench.extra_posts(naive) != {}


async def test_cancellation_does_not_delete_the_message(bench: Bench) -> None:
    """A task cancelled inside `message.process()` deletes its message; a drain of ours keeps it."""
    tasks: list[asyncio.Task[None] | None] = []

    async def handle(message: AbstractIncomingMessage) -> None:
        tasks.append(asyncio.current_task())
        async with message.process():
            await asyncio.Event().wait()

    async with naive_consumer(bench, handle):
        await bench.publish(1)
        await eventually(lambda: tasks, what="the callback")
        assert tasks[0] is not None
        tasks[0].cancel()
        await eventually(tasks[0].done, what="the end of the callback")
    naively_left = await bench.amqp.count(bench.queue)
    bench.service.misbehave({"mode": "hang"})
    async with bench.worker(worker__shutdown_timeout_seconds=0.2) as live:
        numbers = await bench.publish(1)
        await eventually(lambda: bench.service.posts(numbers), what="the POST")
        code = await live.stop()

    assert (naively_left, code) == (0, 75)
    await eventually(lambda: _is_through(bench.amqp, bench.queue, 1), what="back in the queue")


async def test_an_unexpected_error_does_not_stall(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks that raise use up the prefetch for good; ours end as dead letters."""
    seen: list[int] = []

    async def handle(message: AbstractIncomingMessage) -> None:
        seen.append(message.delivery_tag or 0)
        raise ValueError

    async with naive_consumer(bench, handle, prefetch=3):
        await bench.publish(7)
        await eventually(lambda: len(seen) == 3, what="three callbacks")
        await eventually(lambda: _is_through(bench.amqp, bench.queue, 4), what="four left")

    async def fail(*_: object) -> Answer:
        raise ZeroDivisionError

    monkeypatch.setattr(Sender, "send", fail)
    async with bench.worker(worker__concurrency=3) as live:
        await bench.until_dead(7)
        await bench.until_settled(live)
        letters = await bench.dead_letters()
        live.ears.lines.clear()  # it has logged the bug that we made

    assert seen == [1, 2, 3]
    assert [letter.headers["sms-bridge-reason"] for letter in letters] == ["internal_error"] * 7


async def test_no_channel_stays_dead(bench: Bench, client: httpx.AsyncClient) -> None:
    """A robust channel whose restore fails stays dead; ours heals once there is an exchange."""
    async with naive_client(bench) as connection, bench.webhook() as live:
        operator = bench.amqp.channel
        channel = await connection.channel(on_return_raises=True)
        exchange = await channel.declare_exchange(bench.exchange, "topic", passive=True)
        await exchange.publish(aio_pika.Message(b""), "key", timeout=3)
        await operator.exchange_delete(bench.exchange)
        with pytest.raises((aiormq.exceptions.AMQPError, aiormq.exceptions.ChannelClosed)):
            await exchange.publish(aio_pika.Message(b""), "key", timeout=3)
        await eventually(lambda: channel.is_closed, what="a dead channel")
        first, _ = await post_event(client, live.webhook_url, None)

        async def is_healed() -> bool:
            return (await post_event(client, live.webhook_url, None))[0].status_code == 200

        await eventually(is_healed, what="200 again", seconds=15)
        assert first.status_code == 503
        assert channel.is_closed
        assert connection.connected.is_set()


async def _publish_broken(url: str, queue: str, body: bytes) -> None:
    """Publish with a timestamp in microseconds and a content type in Latin-1."""
    connection = await aiormq.connect(url)
    channel = await connection.channel()
    encode = pamqp.encode.METHODS
    kept = dict(encode)
    encode["timestamp"] = lambda _: struct.pack(">Q", time.time_ns() // 1000)
    encode["shortstr"] = lambda text: bytes([len(text)]) + text.encode("latin-1")
    try:
        now = datetime.now(UTC)
        properties = ClientProperties(delivery_mode=2, timestamp=now, content_type="é")
        await channel.basic_publish(body, routing_key=queue, properties=properties)
    finally:
        encode.update(kept)
        await connection.close()


async def test_one_broken_property_does_not_stop_all(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A property that pamqp cannot decode ends each naive connection; ours read on."""
    await bench.declare_main()
    broken, good = make_numbers(2)
    body = json.dumps({"to": broken, "from": "Acme", "text": "Hi"}).encode()
    await _publish_broken(bench.broker.url, bench.queue, body)
    await bench.publish([good])
    seen: list[bytes] = []

    async def handle(message: AbstractIncomingMessage) -> None:
        seen.append(message.body)
        await message.ack()

    with monkeypatch.context() as patch:
        patch.setitem(pamqp.decode.METHODS, "shortstr", pamqp.decode.short_str)
        patch.setitem(pamqp.decode.METHODS, "timestamp", pamqp.decode.timestamp)
        logins = bench.proxy.trap("client", (10, 11), "pass", nth=3)
        async with naive_consumer(bench, handle):
            await eventually(logins.sprung.is_set, what="a third connection")
    bench.proxy.traps.clear()
    async with bench.worker():
        await bench.until_taken([broken, good])

    assert seen == []


async def test_confirms_are_not_mixed_up(bench: Bench, publisher: Publisher) -> None:
    """Two publishes with one id get each other's answer from aio-pika, and their own from us."""
    await bench.declare_main()
    wrong = f"{bench.queue}.nobody"

    async def naive(routing_key: str) -> bool:
        message = aio_pika.Message(b"", message_id="same")
        try:
            await bench.amqp.channel.default_exchange.publish(message, routing_key, timeout=3)
        except (aio_pika.exceptions.DeliveryError, aiormq.exceptions.PublishError):
            return False
        return True

    async def ours(routing_key: str) -> bool:
        properties = Properties(message_id="same", delivery_mode=2)
        try:
            await publisher.publish(
                b"", exchange="", routing_key=routing_key, properties=properties
            )
        except PublishError as error:
            return error.fault != "returned"
        return True

    keys = (wrong, bench.queue, wrong, bench.queue)
    mixed_up = [*await asyncio.gather(naive(wrong), naive(bench.queue))]
    right = await asyncio.gather(*(ours(key) for key in keys))

    assert mixed_up == [True, False]
    assert right == [False, True, False, True]


async def test_unroutable_is_an_error(bench: Bench, publisher: Publisher) -> None:
    """A publish that no queue takes looks like a success to aio-pika, and fails with us."""
    nobody = f"{bench.queue}.nobody"
    async with naive_client(bench) as connection:
        channel = await connection.channel()
        result = await channel.default_exchange.publish(aio_pika.Message(b""), nobody)
    assert result is not None
    with pytest.raises(PublishError) as error:
        await publisher.publish(b"", exchange="", routing_key=nobody, properties=Properties())

    assert error.value.fault == "returned"


async def _answer_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, EOFError):
        while await reader.readuntil(b"\r\n\r\n"):
            await asyncio.sleep(0.02)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await writer.drain()
    writer.close()


async def _cancel_many(post: Callable[[], Awaitable[object]], *, seconds: float = 1.5) -> None:
    """Run twenty requests at a time and cancel each after a while, as deadlines do."""
    end = time.monotonic() + seconds
    patience = itertools.cycle([0.001, 0.03, 0.005, 0.0005, 0.045, 0.015, 0.002])

    async def go_on() -> None:
        while time.monotonic() < end:
            with suppress(httpx.HTTPError, AttemptError, TimeoutError):
                async with asyncio.timeout(next(patience)):
                    await post()

    await asyncio.gather(*(go_on() for _ in range(20)))


async def test_cancelled_requests_leave_no_dead_slots() -> None:
    """Cancelled requests block slots of httpx's pool for good, and none of ours."""
    async with await asyncio.start_server(_answer_slowly, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        limits = httpx.Limits(max_connections=10, max_keepalive_connections=10)
        timeout = httpx.Timeout(2, pool=1)
        async with httpx.AsyncClient(trust_env=False, timeout=timeout, limits=limits) as naive:
            await _cancel_many(lambda: naive.get(url))
            pool = naive._transport._pool  # type: ignore[attr-defined]
            stuck = [slot for slot in pool.connections if "CONNECTING" in repr(slot)]
        ours = open_transport(SmsApiSettings(base_url=url, timeout_seconds=2), max_connections=10)
        await _cancel_many(lambda: ours.post(url, (), b""))
        answers = [await ours.post(url, (), b"") for _ in range(3)]
        at_once = await asyncio.gather(*(ours.post(url, (), b"") for _ in range(10)))
        await ours.aclose()

    assert stuck
    assert {answer.status for answer in (*answers, *at_once)} == {200}


class _HalfDeadApi:
    """Refuses every connection for one number and accepts all others."""

    def __init__(self, refused: str) -> None:
        self._refused = refused.encode()

    async def post(self, _url: str, _headers: object, body: bytes, _common: object = ()) -> Reply:
        """Fail or accept, a little later."""
        await asyncio.sleep(0.01)
        if self._refused in body:
            raise AttemptError("connect_failed")
        return Reply(202)

    async def aclose(self) -> None:
        """Do nothing."""


async def test_no_success_for_a_failed_send() -> None:
    """A shared tenacity loop can report success for a send that failed; ours is not shared."""
    shared = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(4), wait=tenacity.wait_none(), reraise=True
    )

    async def naive(name: str, delay: float) -> str:
        async for attempt in shared:
            with attempt:
                await asyncio.sleep(delay)
                if name == "bad":
                    raise ConnectionError
        return "acked"

    async def later() -> str:
        await asyncio.sleep(0.02)
        return await naive("good", 0.01)

    naively = [*await asyncio.gather(naive("bad", 0.05), later())]
    bad, good = make_numbers(2)
    sender = Sender(
        shape_from(SmsApiSettings(base_url="http://127.0.0.1", key=SecretStr("a-key"))),
        transport=_HalfDeadApi(bad),
        metrics=WorkerMetrics(new_registry(), queue="q", retry_queues=[], dead="d"),
    )
    requests = [
        SendRequest.model_validate({"to": to, "from": "Acme", "text": "Hi"})
        for to in (bad, good) * 5
    ]
    answers = await asyncio.gather(*(sender.send(request, make_delivery()) for request in requests))

    assert naively == ["acked", "acked"]
    assert [answer.fate for answer in answers] == [Fate.NOT_SENT, Fate.SENT] * 5


async def test_no_storm_of_redeliveries(bench: Bench) -> None:
    """`nack(requeue=True)` makes a storm out of one 503; ours tries again a second later."""
    storm: list[float] = []

    async def handle(message: AbstractIncomingMessage) -> None:
        storm.append(time.monotonic())
        await message.nack(requeue=True)

    async with naive_consumer(bench, handle):
        await bench.publish(1)
        # RabbitMQ 4 drops the message at the 21st.
        await eventually(lambda: len(storm) >= 20, what="20 deliveries")
    await bench.amqp.purge(bench.queue)
    bench.service.misbehave({**NOT_SENT, "count": 2})
    async with bench.worker() as live:
        numbers = await bench.publish(1)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

    first, second, third = (post.received_at for post in bench.service.posts(numbers))
    assert storm[19] - storm[0] < 19 * (second - first) / 4
    assert second - first > 0.9
    assert third - second > 1.9


async def test_a_delivery_limit_does_not_eat_what_is_in_flight(bench: Bench) -> None:
    """Lost connections use up a delivery limit; what ours has in flight is sent all the same."""
    declare = bench.amqp.channel.declare_queue
    for name in (bench.queue, f"{bench.queue}.naive"):
        await declare(name, durable=True, arguments={**QUORUM, "x-delivery-limit": 2})
    for _ in range(5):
        await bench.amqp.publish(f"{bench.queue}.naive", b"")
    for _ in range(3):
        await _take_and_disconnect(bench, f"{bench.queue}.naive", 5)
    bench.service.misbehave({"latency_seconds": 3})
    for name in ("retry.1s", "retry.2s", "dead"):
        await declare(f"{bench.queue}.{name}", durable=True, arguments=QUORUM)
    # The drain waits for redeliveries that this broker has thrown away.
    changed: dict[str, Any] = {"worker__shutdown_timeout_seconds": 1}
    async with bench.worker(rabbitmq__topology="off", **changed) as live:
        numbers = await bench.publish(5)
        for count in (5, 10, 15):
            await eventually(partial(has_received, live, count), what=f"{count} deliveries")
            bench.proxy.cut(CONSUME_LINK)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

    assert await bench.amqp.count(f"{bench.queue}.naive") == 0
    assert bench.extra_posts(numbers) == {}


def has_received(live: Live, count: int) -> bool:
    """Say whether a worker has been given so many deliveries."""
    return live.metric("sms_bridge_worker_messages_received_total") >= count


async def _take_and_disconnect(bench: Bench, queue: str, count: int) -> None:
    taken: list[AbstractIncomingMessage] = []

    async def hold(message: AbstractIncomingMessage) -> None:
        taken.append(message)

    connection = await aio_pika.connect(bench.broker.url)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=10)
    source = await channel.get_queue(queue, ensure=False)
    await source.consume(hold)
    await eventually(lambda: len(taken) == count, what=f"{count} deliveries")
    await connection.close()
    await eventually(lambda: _has_no_consumer(bench, queue), what="the broker has noticed")


async def _has_no_consumer(bench: Bench, queue: str) -> bool:
    return await bench.amqp.consumers(queue) == 0


async def test_stale_deliveries_are_not_sent(bench: Bench) -> None:
    """aio-pika's iterator hands out deliveries of a dead channel; ours drops them unsent."""
    await bench.declare_main()
    await bench.publish(10)
    handed_out: list[bytes] = []
    async with naive_client(bench) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=10)
        queue = await channel.get_queue(bench.queue)

        async def iterate() -> None:
            async with queue.iterator() as messages:
                async for message in messages:
                    handed_out.append(message.body)
                    await asyncio.sleep(0.05)
                    with suppress(aiormq.exceptions.ChannelInvalidStateError):
                        await message.ack()

        iterating = asyncio.create_task(iterate())
        await eventually(lambda: len(handed_out) == 3, what="three messages")
        bench.proxy.cut("naive")
        await eventually(lambda: len(handed_out) >= 15, what="more than there are")
        iterating.cancel()
        await asyncio.gather(iterating, return_exceptions=True)
    await bench.amqp.purge(bench.queue)
    limit = {"per_second": 8, "burst": 1}
    async with bench.worker(worker__rate_limit=limit) as live:
        numbers = await bench.publish(10, ids=False)
        await eventually(lambda: len(bench.service.taken(numbers)) >= 3, what="three are sent")
        bench.proxy.cut(CONSUME_LINK)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

    assert bench.extra_posts(numbers) == {}


async def test_connecting_has_a_deadline(bench: Bench) -> None:
    """Against a frozen broker aio-pika waits without end, and we as long as is configured."""
    bench.proxy.freeze()
    naive = asyncio.create_task(aio_pika.connect_robust(bench.proxy.url))
    settings = RabbitMQSettings(url=(SecretStr(bench.proxy.url),), connect_timeout_seconds=0.5)
    started = time.monotonic()
    with pytest.raises(Exception, match="nothing answered"):
        await _connect(settings)
    seconds = time.monotonic() - started
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(naive), 3)

    assert seconds < 5
    assert not naive.done()
    naive.cancel()
    await asyncio.gather(naive, return_exceptions=True)


async def _connect(settings: RabbitMQSettings) -> None:
    from bridge.amqp.connecting import open_connection  # noqa: PLC0415

    connection = await open_connection(settings, settings.url[0], name="test")
    await connection.close()


async def test_idle_sockets_do_no_harm(bench: Bench, client: httpx.AsyncClient) -> None:
    """Idle sockets make uvicorn refuse requests; ours goes on, and closes them."""
    port = free_ports(1)[0]
    server = uvicorn.Server(
        uvicorn.Config(_hello, port=port, limit_concurrency=10, log_config=None, lifespan="off")
    )
    serving = asyncio.create_task(server._serve())
    await eventually(lambda: server.started, what="uvicorn")
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    naive = (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code
    for _, writer in idle:
        writer.close()
    server.should_exit = True
    await serving
    async with bench.webhook(webhook__idle_timeout_seconds=1) as live:
        port = httpx.URL(live.webhook_url).port or 0
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(600)]
        answer, _ = await post_event(client, live.webhook_url, None)
        ready = await client.get(f"{live.admin_url}/readyz")
        await eventually(lambda: all(reader.at_eof() for reader, _ in idle), what="all closed")
        for _, writer in idle:
            writer.close()

    assert (naive, answer.status_code, ready.status_code) == (503, 200, 200)


async def _hello(scope: Scope, _receive: Receive, send: Send) -> None:
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})
