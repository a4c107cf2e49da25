"""The preset `twilio` against Twilio's own client."""

import pytest
from twilio.base.exceptions import TwilioRestException
from twilio.http.http_client import TwilioHttpClient
from twilio.rest import Client

from tests.services.comparison import (
    ACCOUNT,
    MESSAGES,
    SECRET,
    Message,
    Service,
    assert_reads_the_same,
    assert_sends_the_same,
)
from tests.services.stub import GUARD_SECONDS, Stub


def send(stub: Stub, message: Message) -> str | None:
    """Send with the client."""
    http = TwilioHttpClient(pool_connections=False, timeout=GUARD_SECONDS)
    client = Client(ACCOUNT, SECRET, http_client=http)
    client.api.base_url = stub.url
    sent = client.messages.create(to=message.to, from_=message.sender, body=message.text)
    sid: str | None = sent.sid
    return sid


def code_of(error: Exception) -> str | None:
    """Take the code; where there is none, the client has the status in its place."""
    if isinstance(error, TwilioRestException) and error.code != error.status:
        return str(error.code)
    return None


NO_SID = "the client takes any 2xx, with or without a message in it"
TWILIO = Service(
    "twilio",
    send,
    code_of,
    own_headers={
        "x-twilio-client": "which client it is",
        "accept-charset": "answers are read as UTF-8 in any case",
    },
    otherwise={
        "accepted, but empty": ("uncertain", NO_SID),
        "accepted, but an empty object": ("uncertain", NO_SID),
        "204": ("uncertain", NO_SID),
    },
)


@pytest.mark.parametrize("name", MESSAGES)
async def test_request_is_the_clients(stub: Stub, name: str) -> None:
    """What we send is what the client sends."""
    await assert_sends_the_same(TWILIO, stub, MESSAGES[name])


@pytest.mark.parametrize("name", TWILIO.answers)
async def test_answer_is_read_as_by_the_client(stub: Stub, name: str) -> None:
    """What we read in an answer is what the client reads, but where we want to differ."""
    await assert_reads_the_same(TWILIO, stub, name)
