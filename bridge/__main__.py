"""The command line: `sms-bridge`, the same as `python -m bridge`.

Each command imports its modules when it runs, so that `--help` is fast.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.core
from typer._completion_classes import completion_init
from typer._completion_shared import Shells
from typer.completion import install_callback, show_callback

from bridge.cli.catalogue import ENTRIES, Catalogue
from bridge.cli.options import ConfigFile
from bridge.cli.output import UNWRITABLE, explain_unwritable
from bridge.errors import EXIT_FAILED, EXIT_USAGE, BridgeError, ConfigError, InvalidMessageError


def main() -> None:
    """Run a command; write an expected fault to standard error, without a traceback."""
    # Without a handler, Python would print the warnings of libraries, including their arguments.
    logging.getLogger().addHandler(logging.NullHandler())
    # Pydantic would load plugins of other installed packages, which would see every message.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    # Typer calls this only for its own completion options.
    completion_init()
    try:
        app()
    except (ConfigError, InvalidMessageError) as error:
        _fail(error, EXIT_USAGE)
    except BridgeError as error:
        _fail(error, EXIT_FAILED)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _fail(BridgeError(f"standard output: {explain_unwritable(error)}"), EXIT_FAILED)


def _fail(error: BridgeError, code: int) -> None:
    for line in str(error).splitlines():
        sys.stderr.write(f"sms-bridge: {line}\n")
    _give_up_what_cannot_be_written()
    sys.exit(code)


def _give_up_what_cannot_be_written() -> None:
    """Flush standard output, or discard it on an error: at exit, Python would end with code 120."""
    if sys.stdout is not None:  # It is None if it was closed before the start.
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _in_plain_words() -> Iterator[None]:
    try:
        yield
    except typer.BadParameter as error:
        # Remove the prefix of the library with which typer checks choices.
        error.message = error.message.removeprefix("Value error, ")
        raise


class _Commands(typer.core.TyperGroup):
    # Any, because typer's Context and formatter are its private copies of click's.
    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401
        super().__init__(**attributes | {"commands": Catalogue()})

    def list_commands(self, _ctx: Any) -> list[str]:  # noqa: ANN401
        return [*ENTRIES]

    def format_commands(self, _ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in ENTRIES.items()])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        with _in_plain_words():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        with _in_plain_words():
            return super().invoke(ctx)


app = typer.Typer(
    name="sms-bridge",
    cls=_Commands,
    help="The bridge between RabbitMQ and an SMS service.",
    no_args_is_help=True,
    # The options below take the name of the shell; typer's own would guess it.
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001  called by typer
    if wanted:
        from bridge import __version__, is_compiled

        typer.echo(f"sms-bridge {__version__}{' (compiled)' if is_compiled() else ''}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    config: ConfigFile = None,
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
    _install: Annotated[
        Shells | None,
        typer.Option(
            "--install-completion",
            callback=install_callback,
            is_eager=True,
            help="Install completion for this shell, from its next start.",
        ),
    ] = None,
    _show: Annotated[
        Shells | None,
        typer.Option(
            "--show-completion",
            callback=show_callback,
            is_eager=True,
            help="Print what --install-completion would install.",
        ),
    ] = None,
) -> None:
    context.obj = config


if __name__ == "__main__":
    main()
