"""The preset `telnyx` against Telnyx's own client."""

from typing import Any

import pytest
from telnyx import APIStatusError, Telnyx, omit

from tests.services.comparison import (
    MESSAGES,
    SECRET,
    Message,
    Service,
    assert_carries_the_key,
    assert_reads_the_same,
    assert_sends_the_same,
)
from tests.services.stub import GUARD_SECONDS, Recorded, Stub


def send(stub: Stub, message: Message) -> str | None:
    """Send with the client."""
    client = Telnyx(api_key=SECRET, base_url=f"{stub.url}/v2", max_retries=0, timeout=GUARD_SECONDS)
    with client:
        sent = client.messages.send(
            to=message.to,
            from_=message.sender,
            text=message.text,
            idempotency_key=message.key or omit,
        )
    message_id: str | None = sent.data.id
    return message_id


def code_of(error: Exception) -> str | None:
    """Take the code of the first error."""
    body: Any = error.body if isinstance(error, APIStatusError) else None
    code: str | None = (
        body["errors"][0]["code"] if isinstance(body, dict) and body.get("errors") else None
    )
    return code


def key_in(request: Recorded) -> str:
    """Find the key, by which a repeat is known."""
    key: str = request.headers["idempotency-key"]
    return key


TELNYX = Service(
    "telnyx",
    send,
    code_of,
    key_in=key_in,
    own_headers={"x-stainless-": "which client it is"},
)


@pytest.mark.parametrize("name", MESSAGES)
async def test_request_is_the_clients(stub: Stub, name: str) -> None:
    """What we send is what the client sends."""
    await assert_sends_the_same(TELNYX, stub, MESSAGES[name])


@pytest.mark.parametrize("name", MESSAGES)
async def test_key_is_carried(stub: Stub, name: str) -> None:
    """The message's key is where the service looks for it."""
    await assert_carries_the_key(TELNYX, stub, MESSAGES[name], most_characters=255)


@pytest.mark.parametrize("name", TELNYX.answers)
async def test_answer_is_read_as_by_the_client(stub: Stub, name: str) -> None:
    """What we read in an answer is what the client reads, but where we want to differ."""
    await assert_reads_the_same(TELNYX, stub, name)
