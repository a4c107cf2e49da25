"""The key by which messages are kept in order."""

import json

from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.worker.envelope import ORDERING_KEY


def ordering_key(properties: Properties, body: Body) -> str:
    """Return the key that the publisher named, else the recipient's number; never raises.

    What cannot be read has the empty key: whoever sends it finds it invalid.
    """
    named = (properties.headers or {}).get(ORDERING_KEY)
    if isinstance(named, bytes | bytearray):
        named = bytes(named).decode("utf-8", "replace")
    if isinstance(named, str) and named:
        return named
    try:
        recipient = json.loads(body)["to"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return recipient if isinstance(recipient, str) else ""
