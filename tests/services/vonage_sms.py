"""The preset `vonage-sms` and Vonage's client."""

import re

from vonage import Auth, HttpClientOptions, Vonage
from vonage_sms import SmsMessage
from vonage_sms.errors import PartialFailureError, SmsError

from tests.services.comparison import (
    ACCOUNT,
    SECRET,
    Message,
    Service,
    by_code,
)
from tests.services.stub import GUARD_SECONDS, Recorded, Stub, Told, in_json


def send(stub: Stub, message: Message) -> str | None:
    options = HttpClientOptions(rest_host=stub.host, timeout=GUARD_SECONDS, max_retries=0)
    client = Vonage(Auth(api_key=ACCOUNT, api_secret=SECRET), options)
    sms = SmsMessage(
        to=message.to_digits,
        from_=message.sender_digits,
        text=message.text,
        type="text" if message.is_gsm7 else "unicode",
        client_ref=message.key,
    )
    message_id: str | None = client.sms.send(sms).messages[0].message_id
    return message_id


def code_of(error: Exception) -> str | None:
    if isinstance(error, PartialFailureError):
        statuses: list[str] = [part["status"] for part in error.response["messages"]]
        return next((status for status in statuses if status != "0"), None)
    if isinstance(error, SmsError):
        found = re.search(r"error code (\d+):", str(error))
        return found and found[1]
    return None


def key_in(request: Recorded) -> str:
    """Find the key, which delivery reports return."""
    key: str = request.document["client-ref"]
    return key


def parts(*statuses: str, count: int = 0) -> Told:
    """Make an answer for a text in several parts, of which only accepted parts have ids."""
    messages = [
        {"status": status, "message-id": f"0C{number}"}
        if status == "0"
        else {"status": status, "error-text": "a text"}
        for number, status in enumerate(statuses)
    ]
    return in_json(200, {"message-count": str(count or len(statuses)), "messages": messages})


SERVICE = Service(
    "vonage-sms",
    send,
    code_of,
    key_characters=40,
    code_of_another_key="4",
    key_in=key_in,
    also=by_code("vonage-sms", parts)
    | {
        "a new status": (parts("99"), "uncertain"),
        "all of three parts taken": (parts("0", "0", "0"), "sent"),
        "both parts refused": (parts("9", "9"), "setup:insufficient_funds"),
        "both parts refused, for two reasons": (parts("7", "9"), "refused"),
        "the first part refused": (parts("1", "0"), "uncertain"),
        "the second part refused": (parts("0", "7"), "uncertain"),
        "the last part in an internal error": (parts("0", "0", "5"), "uncertain"),
        "no parts": (parts(), "uncertain"),
        "of two parts one is told": (parts("0", count=2), "sent"),
    },
    otherwise={
        "of two parts one is told": (
            "sent",
            "the client counts the parts; nothing says that one was not taken",
        ),
    },
)
