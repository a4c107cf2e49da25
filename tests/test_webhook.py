"""The receiver without a broker: its answers to anything, and events that come more than once."""

import asyncio
import hashlib
import hmac
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from bridge.config import RabbitMQSettings, SignatureSettings, WebhookSettings
from bridge.credentials import Credential
from bridge.errors import PublishError
from bridge.metrics import WebhookMetrics, new_registry
from bridge.parser import Answer, Request
from bridge.publisher import Publisher
from bridge.signature import scheme_from
from bridge.webhook import Receiver, RecentEvents
from tests.ears import Ears

SECRET = "a-webhook-secret"
PUBLIC_URL = "https://example.com/webhooks"
GUARD_SECONDS = 6.0
# One for all, because to make them takes longer than to use them.
METRICS = WebhookMetrics(new_registry(), path="/webhooks", event_types=("message.received",))


@dataclass
class Store:
    """Stands where the publisher stands; takes everything, or does what `fate` does."""

    fate: Callable[[], Awaitable[None]] | None = None
    bodies: list[bytes] = field(default_factory=list)

    async def publish(self, body: bytes, *, timeout_seconds: float, **_: Any) -> None:
        """Take an event, or raise PublishError when time is up."""
        try:
            async with asyncio.timeout(timeout_seconds):
                if self.fate is not None:
                    await self.fate()
        except TimeoutError:
            raise PublishError("timeout", "no confirm in time") from None
        self.bodies.append(body)


def make_receiver(store: Store, preset: Any = "plain", **changed: Any) -> Receiver:
    """Make a receiver with one secret."""
    ours = WebhookSettings(secrets=(SecretStr(SECRET),), **changed)
    return Receiver(
        ours,
        RabbitMQSettings(),
        scheme=scheme_from(SignatureSettings(preset=preset), PUBLIC_URL),
        secrets=[Credential("webhook.secrets.0", value=SecretStr(SECRET))],
        publisher=cast("Publisher", store),
        metrics=METRICS,
    )


def sign(body: bytes) -> tuple[bytes, bytes]:
    """Sign a body as the preset `plain` does."""
    digest = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    return b"x-service-signature", digest.encode()


def make_request(
    body: bytes, headers: Sequence[tuple[bytes, bytes]] | None = None, **changed: Any
) -> Request:
    """Make a request, signed unless the headers are given."""
    given = [sign(body)] if headers is None else [*headers]
    values = {"method": "POST", "path": "/webhooks", "query": b"", "headers": given, "body": body}
    return Request(**(values | changed))


EVENT = b'{"type": "message.received", "id": "evt-1"}'

# --- Any request ----------------------------------------------------------------------------------

NAMES = st.sampled_from(
    [
        *(b"x-service-signature", b"traceparent", b"tracestate", b"content-encoding"),
        *(b"x-forwarded-for", b"x-forwarded-proto", b"content-type", b"forwarded"),
    ]
)
# What the parser lets through in a header.
VALUES = st.binary(max_size=80).map(lambda v: bytes(b for b in v if b >= 32 and b != 127))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "id", "data", "message_id", "x"]), inner)
    ),
    max_leaves=8,
)
BODIES = st.binary(max_size=200) | JSON.map(repr).map(lambda t: t.replace("'", '"').encode())


@settings(max_examples=100, deadline=None)
@given(
    body=BODIES,
    headers=st.lists(st.tuples(NAMES, VALUES), max_size=5),
    method=st.sampled_from(["POST", "POST", "POST", "GET", "HEAD", "QUERY"]),
    path=st.sampled_from(["/webhooks", "/webhooks", "/webhooks/", "/", "", "*"]),
)
async def test_any_unsigned_request_is_refused(
    body: bytes, headers: list[tuple[bytes, bytes]], method: str, path: str
) -> None:
    """Whatever its headers and its body are, a stranger's request is 401, 404 or 405."""
    store = Store()
    request = make_request(body, headers, method=method, path=path)
    answer = await make_receiver(store).answer(request)

    expected = 404 if path != "/webhooks" else 405 if method != "POST" else 401
    assert (answer.status, store.bodies) == (expected, [])


@settings(max_examples=100, deadline=None)
@given(
    body=BODIES,
    headers=st.lists(st.tuples(NAMES.filter(lambda n: b"signature" not in n), VALUES), max_size=5),
)
async def test_any_signed_request_is_accepted(
    body: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    """Whatever else its headers and its body are, what is authentic is published as it is."""
    store = Store()
    answer = await make_receiver(store).answer(make_request(body, [*headers, sign(body)]))

    assert (answer.status, store.bodies) == (200, [body])


async def test_proxy_headers_change_nothing() -> None:
    """Where the URL is signed it is `webhook.public_url`, whatever a proxy or a forger says."""
    digest = hashlib.sha256(EVENT).hexdigest()
    forged = f"https://forged.example/webhooks?bodySHA256={digest}".encode()
    signature = hmac.new(SECRET.encode(), forged, hashlib.sha1).digest().hex()
    headers = [
        (b"x-twilio-signature", signature.encode()),
        (b"host", b"forged.example"),
        (b"x-forwarded-host", b"forged.example"),
        (b"x-forwarded-proto", b"https"),
        (b"forwarded", b"host=forged.example;proto=https"),
    ]
    store = Store()
    receiver = make_receiver(store, "twilio")
    request = make_request(EVENT, headers, query=f"bodySHA256={digest}".encode())

    assert ((await receiver.answer(request)).status, store.bodies) == (401, [])


async def test_an_event_that_is_not_stored_is_counted_by_its_type(ears: Ears) -> None:
    """What is verified and cannot be stored is counted and logged with its type and id."""

    async def fail() -> None:
        raise PublishError("returned", "no queue takes it")

    count = METRICS.events.labels("message.received", "publish_failed")
    before = count.value
    answer = await make_receiver(Store(fail)).answer(make_request(EVENT))
    (line,) = ears.heard("webhook")

    assert (answer.status, count.value - before) == (503, 1)
    assert (line["type"], line["event_id"]) == ("message.received", "evt-1")


# --- Events that come more than once --------------------------------------------------------------


@dataclass
class Gate:
    """Publishes that wait until they are told their fate, one after the other."""

    waiting: list["asyncio.Future[None]"] = field(default_factory=list)

    async def __call__(self) -> None:
        """Wait."""
        self.waiting.append(asyncio.get_running_loop().create_future())
        await self.waiting[-1]

    async def until(self, count: int) -> None:
        """Return when so many publishes were begun."""
        async with asyncio.timeout(GUARD_SECONDS):
            while len(self.waiting) < count:  # noqa: ASYNC110  there is no event to wait for
                await asyncio.sleep(0.001)


def ask(receiver: Receiver, count: int) -> list["asyncio.Task[Answer]"]:
    """Post the same event several times at once."""
    return [asyncio.create_task(receiver.answer(make_request(EVENT))) for _ in range(count)]


async def statuses(tasks: Sequence["asyncio.Task[Answer]"]) -> list[int]:
    """Wait for the answers."""
    return [answer.status for answer in await asyncio.gather(*tasks)]


async def test_repeats_wait_for_the_first() -> None:
    """Events that are equal and in flight are published once, and answered together."""
    gate = Gate()
    tasks = ask(make_receiver(Store(gate)), 5)
    await gate.until(1)
    await asyncio.sleep(0)
    before = [task.done() for task in tasks]
    gate.waiting[0].set_result(None)

    assert (before, await statuses(tasks), len(gate.waiting)) == ([False] * 5, [200] * 5, 1)


async def test_failure_of_the_first_is_not_told_to_the_others_as_success() -> None:
    """When the first publish fails, the next in line publishes, and the others wait for that."""
    gate = Gate()
    tasks = ask(make_receiver(Store(gate)), 3)
    await gate.until(1)
    gate.waiting[0].set_exception(PublishError("nacked"))
    await gate.until(2)
    gate.waiting[1].set_result(None)

    assert (await statuses(tasks), len(gate.waiting)) == ([503, 200, 200], 2)


async def test_failures_are_told_to_all() -> None:
    """When every publish fails, nobody is told 200, and a later repeat is published."""
    gate = Gate()
    receiver = make_receiver(Store(gate))
    tasks = ask(receiver, 3)
    for number in range(3):
        await gate.until(number + 1)
        gate.waiting[number].set_exception(PublishError("returned"))
    during = await statuses(tasks)
    again = ask(receiver, 1)
    await gate.until(4)
    gate.waiting[3].set_result(None)

    assert (during, await statuses(again)) == ([503] * 3, [200])


async def test_cancelled_first_does_not_fail_the_others() -> None:
    """When the first request is cancelled, the next in line publishes."""
    gate = Gate()
    tasks = ask(make_receiver(Store(gate)), 3)
    await gate.until(1)
    tasks[0].cancel()
    await gate.until(2)
    gate.waiting[1].set_result(None)

    assert await statuses(tasks[1:]) == [200, 200]


async def test_cancelled_repeat_does_not_fail_the_first() -> None:
    """When a repeat is cancelled, the first and the other repeats go on."""
    gate = Gate()
    tasks = ask(make_receiver(Store(gate)), 3)
    await gate.until(1)
    tasks[1].cancel()
    await asyncio.sleep(0)
    gate.waiting[0].set_result(None)

    assert await statuses([tasks[0], tasks[2]]) == [200, 200]


async def test_answer_comes_in_time() -> None:
    """A publish that does not end is answered 503 in time, and so are its repeats."""
    gate = Gate()
    loop = asyncio.get_running_loop()
    started = loop.time()
    answers = await asyncio.gather(
        *ask(make_receiver(Store(gate), response_timeout_seconds=0.5), 3)
    )

    assert {answer.status for answer in answers} == {503}
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers)
    assert loop.time() - started < 0.5 + GUARD_SECONDS / 2


async def test_too_many_at_once_are_put_off() -> None:
    """Over max_in_flight a webhook is answered 503 at once, and 200 when there is room again."""
    gate = Gate()
    receiver = make_receiver(Store(gate), max_in_flight=1)
    first = ask(receiver, 1)
    await gate.until(1)
    refused = await receiver.answer(make_request(b"another"))
    gate.waiting[0].set_result(None)
    late = ask(receiver, 1)

    assert (refused.status, int(refused.headers["Retry-After"]) > 0) == (503, True)
    assert await statuses([*first, *late]) == [200, 200]


async def _nothing() -> None:
    pass


async def test_memory_of_repeats_ends() -> None:
    """An event is remembered for the window, and then it is new again."""
    clock = [0.0]
    recent = RecentEvents(10, clock=lambda: clock[0])

    async def is_new_at(seconds: float) -> bool:
        clock[0] = seconds
        return await recent.once("key", _nothing, deadline=math.inf)

    found = [await is_new_at(seconds) for seconds in (0, 9.9, 10.1, 15, 20.2)]
    assert found == [True, False, True, False, True]


@given(
    now=st.floats(0, 1e8, allow_nan=False),
    window_seconds=st.floats(0.001, 1e6, allow_nan=False),
)
async def test_the_first_is_never_a_repeat(now: float, window_seconds: float) -> None:
    """An event that was not published is new, whatever the clock and the window are."""
    recent = RecentEvents(window_seconds, clock=lambda: now)

    assert await recent.once("key", _nothing, deadline=math.inf)
    assert not await recent.once("key", _nothing, deadline=math.inf)


async def test_memory_of_repeats_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its size the memory forgets the oldest event first."""
    monkeypatch.setattr("bridge.webhook.MAX_RECENT_EVENTS", 3)
    recent = RecentEvents(600)
    for key in range(5):
        await recent.once(key, _nothing, deadline=math.inf)

    assert [await recent.once(key, _nothing, deadline=math.inf) for key in (4, 3, 2, 0)] == [
        False,
        False,
        False,
        True,
    ]


async def test_events_without_a_key_are_never_repeats() -> None:
    """What has no id is published each time."""
    recent = RecentEvents(600)

    assert [await recent.once(None, _nothing, deadline=math.inf) for _ in range(3)] == [True] * 3
