"""What a check found."""

from dataclasses import dataclass
from typing import Literal

CheckResult = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check: `fail` would lose messages or cannot work; `fix` is what to do."""

    subject: str
    result: CheckResult
    text: str
    fix: str | None = None
