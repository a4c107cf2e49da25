"""What the sandbox's page asks for: its files, its snapshot, its stream."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import StreamingResponse

from bridge.sandbox.memory import MAX_EXCHANGES, Memory
from bridge.sandbox.messages import Message
from bridge.sandbox.page import MAX_SHOWN, MAX_STREAMS, Page
from bridge.sandbox.routes import create_app
from bridge.sandbox.service import Service

MESSAGE = {"to": "+15550100", "from": "Acme", "text": "Hi"}
LOGIN = {"Authorization": "Bearer the-key"}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Ask a sandbox."""
    transport = httpx.ASGITransport(create_app(sign=None, webhook_url=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("text/html,application/xhtml+xml,*/*;q=0.8", "text/html"),
        ("text/plain", "text/plain"),
        ("*/*", "text/plain"),
    ],
)
async def test_browsers_get_the_page_and_programs_the_text(
    client: httpx.AsyncClient, accept: str, kind: str
) -> None:
    """Who asks for HTML gets it; curl, which takes anything, is told what there is."""
    answer = await client.get("/", headers={"Accept": accept})

    assert answer.headers["content-type"].startswith(kind)


async def test_files_bring_the_policy_along(client: httpx.AsyncClient) -> None:
    """The page and what it loads may load nothing of others, and nothing else is given out."""
    page = await client.get("/", headers={"Accept": "text/html"})
    script = await client.get("/sandbox/page/page.js")
    others = [await client.get(f"/sandbox/page/{name}") for name in ("x.js", "..%2Fpage.py")]

    for answer in (page, script):
        assert "default-src 'none'; script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert script.headers["content-type"].startswith("text/javascript")
    assert [answer.status_code for answer in others] == [404, 404]
    assert "<script>" not in page.text
    assert " style=" not in page.text


async def test_a_request_is_shown_with_its_answer(client: httpx.AsyncClient) -> None:
    """Headers and bodies are there as they went over the wire, but for the key."""
    headers = {**LOGIN, "Idempotency-Key": "k"}
    sent = await client.post("/v1/messages", json=MESSAGE, headers=headers)
    snapshot = (await client.get("/sandbox/snapshot")).json()
    (listed,) = snapshot["requests"]
    shown = (await client.get(f"/sandbox/requests/{listed['number']}")).json()

    assert (listed["status"], listed["seconds"] >= 0) == (202, True)
    assert ["authorization", "Bearer ***"] in shown["headers"]
    assert json.loads(shown["body"]) == MESSAGE
    assert json.loads(shown["answer_body"]) == sent.json()
    assert "the-key" not in json.dumps([snapshot, shown])
    assert (await client.get("/sandbox/requests/999")).status_code == 404


async def test_a_snapshot_says_how_long_a_text_is(client: httpx.AsyncClient) -> None:
    """Segments and encoding stand beside each message."""
    for text in ("a" * 160, "a" * 159 + "€", "ж" * 71):
        await client.post("/v1/messages", json=MESSAGE | {"text": text}, headers=LOGIN)
    messages = (await client.get("/sandbox/snapshot")).json()["messages"]

    shown = [(one["encoding"], one["segments"]) for one in messages]
    assert shown == [("gsm7", 1), ("gsm7", 2), ("ucs2", 2)]


@pytest.fixture
def memory() -> Memory:
    """Make the memory of a page."""
    return Memory(100_000, key=None)


@pytest.fixture
def page(memory: Memory) -> Page:
    """Make a page."""
    return Page(Service("generic"), memory, webhook_url=None)


def take(memory: Memory, text: str) -> None:
    """Have the service take a message."""
    memory.keep(Message(text, "+15550100", "Acme", text, None, 0))


async def stream(page: Page, position: str = "") -> AsyncIterator[list[dict[str, str]]]:
    """Read a stream, a list of events for each piece that is written."""
    headers = [(b"last-event-id", position.encode())]
    answer = await page.stream(Request({"type": "http", "headers": headers}))
    assert isinstance(answer, StreamingResponse)
    async with aclosing(cast("AsyncGenerator[str, None]", answer.body_iterator)) as pieces:
        async for piece in pieces:
            events = piece.removesuffix("\n\n").split("\n\n")
            named = [dict(line.split(": ", 1) for line in event.splitlines()) for event in events]
            yield [event for event in named if "event" in event]


async def next_of(events: AsyncIterator[list[dict[str, str]]]) -> list[dict[str, str]]:
    """Return the next events, whatever pieces without any come before."""
    while not (found := await anext(events)):
        pass
    return found


async def test_a_stream_begins_anew_and_goes_on(page: Page, memory: Memory) -> None:
    """A page without a position is told to look; then it is told all that happens."""
    take(memory, "before")
    events = stream(page)
    (first,) = await next_of(events)
    take(memory, "one\nline")
    memory.order([])
    then = await next_of(events)

    assert (first["event"], first["id"]) == ("reset", f"{memory.feed.run}-1")
    assert [event["event"] for event in then] == ["message", "faults"]
    assert json.loads(then[0]["data"])["text"] == "one\nline"


@pytest.mark.parametrize(
    ("position", "events"),
    [
        ("{run}-1", ["message"]),
        ("{run}-9", ["reset"]),
        ("00000000-1", ["reset"]),
        ("nonsense", ["reset"]),
    ],
)
async def test_a_stream_goes_on_where_it_was_cut(
    page: Page, memory: Memory, position: str, events: list[str]
) -> None:
    """A known position is gone on from; any other, of an earlier process too, begins anew."""
    take(memory, "one")
    take(memory, "two")
    told = await next_of(stream(page, position.format(run=memory.feed.run)))

    assert [event["event"] for event in told] == events


async def test_so_many_streams_there_are(page: Page) -> None:
    """Streams are bounded, those that have not begun too; one that ends leaves its place."""
    request = Request({"type": "http", "headers": []})
    begun = asyncio.Event()
    answers = []
    for _ in range(MAX_STREAMS):
        answer = await page.stream(request)
        answers.append(answer)
    for _ in range(5):
        with pytest.raises(HTTPException, match="503"):
            await page.stream(request)

    async def receive() -> Any:
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(_message: object) -> None:
        begun.set()

    await answers[0]({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    await page.stream(request)
    with pytest.raises(HTTPException, match="503"):
        await page.stream(request)


async def test_a_snapshot_is_bounded(page: Page, memory: Memory) -> None:
    """It holds the newest messages, and says how many there are."""
    for number in range(MAX_SHOWN + 1):
        take(memory, str(number))
    answer = await page.show_snapshot(Request({"type": "http"}))
    snapshot = json.loads(bytes(answer.body))

    assert (snapshot["total"], len(snapshot["messages"])) == (MAX_SHOWN + 1, MAX_SHOWN)
    assert snapshot["messages"][0]["text"] == "1"


async def test_only_the_newest_requests_keep_their_bodies(client: httpx.AsyncClient) -> None:
    """However many come, so many are kept whole."""
    for _ in range(MAX_EXCHANGES + 1):
        await client.post("/v1/messages", content=b"{}", headers=LOGIN)
    (first, second, *_) = (await client.get("/sandbox/snapshot")).json()["requests"]

    assert len((await client.get("/sandbox/requests")).json()["requests"]) == MAX_EXCHANGES + 1
    assert first["number"] > 1
    assert (await client.get("/sandbox/requests/1")).status_code == 404
    assert (await client.get(f"/sandbox/requests/{second['number']}")).status_code == 200


async def test_what_was_read_is_taken_down(client: httpx.AsyncClient) -> None:
    """It is remembered up to the highest number, until messages are forgotten."""
    for number in (7, 3):
        order = {"to": "+15550100", "number": number}
        assert (await client.put("/sandbox/read", json=order)).status_code == 204
    assert (await client.get("/sandbox/snapshot")).json()["read"] == {"+15550100": 7}
    await client.delete("/sandbox/messages")

    assert (await client.get("/sandbox/snapshot")).json()["read"] == {}
    refused = await client.put("/sandbox/read", json={"to": "+15550100", "number": -1})
    assert refused.status_code == 400


async def test_a_fault_can_be_added(client: httpx.AsyncClient) -> None:
    """It comes behind those that are there, and is checked as they are."""
    await client.put("/sandbox/faults", json=[{"status": 500}])
    added = await client.post("/sandbox/faults", json={"status": 429, "count": 2})
    refused = await client.post("/sandbox/faults", json={"answer": "no such thing"})

    assert [one["status"] for one in added.json()["faults"]] == [500, 429]
    assert refused.status_code == 400
