"""Orders to the sandbox against their models, with faults in a line that names the member."""

from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException

T = TypeVar("T")


def validate(adapter: TypeAdapter[T], given: bytes | dict[str, str]) -> T:
    """Read JSON, or members that are text; raises HTTPException 400 with the first fault."""
    try:
        if isinstance(given, bytes):
            return adapter.validate_json(given)
        return adapter.validate_python(given)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"]) or "body"
        text = first["msg"].removeprefix("Value error, ")
        raise HTTPException(400, f"{path}: {text[:1].lower()}{text[1:]}") from None
