"""The preset `sinch` and Sinch's client."""

from tests.services.comparison import (
    ACCOUNT,
    NUMBER,
    SECRET,
    Message,
    Service,
    by_code,
)
from tests.services.stub import Recorded, Stub, Told, in_json


def send(stub: Stub, message: Message, **options: str) -> str | None:
    from sinch import SinchClient
    from sinch.core.clients.retry_configuration import RetryConfiguration
    from sinch.core.enums import RetryPolicy

    client = SinchClient(
        service_plan_id=ACCOUNT,
        sms_api_token=SECRET,
        sms_region="us",
        retry_configuration=RetryConfiguration(RetryPolicy.NONE),
    )
    client.configuration.sms_domain_with_service_plan_id = stub.url
    sent = client.sms.batches.send_sms(
        to=[message.to],
        from_=message.sender,
        body=message.text,
        client_reference=message.key,
        **options,
    )
    batch_id: str | None = sent.id
    return batch_id


def code_of(error: Exception) -> str | None:
    from sinch.domains.sms.api.v1.exceptions import SmsException

    if isinstance(error, SmsException) and isinstance(error.http_response.body, dict):
        code: str | None = error.http_response.body.get("code")
        return code
    return None


def key_in(request: Recorded) -> str:
    """Find the key, which delivery reports return."""
    key: str = request.document["client_reference"]
    return key


def refusal(status: int, code: str) -> Told:
    return in_json(status, {"code": code, "text": f"{NUMBER} is wrong"})


SERVICE = Service(
    "sinch",
    send,
    code_of,
    key_characters=255,
    key_in=key_in,
    otherwise={
        "201 without an id": ("uncertain", "the client hands on what has the kind of a batch"),
        "200 with an error": ("refused", "the client finds no batch, and does not look for a code"),
        "200 with an unknown error": ("uncertain", "as above; we name the code"),
        "a code that is a number": ("refused", "what may be a phone number is never a code"),
    },
    also={
        **by_code("sinch", lambda code: refusal(403, code)),
        "200 with a batch": (in_json(200, {"id": "a-batch", "type": "mt_text"}), "sent"),
        "a batch without its kind": (in_json(201, {"id": "a-batch"}), "sent"),
        "a batch that has other members": (
            in_json(201, {"id": "a-batch", "type": "mt_text", "new": {"x": [1]}}),
            "sent",
        ),
        "201 without an id": (in_json(201, {"type": "mt_text", "canceled": False}), "uncertain"),
        "200 with an error": (refusal(200, "syntax_invalid_json"), "refused"),
        "200 with an unknown error": (refusal(200, "a_new_code"), "uncertain"),
        "an error in the older form": (
            in_json(400, {"error": {"code": 400, "message": "x", "status": "InvalidArgument"}}),
            "refused",
        ),
        "a code that is a number": (refusal(400, NUMBER), "refused"),
        "forbidden for a new reason": (refusal(403, "a_new_code"), "ambiguous"),
    },
)
