"""The command line: `sms-bridge`, the same as `python -m bridge`.

Each command imports what it needs when it runs, so that `--help` is quick.
"""

import gc
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import typer.core

from bridge.commands import check, dead_letters, schema, topology
from bridge.commands.options import EXIT_FAILED, EXIT_USAGE, ConfigFile, examples, read_settings
from bridge.errors import BridgeError, ConfigError, InvalidMessageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.config import Settings


GARBAGE_OBJECTS: Final = 10_000


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  typer's Context is its own copy of click's
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # How the library that typer checks choices with begins its own text.
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    name="sms-bridge",
    cls=_Commands,
    help="The bridge between RabbitMQ and an SMS service.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


app.add_typer(dead_letters.app, name="dlq")
app.add_typer(topology.app, name="topology")
app.add_typer(schema.app, name="schema")


def main() -> None:
    """Run a command; a fault of ours is one line on standard error, never a traceback."""
    # Without a handler Python prints what libraries warn of, with its arguments.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        app()
    except (ConfigError, InvalidMessageError) as error:
        _fail(error, EXIT_USAGE)
    except BridgeError as error:
        _fail(error, EXIT_FAILED)


def _fail(error: BridgeError, code: int) -> None:
    for line in str(error).splitlines():
        sys.stderr.write(f"sms-bridge: {line}\n")
    sys.exit(code)


def _print_version(wanted: bool) -> None:  # noqa: FBT001  typer calls it so
    if wanted:
        from bridge import __version__

        typer.echo(f"sms-bridge {__version__}")
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
) -> None:
    context.obj = config


@app.command(epilog=examples("sms-bridge worker --config config.yaml"))
def worker(context: typer.Context, config: ConfigFile = None) -> None:
    """Take send requests from the queue and post them to the SMS API."""
    _run(context, config, "worker")


@app.command(epilog=examples("sms-bridge webhook --config config.yaml"))
def webhook(context: typer.Context, config: ConfigFile = None) -> None:
    """Receive the service's webhooks and publish them to the exchange."""
    _run(context, config, "webhook")


@app.command(name="all", epilog=examples("sms-bridge all --config config.yaml"))
def both(context: typer.Context, config: ConfigFile = None) -> None:
    """Run both roles in one process."""
    _run(context, config, "worker", "webhook")


def _run(context: typer.Context, config: Path | None, *roles: Any) -> None:  # noqa: ANN401
    # Hardly anything here is a cycle. To look for them as often as Python does by default takes a
    # tenth of the time of a message, and of the start.
    gc.set_threshold(GARBAGE_OBJECTS)
    from bridge.app import run

    sys.exit(run(read_settings(context, config), roles))


app.command(epilog=check.CHECK_EXAMPLES)(check.check)


@app.command(
    epilog=examples(
        "sms-bridge send --to +4917012345678 --from Acme --text Hi",
        "sms-bridge send --to +4917012345678 --from Acme --text Hi --wait",
    )
)
def send(
    context: typer.Context,
    *,
    to: Annotated[str, typer.Option(help="The number: + and digits.")],
    text: Annotated[str, typer.Option(help="The text.")],
    sender: Annotated[str | None, typer.Option("--from", help="The sender's name.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the outcome.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.", min=0)] = 60,
    config: ConfigFile = None,
) -> None:
    """Publish one send request and print its message id.

    With --wait also its outcome: exit 0 when it was sent, 1 when it is dead or none came.
    """
    import asyncio

    from bridge import client

    request = {"to": to, "from": sender, "text": text}
    wait_seconds = timeout if wait else None
    settings = read_settings(context, config)
    message_id, outcome = asyncio.run(client.send(settings, request, wait_seconds=wait_seconds))
    typer.echo(message_id)
    if not wait:
        return
    if outcome is None:
        raise BridgeError(f"no outcome within {timeout:g} s; the request stays queued")
    typer.echo(json.dumps(outcome))
    sys.exit(0 if outcome.get("outcome") == "sent" else EXIT_FAILED)


@app.command(epilog=examples("sms-bridge listen", "sms-bridge listen | jq -r .body.data.text"))
def listen(context: typer.Context, config: ConfigFile = None) -> None:
    """Print inbound events as they come, a line of JSON each, until Ctrl-C."""
    import asyncio

    from bridge import client

    async def show() -> None:
        async for event in client.listen(settings):
            typer.echo(json.dumps(event))

    settings = read_settings(context, config)
    _until_interrupted(lambda: asyncio.run(show()))


@app.command(
    epilog=examples(
        "sms-bridge sign event.json",
        "sms-bridge sign event.json --curl http://localhost:8080/webhooks",
    )
)
def sign(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="The body; standard input without.")] = None,
    curl: Annotated[
        str | None, typer.Option(metavar="URL", help="Print a ready curl command instead.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Sign a body as the configured scheme does and print the headers, a line each."""
    import shlex

    body = sys.stdin.buffer.read() if file is None else _read(file)
    headers, query = _sign(read_settings(context, config), body)
    if curl is None:
        for name, value in headers:
            typer.echo(f"{name}: {value}")
        return
    url = curl + (f"?{query.decode()}" if query else "")
    parts = ["curl", "-i", "-X", "POST", url, "-H", "Content-Type: application/json"]
    for name, value in headers:
        parts += ["-H", f"{name}: {value}"]
    typer.echo(shlex.join([*parts, "--data-binary", f"@{file or '-'}"]))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None


def _sign(settings: "Settings", body: bytes) -> "tuple[Sequence[tuple[str, str]], bytes]":
    import uuid

    from bridge.app import webhook_secrets
    from bridge.signature import decode_secret, scheme_from, sign

    scheme = scheme_from(settings.webhook.signature, settings.webhook.public_url)
    secret = webhook_secrets(settings, scheme)[0]
    key = decode_secret(scheme, secret.current)
    signed = sign(scheme, key, body, now=time.time(), event_id=f"evt_{uuid.uuid4().hex}")
    return signed.headers, signed.query


@app.command(
    epilog=examples(
        "sms-bridge sandbox",
        "sms-bridge sandbox --webhook-url http://localhost:8080/webhooks --webhook-secret S",
    )
)
def sandbox(
    *,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 = any free one.", min=0, max=65535)] = 8025,
    webhook_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Where replies and events are sent.")
    ] = None,
    webhook_secret: Annotated[
        str | None, typer.Option(metavar="S", help="The secret that signs them.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The only API key that is accepted.")] = None,
) -> None:
    """Run a stand-in for the SMS service, with faults to order."""
    import asyncio

    import uvloop

    from bridge.sandbox.server import create_app, serve

    signing = None if webhook_secret is None else _plain_signer(webhook_secret)
    service = create_app(sign=signing, webhook_url=webhook_url, key=key)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(service, host=host, port=port))


def _plain_signer(secret: str) -> "Callable[[bytes], Sequence[tuple[str, str]]]":
    import uuid

    from bridge.signature import PRESETS, decode_secret, sign

    scheme = PRESETS["plain"]
    key = decode_secret(scheme, secret)

    def signed(body: bytes) -> "Sequence[tuple[str, str]]":
        return sign(scheme, key, body, now=time.time(), event_id=uuid.uuid4().hex).headers

    return signed


@app.command(epilog=examples("sms-bridge demo", "sms-bridge demo --keep"))
def demo(
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave it running until Ctrl-C.")] = False,
    messages: Annotated[int, typer.Option(help="Send requests.", min=50)] = 1000,
    events: Annotated[int, typer.Option(help="Webhooks.", min=20)] = 200,
) -> None:
    """Run the whole flow on this computer: broker, sandbox, both roles, traffic, faults."""
    from bridge.sandbox.demo import run_demo

    sys.exit(run_demo(keep=keep, messages=messages, events=events))


def _until_interrupted(action: "Callable[[], None]") -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        action()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
