"""Options, examples and signal handlers that commands share, and the configuration."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bridge.errors import EXIT_CLEAN, ConfigError

if TYPE_CHECKING:
    import asyncio

    from bridge.config import Role, Settings


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file to read. Default: the file named by SMS_BRIDGE_CONFIG.",
        show_default=False,
    ),
]
OneRole = Annotated[
    Literal["worker", "webhook"] | None,
    typer.Option("--role", help="Only this role. Default: both."),
]
ManagementUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="RabbitMQ's management API. Default: port 15672 of the broker, or 15671 with TLS.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Yes = Annotated[
    bool,
    typer.Option(
        "--yes", help="Make the changes. Without --yes, the command only prints what it would do."
    ),
]
Reason = typer.Option(
    "--reason",
    metavar="TEXT",
    help="Reason, in one line, which others can read. Do not include phone numbers.",
)
AtMost = Annotated[int | None, typer.Option("--limit", help="Maximum number of messages.", min=1)]


def read_settings(context: typer.Context, config: Path | None) -> "Settings":
    """Load the configuration that an option or the environment names."""
    from bridge.config import load_settings
    from bridge.config.loading import CONFIG_VARIABLE

    named = os.environ.get(CONFIG_VARIABLE)
    path = config or context.obj or (Path(named) if named else None)
    return load_settings(path, os.environ)


def read_reason(text: str) -> str:
    """Check the text of --reason; raise ConfigError if it may not be shown to everybody."""
    from bridge.topology.paused_queue import checked_reason

    try:
        return checked_reason(text)
    except ValueError as error:
        raise ConfigError(f"--reason: {error}") from None


def roles_of(role: "Role | None") -> "list[Role]":
    return ["worker", "webhook"] if role is None else [role]


def examples(*lines: str) -> str:
    """Return the end of a command's help; the leading backspace stops click from wrapping it."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def until_interrupted(action: Callable[[], None]) -> None:
    """Run an action until it ends, or until Ctrl-C or SIGTERM, which exits with 0."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        action()
    except KeyboardInterrupt:
        sys.exit(EXIT_CLEAN)


def stop_at_signals(stopping: "asyncio.Event") -> None:
    """Set an event at the first SIGINT or SIGTERM; the second ends the process."""
    import asyncio

    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stopping.set()

    for number in signals:
        loop.add_signal_handler(number, stop)
