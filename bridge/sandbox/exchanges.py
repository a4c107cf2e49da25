"""A request as it came over the wire, and what it was answered, with its login masked."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

MAX_SHOWN_BYTES: Final = 64 * 1024
MASK: Final = "***"
# Logins whatever service is played; a preset adds its own.
_LOGINS: Final = frozenset({"authorization", "proxy-authorization", "cookie"})

Headers = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Exchange:
    """One request and its answer; bodies are cut after `MAX_SHOWN_BYTES`."""

    method: str
    path: str
    headers: Headers
    body: str
    answer_headers: Headers = ()
    answer_body: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the exchange as the sandbox shows it."""
        return {
            "method": self.method,
            "path": self.path,
            "headers": self.headers,
            "body": self.body,
            "answer_headers": self.answer_headers,
            "answer_body": self.answer_body,
        }


def mask(headers: Iterable[tuple[str, str]], *, logins: Collection[str]) -> Headers:
    """Return headers without the values of logins; `logins` names more, in lower case.

    The first word of a login stays where there is a second: it names the scheme.
    """
    return tuple(
        (name, _mask(value) if name.lower() in _LOGINS or name.lower() in logins else value)
        for name, value in headers
    )


def _mask(value: str) -> str:
    scheme, space, _ = value.partition(" ")
    return f"{scheme} {MASK}" if space else MASK


def shorten(body: bytes) -> str:
    """Return as much of a body as is shown, as text."""
    text = body[:MAX_SHOWN_BYTES].decode(errors="replace")
    left = len(body) - MAX_SHOWN_BYTES
    return text if left <= 0 else f"{text}\n... and {left} bytes"
