"""What the sandbox's page asks for: its files, and the stream that keeps it up to date."""

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

from bridge.sandbox import page_api
from bridge.sandbox import store as sandbox_store
from bridge.sandbox.api import create_app
from bridge.sandbox.page_api import MAX_STREAMS, PageApi
from bridge.sandbox.records import AcceptedMessage
from bridge.sandbox.service import PlayedService
from bridge.sandbox.store import MAX_CHANGES, SandboxStore

LOGIN = {"Authorization": "Bearer the-key"}
REQUEST = Request({"type": "http", "headers": []})


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app())
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
    """A request for HTML gets the page; curl, which accepts anything, gets a list of endpoints."""
    answer = await client.get("/", headers={"Accept": accept})

    assert answer.headers["content-type"].startswith(kind)


async def test_files_bring_the_policy_along(client: httpx.AsyncClient) -> None:
    """The page and its files may load nothing from elsewhere, and no other file is served."""
    page = await client.get("/", headers={"Accept": "text/html"})
    script = await client.get("/sandbox/page/page.js")
    others = [await client.get(f"/sandbox/page/{name}") for name in ("x.js", "..%2Fapi.py")]

    for answer in (page, script):
        assert "default-src 'none'; script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert script.headers["content-type"].startswith("text/javascript")
    assert [answer.status_code for answer in others] == [404, 404]
    assert "<script>" not in page.text
    assert " style=" not in page.text


@pytest.fixture
def store() -> SandboxStore:
    return SandboxStore(100_000)


@pytest.fixture
def page(store: SandboxStore) -> PageApi:
    return PageApi(PlayedService("generic"), store, webhook_url=None)


def take(store: SandboxStore, text: str) -> None:
    store.add_message(AcceptedMessage(text, "+15550100", "Acme", text, None, 0))


async def stream(page: PageApi) -> AsyncIterator[list[tuple[str, Any]]]:
    """Read a stream: a list of events, their kind and data, for each piece that is written."""
    answer = await page.stream(REQUEST)
    assert isinstance(answer, StreamingResponse)
    async with aclosing(cast("AsyncGenerator[str, None]", answer.body_iterator)) as pieces:
        async for piece in pieces:
            events = piece.removesuffix("\n\n").split("\n\n")
            fields = [dict(line.split(": ", 1) for line in event.splitlines()) for event in events]
            yield [(one["event"], json.loads(one["data"])) for one in fields if "event" in one]


async def test_a_stream_begins_with_a_snapshot_and_goes_on(
    page: PageApi, store: SandboxStore
) -> None:
    """Every change after the snapshot is streamed, in order."""
    take(store, "before")
    events = stream(page)
    ((kind, snapshot),) = await anext(events)
    take(store, "one\nline")
    store.set_faults([])
    then = await anext(events)

    assert (kind, [one["text"] for one in snapshot["messages"]]) == ("snapshot", ["before"])
    assert [kind for kind, _ in then] == ["message", "faults"]
    assert then[0][1]["text"] == "one\nline"


async def test_a_stream_that_has_missed_changes_gets_a_snapshot(
    page: PageApi, store: SandboxStore
) -> None:
    """So does every stream when records are dropped."""
    events = stream(page)
    await anext(events)
    for number in range(MAX_CHANGES + 1):
        take(store, str(number))
    ((behind, snapshot),) = await anext(events)
    store.forget_messages()
    ((dropped, empty),) = await anext(events)

    assert (behind, len(snapshot["messages"])) == ("snapshot", MAX_CHANGES + 1)
    assert (dropped, empty["messages"]) == ("snapshot", [])


async def test_the_number_of_streams_is_bounded(page: PageApi) -> None:
    """Streams that have not begun count too; a stream that ends makes room for another."""
    begun = asyncio.Event()
    answers = [await page.stream(REQUEST) for _ in range(MAX_STREAMS)]
    for _ in range(5):
        with pytest.raises(HTTPException, match="503"):
            await page.stream(REQUEST)

    async def receive() -> Any:
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(_message: object) -> None:
        begun.set()

    await answers[0]({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    await page.stream(REQUEST)
    with pytest.raises(HTTPException, match="503"):
        await page.stream(REQUEST)


async def test_a_snapshot_is_bounded(
    page: PageApi, store: SandboxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the newest messages, with segments and encoding."""
    monkeypatch.setattr(page_api, "MAX_SHOWN", 6)
    for number in range(7):
        take(store, str(number))
    for text in ("a" * 160, "a" * 159 + "€", "ж" * 71):
        take(store, text)
    ((_, snapshot),) = await anext(stream(page))
    shown = [(one["encoding"], one["segments"]) for one in snapshot["messages"]]

    assert len(shown) == 6
    assert snapshot["messages"][0]["text"] == "4"
    assert shown[-3:] == [("gsm7", 1), ("gsm7", 2), ("ucs2", 2)]


async def test_only_the_newest_requests_keep_their_bodies(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_store, "MAX_EXCHANGES", 2)
    for _ in range(3):
        await client.post("/v1/messages", content=b"{}", headers=LOGIN)
    listed = (await client.get("/sandbox/requests")).json()["requests"]
    shown = [await client.get(f"/sandbox/requests/{one['number']}") for one in listed]

    assert [answer.status_code for answer in shown] == [404, 200, 200]


async def test_read_marks_are_kept(page: PageApi, store: SandboxStore) -> None:
    """The highest number is kept until messages are forgotten, and every page is told."""
    events = stream(page)
    await anext(events)
    transport = httpx.ASGITransport(create_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        mark = {"to": "+15550100", "number": 7}
        marked = await client.put("/sandbox/read", json=mark)
        refused = await client.put("/sandbox/read", json=mark | {"number": -1})
    for number in (7, 3):
        store.mark_read("+15550100", number)
    told = await anext(events)

    assert (marked.status_code, refused.status_code) == (204, 400)
    assert told == [("read", {"to": "+15550100", "number": 7})] * 2
    store.forget_messages()
    assert store.read == {}
