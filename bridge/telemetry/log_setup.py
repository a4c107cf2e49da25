"""Has what the process logs written, and lets pass of what libraries log only what cannot quote."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from bridge.telemetry.logs import Level, Lines, Log, Stream, describe, outputs

log = Log(__name__)


def configure_logging(
    level: str,
    form: Literal["json", "console", "auto"],
    *,
    stream: Stream,
    count: Callable[[Level], object] = lambda _level: None,
    finish: Callable[[], object] = lambda: None,
) -> None:
    """Write what is logged from `level` on to `stream`, which must take a line at once.

    `count` is called with the level of each, `finish` when the program ends. Takes the place of an
    earlier call.
    """
    console = form == "console" or (form == "auto" and stream.isatty())
    configured = logging.getLevelNamesMapping()[level.upper()]
    lines = Lines(stream, configured, count, is_console=console)
    outputs[:] = [one for one in outputs if not isinstance(one, Lines)] + [lines]
    logging.basicConfig(level=configured, handlers=[_Libraries(lines, finish)], force=True)
    # At DEBUG these write whole frames, bodies included, into the message itself.
    logging.getLogger("asyncio").setLevel(max(configured, logging.INFO))
    # They log what they also raise or return, several lines for each try; we log it once.
    for name in ("aiormq", "aio_pika", "opentelemetry"):
        logging.getLogger(name).setLevel(
            logging.INFO if configured <= logging.DEBUG else logging.CRITICAL
        )
    for name in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(name).setLevel(max(configured, logging.WARNING))


class _Libraries(logging.Handler):
    """Reduces what libraries log."""

    def __init__(self, lines: Lines, finish: Callable[[], object]) -> None:
        super().__init__()
        self._lines = lines
        self._finish = finish

    def handle(self, record: logging.LogRecord) -> bool:
        """Write of a library's record what cannot quote a value."""
        # Some log an exception itself, whose text may quote one.
        event = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        cause = record.exc_info[1] if record.exc_info else None
        self._lines.take(record.levelno, record.name, event, describe(cause))
        return True

    def close(self) -> None:
        """Write what is left; `logging.shutdown` calls this when the program ends."""
        super().close()
        self._finish()


def log_loop_faults(loop: asyncio.AbstractEventLoop) -> None:
    """Log errors that nobody awaited; asyncio's own handler would quote the exception's values."""

    def handle(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        log.error(
            "unhandled_error",
            # After the first words comes the repr of a callback, with its arguments.
            what=" ".join(str(context.get("message")).split()[:3]),
            cause=error if isinstance(error, BaseException) else None,
        )

    loop.set_exception_handler(handle)
