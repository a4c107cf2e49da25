"""Which messages are asked for, and how long may be waited for the first of them."""

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from bridge.sandbox.messages import find_fault

MAX_WAIT_SECONDS: Final = 60


def _number(value: str) -> str:
    # In a query a + that is not written as %2B means a space.
    number = f"+{value.strip().removeprefix('+')}"
    if fault := find_fault("to", {"to": number}):
        raise ValueError(fault)
    return number


class MessageQuery(BaseModel):
    """Messages for a number, after the message with an id; None is all.

    `wait_seconds` is how long to wait where there is none yet.
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    to: Annotated[str, AfterValidator(_number)] | None = None
    after: str | None = None
    wait_seconds: Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False)] = 0


MESSAGE_QUERY: Final = TypeAdapter(MessageQuery)
