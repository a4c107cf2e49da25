"""By what messages are kept in order, and in which lane they wait."""

import json
import zlib

from bridge.amqp.properties import Properties
from bridge.amqp.wire import Body
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


def lane_of(key: str, lanes: int) -> int:
    """Return the lane of a key, from 0; every worker and every version has to find the same."""
    return zlib.crc32(key.encode("utf-8", "surrogatepass")) % lanes
