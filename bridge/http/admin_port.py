"""The admin port of both roles: /livez, /readyz, /startupz, /metrics.

Liveness depends only on the process's own tasks and event loop: an outage of the broker or of the
API must not cause a restart.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NoReturn, cast

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder

from bridge.http.listener_state import Limits
from bridge.http.messages import Request, Response, ResponseOrFuture, problem
from bridge.telemetry.log_format import dump_json
from bridge.telemetry.metrics import BridgeMetrics, Registry

Check = Callable[[], bool]
# Clients of this port are our own probes and scrapers, whose requests have no body.
LIMITS: Final = Limits(
    max_connections=64,
    max_header_bytes=16384,
    max_headers=100,
    max_body_bytes=4096,
    # For all connections together; leaves room for probes while a scrape is being answered.
    max_buffered_bytes=4 * 1024 * 1024,
    idle_timeout_seconds=15,
    body_timeout_seconds=10,
    keep_alive_seconds=75,
)
# The process counts as dead if its event loop has run no timer for this long.
MAX_SILENCE_SECONDS: Final = 10.0
# Interval of the measurements of the event loop's lag.
BEAT_SECONDS: Final = 0.5
# Encoding all metrics takes tens of milliseconds; the event loop can process messages after each
# part of this duration.
PART_SECONDS: Final = 0.002
# The last line that the OpenMetrics encoder writes.
_END: Final = b"# EOF\n"


class Health:
    """The state that the probes report; `ready` and `live` map names of checks to functions.

    /readyz also shows the `facts`, which have no influence on readiness.
    """

    def __init__(
        self, metrics: BridgeMetrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._last_beat = clock()
        self.is_draining = False
        self.ready: dict[str, Check] = {"not_draining": lambda: not self.is_draining}
        self.facts: dict[str, Callable[[], object]] = {}
        self.live: dict[str, Check] = {"event_loop": self._is_beating}
        metrics.ready.set_function(lambda: all(check() for check in self.ready.values()))

    async def beat(self) -> NoReturn:
        """Measure continuously how late the event loop runs a timer."""
        while True:
            before = self._clock()
            await asyncio.sleep(BEAT_SECONDS)
            self._last_beat = self._clock()
            self._metrics.loop_lag.observe(max(0.0, self._last_beat - before - BEAT_SECONDS))

    def _is_beating(self) -> bool:
        return self._clock() - self._last_beat < MAX_SILENCE_SECONDS


def admin_handler(health: Health, registry: Registry) -> Callable[[Request], ResponseOrFuture]:
    """Build the request handler of the admin port; a separate task answers /metrics."""
    pages: dict[str, Callable[[Request], ResponseOrFuture]] = {
        "/livez": lambda _: _probe(health.live, {}),
        "/readyz": lambda _: _probe(health.ready, health.facts),
        "/startupz": lambda _: _probe({}, {}),
        "/metrics": lambda request: asyncio.get_running_loop().create_task(
            _expose(request, registry)
        ),
    }

    def answer(request: Request) -> ResponseOrFuture:
        page = pages.get(request.path)
        if page is None:
            return problem(404, "nothing is here")
        if request.method not in {"GET", "HEAD"}:
            return problem(405, "only GET", Allow="GET, HEAD")
        return page(request)

    return answer


def _probe(checks: Mapping[str, Check], facts: Mapping[str, Callable[[], object]]) -> Response:
    results = {name: check() for name, check in checks.items()}
    healthy = all(results.values())
    body = {
        "status": "ok" if healthy else "failing",
        "checks": {name: "ok" if good else "failing" for name, good in results.items()},
        **{name: fact() for name, fact in facts.items()},
    }
    return Response(
        200 if healthy else 503, dump_json(body).encode(), {"content-type": "application/json"}
    )


class _NextMetrics:
    """A registry that yields as many of the remaining metrics as fit into `PART_SECONDS`."""

    def __init__(self, all_: Iterator[Metric]) -> None:
        self._all = all_
        self.is_last = False

    def collect(self) -> Iterator[Metric]:
        """Yield metrics until `PART_SECONDS` have passed or none is left."""
        end_at = time.perf_counter() + PART_SECONDS
        while time.perf_counter() < end_at:
            metric = next(self._all, None)
            if metric is None:
                self.is_last = True
                return
            yield metric


async def _expose(request: Request, registry: Registry) -> Response:
    try:
        encode, content_type = choose_encoder(request.header(b"accept") or "")
    except (TypeError, ValueError):
        # The client asked for a version that is not a number.
        encode, content_type = choose_encoder("")
    metrics = _NextMetrics(iter(registry.collect()))
    parts: list[bytes] = []
    while not metrics.is_last:
        parts.append(_write_part(metrics, encode).removesuffix(_END))
        await asyncio.sleep(0)
    if content_type.startswith("application/openmetrics-text"):
        parts.append(_END)
    return Response(200, b"".join(parts), {"content-type": content_type})


def _write_part(metrics: _NextMetrics, encode: Callable[[Registry], bytes]) -> bytes:
    # An encoder calls only `collect` on the registry.
    return encode(cast("Registry", metrics))
