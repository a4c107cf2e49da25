"""Header types that keep the bytes in which they were received.

A module of its own, because mypyc cannot compile subclasses of built-in classes.
"""

from typing import Any


class HeaderTable(dict[str, Any]):
    """Decoded headers; `written` is the encoded table as received, starting with its length."""

    __slots__ = ("written",)

    def __init__(self, values: dict[str, Any], written: bytes) -> None:
        super().__init__(values)
        self.written = written


class Written(bytes):
    """The encoded value of a header as received, with its type octet; written back unchanged."""

    __slots__ = ()
