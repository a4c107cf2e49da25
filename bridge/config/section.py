"""What every section of the configuration has in common."""

from pydantic import BaseModel, ConfigDict, model_validator

from bridge.config.fields import read_json


def read_section(value: object) -> object:
    """Take an empty section for all defaults, and JSON where the environment gives a map."""
    if value is None:
        return {}
    return read_json(value, "must hold keys; in the environment it is JSON")


class Section(BaseModel):
    """Keys with their types and defaults; an unknown one is a fault."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        # Built as a part of `Settings`; none is read by itself.
        defer_build=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _read_map(cls, value: object) -> object:
        return read_section(value)
