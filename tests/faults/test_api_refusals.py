"""An SMS service that refuses: the key, the path, or the number."""

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from tests.faults.bench import Bench, eventually, make_numbers
from tests.faults.traffic import has_taken, seconds_to_send


async def test_credentials_rejected_for_a_while(bench: Bench) -> None:
    """A key that is refused for a while costs no message, no attempt and no second sending."""
    await bench.declare_main()
    numbers = await bench.publish(200)
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


async def send_until_refused(bench: Bench, count: int) -> None:
    deadline = time.monotonic() + 30
    while await bench.amqp.count_if_there(bench.dead_queue) < count:
        assert await seconds_to_send(bench, 1) < 5
        assert time.monotonic() < deadline


async def test_a_number_that_is_never_found(bench: Bench) -> None:
    """A number that is answered 404 for ever is refused, and holds others up for no longer."""
    (bad,) = make_numbers(1)
    bench.service.misbehave({"to": bad, "status": 404})
    async with bench.worker() as live:
        # Nobody else sends: it cannot be known yet whose fault it is.
        await bench.publish([bad])
        await eventually(lambda: live.paused == {"misconfigured"}, what="paused")
        assert await bench.amqp.count_if_there(bench.dead_queue) == 0
        await eventually(lambda: len(bench.service.posts([bad])) >= 5, what="probes")

        # The next probe would come after four seconds.
        assert await seconds_to_send(bench, 20) < 3
        await send_until_refused(bench, 1)
        await bench.until_settled(live)
        (letter,) = await bench.dead_letters()
        assert letter.headers["sms-bridge-reason"] == "refused"
        assert not live.paused


async def test_many_messages_to_a_bad_number(bench: Bench) -> None:
    """Twenty messages to a number that is never found hold up the one behind them for a moment."""
    (bad,) = make_numbers(1)
    bench.service.misbehave({"to": bad, "status": 404})
    async with bench.worker() as live:
        for _ in range(20):
            await bench.publish([bad], ids=False)

        # Twenty probes, one after the other, would take minutes.
        assert await seconds_to_send(bench, 30) < 5
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
    await bench.declare_main()
    numbers = await bench.publish(200)
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


async def test_redirect_is_not_followed(bench: Bench) -> None:
    visits: list[float] = []

    async def visit(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(time.time())
        writer.close()

    async with await asyncio.start_server(visit, "127.0.0.1", 0) as target:
        location = f"http://127.0.0.1:{target.sockets[0].getsockname()[1]}/v1/messages"
        bench.service.misbehave({"status": 307, "headers": {"Location": location}})
        async with bench.worker() as live:
            numbers = await bench.publish(5)
            await eventually(lambda: live.paused == {"misconfigured"}, what="paused")
            before = len(bench.service.posts(numbers))
            await eventually(lambda: len(bench.service.posts(numbers)) > before, what="a probe")
            assert await bench.dead_letters() == []
            bench.service.behave()
            await bench.until_taken(numbers)

    assert visits == []
