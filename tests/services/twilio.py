"""The preset `twilio` and Twilio's client."""

from twilio.base.exceptions import TwilioRestException, TwilioServiceException
from twilio.http.http_client import TwilioHttpClient
from twilio.rest import Client

from tests.services.comparison import (
    ACCOUNT,
    NUMBER,
    SECRET,
    Message,
    Service,
    by_code,
)
from tests.services.stub import GUARD_SECONDS, Stub, Told, in_json


def send(stub: Stub, message: Message) -> str | None:
    http = TwilioHttpClient(pool_connections=False, timeout=GUARD_SECONDS)
    client = Client(ACCOUNT, SECRET, http_client=http)
    client.api.base_url = stub.url
    sent = client.messages.create(to=message.to, from_=message.sender, body=message.text)
    sid: str | None = sent.sid
    return sid


def code_of(error: Exception) -> str | None:
    match error:
        case TwilioRestException() | TwilioServiceException():
            return None if error.code == error.status else str(error.code)
        case _:
            return None


def refusal(code: str, status: int = 400) -> Told:
    """Make a refusal whose text contains the number."""
    more = f"https://www.twilio.com/docs/errors/{code}"
    message = f"The number {NUMBER} is wrong"
    return in_json(
        status, {"code": int(code), "message": message, "more_info": more, "status": status}
    )


NO_SID = "the client takes any 2xx, with or without a message in it"
SERVICE = Service(
    "twilio",
    send,
    code_of,
    code_of_another_key="20003",
    own_headers={
        "x-twilio-client": "which client it is",
        "accept-charset": "answers are read as UTF-8 in any case",
    },
    otherwise={
        "accepted, but empty": ("uncertain", NO_SID),
        "accepted, but an empty object": ("uncertain", NO_SID),
        "204": ("uncertain", NO_SID),
        "201 with an error": ("refused", NO_SID),
    },
    also=by_code("twilio", refusal)
    | {
        "a new code": (refusal("29999"), "refused"),
        "a new code of the service's own trouble": (refusal("29999", 503), "uncertain"),
        "forbidden for a new reason": (refusal("29999", 403), "ambiguous"),
        "a problem by RFC 9457": (
            in_json(400, {"type": "x", "title": NUMBER, "status": 400, "code": 21211}),
            "refused",
        ),
        "no code": (in_json(400, {"message": "x", "status": 400}), "refused"),
        "200 with a message": (in_json(200, {"sid": "SM1", "status": "queued"}), "sent"),
        "a message that went wrong before": (
            in_json(201, {"sid": "SM1", "status": "failed", "error_code": 30001}),
            "sent",
        ),
        "201 with an error": (
            in_json(201, {"code": 21211, "message": "x", "status": 400}),
            "refused",
        ),
    },
)
