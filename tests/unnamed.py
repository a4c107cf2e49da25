"""How tests publish a message without an id: aiormq makes one up for whatever has none."""

from typing import Final


class _Unnamed(str):
    """An empty id that counts as one for aiormq, and that pamqp leaves out as empty."""

    __slots__ = ()

    def __bool__(self) -> bool:
        """Be taken for an id."""
        return True

    def __str__(self) -> "_Unnamed":
        """Stay what it is where aio-pika makes a str of it."""
        return self


NO_ID: Final = _Unnamed()
