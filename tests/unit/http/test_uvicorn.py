"""Why the listener is ours: what uvicorn leaves open, with the same handler behind it.

When one of these fails, look again whether uvicorn can take the listener's place.
"""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn

from tests.unit.http.asgi import asgi_app
from tests.unit.http.raw import (
    GUARD_SECONDS,
    HALF_BODY,
    HALF_HEADER,
    IDLE_SECONDS,
    LIMITS,
    App,
    Served,
    connected,
    post_of,
    request,
    status_of,
    until,
)

MIB = 1024 * 1024


@pytest.fixture(scope="module")
async def uvicorn_port() -> AsyncIterator[int]:
    app = asgi_app(App().answer, max_body_bytes=LIMITS.max_body_bytes)
    server = uvicorn.Server(
        uvicorn.Config(
            app, lifespan="off", log_config=None, timeout_keep_alive=IDLE_SECONDS, ws="none"
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server._serve(sockets=[listening]))
        await until(lambda: server.started)
        yield listening.getsockname()[1]
        server.should_exit = server.force_exit = True
        await asyncio.wait_for(serving, GUARD_SECONDS)


async def test_the_handler_answers_there_too(served: Served, uvicorn_port: int) -> None:
    """A request is answered alike by both: a handler does not know who serves it."""
    answers = []
    for port in (served.port, uvicorn_port):
        async with connected(port) as client:
            answer = await client.ask(post_of(1000))
        answers.append((status_of(answer), answer.partition(b"\r\n\r\n")[2]))

    assert answers == [(200, b"/bad")] * 2


@pytest.mark.parametrize("said", [b"", HALF_HEADER, HALF_BODY], ids=["silent", "header", "body"])
async def test_uvicorn_waits_for_what_never_comes(
    served: Served, uvicorn_port: int, said: bytes
) -> None:
    """A connection that brings nothing more is closed by us, and kept by uvicorn."""
    async with connected(uvicorn_port) as kept, connected(served.port) as closed:
        for client in (kept, closed):
            client.writer.write(said)
        await closed.rest()

        assert not kept.reader.at_eof()


async def test_uvicorn_takes_a_header_of_any_size(served: Served, uvicorn_port: int) -> None:
    """Sixteen megabytes of headers are refused by us, and held and answered by uvicorn."""
    data = request(*[b"X-Pad: " + b"a" * MIB] * 16)
    statuses = []
    for port in (served.port, uvicorn_port):
        async with connected(port) as client:
            client.writer.write(data)
            statuses.append(status_of(await client.reader.readuntil(b"\r\n\r\n")))

    assert statuses == [431, 200]
