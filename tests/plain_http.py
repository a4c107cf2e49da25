"""TLS settings for HTTP clients that only use plain HTTP on loopback."""

import ssl
from typing import Final

# Without certificate authorities, which each httpx client would load in 45 ms of CPU time.
NO_AUTHORITIES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
