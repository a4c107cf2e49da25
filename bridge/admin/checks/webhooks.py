"""Whether the receiver on this computer verifies anything of what its services send."""

from typing import Final

from bridge.admin.admin_port import local_port, open_client, read_health
from bridge.admin.checks.set_up import SetUp
from bridge.admin.finding import Finding
from bridge.errors import BridgeError

_CLOCK: Final = "compare this computer's clock with the service's"
_FIXES: Final = {
    "mismatch": "compare {endpoint}.secret_files with the secret at the service, and public_url, "
    "where its scheme signs the address, with the address that it calls",
    "malformed": "compare {endpoint}.preset and .signature with what the service sends",
    "stale": _CLOCK,
    "future": _CLOCK,
}


async def check_webhooks(set_up: SetUp) -> list[Finding]:
    """Ask the receiver that listens on the admin port here; none that does is no finding."""
    port = local_port(set_up.settings.admin)
    if "webhook" not in set_up.roles or port.port == 0:
        return []
    try:
        async with open_client() as client:
            health = await read_health(client, port)
    except BridgeError:
        return []
    refused = () if health.webhook is None else health.webhook.refused
    return [
        Finding(
            one.endpoint,
            "warn",
            f"every webhook of the last hour was refused, {one.refused} of them ({one.why})",
            _FIXES.get(one.why, _FIXES["mismatch"]).format(endpoint=one.endpoint),
        )
        for one in refused
    ]
