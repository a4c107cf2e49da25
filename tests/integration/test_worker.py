"""The worker as a process: from a real queue to the stand-in SMS service, and what it leaves."""

import asyncio
import json
import os
import re
import struct
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import aio_pika
import pamqp.encode
import pytest

from tests.amqp_client import NO_ID, Amqp
from tests.integration.conftest import (
    SECONDS,
    Canaries,
    HttpStub,
    Launcher,
    Line,
    Post,
    Service,
    StartService,
    eventually,
    http_answer,
    http_stub,
    unique,
)

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LONG = 100_000
# RabbitMQ's own limit, less what is around a frame.
FRAME_BYTES = 131072 - 8


@pytest.fixture(scope="module")
async def shared_line(
    launcher: Launcher, amqp: Amqp, canaries: Canaries, session_service: Service
) -> Line:
    """Start the worker that most tests share: a short ladder, few attempts."""
    queue = unique("worker")
    settings = {
        "worker.queue": queue,
        "worker.retry_delays": ["1s", "2s"],
        "worker.max_attempts": "3",
        "worker.max_uncertain_attempts": "2",
        "sms_api.base_url": session_service.url,
        "sms_api.key": canaries.key,
    }
    return Line(amqp, canaries, await launcher.role("worker", settings=settings), queue)


@pytest.fixture
async def line(shared_line: Line, service: Service) -> Line:
    """Lend the shared worker, the service's memory being empty."""
    assert service.url
    return shared_line


class Recorder:
    """An SMS service that keeps what it is sent, and answers what is told for a number."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.stub: HttpStub

    def answer(self, post: Post) -> bytes:
        return http_answer(*self.answers.get(json.loads(post.body)["to"], (202, b"")))

    def find(self, to: str) -> list[Post]:
        return [post for post in self.stub.posts if json.loads(post.body)["to"] == to]


@pytest.fixture(scope="module")
async def recorder() -> AsyncIterator[Recorder]:
    ours = Recorder()
    async with http_stub(ours.answer) as ours.stub:
        yield ours


@pytest.fixture(scope="module")
async def other_line(
    launcher: Launcher, amqp: Amqp, canaries: Canaries, recorder: Recorder
) -> Line:
    """Start a worker with what is off by default, and a ladder so slow that copies can be seen."""
    queue = unique("other")
    settings = {
        "worker.queue": queue,
        "worker.retry_delays": ["60s"],
        "worker.max_age": "1h",
        "worker.outcome_exchange": f"{queue}.outcome",
        "sms_api.base_url": f"{recorder.stub.url}/prefix/",
        "sms_api.key": canaries.key,
    }
    return Line(amqp, canaries, await launcher.role("worker", settings=settings), queue)


@dataclass
class Locked:
    """A worker whose key the service does not know, and the request that it holds."""

    line: Line
    service: Service
    folder: Path
    to: str

    def change_key(self, key: str) -> None:
        """Swap the folder behind the key file, as Kubernetes does."""
        versions = len(list(self.folder.glob("..v*")))
        fresh = self.folder / f"..v{versions}"
        fresh.mkdir()
        (fresh / "key").write_text(key, encoding="utf-8")
        link = self.folder / "..tmp"
        link.symlink_to(fresh.name)
        link.rename(self.folder / "..data")


@pytest.fixture(scope="module")
async def locked(
    launcher: Launcher,
    amqp: Amqp,
    canaries: Canaries,
    start_service: StartService,
    tmp_path_factory: pytest.TempPathFactory,
) -> Locked:
    service = await start_service(f"{canaries.key}-new")
    queue = unique("locked")
    request = canaries.request()
    folder = tmp_path_factory.mktemp("key")
    settings = {
        "worker.queue": queue,
        "worker.retry_delays": ["1s", "2s"],
        "sms_api.base_url": service.url,
        "sms_api.key_file": str(folder / "key"),
    }
    lock = Locked(Line(amqp, canaries, None, queue), service, folder, request["to"])  # type: ignore[arg-type]  # started below
    lock.change_key(canaries.key)
    (folder / "key").symlink_to("..data/key")
    lock.line.worker = await launcher.role("worker", settings=settings)
    await lock.line.publish(request)
    await service.until_requested(lock.to)
    return lock


# A key that is not accepted, part one; part two is the last test, when the waits have grown.


async def test_a_paused_worker_stays_ready(locked: Locked) -> None:
    await locked.service.until_requested(locked.to, 2)
    answer = await locked.line.worker.ask("/readyz")

    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    facts = answer.json()["worker"]
    since = facts["pauses"][0].pop("since")
    assert 0 <= time.time() - datetime.fromisoformat(since).timestamp() < 60
    assert facts == {
        "queue": locked.line.worker.entities[0],
        "paused": "credentials_rejected",
        "pauses": [
            {
                "reason": "credentials_rejected",
                "status": 401,
                "code": None,
                "queue": None,
                "fault": None,
            }
        ],
        "paused_by_operator": None,
        "outage_suspected": False,
        "standby": None,
        "copies_refused": 0,
        "retry_after_seconds": 0.0,
        "peers": 0,
    }


# What is posted


async def test_the_post_is_exact(other_line: Line, recorder: Recorder) -> None:
    request = other_line.request()
    headers = {"traceparent": TRACE, "tracestate": "vendor=1"}
    await other_line.outcome(request, message_id="order-1", headers=headers)
    (post,) = recorder.find(request["to"])
    expected = {
        "authorization": f"Bearer {other_line.canaries.key}",
        "content-type": "application/json",
        "idempotency-key": "order-1",
        "traceparent": TRACE,
        "tracestate": "vendor=1",
    }

    assert post.first_line == "POST /prefix/v1/messages HTTP/1.1"
    assert {name: post.headers.get(name) for name in expected} == expected
    assert json.loads(post.body) == request


@pytest.mark.parametrize(
    "text", ['Grüße 👋🏽\n\tعربى\r\u2028"\\', "x" * 1600], ids=["awkward", "longest"]
)
async def test_a_text_arrives_as_it_was(line: Line, service: Service, text: str) -> None:
    request = line.request(text=text)
    await line.publish(request)

    assert (await service.until_sent(request["to"]))["text"] == text


async def test_a_message_without_an_id_keeps_one_key(line: Line, service: Service) -> None:
    request = line.request()
    await service.misbehave({"to": request["to"], "count": 1, "status": 503})
    await line.publish(request)
    await service.until_sent(request["to"])
    keys = {attempt["idempotency_key"] for attempt in await service.requests(request["to"])}

    assert len(keys) == 1
    assert keys.isdisjoint({None, ""})


async def test_equal_messages_without_an_id_are_two(line: Line, service: Service) -> None:
    """The same words to the same number twice, without an id, are sent twice under two keys."""
    request = line.request()
    await line.publish(request)
    await line.publish(request)
    first, second = await service.until_requested(request["to"], 2)

    assert first["idempotency_key"] != second["idempotency_key"]


async def test_a_repeated_message_id_is_posted_once(line: Line, service: Service) -> None:
    request = line.request()
    message_id = uuid.uuid4().hex
    before = await line.settled()
    await line.publish(request, message_id=message_id)
    await line.publish(request, message_id=message_id)
    await line.until_settled(before + 2)

    assert len(await service.requests(request["to"])) == 1


# What is no send request

NOT_REQUESTS: dict[str, tuple[bytes, str]] = {
    "no-json": (b"to=%(to)s", "body"),
    "to-with-newline": (b'{"to": "%(to)s\\n", "from": "A", "text": "x"}', "to"),
    "to-twice": (b'{"to": "+491713920002", "to": "%(to)s", "from": "A", "text": "x"}', "to"),
    "text-too-long": (b'{"to": "%(to)s", "from": "A", "text": "%(huge)s"}', "text"),
    "latin-1": ('{"to": "+491713920011", "from": "A", "text": "ü"}'.encode("latin-1"), "body|text"),
    "nested-deep": (b"[" * LONG, "body"),
}


@pytest.fixture(params=list(NOT_REQUESTS))
def not_a_request(request: pytest.FixtureRequest, canaries: Canaries) -> tuple[bytes, str]:
    body, blamed = NOT_REQUESTS[request.param]
    values = {b"to": canaries.number().encode(), b"huge": b"Zikadensommer" * 124}
    for name, value in values.items():
        body = body.replace(b"%%(%s)s" % name, value)
    return body, blamed


async def test_what_is_no_request_is_kept(line: Line, not_a_request: tuple[bytes, str]) -> None:
    body, blamed = not_a_request
    letter = await line.dead_letter(body)
    detail = str(letter.headers["sms-bridge-detail"])

    assert letter.headers["sms-bridge-reason"] == "invalid"
    assert letter.body == body
    assert re.match(rf"({blamed}): ", detail)
    assert line.canaries.found_in(detail) == set()


async def test_a_misspelt_header_is_told(line: Line, service: Service) -> None:
    request = line.request()
    letter = await line.dead_letter(request, headers={"sms-bridge-expire-at": 1})

    assert letter.headers["sms-bridge-reason"] == "invalid"
    assert letter.headers["sms-bridge-detail"] == (
        "sms-bridge-expire-at: is unknown; did you mean sms-bridge-expires-at?"
    )
    assert letter.headers["sms-bridge-expire-at"] == 1
    assert await service.requests(request["to"]) == []


async def test_a_dead_letter_keeps_its_properties(line: Line) -> None:
    properties = {
        "message_id": uuid.uuid4().hex,
        "correlation_id": "correlation",
        "content_type": "text/x-odd",
        "content_encoding": "identity",
        "priority": 3,
        "timestamp": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "type": "some type",
        "app_id": "some application",
    }
    headers = {"traceparent": TRACE, "team": "billing", "number": 5}
    letter = await line.dead_letter(b"no request", headers=headers, **properties)

    assert {name: getattr(letter, name) for name in properties} == properties
    assert {name: letter.headers.get(name) for name in headers} == headers
    assert letter.delivery_mode == aio_pika.DeliveryMode.PERSISTENT


@pytest.mark.parametrize(
    "size", [FRAME_BYTES, FRAME_BYTES + 1, 5 << 20], ids=["one-frame", "two", "many"]
)
async def test_a_message_in_many_frames(line: Line, service: Service, size: int) -> None:
    """A body that the broker cuts into frames comes out as it went in, and holds nothing up."""
    body, request = os.urandom(size), line.request()
    message_id = uuid.uuid4().hex
    await line.publish(body, message_id=message_id)
    await line.publish(request)
    letter = await line.amqp.take(f"{line.queue}.dead", message_id=message_id)

    assert letter.body == body
    assert await service.until_sent(request["to"])


# What the service answers


@pytest.mark.parametrize("status", [400, 451])
async def test_a_refused_message_is_dead(line: Line, service: Service, status: int) -> None:
    """A definite no to this message is never repeated."""
    request = line.request()
    await service.misbehave({"to": request["to"], "status": status})
    outcome = await line.outcome(request)

    assert (outcome["reason"], outcome["attempts"], outcome["status"]) == ("refused", 1, status)


@pytest.mark.parametrize("status", [404, 501])
async def test_an_ambiguous_status_between_acceptances_is_about_the_message(
    line: Line, service: Service, status: int
) -> None:
    request = line.request()
    pauses = await line.worker.metric("sms_bridge_worker_pauses_total")
    await service.misbehave({"to": request["to"], "status": status})
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(line.outcome(request))
        await service.until_requested(request["to"])
        await line.outcome(line.request())
    outcome = ending.result()

    assert (outcome["reason"], outcome["attempts"], outcome["status"]) == ("refused", 1, status)
    assert len(await service.requests(request["to"])) == 2
    assert await line.worker.metric("sms_bridge_worker_pauses_total") == pauses


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503, "headers": {"Retry-After": "1"}},
        {"status": 500},
        {"status": 408},
        {"mode": "cut"},
    ],
    ids=["503-retry-after", "500", "408", "cut"],
)
async def test_a_passing_fault_is_survived(
    line: Line, service: Service, fault: dict[str, object]
) -> None:
    request = line.request()
    await service.misbehave({"to": request["to"], "count": 1, **fault})
    outcome = await line.outcome(request, message_id=uuid.uuid4().hex)
    keys = [attempt["idempotency_key"] for attempt in await service.requests(request["to"])]

    assert (outcome["outcome"], outcome["attempts"]) == ("sent", 2)
    assert keys == [outcome["message_id"]] * 2


async def test_the_attempts_are_used_up(line: Line, service: Service) -> None:
    """After max_attempts a message is dead as exhausted."""
    request = line.request()
    await service.misbehave({"to": request["to"], "status": 408})
    outcome = await line.outcome(request)

    assert (outcome["reason"], outcome["attempts"]) == ("exhausted", 3)
    assert len(await service.requests(request["to"])) == 3


async def test_uncertain_attempts_have_their_own_cap(line: Line, service: Service) -> None:
    request = line.request()
    await service.misbehave({"to": request["to"], "status": 500})
    outcome = await line.outcome(request)

    assert (outcome["reason"], outcome["attempts"]) == ("uncertain", 2)
    assert len(await service.requests(request["to"])) == 2


@pytest.mark.parametrize(
    "fault", [{"status": 500}, {"mode": "accept_then_cut"}], ids=["500", "cut"]
)
async def test_a_message_may_ask_to_be_parked(
    line: Line, service: Service, fault: dict[str, object]
) -> None:
    request = line.request()
    await service.misbehave({"to": request["to"], **fault})
    outcome = await line.outcome(request, headers={"sms-bridge-on-uncertain": "park"})

    assert (outcome["reason"], outcome["attempts"]) == ("uncertain", 1)
    assert len(await service.requests(request["to"])) == 1


async def test_a_429_slows_the_whole_worker(line: Line, service: Service) -> None:
    """After a 429 nothing at all is posted before Retry-After has passed; no attempt is burnt."""
    slowed, other = line.request(), line.request()
    headers = {"Retry-After": "2"}
    await service.misbehave({"to": slowed["to"], "count": 1, "status": 429, "headers": headers})
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(line.outcome(slowed))
        (refused,) = await service.until_requested(slowed["to"])
        await eventually(
            lambda: line.worker.metric("sms_bridge_worker_provider_responses_total", code="429"),
            what="the 429 counted",
        )
        await line.publish(other)
        sent = await service.until_sent(other["to"])
    outcome = ending.result()

    assert (outcome["outcome"], outcome["attempts"]) == ("sent", 1)
    assert _seconds_between(refused["received_at"], sent["received_at"]) >= 1.99


def _seconds_between(first: str, second: str) -> float:
    return (datetime.fromisoformat(second) - datetime.fromisoformat(first)).total_seconds()


async def test_a_fault_of_the_set_up_is_waited_for(line: Line, service: Service) -> None:
    """A fault of the set-up pauses the worker, which probes until it is mended, and burns nothing.

    The worker here gives a message three attempts.
    """
    request, reason = line.request(), "insufficient_funds"
    pauses = "sms_bridge_worker_pauses_total"
    before = await line.worker.metric(pauses, reason=reason)
    await service.misbehave({"to": request["to"], "count": 3, "status": 402})
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(line.outcome(request))
        await service.until_requested(request["to"], 2)
        assert await line.worker.metric("sms_bridge_worker_paused", reason=reason) == 1
    outcome = ending.result()
    posts = await service.requests(request["to"])

    assert (outcome["outcome"], outcome["attempts"]) == ("sent", 1)
    assert [post["status"] for post in posts] == [402] * 3 + [202]
    assert _seconds_between(posts[0]["received_at"], posts[1]["received_at"]) >= 0.75
    assert _seconds_between(posts[1]["received_at"], posts[2]["received_at"]) >= 1.5
    assert await line.worker.metric(pauses, reason=reason) == before + 1
    assert await line.worker.metric("sms_bridge_worker_paused", reason=reason) == 0


@pytest.mark.parametrize(
    "answer",
    [(204, b""), (201, b'{"id": null}'), (202, b'["x"')],
    ids=["nothing", "null", "cut-json"],
)
async def test_the_status_line_decides(
    other_line: Line, recorder: Recorder, answer: tuple[int, bytes]
) -> None:
    """Any 2xx is an acceptance, whatever its body is."""
    request = other_line.request()
    recorder.answers[request["to"]] = answer
    outcome = await other_line.outcome(request)

    assert (outcome["outcome"], outcome["status"]) == ("sent", answer[0])


async def test_a_retry_copy_is_the_message_itself(other_line: Line, recorder: Recorder) -> None:
    request, message_id = other_line.request(), uuid.uuid4().hex
    recorder.answers[request["to"]] = (408, b"")
    await other_line.publish(request, message_id=message_id)
    copy = await other_line.amqp.take(f"{other_line.queue}.retry.1m", message_id=message_id)

    assert json.loads(copy.body) == request
    assert copy.headers["sms-bridge-attempts"] == 1
    assert copy.headers["sms-bridge-status"] == 408


# When a message may go


@pytest.mark.parametrize(
    "properties",
    [
        {"headers": {"sms-bridge-expires-at": int(time.time()) - 60}},
        {"headers": {"sms-bridge-expires-at": "2026-01-02T03:04:05+01:00"}},
        {"timestamp": datetime.now(UTC) - timedelta(hours=1, seconds=60)},
    ],
    ids=["unix", "rfc-3339", "older than worker.max_age"],
)
async def test_an_expired_message_is_never_sent(
    other_line: Line, recorder: Recorder, properties: dict[str, Any]
) -> None:
    request = other_line.request()
    letter = await other_line.dead_letter(request, **properties)

    assert letter.headers["sms-bridge-reason"] == "expired"
    assert recorder.find(request["to"]) == []


@pytest.mark.parametrize("hours", [-2, 2])
async def test_an_expiration_does_not_count_by_the_publishers_clock(
    line: Line, service: Service, hours: int
) -> None:
    """A local time without its zone is hours off; what the broker has just delivered is sent."""
    request = line.request()
    claimed = datetime.now(UTC) + timedelta(hours=hours)
    await line.publish(request, expiration=timedelta(minutes=10), timestamp=claimed)

    assert (await service.until_sent(request["to"]))["to"] == request["to"]


async def test_a_message_waits_for_its_time(line: Line, service: Service) -> None:
    request = line.request()
    due = datetime.now(UTC) + timedelta(seconds=1.3)
    # A float would be a short one on the wire, up to a minute wrong.
    headers = {"sms-bridge-not-before": str(due.timestamp())}
    await line.publish(request, headers=headers)
    sent = await service.until_sent(request["to"])

    assert datetime.fromisoformat(sent["received_at"]) >= due - timedelta(milliseconds=2)


# What others hear of it


async def test_an_outcome_goes_to_reply_to(line: Line, service: Service) -> None:
    request, message_id = line.request(), uuid.uuid4().hex
    outcome = await line.outcome(request, message_id=message_id)
    (message,) = await service.messages(request["to"])
    at = datetime.fromisoformat(outcome.pop("at"))

    assert outcome == {
        "message_id": message_id,
        "outcome": "sent",
        "reason": None,
        "attempts": 1,
        "status": 202,
        "provider_id": message["id"],
    }
    assert abs(datetime.now(UTC) - at) < timedelta(seconds=30)


async def test_a_repeat_is_answered_as_the_first_was(line: Line, service: Service) -> None:
    request, message_id = line.request(), uuid.uuid4().hex
    first = await line.outcome(request, message_id=message_id)
    repeats = [await line.outcome(request, message_id=message_id) for _ in range(2)]

    assert "duplicate" not in first
    assert repeats == [{**first, "duplicate": True}] * 2
    assert len(await service.requests(request["to"])) == 1


async def test_a_repeat_during_the_first_is_answered(line: Line, service: Service) -> None:
    request, message_id = line.request(), uuid.uuid4().hex
    await service.misbehave({"to": request["to"], "latency_seconds": 0.5})
    outcomes = await asyncio.gather(
        *(line.outcome(request, message_id=message_id) for _ in range(3))
    )

    assert sorted(outcome.get("duplicate", False) for outcome in outcomes) == [False, True, True]
    assert len({outcome["provider_id"] for outcome in outcomes}) == 1
    assert len(await service.requests(request["to"])) == 1


async def test_a_repeat_of_a_dead_letter_is_tried_anew(line: Line, service: Service) -> None:
    request, message_id = line.request(), uuid.uuid4().hex
    await service.misbehave({"to": request["to"], "status": 400, "count": 1})
    first = await line.outcome(request, message_id=message_id)
    second = await line.outcome(request, message_id=message_id)

    letter = await line.amqp.take(f"{line.queue}.dead", message_id=message_id)

    assert (first["outcome"], second["outcome"]) == ("dead", "sent")
    assert "duplicate" not in second
    assert letter.headers["sms-bridge-reason"] == "refused"


async def test_a_repeat_of_a_dead_letter_has_all_its_tries(line: Line, service: Service) -> None:
    request, message_id = line.request(), uuid.uuid4().hex
    later = {"to": request["to"], "status": 503, "headers": {"Retry-After": "0"}, "count": 1}
    await service.misbehave(later, {"to": request["to"], "status": 400, "count": 1})
    first = await line.outcome(request, message_id=message_id)
    await service.misbehave(later)
    second = await line.outcome(request, message_id=message_id)

    await line.amqp.take(f"{line.queue}.dead", message_id=message_id)

    assert (first["outcome"], first["attempts"]) == ("dead", 2)
    assert (second["outcome"], second["attempts"]) == ("sent", 2)


async def test_a_reply_without_a_message_id_names_the_key(line: Line, service: Service) -> None:
    request = line.request()
    await service.misbehave({"to": request["to"], "status": 500, "count": 1})
    outcome = await line.outcome(request, message_id=NO_ID)
    requests = await service.requests(request["to"])

    assert {outcome["message_id"]} == {post["idempotency_key"] for post in requests}
    assert len(requests) == 2


@pytest.mark.parametrize("retried", [False, True], ids=["at_once", "after_a_retry"])
async def test_a_direct_reply(line: Line, service: Service, *, retried: bool) -> None:
    request, mark = line.request(), uuid.uuid4().hex
    if retried:
        await service.misbehave({"to": request["to"], "status": 500, "count": 1})
    found: asyncio.Queue[aio_pika.abc.AbstractIncomingMessage] = asyncio.Queue()
    replies = await line.amqp.channel.get_queue("amq.rabbitmq.reply-to", ensure=False)
    returned = partial(line.worker.metric, "sms_bridge_amqp_published_total", outcome="returned")
    before, lines = await returned(), len(line.worker.logged("outcome_not_published"))
    tag = await replies.consume(found.put, no_ack=True)
    try:
        await line.publish(request, reply_to=replies.name, correlation_id=mark)
        reply = await asyncio.wait_for(found.get(), SECONDS)
    finally:
        await replies.cancel(tag)

    assert (reply.correlation_id, json.loads(reply.body)["outcome"]) == (mark, "sent")
    assert await returned() == before
    assert len(line.worker.logged("outcome_not_published")) == lines


async def test_an_outcome_passes_the_trace_on(line: Line) -> None:
    async with line.replies() as replies:
        await line.publish(line.request(), reply_to=replies, headers={"traceparent": TRACE})
        outcome = await line.amqp.take(replies)

    assert outcome.headers.get("traceparent") == TRACE


async def test_a_missing_reply_queue_does_no_harm(line: Line, service: Service) -> None:
    """A reply_to that nobody listens on keeps neither the message nor the next one."""
    request = line.request()
    before = await line.settled()
    await line.publish(request, reply_to="nobody-listens-here", correlation_id="x")
    await line.until_settled(before + 1)

    assert len(await service.messages(request["to"])) == 1


@pytest.mark.parametrize(
    ("body", "routing_key"), [(None, "sent"), (b"no request", "dead")], ids=["sent", "dead"]
)
async def test_outcomes_go_to_the_exchange(
    other_line: Line, body: bytes | None, routing_key: str
) -> None:
    message_id = uuid.uuid4().hex
    channel = other_line.amqp.channel
    heard = await channel.declare_queue(exclusive=True)
    await heard.bind(f"{other_line.queue}.outcome", "#")
    await other_line.publish(body or other_line.request(), message_id=message_id)
    event = await other_line.amqp.take(heard.name)
    await heard.delete(if_unused=False, if_empty=False)

    assert event.routing_key == routing_key
    assert json.loads(event.body)["message_id"] == message_id


# What the broker may do


@asynccontextmanager
async def odd_publisher(amqp_url: str) -> AsyncIterator[Any]:
    """Open a connection of its own for what a proper client does not publish."""
    connection = await aio_pika.connect(amqp_url)
    async with connection:
        yield await connection.channel()


def _latin_1(value: str) -> bytes:
    encoded = value.encode("latin-1")
    return bytes([len(encoded)]) + encoded


@pytest.mark.parametrize(
    ("kind", "encode", "properties"),
    [
        ("timestamp", lambda _: struct.pack(">Q", int(time.time() * 10**9)), {}),
        ("timestamp", lambda _: struct.pack(">Q", 2**64 - 1), {}),
        ("shortstr", _latin_1, {"content_type": "text/é"}),
        ("shortstr", _latin_1, {"message_id": "größe"}),
    ],
    ids=["ns", "largest", "latin-1-type", "latin-1-id"],
)
async def test_a_broken_property_stops_nothing(
    line: Line,
    service: Service,
    amqp_url: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    encode: Any,
    properties: dict[str, Any],
) -> None:
    """A property that client libraries choke on keeps neither its message nor the next one."""
    odd, good = line.request(), line.request()
    message = aio_pika.Message(
        json.dumps(odd).encode(),
        timestamp=datetime.now(UTC) if kind == "timestamp" else None,
        **properties,
    )
    async with odd_publisher(amqp_url) as channel:
        with monkeypatch.context() as patch:
            patch.setitem(pamqp.encode.METHODS, kind, encode)
            await channel.default_exchange.publish(message, line.queue)
    await line.publish(good)
    await service.until_sent(good["to"])

    assert await service.until_sent(odd["to"])


async def test_a_broken_property_survives_the_dead_letter_queue(
    line: Line, amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = await line.amqp.channel.get_queue(f"{line.queue}.dead", ensure=False)
    await letters.purge()
    before = await line.settled()
    message = aio_pika.Message(b"no request", content_type="text/é")
    async with odd_publisher(amqp_url) as channel:
        with monkeypatch.context() as patch:
            patch.setitem(pamqp.encode.METHODS, "shortstr", _latin_1)
            await channel.default_exchange.publish(message, line.queue)
    await line.until_settled(before + 1)

    await line.amqp.until_count(letters.name, 1)


async def _declare(amqp: Amqp, names: Sequence[str]) -> None:
    for name in names:
        await amqp.channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})


async def test_nothing_is_acked_before_its_copy_is_stored(
    launcher: Launcher, amqp: Amqp, canaries: Canaries, service: Service
) -> None:
    """While its dead letter has nowhere to go a message stays the broker's, and comes back."""
    queue = unique("homeless")
    await _declare(amqp, [queue, f"{queue}.urgent"])
    settings = {
        "worker.queue": queue,
        "worker.retry_delays": ["1s"],
        "rabbitmq.topology": "off",
        "sms_api.base_url": service.url,
        "sms_api.key": canaries.key,
    }
    worker = await launcher.role("worker", settings=settings)
    await amqp.publish(queue, b"no request")
    await worker.until_metric("sms_bridge_amqp_published_total", 1, outcome="returned")
    worker.child.kill()
    await worker.ended()
    await amqp.until_count(queue, 1)

    assert (await amqp.take(queue)).body == b"no request"


# A key that is not accepted, part two


async def test_a_pause_dead_letters_nothing(locked: Locked) -> None:
    """However often the probe is refused, nothing is dead-lettered."""
    await locked.service.until_requested(locked.to, 4)

    assert await locked.line.amqp.count(f"{locked.line.queue}.dead") == 0


async def test_a_changed_key_ends_the_pause(locked: Locked) -> None:
    """The worker goes on within 10 s of a change of its key file, however long its waits are."""
    await locked.service.until_requested(locked.to, 5)
    changed = time.monotonic()
    locked.change_key(f"{locked.line.canaries.key}-new")
    await locked.service.until_sent(locked.to)

    assert time.monotonic() - changed < 10
