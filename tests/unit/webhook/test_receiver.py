"""The receiver without a broker: its answers to anything, and events that come more than once."""

import asyncio
import base64
import gc
import hashlib
import hmac
import json
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlencode

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from bridge.amqp.client import Connection
from bridge.amqp.publication import Publication
from bridge.amqp.publisher import Publisher
from bridge.config import SignatureSettings, WebhookSettings
from bridge.errors import Confirm
from bridge.http.messages import Request, Response, problem
from bridge.telemetry.metrics import new_registry
from bridge.topology.declarations import webhook_topology
from bridge.topology.upkeep import Upkeep
from bridge.webhook.endpoint import Endpoint
from bridge.webhook.event import EVENT_ID
from bridge.webhook.metrics import WebhookMetrics
from bridge.webhook.publishing import LEAST_RECENT_EVENTS
from bridge.webhook.receiver import Receiver
from tests.ears import Ears
from tests.unit.webhook.publications import GUARD_SECONDS, PUBLISHED, Gate, answer_of, write

SECRET = "a-webhook-secret"
REMEMBERED = 400
PUBLIC_URL = "https://example.com/webhooks"
# One for all, because to make them takes longer than to use them.
METRICS = WebhookMetrics(
    new_registry(), paths=("/webhooks", "/github", "/infobip"), event_types=("message.received",)
)


@dataclass
class Store:
    """Stands where the publisher stands; takes everything, or does what `fate` says.

    `is_busy`: it takes nothing at once.
    """

    fate: Callable[[], Awaitable[Publication]] | None = None
    bodies: list[bytes] = field(default_factory=list)
    properties: list[Any] = field(default_factory=list)
    is_busy: bool = False

    async def write(self, body: bytes, **rest: Any) -> Publication:
        self.bodies.append(body)
        self.properties.append(rest.get("properties"))
        return write() if self.fate is None else await self.fate()

    def write_at_once(self, body: bytes, **rest: Any) -> Publication | None:
        if self.is_busy or not (self.fate is None or isinstance(self.fate, Gate)):
            return None
        self.bodies.append(body)
        self.properties.append(rest.get("properties"))
        return write() if self.fate is None else self.fate.write()


def make_receiver(store: Store, preset: Any = "plain", **changed: Any) -> Receiver:
    ours = WebhookSettings(
        secrets=changed.pop("secrets", (SecretStr(SECRET),)),
        signature=SignatureSettings(preset=preset),
        public_url=PUBLIC_URL,
        **changed,
    )
    return Receiver(
        ours,
        endpoints=[Endpoint(one, key=key) for key, one in ours.endpoints_by_key.items()],
        publisher=cast("Publisher", store),
        upkeep=Upkeep(webhook_topology(ours), "off", metrics=PUBLISHED),
        metrics=METRICS,
    )


def sign(body: bytes, secret: str = SECRET) -> tuple[bytes, bytes]:
    digest = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    return b"x-service-signature", digest.encode()


def sign_as_github(body: bytes, secret: str) -> tuple[bytes, bytes]:
    return b"x-hub-signature-256", b"sha256=" + sign(body, secret)[1]


def make_request(
    body: bytes, headers: Sequence[tuple[bytes, bytes]] | None = None, **changed: Any
) -> Request:
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
    answer = await answer_of(make_receiver(store), request)

    expected = 404 if path != "/webhooks" else 405 if method != "POST" else 401
    assert (answer.status, store.bodies) == (expected, [])


@given(
    body=BODIES,
    headers=st.lists(st.tuples(NAMES.filter(lambda n: b"signature" not in n), VALUES), max_size=5),
)
async def test_any_signed_request_is_accepted(
    body: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    """Whatever else its headers and its body are, what is authentic is published as it is."""
    store = Store()
    answer = await answer_of(make_receiver(store), make_request(body, [*headers, sign(body)]))

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

    assert ((await answer_of(receiver, request)).status, store.bodies) == (401, [])


async def test_an_event_that_is_not_stored_is_counted_by_its_type(ears: Ears) -> None:

    async def give_back() -> Publication:
        return write("returned")

    count = METRICS.events.labels("message.received", "publish_failed")
    before = count.value
    answer = await answer_of(make_receiver(Store(give_back)), make_request(EVENT))
    (line,) = ears.heard("webhook")

    assert (answer.status, count.value - before) == (503, 1)
    assert (line["type"], line["event_id"]) == ("message.received", "evt-1")


async def test_refused_webhooks_are_counted_in_few_lines(ears: Ears) -> None:
    """Of each cause the first is logged, and the rest with their number; a good one has a line."""
    receiver = make_receiver(Store())
    forged = make_request(EVENT, [(b"x-service-signature", b"0" * 64)])
    for _ in range(5):
        await answer_of(receiver, forged)
        await answer_of(receiver, make_request(EVENT, []))
        receiver.recorder.record_refusal("POST", "/webhooks", problem(413, "too large"))
        receiver.recorder.record_eviction("memory")
    await answer_of(receiver, make_request(EVENT))
    receiver.recorder.flush_log()
    lines = ears.heard("webhook")
    refused = [(line.get("why", line["outcome"]), line["count"]) for line in lines[:3] + lines[4:]]

    assert refused == [
        *(("mismatch", 1), ("missing", 1), ("too_large", 1)),
        *(("mismatch", 4), ("missing", 4), ("too_large", 4)),
    ]
    assert lines[3]["outcome"] == "published"
    assert [line["count"] for line in ears.heard("connections_evicted")] == [1, 4]


async def test_each_type_that_finds_no_queue_is_told_once(ears: Ears) -> None:
    """A type that never finds a queue hides no other; a repeat of what is stored ends nothing."""
    lost = {"a.b"}

    async def post(kind: str, number: int) -> int:
        async def settle() -> Publication:
            return write("returned" if kind in lost else "confirmed", routing_key=kind)

        store.fate = settle
        body = f'{{"type": "{kind}", "id": "{number}"}}'.encode()
        return (await answer_of(receiver, make_request(body))).status

    store = Store()
    receiver = make_receiver(store)
    before = [await post("a.b", 1), await post("message.received", 2)]
    lost.add("message.received")
    during = [await post("message.received", number) for number in (3, 2, 3, 4)]
    lost.remove("message.received")
    after = [await post("message.received", 3), await post("a.b", 1)]

    assert (before, during, after) == ([503, 200], [503, 200, 503, 503], [200, 503])
    told = [(line.event, line.facts["type"]) for line in ears.lines if "routable" in line.event]
    assert told == [
        ("events_unroutable", "other"),
        ("events_unroutable", "message.received"),
        ("events_routable", "message.received"),
    ]


# --- Bundles --------------------------------------------------------------------------------------

INFOBIP = {
    "path": "/infobip",
    "preset": "infobip",
    "secrets": (SECRET,),
    "signature": {"preset": "plain"},
}


async def test_one_item_of_a_bundle_holds_up_no_other(ears: Ears) -> None:
    """Many services repeat a webhook a few times only, and some not at all."""

    class Partial(Store):
        async def write(self, body: bytes, **rest: Any) -> Publication:
            self.bodies.append(body)
            return write("returned" if rest["routing_key"] == "odd" else "confirmed")

    items = [{"messageId": f"m-{n}", "from": "447700900001", "text": "YES"} for n in range(250)]
    odd = {"messageId": "m-odd", "status": {"groupName": "odd"}}
    body = json.dumps({"results": [odd, *items]}).encode()
    store = Partial()
    receiver = make_receiver(store, endpoints=[INFOBIP])
    answers = [await answer_of(receiver, make_request(body, path="/infobip")) for _ in range(2)]

    assert [answer.status for answer in answers] == [503, 503]
    assert len(store.bodies) == len(items) + 2
    assert len(ears.heard("events_unroutable")) == 1


async def test_an_unparsed_item_does_not_count_the_others_as_unparsed(ears: Ears) -> None:
    counts = [
        METRICS.events.labels("message.received", "published"),
        METRICS.events.labels("message.received", "unparsed"),
        METRICS.events.labels("other", "unparsed"),
    ]
    before = [count.value for count in counts]
    receiver = make_receiver(Store(), endpoints=[INFOBIP])
    body = b'{"results": [7, {"messageId": "m-1", "from": "Acme", "text": "YES"}]}'
    answer = await answer_of(receiver, make_request(body, path="/infobip"))
    (line,) = ears.heard("webhook")

    assert answer.status == 200
    assert [now.value - then for now, then in zip(counts, before, strict=True)] == [1, 0, 1]
    assert line["outcome"] == "published"


# --- Several endpoints ----------------------------------------------------------------------------

OTHER_SECRET = "the-secret-of-github"
OTHER = {"path": "/github", "secrets": (OTHER_SECRET,), "signature": {"preset": "github"}}


@pytest.mark.parametrize("form", ["raw", "normalized"])
async def test_the_signed_address_has_the_id_of_the_message(form: str) -> None:
    store = Store()
    members = {"AccountSid": f"AC{'0' * 32}", "From": "+12025550102", "To": "+12025550101"}
    members |= {"MessageSid": f"SM{'1' * 32}", "MessageStatus": "delivered"}
    query = b"sms-bridge-id=order-1"
    row = "".join(name + text for name, text in sorted(members.items()))
    content = f"{PUBLIC_URL}?{query.decode()}{row}".encode()
    signature = base64.b64encode(hmac.digest(SECRET.encode(), content, "sha1"))
    headers = [
        (b"x-twilio-signature", signature),
        (b"content-type", b"application/x-www-form-urlencoded"),
    ]
    receipts = {"status_pointers": ("/MessageStatus",), "delivered": ("delivered",)}
    receiver = make_receiver(store, "twilio", body=form, receipts=receipts)
    body = urlencode(members).encode()

    assert (await answer_of(receiver, make_request(body, headers, query=query))).status == 200
    assert store.properties[0].headers["sms-bridge-message-id"] == "order-1"
    assert (store.bodies[0] == body) == (form == "raw")
    assert (b'"message_id":"order-1"' in store.bodies[0]) == (form == "normalized")
    for other in (b"", b"sms-bridge-id=order-2", query + b"&a=1"):
        assert (await answer_of(receiver, make_request(body, headers, query=other))).status == 401


async def test_a_query_that_is_not_signed_says_nothing() -> None:
    """Anyone on the way could change it, and the signature would still fit."""
    store = Store()
    receiver = make_receiver(
        store,
        receipts={"status_pointers": ("/status",), "delivered": ("delivered",)},
    )
    body = b'{"type": "receipt", "status": "delivered"}'
    request = make_request(body, query=b"sms-bridge-id=order-1")

    assert (await answer_of(receiver, request)).status == 200
    assert store.properties[0].headers["sms-bridge-delivery"] == "delivered"
    assert "sms-bridge-message-id" not in store.properties[0].headers


async def test_a_get_is_published_as_the_form_in_its_query() -> None:
    """Where a service signs GETs, their query is the body; elsewhere only POST is taken."""
    store = Store()
    query = b"id=a-1&reference=order-1&status=delivered&recipient=12025550101"
    url = f"{PUBLIC_URL}?{query.decode()}"
    now = int(time.time())
    claims = {"iss": "MessageBird", "nbf": now, "exp": now + 60}
    claims |= {"url_hash": hashlib.sha256(url.encode()).hexdigest()}
    signed = jwt.encode(claims, SECRET * 3, algorithm="HS256").encode()
    receiver = make_receiver(
        store,
        "messagebird",
        secrets=(SecretStr(SECRET * 3),),
        event_type_pointers=("/status",),
        event_id_pointers=("/id",),
    )
    headers = [
        (b"messagebird-signature-jwt", signed),
        (b"content-type", b"application/json"),
        (b"content-encoding", b"gzip"),
    ]

    async def answer(**changed: Any) -> Response:
        return await answer_of(receiver, make_request(b"", headers, query=query, **changed))

    assert (await answer(method="GET")).status == 200
    (body,), (properties,) = store.bodies, store.properties
    assert body == query
    assert properties.content_type == "application/x-www-form-urlencoded"
    assert properties.content_encoding is None
    assert (properties.message_type, properties.headers[EVENT_ID]) == ("delivered", "a-1")
    assert (await answer(method="POST")).status == 401
    other = await answer(method="HEAD")
    assert (other.status, other.headers["Allow"]) == (405, "POST, GET")
    plain = await answer_of(make_receiver(Store()), make_request(b"", method="GET"))
    assert (plain.status, plain.headers["Allow"]) == (405, "POST")
    assert len(store.bodies) == 1


async def test_a_health_check_earns_no_trust() -> None:
    """Anybody gets the 200 of `health_path`: it does not make a connection a good sender's."""
    receiver = make_receiver(Store(), health_path="/")
    healthy = await answer_of(receiver, make_request(b"", [], method="GET", path="/"))
    genuine = await answer_of(receiver, make_request(EVENT))

    assert (healthy.status, healthy.for_anybody) == (200, True)
    assert (genuine.status, genuine.for_anybody) == (200, False)


async def test_each_endpoint_has_its_own_time() -> None:
    """An endpoint's webhooks are answered within its own time, the others within the common one."""
    gate = Gate()
    receiver = make_receiver(
        Store(gate),
        response_timeout_seconds=30,
        endpoints=[OTHER | {"response_timeout_seconds": 0.2}],
    )
    slow = asyncio.ensure_future(answer_of(receiver, make_request(EVENT)))
    await gate.until(1)
    signed = [sign_as_github(EVENT, OTHER_SECRET)]
    quick = await answer_of(receiver, make_request(EVENT, signed, path="/github"))

    assert (quick.status, slow.done()) == (503, False)
    gate.confirms[0].set_result("confirmed")
    assert (await slow).status == 200


# --- Events that come more than once --------------------------------------------------------------


# Whether the publisher takes what it is given at once, or later.
WAYS = pytest.mark.parametrize("is_busy", [False, True], ids=["at once", "later"])


def ask(receiver: Receiver, count: int) -> list["asyncio.Task[Response]"]:
    return [asyncio.create_task(answer_of(receiver, make_request(EVENT))) for _ in range(count)]


async def statuses(tasks: Sequence["asyncio.Task[Response]"]) -> list[int]:
    return [answer.status for answer in await asyncio.gather(*tasks)]


@WAYS
async def test_repeats_wait_for_the_first(*, is_busy: bool) -> None:
    """Events that are equal and in flight are published once, and answered together."""
    gate = Gate()
    tasks = ask(make_receiver(Store(gate, is_busy=is_busy)), 5)
    await gate.until(1)
    await asyncio.sleep(0)
    before = [task.done() for task in tasks]
    gate.confirms[0].set_result("confirmed")

    assert (before, await statuses(tasks), len(gate.confirms)) == ([False] * 5, [200] * 5, 1)


@WAYS
async def test_failure_of_the_first_is_not_told_to_the_others_as_success(*, is_busy: bool) -> None:
    """When the first publish fails, the next in line publishes, and the others wait for that."""
    gate = Gate()
    tasks = ask(make_receiver(Store(gate, is_busy=is_busy)), 3)
    await gate.until(1)
    gate.confirms[0].set_result("nacked")
    await gate.until(2)
    gate.confirms[1].set_result("confirmed")

    assert (await statuses(tasks), len(gate.confirms)) == ([503, 200, 200], 2)


@WAYS
async def test_failures_are_told_to_all(*, is_busy: bool) -> None:
    """When every publish fails, nobody is told 200, and a later repeat is published."""
    gate = Gate()
    receiver = make_receiver(Store(gate, is_busy=is_busy))
    tasks = ask(receiver, 3)
    for number in range(3):
        await gate.until(number + 1)
        gate.confirms[number].set_result("returned")
    during = await statuses(tasks)
    again = ask(receiver, 1)
    await gate.until(4)
    gate.confirms[3].set_result("confirmed")

    assert (during, await statuses(again)) == ([503] * 3, [200])


@WAYS
async def test_cancelled_first_does_not_fail_the_others(*, is_busy: bool) -> None:
    gate = Gate()
    tasks = ask(make_receiver(Store(gate, is_busy=is_busy)), 3)
    await gate.until(1)
    tasks[0].cancel()
    await asyncio.sleep(0)
    gate.confirms[0].set_result("confirmed")

    assert (await statuses(tasks[1:]), len(gate.confirms)) == ([200, 200], 1)


async def test_cancelled_first_that_has_written_nothing() -> None:
    """When the first request is cancelled before it could write, the next in line does."""
    begun: list[asyncio.Future[Publication]] = []

    async def write_later() -> Publication:
        begun.append(asyncio.get_running_loop().create_future())
        return await begun[-1]

    async def until_begun(count: int) -> None:
        async with asyncio.timeout(GUARD_SECONDS):
            while len(begun) < count:  # noqa: ASYNC110  there is no event to wait for
                await asyncio.sleep(0.001)

    tasks = ask(make_receiver(Store(write_later)), 3)
    await until_begun(1)
    tasks[0].cancel()
    await until_begun(2)
    begun[1].set_result(write())

    assert (await statuses(tasks[1:]), len(begun)) == ([200, 200], 2)


@WAYS
async def test_answer_comes_in_time(*, is_busy: bool) -> None:
    """A publish that does not end is answered 503 in time, and so are its repeats."""
    gate = Gate()
    loop = asyncio.get_running_loop()
    started = loop.time()
    receiver = make_receiver(Store(gate, is_busy=is_busy), response_timeout_seconds=0.5)
    async with asyncio.timeout(GUARD_SECONDS):
        answers = await asyncio.gather(*ask(receiver, 3))

    assert {answer.status for answer in answers} == {503}
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers)
    assert loop.time() - started < 0.5 + GUARD_SECONDS / 2


@WAYS
async def test_too_many_at_once_are_put_off(*, is_busy: bool) -> None:
    """Over max_in_flight a webhook is answered 503 at once, and 200 when there is room again."""
    gate = Gate()
    receiver = make_receiver(Store(gate, is_busy=is_busy), max_in_flight=1)
    first = ask(receiver, 1)
    await gate.until(1)
    refused = await answer_of(receiver, make_request(b"another"))
    gate.confirms[0].set_result("confirmed")
    answered = await statuses(first)
    late = ask(receiver, 1)

    assert (refused.status, int(refused.headers["Retry-After"]) > 0) == (503, True)
    assert [*answered, *await statuses(late)] == [200, 200]


async def test_memory_of_repeats_is_small() -> None:
    """Of an event with the longest id little is kept: a hundred thousand are less than 24 MiB."""

    async def post(number: int) -> Response:
        return await answer_of(receiver, make_request(b'{"type": "a", "id": "%0255d"}' % number))

    store = Store()
    receiver = make_receiver(store)
    # What the first ones take, others use again.
    first = [await post(number) for number in range(200)]
    gc.collect()
    tracemalloc.start()
    try:
        later = [(await post(number)).status for number in range(200, 200 + REMEMBERED)]
        store.bodies.clear()
        store.properties.clear()
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert {answer.status for answer in first} | set(later) == {200}
    assert kept_bytes / REMEMBERED < 24 * 1024 * 1024 / (LEAST_RECENT_EVENTS * 3 / 2)


@WAYS
async def test_nothing_of_a_body_is_kept_for_a_late_confirm(*, is_busy: bool) -> None:
    """Once a webhook is answered 503 its body is let go, however long the broker hangs."""
    size, count, gate = 100_000, 20, Gate()
    store = Store(gate, is_busy=is_busy)
    receiver = make_receiver(store, response_timeout_seconds=0.2)

    async def post(number: int) -> int:
        body = b'{"type": "a", "id": "%d", "text": "%0*d"}' % (number, size, number)
        return (await answer_of(receiver, make_request(body))).status

    tracemalloc.start()
    try:
        told = set(await asyncio.gather(*map(post, range(count))))
        store.bodies.clear()
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (told, len(gate.confirms)) == ({503}, count)
    assert kept_bytes < count * size / 4


async def test_a_late_confirm_is_no_second_answer(ears: Ears) -> None:
    """A confirm after the deadline makes repeats of the event repeats, and is told to nobody."""
    gate = Gate()
    receiver = make_receiver(Store(gate), response_timeout_seconds=0.2)
    late = await answer_of(receiver, make_request(EVENT))
    gate.confirms[0].set_result("confirmed")
    await asyncio.sleep(0)
    repeat = await answer_of(receiver, make_request(EVENT))

    assert (late.status, repeat.status, len(gate.confirms)) == (503, 200, 1)
    assert [line["outcome"] for line in ears.heard("webhook")] == ["publish_failed", "duplicate"]


@WAYS
async def test_a_bug_is_answered(ears: Ears, *, is_busy: bool) -> None:
    """A publisher that fails in a way of its own makes the service try again, and is logged."""

    class Broken(Store):
        async def write(self, body: bytes, **_: Any) -> Publication:
            raise ZeroDivisionError(body)

        def write_at_once(self, body: bytes, **_: Any) -> Publication | None:
            if self.is_busy:
                return None
            raise ZeroDivisionError(body)

    receiver = make_receiver(Broken(is_busy=is_busy), max_in_flight=1)
    answers = [await answer_of(receiver, make_request(EVENT)) for _ in range(2)]

    assert [answer.status for answer in answers] == [503, 503]
    assert [line["why"] for line in ears.heard("webhook")] == ["internal_error"] * 2
    assert len(ears.heard("internal_error")) == 2


@WAYS
@pytest.mark.parametrize("fate", ["confirmed", "error"])
async def test_a_cancelled_webhook_is_no_answer(
    ears: Ears, fate: Confirm, *, is_busy: bool
) -> None:
    """Who is cut off when a drain times out is told nothing; no line or count says otherwise."""
    gate = Gate()
    before = METRICS.http_requests.labels("/webhooks", "POST", "503").value
    (task,) = ask(make_receiver(Store(gate, is_busy=is_busy)), 1)
    await gate.until(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gate.confirms[0].set_result(fate)
    await asyncio.sleep(0)

    assert ears.heard("webhook") == []
    assert METRICS.http_requests.labels("/webhooks", "POST", "503").value == before


@WAYS
async def test_a_cancelled_webhook_frees_its_place(*, is_busy: bool) -> None:
    """What is cancelled is in flight no more, at the latest when its confirm comes."""
    gate = Gate()
    receiver = make_receiver(Store(gate, is_busy=is_busy), max_in_flight=1)
    (task,) = ask(receiver, 1)
    await gate.until(1)
    task.cancel()
    await asyncio.sleep(0)
    gate.confirms[0].set_result("confirmed")
    await asyncio.sleep(0)

    assert (await answer_of(receiver, make_request(EVENT))).status == 200


class _Served(Store):
    """Publishes on a connection for as long as that lasts."""

    async def serve(self, _connection: Connection) -> None:
        await asyncio.Event().wait()


async def test_a_lost_connection_is_no_part_of_other_errors() -> None:
    """While two are lost, and after that, what is raised elsewhere has its own causes alone.

    Compiled, an error is everybody's for as long as its handler awaits something.
    """
    connection = cast("Connection", None)
    serving = [asyncio.create_task(make_receiver(_Served()).serve(connection)) for _ in range(2)]
    await asyncio.sleep(0)
    causes = list[BaseException | None]()
    for one in serving:
        one.cancel()
    while not all(one.done() for one in serving):
        await asyncio.sleep(0)
        causes.append(cause_of_an_error())

    assert {*causes, cause_of_an_error()} == {None}


def cause_of_an_error() -> BaseException | None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("")
    return caught.value.__context__


async def test_the_only_endpoint_is_not_named(ears: Ears) -> None:
    """With one endpoint every line is about it, and none says so."""
    receiver = make_receiver(Store())
    await answer_of(receiver, make_request(EVENT))
    await answer_of(receiver, make_request(EVENT, []))

    assert [line.get("route") for line in ears.heard("webhook")] == [None, None]
