"""`sms-bridge sandbox` and `demo`: a stand-in for the SMS service, and the whole flow with it."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from bridge.cli.options import examples
from bridge.config.presets import KnownPreset, Preset
from bridge.credentials import read_secret
from bridge.errors import ConfigError

app = typer.Typer()


@app.command(
    epilog=examples(
        "sms-bridge sandbox",
        "sms-bridge sandbox --preset twilio",
        "sms-bridge sandbox --webhook-url http://localhost:8080/webhooks --webhook-secret S",
        "curl -X PUT localhost:8025/sandbox/faults -H 'Content-Type: application/json' \\",
        """     -d '[{"count": 10, "status": 503, "headers": {"Retry-After": "2"}}]'""",
    ),
)
def sandbox(  # noqa: PLR0913  an option each
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Service to imitate, as in sms_api.preset.")
    ] = "generic",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 means any free port.", min=0, max=65535)
    ] = 8025,
    webhook_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where to send webhooks. Default with a preset: 127.0.0.1:8080/webhooks/NAME.",
        ),
    ] = None,
    webhook_secret: Annotated[
        str | None,
        typer.Option(
            metavar="S", help="Secret that signs webhooks. Default with a preset: a random one."
        ),
    ] = None,
    webhook_secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File with the webhook secret, instead of --webhook-secret."
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The only API key to accept. Default: any.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another host name by which clients reach the sandbox. May be repeated.",
        ),
    ] = None,
) -> None:
    """Run a stand-in for the SMS service, with faults on demand.

    The sandbox accepts messages in the format of a preset, and sends signed webhooks on demand. GET
    / lists its endpoints and shows how to request a fault. With --preset, the command prints the
    settings that point the bridge at the sandbox.
    """
    _check_installed("sandbox")
    import asyncio

    import uvloop

    from bridge.sandbox.api import create_app
    from bridge.sandbox.server import serve
    from bridge.sandbox.webhooks import Signer, check_url

    played = _known_preset(preset)
    if webhook_url is None and played != "generic":
        webhook_url = f"http://127.0.0.1:8080/webhooks/{played}"
    if webhook_secret_file is not None:
        if webhook_secret is not None:
            raise ConfigError("--webhook-secret-file: --webhook-secret is given too; leave one out")
        webhook_secret = read_secret("--webhook-secret-file", webhook_secret_file)
    if webhook_url is not None:
        check_url(webhook_url)
    # The generic service sends no webhooks without a secret.
    signer = None
    if webhook_url is not None and (played != "generic" or webhook_secret is not None):
        signer = Signer(played, webhook_url, webhook_secret)
    hosts = (host, *(name.lower() for name in allow_host or ()))
    service = create_app(preset=played, key=key, signer=signer, hosts=hosts)

    def announce(url: str) -> None:
        sys.stdout.write(f"sandbox: {url}\n")
        if signer is not None and played != "generic":
            settings = signer.settings_to_copy(url, has_key=key is not None)
            sys.stdout.write(f"It imitates {played}. Settings for the bridge:\n\n{settings}\n")
        sys.stdout.flush()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(service, host=host, port=port, announce=announce))


def _check_installed(command: str) -> None:
    from importlib.util import find_spec

    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ConfigError(
            f"{command}: the web server of the sandbox is not installed; pip install "
            "'sms-bridge[sandbox]'"
        )


def _known_preset(name: str) -> Preset:
    try:
        return TypeAdapter[Preset](KnownPreset).validate_python(name)
    except ValidationError as error:
        text = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--preset: {text}") from None


@app.command(epilog=examples("sms-bridge demo", "sms-bridge demo --keep"))
def demo(
    *,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep everything running until Ctrl-C.")
    ] = False,
    messages: Annotated[int, typer.Option(help="Number of send requests.", min=50)] = 1000,
    events: Annotated[int, typer.Option(help="Number of webhooks.", min=20)] = 200,
) -> None:
    """Run the whole flow on this computer, with a broker, both roles, traffic and faults."""
    _check_installed("demo")
    from bridge.sandbox.demo.run import run_demo

    sys.exit(run_demo(keep=keep, messages=messages, events=events))
