"""The admin port of both roles: /livez, /readyz, /startupz, /metrics.

Liveness looks at our own tasks and event loop only: an outage of the broker or of the API must
not restart anything.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bridge.metrics import BridgeMetrics, Registry

Check = Callable[[], bool]
MAX_SILENCE_SECONDS: Final = 10.0
BEAT_SECONDS: Final = 0.5


class Health:
    """What the probes ask; `ready` and `live` map the name of a check to its function."""

    def __init__(self, metrics: BridgeMetrics) -> None:
        self._metrics = metrics
        self._last_beat = time.monotonic()
        self.is_draining = False
        self.ready: dict[str, Check] = {"not_draining": lambda: not self.is_draining}
        self.live: dict[str, Check] = {"event_loop": self._is_beating}
        metrics.ready.set_function(lambda: all(check() for check in self.ready.values()))

    async def beat(self) -> NoReturn:
        """Measure for ever how late the event loop wakes a timer."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT_SECONDS)
            self._last_beat = time.monotonic()
            self._metrics.loop_lag.observe(max(0.0, self._last_beat - before - BEAT_SECONDS))

    def _is_beating(self) -> bool:
        return time.monotonic() - self._last_beat < MAX_SILENCE_SECONDS


def admin_app(health: Health, registry: Registry) -> Starlette:
    """Make the application of the admin port."""
    return Starlette(
        routes=[
            Route("/livez", lambda request: _answer(request, health.live)),
            Route("/readyz", lambda request: _answer(request, health.ready)),
            Route("/startupz", lambda request: _answer(request, {})),
            Route("/metrics", lambda request: _expose(request, registry)),
        ]
    )


def _answer(_request: Request, checks: Mapping[str, Check]) -> Response:
    results = {name: check() for name, check in checks.items()}
    healthy = all(results.values())
    body = {
        "status": "ok" if healthy else "failing",
        "checks": {name: "ok" if good else "failing" for name, good in results.items()},
    }
    return JSONResponse(body, status_code=200 if healthy else 503)


def _expose(request: Request, registry: Registry) -> Response:
    try:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
    except (TypeError, ValueError):
        # A version that is no number.
        encode, content_type = choose_encoder("")
    return Response(encode(registry), media_type=content_type)
