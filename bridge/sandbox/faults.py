"""Faults to order: how the stand-in SMS service misbehaves, to whom and how often."""

from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    model_validator,
)

# The longest time that a fault may delay its answer, or hang.
MAX_HANG_SECONDS: Final = 600


def _not_framing(name: str) -> str:
    if name.lower() in {"content-length", "transfer-encoding"}:
        raise ValueError("is the server's own and cannot be set")
    return name


HeaderName = Annotated[
    str, StringConstraints(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"), AfterValidator(_not_framing)
]
HeaderValue = Annotated[str, StringConstraints(pattern=r"^[\t\x20-\x7e\xa0-\xff]*$")]


class Fault(BaseModel):
    """How to misbehave, to whom (`to`, None is all) and how often (`count`, None is always).

    `answer` is the name of one of the service's answers, which brings its own status along.
    """

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    to: str | None = None
    count: Annotated[int, Field(ge=1)] | None = None
    answer: Annotated[str, Field(max_length=200)] | None = None
    status: Annotated[int, Field(ge=200, le=599)] = 202
    headers: Annotated[dict[HeaderName, HeaderValue], Field(max_length=50)] = {}
    latency_seconds: Annotated[float, Field(ge=0, le=MAX_HANG_SECONDS, allow_inf_nan=False)] = 0
    mode: Literal["answer", "hang", "cut", "accept_then_cut"] = "answer"

    @property
    def own_status(self) -> int | None:
        """The status that the fault itself says, or None where it leaves that to the service."""
        return self.status if "status" in self.model_fields_set else None

    @model_validator(mode="after")
    def _has_one_answer(self) -> "Fault":
        if self.answer is not None and self.own_status is not None:
            raise ValueError("answer brings a status along; leave status out")
        return self


MAX_FAULTS: Final = 1000
FAULT: Final[TypeAdapter[Fault]] = TypeAdapter(Fault)
FAULTS: Final[TypeAdapter[list[Fault]]] = TypeAdapter(
    Annotated[list[Fault], Field(max_length=MAX_FAULTS)]
)
