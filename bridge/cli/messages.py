"""`sms-bridge send` and `listen`: publish a request, print inbound events."""

import asyncio
import json
import sys
from typing import Annotated, Any

import typer

from bridge.admin.listen import listen as subscribe
from bridge.admin.send import send_request
from bridge.cli.options import ConfigFile, examples, read_settings, until_interrupted
from bridge.cli.output import explain_unwritable
from bridge.config import Settings
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
    to: Annotated[str, typer.Option(help="Recipient: + and digits.")],
    text: Annotated[str, typer.Option(help="Text of the message.")],
    sender: Annotated[
        str | None, typer.Option("--from", help="Sender. Default: worker.default_from.")
    ] = None,
    urgent: Annotated[
        bool,
        typer.Option("--urgent", help="Publish the request to the urgent queue, ahead of others."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the outcome.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the outcome.", min=0)] = 60,
    config: ConfigFile = None,
) -> None:
    """Publish one send request and print its message id.

    With --wait, the command also prints the outcome. It then exits with 1 if the message became a
    dead letter, or if no outcome arrived in time.
    """
    settings = read_settings(context, config)
    request = {"to": to, "from": sender, "text": text}
    seconds = timeout if wait else None
    outcome = asyncio.run(_send(settings, request, is_urgent=urgent, seconds=seconds))
    if outcome is not None:
        typer.echo(json.dumps(outcome))
        sys.exit(EXIT_CLEAN if outcome.get("outcome") == "sent" else EXIT_FAILED)


async def _send(
    settings: Settings, request: dict[str, str | None], *, is_urgent: bool, seconds: float | None
) -> dict[str, Any] | None:
    wants_outcome = seconds is not None
    sending = send_request(settings, request, is_urgent=is_urgent, wants_outcome=wants_outcome)
    async with sending as sent:
        try:
            typer.echo(sent.message_id)
        except OSError as error:
            why = explain_unwritable(error)
            stored = f"the request {sent.message_id} is stored, and standard output {why}"
            raise BridgeError(stored) from None
        if seconds is not None:
            async for why in sent.wait(seconds):
                typer.echo(f"sms-bridge: still waiting: {why}", err=True)
        return sent.outcome


@app.command(
    epilog=examples(
        "sms-bridge listen",
        "sms-bridge listen --count 1",
        "sms-bridge listen | jq -r .body.data.text",
    )
)
def listen(
    context: typer.Context,
    *,
    count: Annotated[
        int | None, typer.Option("--count", help="End after this many events.", min=1)
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Print inbound events as they arrive, one JSON object per line, until Ctrl-C.

    The command prints a line to standard error when it is ready, and then receives every event.
    Other subscribers still receive every event.
    """
    settings = read_settings(context, config)
    until_interrupted(lambda: asyncio.run(_listen(settings, count)))


async def _listen(settings: Settings, count: int | None) -> None:
    async with subscribe(settings) as events:
        typer.echo(f"listening on the exchange {settings.webhook.exchange}", err=True)
        printed = 0
        async for event in events:
            typer.echo(json.dumps(event))
            printed += 1
            if printed == count:
                return
