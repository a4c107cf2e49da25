"""`sms-bridge send` and `listen`: a request to the worker, events of the webhook receiver."""

import json
import sys
from typing import Annotated

import typer

from bridge.cli.options import ConfigFile, examples, read_settings, until_interrupted
from bridge.cli.output import explain_unwritable
from bridge.errors import EXIT_CLEAN, EXIT_FAILED, BridgeError

app = typer.Typer()


@app.command(
    epilog=examples(
        "sms-bridge send --to +491713920001 --from Acme --text Hi",
        "sms-bridge send --to +491713920001 --from Acme --text Hi --wait",
    )
)
def send(  # noqa: PLR0913  an option each
    context: typer.Context,
    *,
    to: Annotated[str, typer.Option(help="The number: + and digits.")],
    text: Annotated[str, typer.Option(help="The text.")],
    sender: Annotated[str | None, typer.Option("--from", help="The sender's name.")] = None,
    urgent: Annotated[
        bool, typer.Option("--urgent", help="Publish it to the urgent queue: it passes the others.")
    ] = False,
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

    from bridge.admin.send import send as send_request

    def published(message_id: str) -> None:
        try:
            typer.echo(message_id)
        except OSError as error:
            why = explain_unwritable(error)
            stored = f"the request {message_id} is stored, and standard output {why}"
            raise BridgeError(stored) from None

    settings = read_settings(context, config)
    outcome = asyncio.run(
        send_request(
            settings,
            {"to": to, "from": sender, "text": text},
            is_urgent=urgent,
            wait_seconds=timeout if wait else None,
            published=published,
            waiting=lambda why: typer.echo(f"sms-bridge: still waiting: {why}", err=True),
        )
    )
    if outcome is not None:
        typer.echo(json.dumps(outcome))
        sys.exit(EXIT_CLEAN if outcome.get("outcome") == "sent" else EXIT_FAILED)


@app.command(epilog=examples("sms-bridge listen", "sms-bridge listen | jq -r .body.data.text"))
def listen(context: typer.Context, config: ConfigFile = None) -> None:
    """Print inbound events as they come, a line of JSON each, until Ctrl-C.

    It says on standard error when it is ready: what comes from then on is printed. It creates
    nothing that stays, and ends with 1 when there is no such exchange.
    """
    import asyncio

    from bridge.admin.listen import listen as listen_to_events

    def listening(exchange: str) -> None:
        typer.echo(f"listening on the exchange {exchange}", err=True)

    async def show() -> None:
        async for event in listen_to_events(settings, listening=listening):
            typer.echo(json.dumps(event))

    settings = read_settings(context, config)
    until_interrupted(lambda: asyncio.run(show()))
