"""Answers that fit no rule of a service's, or of HTTP's: what becomes of the message."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs

import pytest

from tests.amqp_client import Amqp
from tests.integration.conftest import (
    Canaries,
    Launcher,
    Line,
    Post,
    eventually,
    http_answer,
    http_stub,
    run_program,
    unique,
)

YES = b'{"messages": [{"status": "0", "message-id": "1"}]}'


class OddService:
    """Answers with the bytes that are meant for a number; those without a status line get a 200."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        # The requests for each number.
        self.counts: Counter[str] = Counter()
        self.url = ""

    def answer(self, post: Post) -> bytes:
        body = post.body.decode()
        if not body:
            # `check --online` looks whether somebody is there.
            return http_answer(404)
        to = json.loads(body)["to"] if body.startswith("{") else f"+{parse_qs(body)['to'][0]}"
        self.counts[to] += 1
        said = self.answers[to]
        return said if b"HTTP/1.1 " in said else b"HTTP/1.1 200 OK\r\n" + said


@pytest.fixture(scope="module")
async def odd_service() -> AsyncIterator[OddService]:
    ours = OddService()
    async with http_stub(ours.answer) as stub:
        ours.url = stub.url
        yield ours


async def end_of(line: Line, request: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Publish a request; return the headers of its dead letter, and its line in the log."""
    letter = await line.dead_letter(request)
    logged = await line.worker.until_logged("delivery", message_id=letter.message_id)
    return dict(letter.headers), logged


@pytest.fixture(scope="module")
async def line(
    launcher: Launcher,
    amqp: Amqp,
    canaries: Canaries,
    odd_service: OddService,
) -> Line:
    """Start the worker; that nothing is accepted for long is no outage here.

    It asks a proxy, for plain HTTP as it would ask the service.
    """
    queue = unique("odd")
    settings: dict[str, Any] = {
        "worker.queue": queue,
        "worker.outage_after": "1h",
        "sms_api.preset": "vonage-sms",
        "sms_api.base_url": odd_service.url,
        "sms_api.account": "a1b2c3d4",
        "sms_api.key": canaries.key,
        "sms_api.proxy": odd_service.url,
    }
    return Line(amqp, canaries, await launcher.role("worker", settings=settings), queue)


def whole(body: bytes, kind: str = "application/json", more: str = "") -> bytes:
    """Write the rest of an answer behind its first line."""
    head = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    return head.encode() + body


def nested(depth: int) -> bytes:
    """Write lists in lists, the yes behind them."""
    return b'{"x": ' + b"[" * depth + b"]" * depth + b", " + YES[1:]


# Each says something of the message that must not be seen: its number, its text.
ODD: dict[str, tuple[str, str | None]] = {
    "other JSON": ('{{"queued": "{text}", "to": "{to}"}}', None),
    "a text": ('"{text}"', None),
    "unknown code": ('{{"messages": [{{"status": "5", "error-text": "{text}"}}]}}', "5"),
    "number for a code": ('{{"messages": [{{"status": "{to}"}}]}}', None),
    "word for a code": ('{{"messages": [{{"status": "{word}"}}]}}', None),
    "names twice": ('{{"messages": [{{"status": "0", "status": "77", "x": "{to}"}}]}}', "77"),
    "NaN": ('{{"messages": [{{"status": NaN, "x": "{to}"}}]}}', None),
    "too large a number": ('{{"messages": [{{"status": 1e999, "x": "{to}"}}]}}', None),
}
OTHER: dict[str, bytes] = {
    "nothing": whole(b""),
    "truncated": whole(YES + b" " * 50)[:-60],
    "gzip that is not told": whole(gzip.compress(YES)),
    "10 MB": whole(b'{"x": "' + b"x" * 10_000_000 + b'", ' + YES[1:]),
    "too deep": whole(nested(100_000)),
    "not a list": whole(b'{"messages": {"status": "0"}}'),
}


@pytest.mark.parametrize("odd", ODD)
async def test_answer_that_fits_no_rule(
    line: Line, odd_service: OddService, canaries: Canaries, odd: str
) -> None:
    request, (form, code) = canaries.request(), ODD[odd]
    to, text = request["to"], request["text"]
    body = form.format(to=to, text=text, word=text.partition(" ")[0])
    odd_service.answers[to] = whole(body.encode())
    headers, logged = await end_of(line, request)

    assert (headers["sms-bridge-reason"], headers["sms-bridge-status"]) == ("uncertain", 200)
    assert (logged["outcome"], logged["reason"], logged["status"]) == ("dead", "uncertain", 200)
    assert headers.get("sms-bridge-code") == logged.get("code") == code
    assert headers["sms-bridge-detail"] == "the SMS API gave an answer that matches no rule"
    assert not canaries.found_in(json.dumps([str(headers), logged]))


@pytest.mark.parametrize("odd", OTHER)
async def test_answer_that_cannot_be_read(
    line: Line, odd_service: OddService, canaries: Canaries, odd: str
) -> None:
    """What no decoder reads as the service's yes is uncertain, though there is a yes inside."""
    request = canaries.request()
    odd_service.answers[request["to"]] = OTHER[odd]
    headers, logged = await end_of(line, request)

    assert (logged["outcome"], logged["reason"], logged["status"]) == ("dead", "uncertain", 200)
    assert "sms-bridge-code" not in headers
    assert logged.get("code") is None


LENGTH = b"Content-Length: %d\r\n" % len(YES)
CHUNKS = b"Transfer-Encoding: chunked\r\n%s\r\n%x%s\r\n%s\r\n0\r\n\r\n"
LATIN = b'{"x": "\xe9", ' + YES[1:]
CREATED = b"HTTP/1.1 201 Created\r\n"
READ: dict[str, bytes] = {
    "nesting": whole(nested(20_000)),
    "blanks behind a chunk's size": CHUNKS % (b"", len(YES), b"  ", YES),
    "length beside chunked": CHUNKS % (LENGTH, len(YES), b"", YES),
    "thousands of blanks for a chunk's size": (
        b"Transfer-Encoding: chunked\r\n" + whole(b" " * 20_000 + YES)
    ),
    "length twice": LENGTH * 2 + b"\r\n" + YES,
    "identity": b"Transfer-Encoding: identity\r\n" + LENGTH + b"\r\n" + YES,
    "bare LF": (CREATED + LENGTH + b"\r\n").replace(b"\r", b"") + YES,
    "folded header": b"X: a\r\n b\r\n" + LENGTH + b"\r\n" + YES,
    "blank before a colon": LENGTH.replace(b":", b" :") + b"\r\n" + YES,
    "control character": b"X: a\x01b\r\n" + LENGTH + b"\r\n" + YES,
    "byte-order mark": whole(b"\xef\xbb\xbf" + YES),
    "UTF-16": whole(YES.decode().encode("utf-16"), "application/json; charset=utf-16"),
    "Latin-1": whole(LATIN, "application/json; charset=iso-8859-1"),
    "gzip": whole(gzip.compress(YES), more="Content-Encoding: gzip\r\n"),
    "deflate": whole(zlib.compress(YES), more="Content-Encoding: deflate\r\n"),
    "what looks like a status line": CREATED + b"HTTP/1.1 500 No\r\n" + LENGTH + b"\r\n" + YES,
}


@pytest.mark.parametrize("odd", READ)
async def test_yes_is_one_however_sloppily_it_is_sent(
    line: Line, odd_service: OddService, canaries: Canaries, odd: str
) -> None:
    """Bad framing, another charset, compression, something odd beside it do not hide a yes."""
    request = canaries.request()
    odd_service.answers[request["to"]] = READ[odd]
    outcome = await line.outcome(request)

    assert (outcome["outcome"], outcome["provider_id"], outcome["attempts"]) == ("sent", "1", 1)
    assert odd_service.counts[request["to"]] == 1


PAGE = b"<html>\r\nHTTP/1.1 200 OK\r\n\r\n" + YES
NO: dict[str, tuple[bytes, int | None]] = {
    "in the header": (b"HTTP/1.1 500 Oh\r\nHTTP/1.1 200 OK\r\n" + LENGTH + b"\r\n" + YES, 500),
    "in a page without a status": (PAGE, None),
}


@pytest.mark.parametrize("where", NO)
async def test_what_looks_like_a_status_line_is_no_yes(
    line: Line, odd_service: OddService, canaries: Canaries, where: str
) -> None:
    """A 500 whose header or page quotes a 200 is uncertain, and nothing was sent."""
    request = canaries.request()
    odd_service.answers[request["to"]], status = NO[where]
    outcome = await line.outcome(request)

    assert (outcome["outcome"], outcome["reason"]) == ("dead", "uncertain")
    assert outcome.get("status") == status


async def test_web_pages_behind_a_yes_are_told(
    launcher: Launcher, amqp: Amqp, amqp_url: str, canaries: Canaries, odd_service: OddService
) -> None:
    queue = unique("pages")
    api = {"sms_api.base_url": odd_service.url, "sms_api.key": canaries.key}
    settings = {"worker.queue": queue, **api}
    worker = await launcher.role("worker", settings=settings)
    line = Line(amqp, canaries, worker, queue)
    page = whole(b"<!doctype html><title>Sign in</title>", "text/html; charset=utf-8")
    outcomes = []
    for answer in (page, page, whole(b'{"id": "m1"}')):
        request = canaries.request()
        odd_service.answers[request["to"]] = answer
        outcomes.append((await line.outcome(request))["outcome"])
    (warning,) = worker.logged("web_page_counts_as_sent")
    port = worker.logged("started")[0]["admin_port"]
    command = ("check", "--online", "--quiet", "--role", "worker")
    where = {"rabbitmq.url": amqp_url, "admin.host": "127.0.0.1", "admin.port": str(port)}

    async def is_told() -> bool:
        checked = await run_program(*command, settings=settings | where)
        return b"2 of its answers to the worker on this computer were HTML pages" in checked.stdout

    # The check gives a worker two seconds to answer.
    await eventually(is_told, what="the pages told")

    assert outcomes == ["sent"] * 3
    assert (warning["level"], warning["status"]) == ("warning", 200)
    assert await worker.metric("sms_bridge_worker_provider_pages_total") == 2
