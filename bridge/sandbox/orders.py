"""Models that validate the JSON and the queries of `/sandbox/...`."""

from typing import Annotated, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    StringConstraints,
    ValidationError,
    model_validator,
)
from starlette.exceptions import HTTPException

from bridge.sandbox.service import find_problem
from bridge.webhook.receipts import DeliveryState

MAX_FAULTS: Final = 1000
# The longest delay of a fault, and the time of a hang.
MAX_HANG_SECONDS: Final = 600
MAX_WAIT_SECONDS: Final = 60

Order = TypeVar("Order", bound=BaseModel)


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class WebhookOrder(_Order):
    """The number of times to send a webhook, and whether to forge its signature."""

    repeat: Annotated[int, Field(ge=1, le=1000)] = 1
    forged: bool = False


class PhoneReply(WebhookOrder):
    """A reply from a phone."""

    sender: Annotated[str, Field(alias="from", min_length=1, max_length=32)]
    text: str


class ReceiptOrder(WebhookOrder):
    """A delivery receipt for the newest message with this id and number; None matches any."""

    id: str | None = None
    to: str | None = None
    delivery: DeliveryState = "delivered"


class ReadMark(_Order):
    """The newest message of a number that has been seen on a page."""

    to: Annotated[str, Field(min_length=1, max_length=32)]
    number: Annotated[int, Field(ge=0)]


def _not_framing(name: str) -> str:
    if name.lower() in {"content-length", "transfer-encoding"}:
        raise ValueError("is set by the server and cannot be changed")
    return name


_HeaderName = Annotated[
    str, StringConstraints(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"), AfterValidator(_not_framing)
]
_HeaderValue = Annotated[str, StringConstraints(pattern=r"^[\t\x20-\x7e\xa0-\xff]*$")]


class Fault(_Order):
    """A fault of the service for the number `to` (None: all), `count` times (None: always).

    `answer` names one of the service's documented answers, instead of `status`.
    """

    to: str | None = None
    count: Annotated[int, Field(ge=1)] | None = None
    answer: Annotated[str, Field(max_length=200)] | None = None
    status: Annotated[int, Field(ge=200, le=599)] = 202
    headers: Annotated[dict[_HeaderName, _HeaderValue], Field(max_length=50)] = {}
    latency_seconds: Annotated[float, Field(ge=0, le=MAX_HANG_SECONDS, allow_inf_nan=False)] = 0
    mode: Literal["answer", "hang", "cut", "accept_then_cut"] = "answer"

    @property
    def given_status(self) -> int | None:
        """The given status, or None for the service's own."""
        return self.status if "status" in self.model_fields_set else None

    @model_validator(mode="after")
    def _has_one_answer(self) -> "Fault":
        if self.answer is not None and self.given_status is not None:
            raise ValueError("answer implies a status; leave status out")
        return self


def _number(value: str) -> str:
    # In a query, an unescaped + means a space.
    number = f"+{value.strip().removeprefix('+')}"
    if problem := find_problem("to", number):
        raise ValueError(problem)
    return number


class MessageQuery(BaseModel):
    """The messages to list: for a number, and after the message with an id; None matches all.

    If there is none yet, the answer waits up to `wait_seconds` for the first.
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    to: Annotated[str, AfterValidator(_number)] | None = None
    after: str | None = None
    wait_seconds: Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False)] = 0


class Faults(RootModel[Annotated[list[Fault], Field(max_length=MAX_FAULTS)]]):
    """All faults, in the order in which they are tried."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)


def validate(model: type[Order], given: bytes | dict[str, str]) -> Order:
    """Parse JSON or the members of a query; raise HTTPException 400 that names a wrong member."""
    try:
        if isinstance(given, bytes):
            return model.model_validate_json(given)
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"]) or "body"
        text = first["msg"].removeprefix("Value error, ")
        raise HTTPException(400, f"{path}: {text[:1].lower()}{text[1:]}") from None
