"""Warns when every webhook of an endpoint is refused: a wrong secret, address or clock.

Strangers can post refused webhooks too, so the warning comes at most once an hour, and only for an
endpoint at which nothing was verified for an hour.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bridge.errors import SignatureFault
from bridge.telemetry.log_format import utc_text
from bridge.telemetry.logs import Log
from bridge.webhook.endpoint import Endpoint

log = Log(__name__)

QUIET_SECONDS: Final = 3600.0
_CLOCK: Final = "compare this computer's clock with the service's"
_SETTINGS: Final = (
    "compare the secret with the one at the service{public_url}; "
    "something on the way must not rewrite bodies"
)
_ADDRESS: Final = ", and public_url, to the letter, with the address that it is told to call"
_SCHEME: Final = "compare preset and signature with what the service sends"
# Without `missing`, which is mostly strangers, and `ambiguous`, whose secret was right.
_REMEDIES: Final[Mapping[SignatureFault, str]] = {
    "mismatch": _SETTINGS,
    "malformed": _SCHEME,
    "stale": _CLOCK,
    "future": _CLOCK,
}


@dataclass(slots=True)
class _State:
    """Refused webhooks of one endpoint since the last genuine one."""

    verified_at: float = -QUIET_SECONDS
    refused: int = 0
    refused_at: float = 0.0
    told_at: float = -QUIET_SECONDS
    why: SignatureFault = "mismatch"


class Trust:
    """Follows for each endpoint whether any webhook is verified; `clock` is monotonic."""

    def __init__(
        self, endpoints: Iterable[Endpoint], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._states = {endpoint.setting: _State() for endpoint in endpoints}

    def note_verified(self, endpoint: Endpoint) -> None:
        """Record a genuine webhook."""
        state = self._states[endpoint.setting]
        state.verified_at = self._clock()
        state.refused = 0

    def note_refused(self, endpoint: Endpoint, why: SignatureFault) -> None:
        """Record a refused webhook; warn if none was genuine for an hour."""
        if why not in _REMEDIES:
            return
        state, now = self._states[endpoint.setting], self._clock()
        state.refused += 1
        state.refused_at, state.why = now, why
        is_quiet = now - state.verified_at >= QUIET_SECONDS
        if is_quiet and now - state.told_at >= QUIET_SECONDS:
            state.told_at = now
            log.warning(
                "webhooks_refused",
                endpoint=endpoint.setting,
                why=why,
                refused=state.refused,
                remedy=_remedy(endpoint, why),
            )

    def facts(self) -> list[dict[str, object]]:
        """Return the endpoints at which all webhooks of the last hour were refused."""
        now = self._clock()
        return [
            {
                "endpoint": setting,
                "why": state.why,
                "refused": state.refused,
                "last": utc_text(time.time() - (now - state.refused_at)),
            }
            for setting, state in self._states.items()
            if state.refused and now - state.refused_at < QUIET_SECONDS <= now - state.verified_at
        ]


def _remedy(endpoint: Endpoint, why: SignatureFault) -> str:
    public_url = _ADDRESS if endpoint.scheme.url is not None else ""
    return _REMEDIES[why].format(public_url=public_url)
