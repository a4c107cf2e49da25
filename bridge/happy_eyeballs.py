"""Connects to a host that may have several addresses (Happy Eyeballs, RFC 8305).

The event loop itself tries one address after the other, so an address that never answers would use
up the whole connect timeout. This is the only module that uses aiohappyeyeballs.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final, TypeVar

import aiohappyeyeballs

Protocol = TypeVar("Protocol", bound=asyncio.BaseProtocol)

# RFC 8305, section 5: the recommended Connection Attempt Delay.
CONNECTION_ATTEMPT_DELAY_SECONDS: Final = 0.25
# RFC 8305, section 4: the First Address Family Count. IPv6 and IPv4 addresses alternate.
FIRST_FAMILY_COUNT: Final = 1


async def create_connection(
    protocol_factory: Callable[[], Protocol],
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
) -> tuple[asyncio.Transport, Protocol]:
    """Connect to the first address of a host that answers, with a TLS handshake if `tls` is given.

    If an address has not answered after a quarter of a second, the next one is tried in parallel,
    in the resolver's order. The caller sets the deadline. Raises OSError, and UnicodeError for an
    invalid host name.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    try:
        connected = await aiohappyeyeballs.start_connection(
            addresses,
            happy_eyeballs_delay=CONNECTION_ATTEMPT_DELAY_SECONDS,
            interleave=FIRST_FAMILY_COUNT,
        )
    except RuntimeError as error:
        # uvloop raises this for a file descriptor that it still uses.
        raise OSError("no socket to connect with") from error
    return await loop.create_connection(
        protocol_factory,
        sock=connected,
        ssl=tls,
        server_hostname=None if tls is None else server_hostname or host,
    )
