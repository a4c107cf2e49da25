"""Connect to a name with several addresses, of which some may be silent (RFC 8305).

The event loop alone tries one address after another, so one that never answers would use up the
whole time for connecting.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final, TypeVar

import aiohappyeyeballs

Protocol = TypeVar("Protocol", bound=asyncio.BaseProtocol)

# RFC 8305, section 5: the recommended Connection Attempt Delay.
ATTEMPT_DELAY_SECONDS: Final = 0.25
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

    After a quarter of a second without an answer the next address is tried beside it, in the order
    of the system's resolver. There is no deadline of its own: the caller sets one. Raises OSError,
    and UnicodeError for a host that cannot be a name.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    try:
        connected = await aiohappyeyeballs.start_connection(
            addresses,
            happy_eyeballs_delay=ATTEMPT_DELAY_SECONDS,
            interleave=FIRST_FAMILY_COUNT,
        )
    except RuntimeError as error:
        # uvloop raises it for a file descriptor that it still holds.
        raise OSError("no socket to connect with") from error
    return await loop.create_connection(
        protocol_factory,
        sock=connected,
        ssl=tls,
        server_hostname=None if tls is None else server_hostname or host,
    )
