"""The preset `telnyx` and Telnyx's client."""

from typing import Any

from tests.services.comparison import (
    NUMBER,
    SECRET,
    Message,
    Service,
    by_code,
)
from tests.services.stub import GUARD_SECONDS, Recorded, Stub, Told, in_json


def send(stub: Stub, message: Message) -> str | None:
    from telnyx import Telnyx, omit

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
    from telnyx import APIStatusError

    body: Any = error.body if isinstance(error, APIStatusError) else None
    code: str | None = (
        body["errors"][0]["code"] if isinstance(body, dict) and body.get("errors") else None
    )
    return code


def key_in(request: Recorded) -> str:
    """Find the key, by which a repeat is recognised."""
    key: str = request.headers["idempotency-key"]
    return key


def refusal(code: str, status: int = 400) -> Told:
    """Make a refusal whose texts contain the number."""
    error = {
        "code": code,
        "title": f"{NUMBER} is wrong",
        "detail": f"It was {NUMBER}",
        "source": {"pointer": "/to"},
        "meta": {"url": f"https://developers.telnyx.com/docs/overview/errors/{code}"},
    }
    return in_json(status, {"errors": [error]})


SERVICE = Service(
    "telnyx",
    send,
    code_of,
    key_characters=255,
    code_of_another_key="10009",
    key_in=key_in,
    own_headers={"x-stainless-": "which client it is"},
    also=by_code("telnyx", refusal)
    | {
        "a new code": (refusal("49999", 422), "refused"),
        "a new code of the service's own trouble": (refusal("49999", 503), "uncertain"),
        "forbidden for a new reason": (refusal("49999", 403), "ambiguous"),
        "two errors": (
            in_json(422, {"errors": [{"code": "40310"}, {"code": "20100"}]}),
            "refused",
        ),
        "no errors": (in_json(422, {"errors": []}), "refused"),
        "202 with a message": (in_json(202, {"data": {"id": "a-1"}}), "sent"),
        "200 with an error": (refusal("40310", 200), "refused"),
    },
    otherwise={
        "200 with an error": ("refused", "the client finds no message, and looks for no code"),
    },
)
