"""Places and memory: who has to go for others, over real sockets."""

import asyncio
from contextlib import AsyncExitStack

from bridge.http.parser import HEADER_OVERHEAD_BYTES
from tests.unit.http.raw import (
    GET,
    HALF_HEADER,
    App,
    assert_problem,
    connected,
    listening,
    post_of,
    request,
    status_of,
    until,
)


async def test_newcomer_takes_the_place_of_who_waited_longest() -> None:
    """When all places are taken, the connection that has waited longest is closed."""
    app = App()
    async with listening(app, max_connections=2) as listener, AsyncExitStack() as stack:
        first, second, third = [
            await stack.enter_async_context(connected(listener.port)) for _ in range(3)
        ]

        assert await first.rest() == b""
        assert status_of(await second.ask(GET)) == 200
        assert status_of(await third.ask(GET)) == 200
        assert len(listener.occupancy.connections) == 2


async def test_half_request_that_is_older_goes_before_a_silent_connection() -> None:
    """A beginning is no way to keep a place: who has waited longer for the rest goes first."""
    app = App()
    async with listening(app, max_connections=2) as listener, AsyncExitStack() as stack:
        half = await stack.enter_async_context(connected(listener.port))
        half.writer.write(HALF_HEADER)
        await until(lambda: listener.occupancy.receiving)
        (first,) = listener.occupancy.receiving
        # The loop's clock counts whole milliseconds: who joined in the same one is no older.
        await until(lambda: asyncio.get_running_loop().time() > first.since)
        silent, newcomer = [
            await stack.enter_async_context(connected(listener.port)) for _ in range(2)
        ]
        lost = await half.rest()
        answers = [await silent.ask(GET), await newcomer.ask(GET)]

    assert_problem(lost, 503)
    assert [status_of(answer) for answer in answers] == [200, 200]


async def test_connection_that_is_answered_keeps_its_place() -> None:
    app = App()
    async with listening(app, max_connections=1) as listener, connected(listener.port) as busy:
        busy.writer.write(GET.replace(b"/ ", b"/wait "))
        await until(lambda: app.requests)
        async with connected(listener.port) as newcomer:
            refused = await newcomer.rest()
        app.go.set()
        answer = await busy.ask(b"")

    assert_problem(refused, 503)
    assert b"Retry-After: " in refused
    assert (status_of(answer), app.refusals) == (200, [(None, 503)])


async def test_bodies_together_have_a_limit() -> None:
    """When halves of bodies take up too much, the slowest senders are answered 503."""
    app = App()
    async with listening(app, max_buffered_bytes=150_000) as listener, AsyncExitStack() as stack:
        head = request(b"Content-Length: 60000")
        clients = [await stack.enter_async_context(connected(listener.port)) for _ in range(3)]
        for count, client in enumerate(clients):
            client.writer.write(head + bytes(59999))
            await until(lambda: listener.occupancy.held_bytes > 59999 * min(count, 1))  # noqa: B023
        answers = [await client.ask(b"x") for client in clients[1:]]
        lost = await clients[0].rest()
        left = listener.occupancy.held_bytes

    assert_problem(lost, 503)
    assert ([status_of(answer) for answer in answers], left) == ([200, 200], 0)
    assert app.evictions == ["memory"]


async def test_age_of_a_connection_does_not_make_a_victim() -> None:
    """Whose request began first has to go, however old the others' connections are."""
    app = App()
    async with (
        listening(app, max_buffered_bytes=60_000) as listener,
        connected(listener.port) as old,
        connected(listener.port) as young,
    ):
        await old.ask(GET)
        young.writer.write(post_of(50_000)[:-1])
        await until(lambda: listener.occupancy.held_bytes > 50_000)
        old.writer.write(post_of(50_000)[:-1])
        lost = await young.rest()
        answer = await old.ask(bytes(1))

    assert_problem(lost, 503)
    assert status_of(answer) == 200


async def test_complete_request_is_no_victim_of_its_own_size() -> None:
    """A request that its last bytes make whole drives halves out, even if it began before them."""
    app = App()
    async with (
        listening(app, max_buffered_bytes=60_500) as listener,
        connected(listener.port) as old,
        connected(listener.port) as young,
    ):
        old.writer.write(post_of(40_000)[:-1_000])
        await until(lambda: listener.occupancy.held_bytes > 39_000)
        young.writer.write(post_of(30_000)[:-10_000])
        await until(lambda: listener.occupancy.held_bytes > 59_000)
        # The beginning of its next one does not make it a half again.
        answer = await old.ask(bytes(1_000) + GET[:10])
        lost = await young.rest()

    assert_problem(lost, 503)
    assert status_of(answer) == 200


async def test_requests_that_are_answered_have_a_limit_together() -> None:
    """While those that are being answered fill the memory, the next one is told to come again."""
    app = App()
    waits = request(b"Content-Length: 40000", line=b"POST /wait HTTP/1.1", body=bytes(40_000))
    async with listening(app, max_buffered_bytes=60_000) as listener, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(listener.port)) for _ in range(3)]
        for count, client in enumerate(clients[:2], 1):
            client.writer.write(waits)
            await until(lambda: len(app.requests) == count)  # noqa: B023
        refused = await clients[2].ask(waits)
        app.go.set()
        answers = [await client.ask(b"") for client in clients[:2]]
        again = await clients[2].ask(waits)

    assert [status_of(answer) for answer in (refused, *answers, again)] == [503, 200, 200, 200]
    assert b"Retry-After: " in refused
    assert (app.refusals, app.evictions) == ([("/wait", 503)], [])


async def test_all_that_is_held_is_counted() -> None:
    """Headers count with what Python takes for them, and so does what comes during an answer."""
    app = App()
    names = b"".join(b"X-%d: y\r\n" % n for n in range(50))
    async with listening(app) as listener:
        async with connected(listener.port) as client:
            client.writer.write(HALF_HEADER + b"y\r\n" + names)
            least = 50 * HEADER_OVERHEAD_BYTES + len(names)
            await until(lambda: listener.occupancy.held_bytes >= least)
        await until(lambda: listener.occupancy.held_bytes == 0)
        async with connected(listener.port) as client:
            client.writer.write(post_of(20_000).replace(b"/bad ", b"/wait "))
            await until(lambda: app.requests)
            client.writer.write(post_of(30_000))
            await until(lambda: listener.occupancy.held_bytes > 50_000)
            app.go.set()
            await client.ask(b"")
            await client.ask(b"")
        await until(lambda: not listener.occupancy.connections)
        left = listener.occupancy.held_bytes

    assert left == 0


async def test_good_client_outlives_silent_newcomers() -> None:
    """When all places are taken, who has been answered with success is the last to go."""
    app = App()
    async with listening(app, max_connections=2) as listener, AsyncExitStack() as stack:
        good = await stack.enter_async_context(connected(listener.port))
        await good.ask(GET)
        crowd = [await stack.enter_async_context(connected(listener.port)) for _ in range(5)]
        await asyncio.gather(*(one.rest() for one in crowd[:4]))
        answer = await good.ask(GET)

    assert status_of(answer) == 200
    assert app.evictions == ["connections"] * 4
