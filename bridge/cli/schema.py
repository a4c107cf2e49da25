"""`sms-bridge schema`: JSON Schemas and an AsyncAPI document."""

import typer

from bridge.admin import asyncapi as contract
from bridge.admin.asyncapi import event_schema, request_schema
from bridge.cli.options import ConfigFile, examples, read_settings
from bridge.cli.output import print_json
from bridge.config import Settings

app = typer.Typer(
    name="schema",
    help="Print the machine-readable contract: JSON Schemas and AsyncAPI.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command(name="config", epilog=examples("sms-bridge schema config > config.schema.json"))
def config_() -> None:
    """Print the JSON Schema of the configuration."""
    print_json(Settings.model_json_schema())


@app.command(epilog=examples("sms-bridge schema request > request.schema.json"))
def request(context: typer.Context, *, config: ConfigFile = None) -> None:
    """Print the JSON Schema of a send request, with the configured limits."""
    print_json(request_schema(read_settings(context, config).worker))


@app.command(epilog=examples("sms-bridge schema event > event.schema.json"))
def event(context: typer.Context, *, config: ConfigFile = None) -> None:
    """Print the JSON Schema of an inbound event: routing key, properties, headers, body."""
    print_json(event_schema(read_settings(context, config)))


@app.command(
    epilog=examples(
        "sms-bridge schema asyncapi > asyncapi.json", "npx @asyncapi/cli validate asyncapi.json"
    )
)
def asyncapi(context: typer.Context, *, config: ConfigFile = None) -> None:
    """Print an AsyncAPI 3.0 document that describes all configured queues and exchanges."""
    print_json(contract.asyncapi(read_settings(context, config)))
