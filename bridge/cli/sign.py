"""`sms-bridge sign`: sign a body as the SMS service signs its webhooks."""

import shlex
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from bridge.cli.options import ConfigFile, examples, read_settings
from bridge.config import Settings
from bridge.errors import ConfigError, InvalidSignatureError
from bridge.webhook.endpoint import Endpoint
from bridge.webhook.signatures.verify import sign as sign_webhook

app = typer.Typer()


@app.command(
    epilog=examples(
        "sms-bridge sign event.json",
        "sms-bridge sign event.json --curl http://localhost:8080/webhooks",
        "sms-bridge sign event.json --path /webhooks/sinch",
    )
)
def sign(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="File with the body to sign. Default: standard input.")
    ] = None,
    curl: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Print a curl command that sends the body to this URL."),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(
            help="Path of the endpoint, if there are several. Default: the path of --curl."
        ),
    ] = None,
    content_type: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="Media type of the body. Some schemes sign forms differently.",
        ),
    ] = "application/json",
    config: ConfigFile = None,
) -> None:
    """Sign a body as an endpoint's service would, and print the headers, one per line."""
    body = sys.stdin.buffer.read() if file is None else _read(file)
    endpoint = _choose(read_settings(context, config), path, curl)
    headers, query = _sign(endpoint, body, content_type)
    if curl is None:
        for name, value in headers:
            typer.echo(f"{name}: {value}")
        return
    url = curl + (f"?{query.decode()}" if query else "")
    parts = ["curl", "-sS", "-i", "-X", "POST", url, "-H", f"Content-Type: {content_type}"]
    for name, value in headers:
        parts += ["-H", f"{name}: {value}"]
    typer.echo(shlex.join([*parts, "--data-binary", f"@{file or '-'}"]))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None


def _choose(settings: Settings, path: str | None, url: str | None) -> Endpoint:
    keys = {one.path: key for key, one in settings.webhook.endpoints_by_key.items()}
    wanted = path
    if path is None:
        of_url = "" if url is None else urlsplit(url).path
        # The public URL of the only endpoint may have another path, behind a proxy.
        wanted = of_url if of_url in keys or len(keys) > 1 else next(iter(keys))
    if wanted not in keys:
        raise ConfigError(f"--path: must be the path of an endpoint: {', '.join(keys)}")
    key = keys[wanted]
    return Endpoint(settings.webhook.endpoints_by_key[key], key=key)


def _sign(
    endpoint: Endpoint, body: bytes, content_type: str
) -> tuple[Sequence[tuple[str, str]], bytes]:
    if endpoint.scheme.algorithm == "ed25519":
        raise ConfigError(
            f"{endpoint.path}: its secret is the service's public key, which cannot sign; "
            "let the service send a webhook"
        )
    try:
        signed = sign_webhook(
            endpoint.scheme,
            endpoint.keys[0],
            body,
            now=time.time(),
            event_id=f"evt_{uuid.uuid4().hex}",
            content_type=content_type,
        )
    except InvalidSignatureError:
        raise ConfigError(
            f"{endpoint.path}: the receiver would refuse this body with any signature; according "
            "to its documentation, the service does not send it"
        ) from None
    return signed.headers, signed.query
