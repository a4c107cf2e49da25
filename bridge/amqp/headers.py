"""Headers that keep the bytes as which they were received.

A module of its own, because mypyc cannot compile subclasses of built-in classes.
"""

from typing import Any


class HeaderTable(dict[str, Any]):
    """Decoded headers; `written` is the table's bytes as they came, beginning with its length."""

    __slots__ = ("written",)

    def __init__(self, values: dict[str, Any], written: bytes) -> None:
        super().__init__(values)
        self.written = written


class Written(bytes):
    """A header's value as the bytes that came, its type octet first; written back unchanged."""

    __slots__ = ()
