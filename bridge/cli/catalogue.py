"""The commands; the module of each is imported when the command is looked up."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Final, NamedTuple

import typer
import typer.core
from typer.main import get_group

# The types into which typer turns a function, and a module with several commands.
Command = typer.core.TyperCommand | typer.core.TyperGroup


class Entry(NamedTuple):
    """The module of a command, and its line in `sms-bridge --help`."""

    module: str
    summary: str


# In the order of `--help`.
ENTRIES: Final[Mapping[str, Entry]] = {
    "worker": Entry("roles", "Consume send requests and post them to the SMS API."),
    "webhook": Entry("roles", "Receive the service's webhooks and publish them to the exchange."),
    "all": Entry("roles", "Run both roles in one process."),
    "init": Entry("init", "Ask five questions and write the configuration."),
    "check": Entry("check", "Validate the configuration; with --online, test broker and API."),
    "send": Entry("messages", "Publish one send request and print its message id."),
    "listen": Entry("messages", "Print inbound events as they arrive, one JSON object per line."),
    "status": Entry("status", "Show queues, rates, pauses, workers and receivers."),
    "pause": Entry("pausing", "Stop all workers of the queue from sending, within two seconds."),
    "resume": Entry("pausing", "Resume sending after `sms-bridge pause`."),
    "drain": Entry("drain", "Move waiting messages to the dead-letter queue."),
    "sign": Entry("sign", "Sign a body as an endpoint's service would."),
    "sandbox": Entry("sandbox", "Run a stand-in for the SMS service, with faults on demand."),
    "demo": Entry("sandbox", "Run the whole flow on this computer, with faults."),
    "dlq": Entry("dlq", "Inspect dead letters, send them again or remove them."),
    "topology": Entry("topology", "Show, compare or create the queues, exchanges and bindings."),
    "schema": Entry("schema", "Print the machine-readable contract: JSON Schemas and AsyncAPI."),
}


class Catalogue(Mapping[str, Command]):
    """The commands by name."""

    def __getitem__(self, name: str) -> Command:
        module = import_module(f"bridge.cli.{ENTRIES[name].module}")
        found = typer.Typer(rich_markup_mode=None)
        found.add_typer(module.app)
        return get_group(found).commands[name]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[str]:
        return iter(ENTRIES)

    def __len__(self) -> int:
        return len(ENTRIES)
