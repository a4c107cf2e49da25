"""The command line: `sms-bridge`, the same as `python -m bridge`.

Each command imports what it needs when it runs, so that `--help` is quick.
"""

import errno
import gc
import json
import logging
import signal
import sys
import time
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import typer.core
from typer._completion_classes import completion_init

from bridge.commands import check, dead_letters, schema, topology
from bridge.commands.options import ConfigFile, examples, read_settings
from bridge.errors import BridgeError, ConfigError, InvalidMessageError
from bridge.exit_codes import EXIT_FAILED, EXIT_USAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bridge.config import Settings


GARBAGE_OBJECTS: Final = 10_000


class Shell(StrEnum):
    """The shells for which there is a completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"
    PWSH = "pwsh"


@contextmanager
def _plain_faults() -> "Iterator[None]":
    try:
        yield
    except typer.BadParameter as error:
        # How the library that typer checks choices with begins its own text.
        error.message = error.message.removeprefix("Value error, ")
        raise


class _Commands(typer.core.TyperGroup):
    # Typer's Context is its own copy of click's.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        with _plain_faults():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        with _plain_faults():
            return super().invoke(ctx)


app = typer.Typer(
    name="sms-bridge",
    cls=_Commands,
    help="The bridge between RabbitMQ and an SMS service.",
    no_args_is_help=True,
    # Typer's own options guess the shell, and ignore the one that is named.
    add_completion=False,
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
    # Typer does so only with its own options for it.
    completion_init()
    try:
        app()
    except (ConfigError, InvalidMessageError) as error:
        _fail(error, EXIT_USAGE)
    except BridgeError as error:
        _fail(error, EXIT_FAILED)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _fail(BridgeError(f"standard output: {_unwritten(error)}"), EXIT_FAILED)


# Of a file or a device that output goes to; who reads a pipe no more is typer's to end for.
_UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _unwritten(error: OSError) -> str:
    return (
        f"cannot be written: {error.strerror}; what the command does may be done: look before you "
        "run it again"
    )


def _fail(error: BridgeError, code: int) -> None:
    for line in str(error).splitlines():
        sys.stderr.write(f"sms-bridge: {line}\n")
    sys.exit(code)


def _print_version(wanted: bool) -> None:  # noqa: FBT001  typer calls it so
    if wanted:
        from bridge import __version__

        typer.echo(f"sms-bridge {__version__}")
        raise typer.Exit


def _install_completion(context: typer.Context, parameter: Any, shell: str | None) -> None:  # noqa: ANN401
    from typer.completion import install_callback

    install_callback(context, parameter, shell)


def _show_completion(context: typer.Context, parameter: Any, shell: str | None) -> None:  # noqa: ANN401
    from typer.completion import show_callback

    show_callback(context, parameter, shell)


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
        Shell | None,
        typer.Option(
            "--install-completion",
            callback=_install_completion,
            is_eager=True,
            help="Complete the commands in this shell from its next start on.",
        ),
    ] = None,
    _show: Annotated[
        Shell | None,
        typer.Option(
            "--show-completion",
            callback=_show_completion,
            is_eager=True,
            help="Print what --install-completion would install.",
        ),
    ] = None,
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

    With --wait also its outcome: exit 0 when it was sent, 1 when it is dead or none came. While
    none comes it says, as far as it can be known, why: whether the worker on this computer is
    paused, for what, and whether any worker takes from the queue.
    """
    import asyncio

    from bridge.operators import client

    def published(message_id: str) -> None:
        try:
            typer.echo(message_id)
        except OSError as error:
            raise BridgeError(
                f"the request {message_id} is stored, and standard output {_unwritten(error)}"
            ) from None

    settings = read_settings(context, config)
    outcome = asyncio.run(
        client.send(
            settings,
            {"to": to, "from": sender, "text": text},
            wait_seconds=timeout if wait else None,
            published=published,
            waiting=lambda why: typer.echo(f"sms-bridge: still waiting: {why}", err=True),
        )
    )
    if outcome is not None:
        typer.echo(json.dumps(outcome))
        sys.exit(0 if outcome.get("outcome") == "sent" else EXIT_FAILED)


@app.command(epilog=examples("sms-bridge listen", "sms-bridge listen | jq -r .body.data.text"))
def listen(context: typer.Context, config: ConfigFile = None) -> None:
    """Print inbound events as they come, a line of JSON each, until Ctrl-C.

    It says on standard error when it is ready: what comes from then on is printed. It creates
    nothing that stays, and ends with 1 when there is no such exchange.
    """
    import asyncio

    from bridge.operators import client

    def listening(exchange: str) -> None:
        typer.echo(f"listening on the exchange {exchange}", err=True)

    async def show() -> None:
        async for event in client.listen(settings, listening=listening):
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

    from bridge.inbound.schemes import decode_secret, scheme_from
    from bridge.inbound.signature import sign
    from bridge.start_checks import webhook_secrets

    scheme = scheme_from(settings.webhook.signature, settings.webhook.public_url)
    secret = webhook_secrets(settings.webhook, scheme)[0]
    key = decode_secret(scheme, secret.current)
    signed = sign(scheme, key, body, now=time.time(), event_id=f"evt_{uuid.uuid4().hex}")
    return signed.headers, signed.query


_SANDBOX_HELP: Final = """\
Run a stand-in for the SMS service, with faults to order.

It takes POST /v1/messages, keeps what it is sent, and sends signed webhooks on order; GET / lists
all that it does. Pages of other sites are refused.

\b
PUT /sandbox/faults takes a list; of those that fit a message the first is done to it:
  to               the number; null or left out: every number
  count            how often; null or left out: until DELETE /sandbox/faults
  mode             answer           with status and headers (the default)
                   hang             take the request and never answer
                   cut              close the connection unanswered
                   accept_then_cut  send the message, then close unanswered
  status           200 to 599, 202 when left out; the message is sent below 300
  headers          of the answer, such as {"Retry-After": "2"}
  latency_seconds  how long to wait first, 0 to 600
"""


@app.command(
    help=_SANDBOX_HELP,
    epilog=examples(
        "sms-bridge sandbox",
        "sms-bridge sandbox --webhook-url http://localhost:8080/webhooks --webhook-secret S",
        "curl -X PUT localhost:8025/sandbox/faults -H 'Content-Type: application/json' \\",
        """     -d '[{"count": 10, "status": 503, "headers": {"Retry-After": "2"}}]'""",
    ),
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
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name with dots by which it is asked for; may be repeated.",
        ),
    ] = None,
) -> None:
    """Run a stand-in for the SMS service; _SANDBOX_HELP says the rest."""
    import asyncio

    import uvloop

    from bridge.sandbox.routes import create_app
    from bridge.sandbox.server import serve

    signing = None if webhook_secret is None else _plain_signer(webhook_secret)
    hosts = (host, *(name.lower() for name in allow_host or ()))
    service = create_app(sign=signing, webhook_url=webhook_url, key=key, hosts=hosts)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(service, host=host, port=port))


def _plain_signer(secret: str) -> "Callable[[bytes], Sequence[tuple[str, str]]]":
    import uuid

    from bridge.inbound.schemes import PRESETS, decode_secret
    from bridge.inbound.signature import sign

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
