"""The bridge between RabbitMQ and an SMS service."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        # Looked up on demand, because it takes a sixth of the time of `sms-bridge --help`.
        if name != "__version__":
            raise AttributeError(name)
        from importlib.metadata import version  # noqa: PLC0415

        return version("sms-bridge")


def is_compiled() -> bool:
    """Whether the modules of the hot path are compiled to machine code, as in the image."""
    return any(Path(__file__).parent.rglob("*.so"))
