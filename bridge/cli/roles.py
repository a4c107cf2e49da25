"""`sms-bridge worker`, `webhook` and `all`: run a role, or both in one process."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bridge import memory
from bridge.cli.options import ConfigFile, examples, read_settings

if TYPE_CHECKING:
    from bridge.config import Role

app = typer.Typer()


@app.command(epilog=examples("sms-bridge worker --config config.yaml"))
def worker(context: typer.Context, config: ConfigFile = None) -> None:
    """Consume send requests and post them to the SMS API."""
    _run(context, config, "worker")


@app.command(epilog=examples("sms-bridge webhook --config config.yaml"))
def webhook(context: typer.Context, config: ConfigFile = None) -> None:
    """Receive the service's webhooks and publish them to the exchange."""
    _run(context, config, "webhook")


@app.command(name="all", epilog=examples("sms-bridge all --config config.yaml"))
def both(context: typer.Context, config: ConfigFile = None) -> None:
    """Run both roles in one process."""
    _run(context, config, "worker", "webhook")


def _run(context: typer.Context, config: Path | None, *roles: "Role") -> None:
    # Imports create many objects that live on; `run` enables the collector again.
    memory.disable_gc_until_started()
    from bridge.app import run

    sys.exit(run(read_settings(context, config), roles))
