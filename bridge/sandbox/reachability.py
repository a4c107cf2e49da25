"""Whether a broker answers, and which one the environment names."""

import json
import socket
import ssl
import urllib.request
from collections.abc import Mapping
from contextlib import suppress

from yarl import URL

URL_VARIABLE = "SMS_BRIDGE_RABBITMQ__URL"

# How long a handshake may take before it counts as failed.
HANDSHAKE_SECONDS = 3


def find_broker(environ: Mapping[str, str]) -> str | None:
    """Return the broker that the environment names, if it is one that answers."""
    value = environ.get(URL_VARIABLE, "").strip()
    for url in _split(value):
        with suppress(ValueError):
            if shakes_hands(URL(url)):
                return url
    return None


def _split(value: str) -> list[str]:
    # The setting is one URL, or a list of them in JSON.
    if not value.startswith("["):
        return [value] if value else []
    with suppress(ValueError):
        return [str(url) for url in json.loads(value)]
    return []


def shakes_hands(url: URL) -> bool:
    """Open a connection and see whether the other side answers as an AMQP 0-9-1 broker does."""
    secure = url.scheme == "amqps"
    address = (url.host or "localhost", url.port or (5671 if secure else 5672))
    try:
        with socket.create_connection(address, HANDSHAKE_SECONDS) as plain:
            if not secure:
                return _greets(plain)
            # The certificate is checked by the client that sends a password; here nobody does.
            context = ssl._create_unverified_context()  # noqa: S323, SLF001
            with context.wrap_socket(plain, server_hostname=address[0]) as wrapped:
                return _greets(wrapped)
    except OSError:
        return False


def _greets(connection: socket.socket) -> bool:
    connection.sendall(b"AMQP\x00\x00\x09\x01")
    # A method frame on channel 0; a broker that speaks another version answers "AMQP...".
    return connection.recv(3) == b"\x01\x00\x00"


def serves(url: str) -> bool:
    """Ask the management API, as the user that a new broker has, and see whether it answers."""
    request = urllib.request.Request(url)  # noqa: S310  always http on 127.0.0.1
    request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=HANDSHAKE_SECONDS) as answer:
            return bool(answer.status == 200)  # noqa: PLR2004
    except OSError:
        return False
