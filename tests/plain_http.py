"""TLS settings for HTTP clients that only speak plain HTTP on loopback."""

import ssl
from typing import Final

# It trusts nobody. By default each httpx client reads all certificate authorities, which takes
# 45 ms of CPU time.
NO_AUTHORITIES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
