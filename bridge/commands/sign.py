"""`sms-bridge sign`: the headers that a webhook of the SMS service would have."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.commands.options import ConfigFile, examples, read_settings
from bridge.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.config import Settings

app = typer.Typer()


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
