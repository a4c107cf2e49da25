"""The sender: the form of a request, quick repeats, the outcome of each answer, privacy."""

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from bridge.config import SmsApiSettings, WorkerSettings
from bridge.credentials import Credential
from bridge.errors import PostError, PostFault
from bridge.worker.fates import Answer, Fate
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.request import parse_request
from bridge.worker.service.sender import QUICK_SECONDS, Sender
from bridge.worker.service.shape import shape_from
from bridge.worker.service.transport import Header, Reply
from tests.deliveries import make_delivery
from tests.ears import Ears

NUMBER = "+12025550123"
TEXT = "Grüße, please answer YES 👋"
REQUEST = {"to": NUMBER, "from": "ACME", "text": TEXT}
KEY = "sk_test_4eC39HqLyjWDarjt"
TRACE = (("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"), ("tracestate", "x=1"))
# Hangs end here; no healthy test comes near it.
GUARD_SECONDS = 10.0

Step = Reply | Exception | Callable[[], Any]


def answer(status: int, body: bytes = b"", *headers: Header) -> Reply:
    return Reply(status, headers, body)


class Script:
    """Plays one step for each request."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.requests: list[httpx.Request] = []
        self.is_closed = False

    async def post(
        self, url: str, headers: Sequence[Header], body: bytes, common: Sequence[Header] = ()
    ) -> Reply:
        """Remember the request; answer, raise, or wait."""
        whole = [*common, *headers]
        self.requests.append(httpx.Request("POST", url, headers=whole, content=body))
        step = self.steps.pop(0)
        if isinstance(step, Reply):
            return step
        if isinstance(step, Exception):
            raise step
        done = await step()
        assert isinstance(done, Reply)
        return done

    async def aclose(self) -> None:
        self.is_closed = True


@dataclass
class Rig:
    """A sender with all that it touches."""

    sender: Sender
    script: Script
    registry: CollectorRegistry
    credential: Credential

    async def send(self, key: str = "m1", **envelope: Any) -> Answer:
        return await self.send_body(REQUEST, key, **envelope)

    async def send_body(self, body: dict[str, Any], key: str = "m1", **envelope: Any) -> Answer:
        settings = WorkerSettings(extra_fields="forward", default_from="DEFAULT")
        request = parse_request(json.dumps(body).encode(), settings)
        async with asyncio.timeout(GUARD_SECONDS):
            return await self.sender.send(request, make_delivery(key, **envelope))

    def metric(self, name: str, **labels: str) -> float:
        """Read a metric of the SMS API; 0 when it is not there."""
        return self.registry.get_sample_value(f"sms_bridge_worker_provider_{name}", labels) or 0


def rig(
    *steps: Step,
    script: Script | None = None,
    base: str = "http://api.test",
    is_held: Callable[[], bool] = lambda: False,
    quick_seconds: float = QUICK_SECONDS,
    **api: Any,
) -> Rig:
    script, registry = script or Script(*steps), CollectorRegistry()
    api = {"key": KEY} | api
    shape = shape_from(SmsApiSettings.model_validate({"base_url": base, **api}))
    sender = Sender(
        shape,
        transport=script,
        metrics=WorkerMetrics(registry, queue="q", retry_queues=(), dead="d", error_codes=["a"]),
        is_held=is_held,
        quick_seconds=quick_seconds,
    )
    return Rig(sender, script, registry, shape.login.key)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


NEVER_LEFT: tuple[PostFault, ...] = (
    "connect_failed",
    "connect_timeout",
    "pool_exhausted",
    "proxy_failed",
)
MAY_HAVE_ARRIVED: tuple[PostFault, ...] = ("answer_timeout", "connection_lost", "not_http")


def failed(fault: PostFault = "connect_failed") -> PostError:
    return PostError(fault)


# --- The form of a request ------------------------------------------------------------------------


# --- The service's code ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "taken"),
    [
        ("E-17", "E-17"),
        ("ACME", None),
        (5550123, None),
    ],
)
async def test_code_that_repeats_the_message_is_none(code: object, taken: str | None) -> None:
    """A code that may be a word, the sender or the number is in no answer, and so nowhere."""
    bridge = rig(answer(400, json.dumps({"code": code}).encode()))

    assert (await bridge.send()).code == taken


@pytest.mark.parametrize(
    "scheme",
    [{"scheme": "bearer"}, {"scheme": "basic", "username": "me"}, {"scheme": "none"}],
    ids=lambda auth: auth["scheme"],
)
@pytest.mark.parametrize("told", ["{}", "wrong-{}.", "{:.8}", "{:.6}"])
async def test_code_that_repeats_a_secret_is_none(told: str, scheme: dict[str, str]) -> None:
    """A key that a service has for a code is in no answer, neither as it is nor as it was sent."""
    secret = "SecretKey7a9c"
    fields = {"/to": "{to}", "/text": "{text}", "/key": "{secret}"}
    as_sent = base64.b64encode(f"me:{secret}".encode()).decode().rstrip("=")
    said = [secret, as_sent] if scheme["scheme"] == "basic" else [secret]
    for one in said:
        body = json.dumps({"code": told.format(one)}).encode()
        bridge = rig(answer(400, body), key=secret, auth=scheme, request={"fields": fields})

        assert (await bridge.send()).code is None


@pytest.mark.parametrize("form", ["{}", "+{}", "sms-{}-1"])
async def test_id_that_repeats_the_number_is_none(form: str) -> None:
    """A number that a service has where an id should be is in no answer; an id is."""
    number = REQUEST["to"].removeprefix("+")
    said = [form.format(number), "491713920011"]
    bridge = rig(*(answer(202, json.dumps({"id": one}).encode()) for one in said))

    assert [(await bridge.send()).provider_id for _ in said] == [None, "491713920011"]


async def test_code_that_is_listed_is_one_whatever_the_message_says() -> None:
    """What the settings list is a code, though the text has the same word."""
    bridge = rig(answer(400, b'{"code": "Answer"}'), response={"errors": {"Answer": "slow_down"}})
    result = await bridge.send()

    assert (result.fate, result.code) == (Fate.SLOW_DOWN, "Answer")


# --- Quick repeats --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", NEVER_LEFT)
async def test_request_that_never_left_is_tried_three_times(fault: PostFault) -> None:
    """A request that never left is tried three times in place, and no more."""
    bridge = rig(*[failed(fault)] * 5)
    result = await bridge.send()

    assert (result.fate, len(bridge.script.requests)) == (Fate.NOT_SENT, 3)


async def test_request_that_never_left_is_not_tried_again_in_an_operators_pause() -> None:
    """What never left when an operator stopped the worker is not posted in place after it."""
    held = False

    class Pausing(Script):
        async def post(
            self, url: str, headers: Sequence[Header], body: bytes, common: Sequence[Header] = ()
        ) -> Reply:
            nonlocal held
            held = True
            return await super().post(url, headers, body, common)

    bridge = rig(script=Pausing(*[failed()] * 5), is_held=lambda: held)
    result = await bridge.send()

    assert (result.fate, len(bridge.script.requests)) == (Fate.NOT_SENT, 1)


async def test_request_that_never_left_can_still_be_sent() -> None:
    """The first acceptance ends the quick repeats, and is the outcome; each try is counted."""
    bridge = rig(*[failed()] * 2, answer(202, b'{"id":"a"}'))
    result = await bridge.send()
    counted = [
        bridge.metric("requests_total", result=name) for name in ("connection_error", "success")
    ]

    assert (result.fate, result.provider_id) == (Fate.SENT, "a")
    assert (len(bridge.script.requests), counted) == (3, [2, 1])


@pytest.mark.parametrize(
    ("step", "fate"),
    [
        (answer(500), Fate.UNCERTAIN),
        (failed("answer_timeout"), Fate.UNCERTAIN),
        (failed("tls_failed"), Fate.SETUP),
    ],
    ids=["500", "time-out", "TLS"],
)
async def test_quick_repeats_end_with_another_outcome(step: Step, fate: Fate) -> None:
    """A repeat that is anything but `never left` is the last one, and is the outcome."""
    bridge = rig(failed(), step, answer(202))
    result = await bridge.send()

    assert (result.fate, len(bridge.script.requests)) == (fate, 2)


async def test_repeats_are_the_same_request() -> None:
    """Every try carries the same body and headers, the idempotency key among them."""
    bridge = rig(*[failed()] * 3)
    await bridge.send(trace=TRACE)
    first, *others = [(r.content, r.headers.raw) for r in bridge.script.requests]

    assert others == [first] * 2


async def test_repeats_end_when_their_time_is_up() -> None:
    """No further try begins when the time for quick repeats has passed since the first began."""

    async def slow_failure() -> None:
        await asyncio.sleep(0.1)
        raise failed("connect_timeout")

    bridge = rig(*[slow_failure] * 3, quick_seconds=0.02)
    await bridge.send()

    assert len(bridge.script.requests) == 1


async def test_waits_between_quick_tries_are_measured() -> None:
    """They are waits in place, from which nothing is given back; a first try waits for nothing."""
    bridge = rig(answer(202), *[failed()] * 2, answer(202))
    at_once, late = make_delivery(), make_delivery()
    request = parse_request(json.dumps(REQUEST).encode(), WorkerSettings())
    await bridge.sender.send(request, at_once)
    sending = asyncio.create_task(bridge.sender.send(request, late))
    await turns()
    assert (late.waiting_for, late.may_be_given_back) == ("retry_in_place", False)
    await sending

    assert at_once.waited_seconds == {}
    assert late.waited_seconds.keys() == {"retry_in_place"}
    assert late.waiting_for is None


@pytest.mark.parametrize("fault", MAY_HAVE_ARRIVED)
async def test_request_that_may_have_arrived_is_not_repeated(fault: PostFault) -> None:
    """A request that may have arrived is posted once, and is uncertain."""
    bridge = rig(failed(fault), answer(202))
    result = await bridge.send()

    assert (result.fate, len(bridge.script.requests)) == (Fate.UNCERTAIN, 1)


@pytest.mark.parametrize("status", [200, 302, 408, 409, 429, 503])
async def test_answer_is_not_repeated(status: int) -> None:
    """Whatever status comes, the request is posted once."""
    bridge = rig(answer(status), answer(202))
    await bridge.send()

    assert len(bridge.script.requests) == 1


async def test_wait_until_a_date_counts_from_the_servers_clock() -> None:
    """A `Retry-After` date is measured against the answer's own `Date`."""
    bridge = rig(
        answer(
            503,
            b"",
            (b"Date", b"Sat, 01 Jan 2000 00:00:00 GMT"),
            (b"Retry-After", b"Sat, 01 Jan 2000 00:00:30 GMT"),
        )
    )

    assert (await bridge.send()).retry_after_seconds == 30


# --- Cancellation, and sends at the same time -----------------------------------------------------


def stuck() -> tuple[Callable[[], Any], asyncio.Event]:
    """Make a step that hangs, and the event that says that it has begun."""
    begun = asyncio.Event()

    async def step() -> None:
        begun.set()
        await asyncio.Event().wait()

    return step, begun


@pytest.mark.parametrize("failures", [0, 2])
async def test_cancellation_in_a_post_is_not_swallowed(failures: int) -> None:
    """A cancelled send ends as cancelled at any try, and posts nothing more."""
    step, begun = stuck()
    bridge = rig(*[failed()] * failures, step, answer(202))
    sending = asyncio.create_task(bridge.send())
    await begun.wait()
    sending.cancel()
    await asyncio.wait([sending])

    assert (sending.cancelled(), len(bridge.script.requests)) == (True, failures + 1)


async def test_cancellation_between_two_tries_is_not_swallowed() -> None:
    """A send that is cancelled while it waits for its next try ends as cancelled."""
    step, _ = stuck()
    bridge = rig(failed(), step, answer(202))
    sending = asyncio.create_task(bridge.send())
    await turns()
    sending.cancel()
    await asyncio.wait([sending])

    assert sending.cancelled()


async def test_cancelled_post_is_not_in_flight() -> None:
    """A cancelled POST does not count as in flight for ever."""
    step, begun = stuck()
    bridge = rig(step)
    sending = asyncio.create_task(bridge.send())
    await begun.wait()
    during = bridge.metric("requests_in_flight")
    sending.cancel()
    await asyncio.wait([sending])

    assert (during, bridge.metric("requests_in_flight")) == (1, 0)


# --- What an acceptance says ----------------------------------------------------------------------


NO_ID: dict[str, bytes] = {
    "not JSON": b"<html>",
    "cut": b'{"id":"a',
    "list": b'[{"id":"a"}]',
    "id is true": b'{"id":true}',
    "id is an object": b'{"id":{"id":"a"}}',
    "id with a line break": b'{"id":"a\\nb"}',
    "id not ASCII": '{"id":"ä"}'.encode(),
    "id too long": b'{"id":"%s"}' % (b"a" * 256),
    "not UTF-8": b'{"id":"\xff"}',
    "nested too deep": b"[" * 60000,
}


@pytest.mark.parametrize("body", NO_ID.values(), ids=NO_ID.keys())
async def test_body_without_a_usable_id_is_accepted_all_the_same(body: bytes) -> None:
    """A 202 with any body is an acceptance, without an id when there is no usable one."""
    result = await rig(answer(202, body)).send()

    assert (result.fate, result.provider_id) == (Fate.SENT, None)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"id":"a"}', "a"),
        (b'{"id":17}', "17"),
        (b'{"messages":[{"id":"c"},{"id":"d"}]}', "c"),
        (b'{"messages":[{"id":"c"}],"id":"a"}', "a"),
        (b'{"id":null,"message_id":"b"}', "b"),
    ],
    ids=["id", "number", "first of a list", "order", "first usable one"],
)
async def test_id_is_taken_from_the_usual_places(body: bytes, expected: str) -> None:
    """The service's id is found under the default pointers, in their order."""
    assert (await rig(answer(202, body)).send()).provider_id == expected


async def test_id_is_taken_from_configured_places_only() -> None:
    """With pointers of one's own the default ones do not count."""
    bridge = rig(
        answer(202, b'{"id":"a","data":{"a/b":["x"]}}'), message_id_pointers=["/data/a~1b/0"]
    )

    assert (await bridge.send()).provider_id == "x"


# --- Metrics and privacy --------------------------------------------------------------------------


async def test_web_page_that_counts_as_sent_is_told_once(ears: Ears) -> None:
    """Each is counted, and the first one is a warning that says what to look at."""
    page = answer(202, b"<html>Sign in</html>")
    ours = rig(page, page, answer(202, b"OK"), answer(500, b"<html>Oh</html>"))
    fates = [(await ours.send(f"m{number}")).fate for number in range(4)]

    assert fates == [Fate.SENT, Fate.SENT, Fate.SENT, Fate.UNCERTAIN]
    assert ours.metric("pages_total") == 2
    (told,) = ears.heard("web_page_counts_as_sent")
    assert told["status"] == 202
    assert "sms_api.base_url" in told["remedy"]


RESULTS: dict[str, Step] = {
    "success": answer(202),
    "rejected": answer(400),
    "unauthorized": answer(401),
    "rate_limited": answer(429),
    "server_error": answer(500),
    "timeout": failed("answer_timeout"),
    "connection_error": failed("connection_lost"),
    "protocol_error": failed("not_http"),
}


@pytest.mark.parametrize(("result", "step"), RESULTS.items(), ids=RESULTS.keys())
async def test_post_is_counted_once_by_its_result(result: str, step: Step) -> None:
    """A POST is one request and one duration of its result."""
    bridge = rig(step)
    await bridge.send()

    assert (
        bridge.metric("requests_total", result=result),
        bridge.metric("request_duration_seconds_count", result=result),
    ) == (1, 1)


@pytest.mark.parametrize(("status", "code"), [(202, "202"), (418, "other"), (299, "other")])
async def test_answer_is_counted_by_a_known_status(status: int, code: str) -> None:
    """An answer counts under its status, or under `other`: the labels are a closed set."""
    bridge = rig(answer(status))
    await bridge.send()

    assert bridge.metric("responses_total", code=code) == 1


@pytest.mark.parametrize(
    ("code", "label"), [("a", "a"), ("b", "other"), ("+491713920001", None), (None, None)]
)
async def test_error_code_is_counted_by_a_listed_one(code: str | None, label: str | None) -> None:
    """An error code counts under itself when it is listed, under `other` when it is not."""
    bridge = rig(answer(400, json.dumps({"code": code}).encode()))
    await bridge.send()
    counted = {name for name in ("a", "other") if bridge.metric("errors_total", code=name)}

    assert counted == {label} - {None}


async def test_failure_is_no_answer() -> None:
    """A POST without an answer counts under no status."""
    bridge = rig(failed("answer_timeout"))
    await bridge.send()
    codes = [
        sample
        for metric in bridge.registry.collect()
        if metric.name == "sms_bridge_worker_provider_responses"
        for sample in metric.samples
        if sample.value
    ]

    assert codes == []


def caused_by(cause: Exception, fault: PostFault) -> PostError:
    """Make the end of an attempt as a transport raises it from an exception of a library."""
    error = failed(fault)
    error.__cause__ = cause
    return error


TELLTALE = f"{NUMBER} {TEXT} {KEY} http://api.test/v1/messages"
TELLING: dict[str, Step] = {
    **{fault: caused_by(OSError(TELLTALE), fault) for fault in (*NEVER_LEFT, *MAY_HAVE_ARRIVED)},
    **{
        str(status): answer(
            status,
            json.dumps({"id": TELLTALE, "error": TELLTALE}).encode(),
            (b"Retry-After", NUMBER.encode()),
            (b"Date", KEY.encode()),
        )
        for status in (202, 302, 400, 401, 403, 404, 409, 429, 500, 503)
    },
}


@pytest.mark.parametrize("step", TELLING.values(), ids=TELLING.keys())
async def test_answer_tells_nothing_private(step: Step) -> None:
    """No answer holds a number, a text or a key, whatever the API or a library wrote."""
    bridge = rig(*[step] * 3)
    told = repr(await bridge.send())

    assert [secret for secret in (NUMBER, NUMBER[1:], TEXT, KEY) if secret in told] == []
