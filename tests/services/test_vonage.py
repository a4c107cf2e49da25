"""The preset `vonage` against Vonage's own client."""

import pytest
from vonage import Auth, HttpClientOptions, Vonage
from vonage_http_client.errors import HttpRequestError
from vonage_messages import Sms

from tests.services.comparison import (
    ACCOUNT,
    MESSAGES,
    NUMBER,
    SECRET,
    Message,
    Service,
    assert_carries_the_key,
    assert_reads_the_same,
    assert_sends_the_same,
    by_code,
)
from tests.services.sandbox import (
    assert_sandbox_refuses_the_client,
    assert_sandbox_takes_what_the_client_sends,
)
from tests.services.stub import GUARD_SECONDS, Recorded, Stub, Told, in_json


def send(stub: Stub, message: Message) -> str | None:
    options = HttpClientOptions(api_host=stub.host, timeout=GUARD_SECONDS, max_retries=0)
    client = Vonage(Auth(api_key=ACCOUNT, api_secret=SECRET), options)
    sms = Sms(
        to=message.to_digits,
        from_=message.sender_digits,
        text=message.text,
        client_ref=message.key,
    )
    uuid: str = client.messages.send(sms).message_uuid
    return uuid


def code_of(error: Exception) -> str | None:
    if not isinstance(error, HttpRequestError):
        return None
    try:
        problem = error.response.json()
    except ValueError:
        return None
    kind = problem.get("type", "") if isinstance(problem, dict) else ""
    return kind.partition("#")[2] or None


def key_in(request: Recorded) -> str:
    """Find the key, which comes back in delivery reports."""
    key: str = request.document["client_ref"]
    return key


def refusal(code: str, status: int = 422) -> Told:
    """Make an answer that refuses, with texts that name the number."""
    page = "messages" if code.isdecimal() else ""
    return in_json(
        status,
        {
            "type": f"https://developer.vonage.com/api-errors/{page}#{code}",
            "title": f"{NUMBER} is wrong",
            "detail": f"It was {NUMBER}",
            "instance": "bf0ca0bf927b3b52e3cb03217e1a1ddf",
        },
    )


VONAGE = Service(
    "vonage",
    send,
    code_of,
    key_in=key_in,
    also=by_code("vonage", refusal)
    | {
        "a new code": (refusal("1999"), "refused"),
        "a new code of the service's own trouble": (refusal("1999", 500), "uncertain"),
        "forbidden for a new reason": (refusal("forbidden", 403), "ambiguous"),
        "a problem without a page": (in_json(422, {"title": NUMBER}), "refused"),
        "a page without a code": (
            in_json(422, {"type": "https://developer.vonage.com/api-errors"}),
            "refused",
        ),
        "200 with a message": (in_json(200, {"message_uuid": "a-1"}), "sent"),
        "a message and its workflow": (
            in_json(202, {"message_uuid": "a-1", "workflow_id": "w-1"}),
            "sent",
        ),
    },
)


@pytest.mark.parametrize("name", MESSAGES)
async def test_request_is_the_clients(stub: Stub, name: str) -> None:
    await assert_sends_the_same(VONAGE, stub, MESSAGES[name])


@pytest.mark.parametrize("name", MESSAGES)
async def test_key_is_carried(stub: Stub, name: str) -> None:
    await assert_carries_the_key(VONAGE, stub, MESSAGES[name], most_characters=100)


@pytest.mark.parametrize("name", VONAGE.answers)
async def test_answer_is_read_as_by_the_client(stub: Stub, name: str) -> None:
    await assert_reads_the_same(VONAGE, stub, name)


def test_sandbox_passes_for_the_service(stub: Stub) -> None:
    assert_sandbox_takes_what_the_client_sends(VONAGE, stub.certificate)
    assert_sandbox_refuses_the_client(VONAGE, stub.certificate, "unauthorized")
