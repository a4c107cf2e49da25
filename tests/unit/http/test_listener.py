"""The listener over real sockets: its port, stalls, signals, its end."""

import asyncio
import contextlib
import errno
import os
import socket

import pytest

import bridge.http.listener
from bridge.errors import BridgeError
from bridge.http.connection import END_SECONDS
from bridge.http.listener import SWEEP_SECONDS, Listener
from tests.unit.http.raw import (
    GET,
    GUARD_SECONDS,
    HALF_HEADER,
    LAST_GET,
    LIMITS,
    App,
    Client,
    connected,
    listening,
    status_of,
    until,
)


async def test_what_has_come_is_read_before_its_time_is_up() -> None:
    """A request that waits in the kernel at its deadline is in time, however little is missing."""
    app = App()
    async with listening(app) as listener, connected(listener.port) as client:
        await until(lambda: listener.occupancy.connections)
        raw = client.transport.get_extra_info("socket")
        # Much later, and the sweep before this one was in time.
        now = asyncio.get_running_loop().time() + 1000
        listener._swept_at = now - SWEEP_SECONDS
        os.write(raw.fileno(), GET.replace(b"/ ", b"/wait "))
        await listener._sweep(now)
        app.go.set()

        assert status_of(await client.ask(b"")) == 200


def listen(host: str, port: int) -> Listener:
    return Listener(App().answer, LIMITS, section="webhook", host=host, port=port)


def test_port_in_use_names_the_setting() -> None:
    """A port that is taken is told by the setting's name, the reason and the remedy."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BridgeError) as caught:
            listen("127.0.0.1", port)

    assert str(caught.value) == (
        f"webhook.port: cannot listen on 127.0.0.1:{port}: it is in use; "
        "stop what listens there, or set another port"
    )


def test_port_that_is_not_allowed_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that the system keeps for the superuser is told by the setting's name."""

    def refuse(*_address: object, **_options: object) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(BridgeError, match=r"^webhook\.port: .*:80: .* set a port above 1023$"):
        listen("127.0.0.1", 80)


@pytest.mark.parametrize(
    "host",
    ["192.0.2.1", "no-such-host.invalid", "127..0.1"],
    ids=["not ours", "unknown", "empty label"],
)
def test_address_that_cannot_be_had_names_the_setting(host: str) -> None:
    """An address that this machine does not have is told by the setting's name."""
    with pytest.raises(BridgeError, match=r"^webhook\.host: .*: this computer has no such"):
        listen(host, 0)


async def test_port_is_free_again_afterwards() -> None:
    """The port can be taken again as soon as the listener has ended, used connections or not."""
    async with listening(App()) as listener, connected(listener.port) as client:
        await client.ask(LAST_GET)
        await client.rest()
    again = listen("127.0.0.1", listener.port)
    again.stop()
    await again.run()

    assert again.port == listener.port


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this computer has no IPv6")
async def test_every_address_is_every_address() -> None:
    """`::` takes the port for IPv4 too."""
    listener = listen("::", 0)
    running = asyncio.create_task(listener.run())
    await until(lambda: listener.is_accepting)
    try:
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, listener.port)
            answer = await Client(reader, writer).ask(LAST_GET)
            writer.close()

            assert status_of(answer) == 200
    finally:
        listener.stop()
        await asyncio.wait_for(running, GUARD_SECONDS)


async def test_accepting_begins_and_ends() -> None:
    """`is_accepting` is true from the start until stop is asked for."""
    listener = listen("127.0.0.1", 0)
    before = listener.is_accepting
    running = asyncio.create_task(listener.run())
    await until(lambda: listener.is_accepting)
    listener.stop()
    after = listener.is_accepting
    await asyncio.wait_for(running, GUARD_SECONDS)

    assert (before, after, listener.is_accepting) == (False, False, False)


async def test_stop_finishes_open_requests() -> None:
    """A request that is being answered when stop is asked for gets its whole answer."""
    app = App()
    async with listening(app) as listener, connected(listener.port) as client:
        asking = asyncio.create_task(client.ask(GET.replace(b"/ ", b"/wait ")))
        await until(lambda: app.paths)
        listener.stop()
        await until_refused(listener.port)
        app.go.set()

        assert (await asking).endswith(b"/wait")


async def until_refused(port: int) -> None:
    """Wait until nobody listens; who came in the very moment is reset."""
    async with asyncio.timeout(GUARD_SECONDS):
        with contextlib.suppress(ConnectionError):
            while True:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.transport.abort()
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("data", [b"", HALF_HEADER, GET], ids=["silent", "half", "idle"])
async def test_stop_does_not_wait_for_idle_connections(data: bytes) -> None:
    """Connections without a request do not hold up the end, but for a moment if one may come."""
    server = listening(App(), drain_timeout_seconds=60)
    async with server as listener, connected(listener.port) as client:
        if data == GET:
            await client.ask(data)
        else:
            client.writer.write(data)
        listener.stop()
        rest = await client.rest()

    assert status_of(rest) == (408 if data == HALF_HEADER else None)


@pytest.mark.parametrize("turns", range(3))
async def test_stop_serves_who_is_not_accepted_yet_when_all_others_leave(turns: int) -> None:
    """Who waits in the kernel's queue is answered, even if the last other client leaves then."""
    async with listening(App()) as listener:
        with socket.create_connection(("127.0.0.1", listener.port)):
            await until(lambda: listener.occupancy.connections)
        for _ in range(turns):
            await asyncio.sleep(0)
        with socket.create_connection(("127.0.0.1", listener.port)) as queued:
            queued.sendall(GET.replace(b"/ ", b"/soon "))
            listener.stop()
            queued.setblocking(False)
            loop = asyncio.get_running_loop()
            answer = await asyncio.wait_for(loop.sock_recv(queued, 65536), GUARD_SECONDS)

    assert status_of(answer) == 200


async def test_stop_resets_nobody_who_comes_as_the_port_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who comes when the queue was empty is refused: a connection that is made is not reset."""
    came: list[str] = []
    read_all = bridge.http.listener._read_all

    async def come_and_read_all() -> None:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.port)).close()
            came.append("connected")
        await read_all()

    async with listening(App()) as listener:
        monkeypatch.setattr("bridge.http.listener._read_all", come_and_read_all)
        listener.stop()
        await until_refused(listener.port)

    assert came == []


async def test_stop_waits_for_a_request_on_its_way() -> None:
    """Who has connected before the port closes gets an answer, even if the request comes later."""
    async with listening(App()) as listener, connected(listener.port) as client:
        client.writer.write(GET[:10])
        await until(lambda: listener.occupancy.receiving)
        listener.stop()
        await until_refused(listener.port)
        answer = await client.ask(GET[10:])

    assert (status_of(answer), b"connection: close" in answer) == (200, True)


async def test_stop_answers_who_asks_again_and_again() -> None:
    """The next request on a connection that is in use may be on its way: it is answered too."""
    async with listening(App()) as listener, connected(listener.port) as client:
        await client.ask(GET)
        listener.stop()
        await until_refused(listener.port)
        answer = await client.ask(GET)

    assert (status_of(answer), b"connection: close" in answer) == (200, True)


async def test_stop_does_not_wait_for_who_has_been_silent_for_long() -> None:
    """A connection that has brought nothing for a second is closed at once."""
    loop = asyncio.get_running_loop()
    async with listening(App()) as listener, connected(listener.port) as client:
        await client.ask(GET)
        (connection,) = listener.occupancy.trusted
        connection.since -= END_SECONDS
        started = loop.time()
        listener.stop()
        rest = await client.rest()

    assert rest == b""
    assert connection.deadline <= started


async def test_stop_gives_up_after_its_time() -> None:
    """A request that does not end is cancelled when the time to drain is over."""
    app = App()
    server = listening(app, drain_timeout_seconds=1)
    async with server as listener, connected(listener.port) as client:
        client.writer.write(GET.replace(b"/ ", b"/wait "))
        await until(lambda: app.paths)
        listener.stop()
        await until(lambda: app.is_cancelled)

    assert listener.has_cut_off
