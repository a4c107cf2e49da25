"""The preset `vonage` and Vonage's client."""

from vonage import Auth, HttpClientOptions, Vonage
from vonage_http_client.errors import HttpRequestError
from vonage_messages import Sms

from tests.services.comparison import (
    ACCOUNT,
    NUMBER,
    SECRET,
    Message,
    Service,
    by_code,
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
    """Find the key, which delivery reports return."""
    key: str = request.document["client_ref"]
    return key


def refusal(code: str, status: int = 422) -> Told:
    """Make a refusal whose texts contain the number."""
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


SERVICE = Service(
    "vonage",
    send,
    code_of,
    key_characters=100,
    code_of_another_key="unauthorized",
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
