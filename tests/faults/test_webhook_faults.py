"""One webhook receiver and a broker that fails: 200 is always the truth, and 503 comes in time."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import httpx
import pytest
from pamqp.common import FieldTable

from tests.alarms import memory_alarm
from tests.amqp_client import open_amqp
from tests.faults.amqp_proxy import ACK, PUBLISH
from tests.faults.bench import WEBHOOK_LINK, Bench, Live, eventually, make_event, post_event, sign

# `webhook.response_timeout_seconds` is 2.5; the rest is for the test, and for others beside it.
IN_TIME_SECONDS = 3.0
IN_TIME_SECONDS_BESIDE_OTHERS = 7.5
EVENT_ID = "sms-bridge-event-id"


@dataclass
class Answered:
    """What became of one event."""

    event_id: str
    status: int
    retry_after: str | None
    seconds: float


@dataclass
class Storm:
    """Events with ids of their own, as many at a time as there are posters."""

    client: httpx.AsyncClient
    url: str
    answers: list[Answered] = field(default_factory=list)
    ids: "itertools.count[int]" = field(default_factory=itertools.count)

    async def post(self, event_id: str) -> Answered:
        answer, seconds = await post_event(self.client, self.url, event_id)
        retry_after = answer.headers.get("Retry-After")
        answered = Answered(event_id, answer.status_code, retry_after, seconds)
        self.answers.append(answered)
        return answered

    async def post_bare(self, event_id: str) -> Answered:
        """Post one event with as little ado as a thousand at once need."""
        body = make_event(event_id)
        fields = {**sign(body), "Host": "localhost", "Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        url, started = httpx.URL(self.url), time.monotonic()
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(f"POST {url.path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            status, *answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        finally:
            writer.close()
        retry_after = next((line for line in answer if line.startswith("retry-after:")), None)
        seconds = time.monotonic() - started
        answered = Answered(event_id, int(status.split()[1]), retry_after, seconds)
        self.answers.append(answered)
        return answered

    async def until_stored(self, event_id: str) -> None:
        async def is_stored() -> bool:
            return (await self.post(event_id)).status == 200

        await eventually(is_stored, what="200")

    async def rage(self) -> None:
        while True:
            await self.post(f"event-{next(self.ids)}")
            await asyncio.sleep(0.03)

    def count(self, status: int) -> int:
        return sum(answered.status == status for answered in self.answers)

    def has(self, status: int, count: int) -> bool:
        return self.count(status) >= count

    async def until(self, status: int, more: int) -> None:
        goal = self.count(status) + more
        await eventually(partial(self.has, status, goal), what=f"{more} answers {status}")

    @property
    def promised(self) -> set[str]:
        return {answered.event_id for answered in self.answers if answered.status == 200}

    def broken_rules(self, seconds: float = IN_TIME_SECONDS_BESIDE_OTHERS) -> list[Answered]:
        """Return what is neither 200 nor a 503 as it should be, or came late."""
        return [
            answered
            for answered in self.answers
            if answered.seconds > seconds
            or answered.status not in {200, 503}
            or (answered.status == 503 and not answered.retry_after)
        ]


@asynccontextmanager
async def raging(client: httpx.AsyncClient, live: Live, posters: int = 8) -> AsyncIterator[Storm]:
    """Post events for as long as the block lasts."""
    storm = Storm(client, live.webhook_url)
    tasks = [asyncio.create_task(storm.rage()) for _ in range(posters)]
    try:
        await storm.until(200, 20)
        yield storm
        await storm.until(200, 20)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stored(bench: Bench) -> Counter[str]:
    async with open_amqp(bench.broker.url) as amqp:
        messages = await amqp.take_all(bench.exchange)
    return Counter(str(message.headers[EVENT_ID]) for message in messages)


async def kill(bench: Bench, storm: Storm) -> None:
    await asyncio.to_thread(bench.broker.flush)
    await asyncio.to_thread(bench.broker.kill)
    await storm.until(503, 10)
    await asyncio.to_thread(bench.broker.start)


async def freeze(bench: Bench, storm: Storm) -> None:
    bench.broker.pause()
    try:
        await storm.until(503, 10)
    finally:
        bench.broker.resume()


async def block(bench: Bench, storm: Storm) -> None:
    async with memory_alarm(bench.broker):
        await storm.until(503, 10)


async def lose_confirms(bench: Bench, storm: Storm) -> None:
    """Cut the connection as confirms come in, three times."""
    for _ in range(3):
        trap = bench.proxy.trap("broker", ACK, "cut", nth=3, link=WEBHOOK_LINK)
        await eventually(trap.sprung.is_set, what="a lost confirm")
        await storm.until(200, 5)


async def lose_publishes(bench: Bench, storm: Storm) -> None:
    """Cut the connection as publishes leave, three times."""
    for _ in range(3):
        trap = bench.proxy.trap("client", PUBLISH, "cut", nth=3, link=WEBHOOK_LINK)
        await eventually(trap.sprung.is_set, what="a lost publish")
        await storm.until(200, 5)


# How late an answer is can be measured only where nothing else runs.
LATE = pytest.mark.serial


@pytest.mark.parametrize(
    "fault",
    [
        kill,
        pytest.param(freeze, marks=LATE),
        pytest.param(block, marks=LATE),
        lose_confirms,
        lose_publishes,
    ],
)
async def test_what_is_answered_200_is_stored(
    bench: Bench, client: httpx.AsyncClient, fault: Callable[[Bench, Storm], Awaitable[None]]
) -> None:
    async with bench.webhook() as live, raging(client, live) as storm:
        await fault(bench, storm)

    is_alone = fault in {freeze, block}
    in_time = IN_TIME_SECONDS if is_alone else IN_TIME_SECONDS_BESIDE_OTHERS
    assert storm.promised - set(await stored(bench)) == set()
    assert storm.broken_rules(in_time) == []
    assert storm.count(503) > 0


async def test_repeats_of_an_event_whose_publish_fails(
    bench: Bench, client: httpx.AsyncClient
) -> None:
    async with bench.webhook() as live:
        storm = Storm(client, live.webhook_url)
        await storm.until_stored("zero")
        bench.proxy.freeze("client")
        during = await asyncio.gather(*(storm.post("one") for _ in range(5)))
        bench.proxy.cut(WEBHOOK_LINK)
        bench.proxy.thaw()
        await storm.until_stored("one")
        after = await asyncio.gather(*(storm.post("one") for _ in range(5)))

    assert {answered.status for answered in during} == {503}
    assert {answered.status for answered in after} == {200}
    assert await stored(bench) == {"zero": 1, "one": 1}
    assert storm.broken_rules() == []


@contextmanager
def held_publishes(bench: Bench) -> Iterator[None]:
    """Let the broker read nothing more."""
    bench.proxy.freeze("client")
    yield
    bench.proxy.thaw()


@contextmanager
def held_confirms(bench: Bench) -> Iterator[None]:
    """Let no confirm arrive."""
    bench.proxy.freeze("broker")
    yield
    bench.proxy.thaw()


@contextmanager
def frozen_broker(bench: Bench) -> Iterator[None]:
    """Stop the broker's process."""
    bench.broker.pause()
    try:
        yield
    finally:
        bench.broker.resume()


@pytest.mark.parametrize("hang", [held_publishes, held_confirms, frozen_broker])
async def test_repeats_while_the_broker_hangs(
    bench: Bench,
    client: httpx.AsyncClient,
    hang: Callable[[Bench], AbstractContextManager[None]],
) -> None:
    """However often an event comes again while the broker hangs, it is published once.

    The confirm that comes late counts: the next repeat is told 200.
    """
    async with bench.webhook(webhook__response_timeout_seconds=0.5) as live:
        storm = Storm(client, live.webhook_url)
        await storm.until_stored("zero")
        with hang(bench):
            during = [(await storm.post("one")).status for _ in range(3)]
        await storm.until_stored("one")

    assert during == [503] * 3
    assert await stored(bench) == {"zero": 1, "one": 1}
    assert storm.broken_rules() == []


async def test_thousand_events_at_once(bench: Bench, client: httpx.AsyncClient) -> None:
    ids = [f"event-{number}" for number in range(1000)]
    async with bench.webhook() as live:
        storm = Storm(client, live.webhook_url)
        while left := [event_id for event_id in ids if event_id not in storm.promised]:
            await asyncio.gather(*(storm.post_bare(event_id) for event_id in left))

    found = await stored(bench)
    assert set(found) == set(ids)
    assert {answered.status for answered in storm.answers} <= {200, 503}
    assert all(answered.retry_after for answered in storm.answers if answered.status == 503)


async def test_thousand_repeats_at_once(bench: Bench, client: httpx.AsyncClient) -> None:
    async with bench.webhook() as live:
        storm = Storm(client, live.webhook_url)
        await asyncio.gather(*(storm.post_bare("one") for _ in range(1000)))

    assert await stored(bench) == {"one": 1}
    assert {answered.status for answered in storm.answers} <= {200, 503}
    assert storm.count(200) >= 500


async def test_event_that_no_queue_takes(bench: Bench, client: httpx.AsyncClient) -> None:
    async with bench.webhook() as live:
        storm = Storm(client, live.webhook_url)
        await storm.until_stored("zero")
        queue = await bench.amqp.channel.get_queue(bench.exchange, ensure=False)
        await queue.unbind(bench.exchange, "#")
        before = await storm.post("one")
        await queue.bind(bench.exchange, "#")
        after = await storm.post("one")

    assert (before.status, after.status) == (503, 200)
    assert await stored(bench) == {"zero": 1, "one": 1}


async def test_an_exchange_that_is_deleted_is_declared_again(
    bench: Bench, client: httpx.AsyncClient
) -> None:
    """The next event is told 503, and stored once a fresh connection has declared the exchange."""
    async with bench.webhook() as live:
        storm = Storm(client, live.webhook_url)
        await storm.until_stored("zero")
        await bench.amqp.channel.exchange_delete(bench.exchange)
        during = await storm.post("one")
        await storm.until_stored("one")

    assert during.status == 503
    assert await stored(bench) == {"zero": 1, "one": 1}


async def test_our_queue_is_declared_again_when_an_event_finds_none(
    bench: Bench, client: httpx.AsyncClient
) -> None:
    async with bench.webhook() as live:
        storm = Storm(client, live.webhook_url)
        await storm.until_stored("zero")
        await bench.amqp.channel.queue_delete(bench.exchange)
        before = await storm.post("one")
        await storm.until_stored("one")
        warned, told_again = live.logged("events_unroutable"), live.logged("events_routable")

    assert (before.status, before.retry_after) == (503, "5")
    assert [line["exchange"] for line in warned] == [bench.exchange]
    assert len(told_again) == 1
    assert await stored(bench) == {"one": 1}


@pytest.mark.parametrize("mode", ["verify", "off"])
async def test_our_queue_is_left_to_others_where_they_make_it(
    bench: Bench, client: httpx.AsyncClient, mode: str
) -> None:
    """A role that may create nothing declares nothing again, and says once what is missing."""
    await bench.declare_inbound()
    async with bench.webhook(rabbitmq__topology=mode) as live:
        storm = Storm(client, live.webhook_url)
        await storm.until_stored("zero")
        await bench.amqp.channel.queue_delete(bench.exchange)
        during = [(await storm.post("one")).status for _ in range(5)]
        warned = live.logged("events_unroutable")

    assert during == [503] * 5
    assert [line["exchange"] for line in warned] == [bench.exchange]


async def test_why_nothing_may_be_published_is_told(
    bench: Bench, client: httpx.AsyncClient
) -> None:
    await bench.amqp.channel.declare_exchange(bench.exchange, "topic", durable=True, internal=True)
    async with bench.webhook() as live:
        status = (await Storm(client, live.webhook_url).post("one")).status
        told = await eventually(
            lambda: live.logged("broker_lost") + live.logged("broker_unavailable"), what="a reason"
        )

    assert status == 503
    assert "ACCESS_REFUSED" in told[0]["why"]
    assert bench.exchange in told[0]["why"]


async def test_event_that_a_full_queue_refuses(bench: Bench, client: httpx.AsyncClient) -> None:
    limits: FieldTable = {
        "x-queue-type": "classic",
        "x-max-length": 1,
        "x-overflow": "reject-publish",
    }
    async with bench.webhook(webhook__queue=None) as live:
        queue = await bench.amqp.channel.declare_queue(
            f"{bench.exchange}.full", durable=True, arguments=limits
        )
        await queue.bind(bench.exchange, "#")
        storm = Storm(client, live.webhook_url)
        await storm.until_stored("zero")
        before = await storm.post("one")
        await queue.purge()
        await storm.until_stored("one")

    assert before.status == 503
    assert storm.broken_rules() == []
