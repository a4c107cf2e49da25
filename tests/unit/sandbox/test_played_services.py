"""A service that is played over HTTP: asked at its own path, answering in its own words."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from bridge.config.presets import Preset
from bridge.sandbox.api import create_app

TWILIO = "/2010-04-01/Accounts/AC-any-of-them/Messages.json"
FORM = {"To": "+15550100", "From": "+15550101", "Body": "Hi"}
ANDROID = {"id": "an-id", "phoneNumbers": ["+15550100"], "textMessage": {"text": "Hi"}}

Play = Callable[[Preset], httpx.AsyncClient]


@pytest.fixture
async def play() -> AsyncIterator[Play]:
    async with AsyncExitStack() as stack:

        def start(preset: Preset) -> httpx.AsyncClient:
            transport = httpx.ASGITransport(create_app(key="the-key", preset=preset))
            client = httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1", auth=("any", "the-key")
            )
            stack.push_async_callback(client.aclose)
            return client

        yield start


async def listed(client: httpx.AsyncClient, kind: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = (await client.get(f"/sandbox/{kind}")).json()[kind]
    return entries


async def order(client: httpx.AsyncClient, **fault: object) -> httpx.Response:
    return await client.put("/sandbox/faults", json=[fault])


async def test_a_form_is_taken_at_the_services_path(play: Play) -> None:
    """Any account will do; the message is kept as every service's are, and has Twilio's id."""
    twilio = play("twilio")
    answer = await twilio.post(TWILIO, data=FORM)
    (message,) = await listed(twilio, "messages")

    assert (answer.status_code, answer.json()["sid"][:2]) == (201, "SM")
    assert answer.json() == {"sid": message["id"], "status": "queued", "error_code": None}
    assert (message["to"], message["from"], message["text"]) == ("+15550100", "+15550101", "Hi")


async def test_what_is_wrong_is_told_beside_the_services_answer(play: Play) -> None:
    """The service's own error goes to who asked; the list of requests says what it was."""
    twilio = play("twilio")
    wrong = await twilio.post(TWILIO, data=FORM, auth=("any", "another"))
    empty = await twilio.post(TWILIO, data=FORM | {"Body": ""})
    without = await twilio.post(TWILIO, data={"To": FORM["To"], "From": FORM["From"]})
    requests = await listed(twilio, "requests")

    assert (wrong.status_code, wrong.json()["code"]) == (401, 20003)
    assert (empty.status_code, empty.json()["code"]) == (400, 21211)
    assert (without.status_code, without.json()["code"]) == (400, 21602)
    assert [(one["status"], one["detail"]) for one in requests] == [
        (401, "Authorization: must be Basic and a known key"),
        (400, "Body: must be valid Unicode and not empty"),
        (400, "Body: is missing"),
    ]


async def test_only_what_the_service_takes_is_let_in(play: Play) -> None:
    """Another body type than the service's is refused, and orders are JSON whoever is played."""
    twilio, vonage = play("twilio"), play("vonage")
    answers = [
        await twilio.post(TWILIO, json=FORM),
        await vonage.post("/v1/messages", data=FORM),
        await twilio.put("/sandbox/faults", data={"x": "y"}),
        await twilio.post("/v1/messages", data=FORM),
    ]

    assert [answer.status_code for answer in answers] == [415, 415, 415, 404]
    assert "x-www-form-urlencoded" in answers[0].json()["error"]


async def test_a_fault_can_be_an_answer_of_the_service(play: Play) -> None:
    """It is ordered by what it means, its code or its fate, with headers beside, and counted."""
    twilio = play("twilio")
    answers = []
    for name in ("The recipient replied STOP.", "21611", "setup:credentials_rejected"):
        await order(twilio, answer=name, count=1)
        answers.append(await twilio.post(TWILIO, data=FORM))
    shown = (await order(twilio, answer="20429", headers={"Retry-After": "2"})).json()["faults"]
    late = await twilio.post(TWILIO, data=FORM)

    assert [(one.status_code, one.json()["code"]) for one in answers] == [
        (400, 21610),
        (400, 21611),
        (401, 20003),
    ]
    assert (late.status_code, late.json()["code"], late.headers["Retry-After"]) == (429, 20429, "2")
    assert (shown[0]["answer"], shown[0]["status"]) == ("20429", 429)
    assert await listed(twilio, "messages") == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"answer": "no such thing"}, "1.answer: is unknown; there are: Queued. (sent); "),
        ({"answer": "20429", "status": 500}, "1: answer implies a status; leave status out"),
    ],
)
async def test_an_unknown_answer_lists_what_there_is(
    play: Play, fault: dict[str, Any], error: str
) -> None:
    """A fault that cannot be played changes nothing, and says what can be."""
    twilio = play("twilio")
    await order(twilio, status=500)
    refused = await twilio.put("/sandbox/faults", json=[{"count": 1}, fault])

    assert refused.status_code == 400
    assert refused.json()["error"].startswith(error)
    assert [one["status"] for one in await listed(twilio, "faults")] == [500]


async def test_a_key_tells_repeats_from_equal_messages(play: Play) -> None:
    """Where the service is given keys, these tell who got a text twice."""
    generic = play("generic")
    message = {"to": "+15550100", "from": "Acme", "text": "Hi"}
    for key in ("one", "two", "one"):
        headers = {"Authorization": "Bearer the-key", "Idempotency-Key": key}
        await generic.post("/v1/messages", json=message, headers=headers, auth=httpx.Auth())

    assert [one["idempotency_key"] for one in await listed(generic, "repeats")] == ["one"]


async def test_a_repeat_is_told_where_the_service_does_so(play: Play) -> None:
    """An id that was taken, even if nobody heard the answer, is answered 409, not taken again."""
    android = play("android-sms-gateway")
    path = "/3rdparty/v1/messages"
    first = await android.post(path, json=ANDROID)
    again = await android.post(path, json=ANDROID)
    other = await android.post(path, json=ANDROID | {"id": "another"})

    assert [one.status_code for one in (first, again, other)] == [202, 409, 202]
    assert [one["id"] for one in await listed(android, "messages")] == ["an-id", "another"]


async def test_the_front_page_names_the_path(play: Play) -> None:
    """A person is told which service it is, and where it takes messages."""
    text = (await play("sinch").get("/")).text

    assert "sinch" in text
    assert "POST   /xms/v1/{account}/batches" in text


@pytest.mark.parametrize(
    ("receipt", "status", "error"),
    [
        ({"to": "+15550199"}, 404, "id, to: there is no such message"),
        ({"delivery": "lost"}, 400, "delivery: input should be 'delivered', 'failed' or 'pending'"),
        ({"to": "+15550100"}, 409, "Start the sandbox with --webhook-url"),
    ],
)
async def test_a_receipt_is_of_a_message_that_was_taken(
    play: Play, receipt: dict[str, Any], status: int, error: str
) -> None:
    """A receipt that cannot be sent says why."""
    twilio = play("twilio")
    await twilio.post(TWILIO, data=FORM)
    refused = await twilio.post("/sandbox/receipts", json=receipt)

    assert refused.status_code == status
    assert refused.json()["error"].startswith(error)


async def test_the_generic_service_has_no_receipts(play: Play) -> None:
    """Nothing is made up where nothing is documented."""
    generic, headers = play("generic"), {"Authorization": "Bearer the-key"}
    message = {"to": "+15550100", "from": "Acme", "text": "Hi"}
    await generic.post("/v1/messages", json=message, headers=headers, auth=httpx.Auth())
    refused = await generic.post("/sandbox/receipts", json={})

    assert refused.status_code == 400
    assert refused.json()["error"].startswith("delivery: the service documents no receipt")
