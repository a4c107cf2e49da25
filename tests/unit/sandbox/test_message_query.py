"""Asking for the messages of a number, and waiting for the next."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from bridge.sandbox.memory import Memory
from bridge.sandbox.messages import Message
from bridge.sandbox.routes import MAX_WAITING, create_app


@pytest.fixture
def app() -> Starlette:
    """Make a sandbox."""
    return create_app(sign=None, webhook_url=None)


@pytest.fixture
def memory(app: Starlette) -> Memory:
    """Look behind its curtain."""
    memory: Memory = app.state.memory
    return memory


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """Ask it."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


def take(memory: Memory, message_id: str, to: str) -> None:
    """Have the service take a message."""
    memory.keep(Message(message_id, to, "Acme", "Hi", None, 0))


async def ids(client: httpx.AsyncClient, **query: Any) -> list[str]:
    """Return the ids of the messages that are shown."""
    answer = await client.get("/sandbox/messages", params=query)
    return [message["id"] for message in answer.raise_for_status().json()["messages"]]


async def test_messages_of_a_number_and_after_another(
    client: httpx.AsyncClient, memory: Memory
) -> None:
    """The + may be left out, or be a space, as which a query has it."""
    take(memory, "a", "+15550100")
    take(memory, "b", "+15550101")
    take(memory, "c", "+15550100")

    assert await ids(client) == ["a", "b", "c"]
    assert await ids(client, after="a") == ["b", "c"]
    assert await ids(client, to="+15550100", after="a") == ["c"]
    assert await ids(client, to="15550100") == ["a", "c"]
    plus_is_a_space = await client.get("/sandbox/messages?to=+15550101")
    assert [one["id"] for one in plus_is_a_space.json()["messages"]] == ["b"]


@pytest.mark.parametrize(
    ("query", "status", "error"),
    [
        ({"too": "+15550100"}, 400, "too: extra inputs are not permitted"),
        ({"to": "me"}, 400, "to: must be + and 4 to 15 digits, the first not 0"),
        ({"wait_seconds": "61"}, 400, "wait_seconds: input should be less than or equal to 60"),
        ({"wait_seconds": "nan"}, 400, "wait_seconds: input should be a finite number"),
        ({"after": "z"}, 404, "after: no message that is kept has this id"),
    ],
)
async def test_a_query_that_cannot_be_answered_is_refused(
    client: httpx.AsyncClient, query: dict[str, str], status: int, error: str
) -> None:
    """A misspelt or unusable member is told, and shows no message of somebody else."""
    answer = await client.get("/sandbox/messages", params=query)

    assert (answer.status_code, answer.json()) == (status, {"error": error})


async def test_the_next_message_is_waited_for(client: httpx.AsyncClient, memory: Memory) -> None:
    """The answer comes with the first that fits, and not with one for somebody else."""
    take(memory, "old", "+15550100")
    query = {"to": "+15550100", "after": "old", "wait_seconds": 30}
    asking = asyncio.create_task(ids(client, **query))
    await asyncio.sleep(0)
    take(memory, "other", "+15550101")
    await asyncio.sleep(0.05)
    assert not asking.done()
    take(memory, "new", "+15550100")

    assert await asking == ["new"]


async def test_a_wait_ends(client: httpx.AsyncClient) -> None:
    """After its time an empty list says that there was none."""
    assert await ids(client, wait_seconds=0.05) == []


async def test_a_message_that_is_there_is_not_waited_for(
    client: httpx.AsyncClient, memory: Memory
) -> None:
    """Whoever asks after the message has come gets it at once."""
    take(memory, "there", "+15550100")
    async with asyncio.timeout(10):
        assert await ids(client, to="+15550100", wait_seconds=60) == ["there"]


async def test_not_everybody_may_wait(client: httpx.AsyncClient, memory: Memory) -> None:
    """There is a bound to those who wait at a time, and who is beyond it is told so."""
    waiting = [asyncio.create_task(ids(client, wait_seconds=30)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0.2)
    refused = await client.get("/sandbox/messages", params={"wait_seconds": 30})
    take(memory, "one", "+15550100")

    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert await asyncio.gather(*waiting) == [["one"]] * MAX_WAITING
