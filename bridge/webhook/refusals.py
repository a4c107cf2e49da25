"""Refuses requests that are not webhooks, and counts and logs the requests of strangers."""

from collections.abc import Collection, Mapping
from typing import Final

from bridge.http.messages import Headers, Response, problem
from bridge.http.occupancy import Eviction
from bridge.telemetry.logs import CountedLog, Log
from bridge.webhook.metrics import EventOutcome, WebhookMetrics

log = Log(__name__)

UNMATCHED: Final = "unmatched"
RETRY_AFTER_SECONDS: Final = 5

NOT_FOUND: Final = problem(404, "nothing is here")
NOT_ALLOWED: Final = problem(405, "only POST", Allow="POST")
NOT_ALLOWED_BESIDE_GET: Final = problem(405, "only POST and GET", Allow="POST, GET")
NOT_ALLOWED_HEALTH: Final = problem(405, "only GET and HEAD", Allow="GET, HEAD")
HEALTHY: Final = Response(200, for_anybody=True)
NOT_SIGNED: Final = problem(401, "the signature is not valid")
# Replaces NOT_SIGNED where a 401 is final for the service.
UNSIGNED: Final = problem(503, "the signature is not valid", Retry_After=str(RETRY_AFTER_SECONDS))
TRY_LATER: Final = problem(503, "try again later", Retry_After=str(RETRY_AFTER_SECONDS))

# Outcome of a webhook that never reached the receiver, by the status of the response.
_OUTCOMES: Final[dict[int, EventOutcome]] = {
    401: "invalid_signature",
    413: "too_large",
    503: "overloaded",
}


class RefusedError(Exception):
    """Ends a webhook with this response."""

    def __init__(self, response: Response, outcome: EventOutcome, why: str | None = None) -> None:
        super().__init__(outcome)
        self.response = response
        self.outcome: EventOutcome = outcome
        self.why = why


class Refusals:
    """Refuses requests by their header alone, and counts every refusal.

    Strangers can cause any number of refusals, so the log aggregates them: few lines, with counts.
    """

    def __init__(
        self,
        signature_headers: Mapping[str, str],
        *,
        metrics: WebhookMetrics,
        get_paths: Collection[str] = (),
        unsigned_paths: Collection[str] = (),
        health_path: str | None = None,
    ) -> None:
        # By the path of each endpoint.
        self._headers = {path: name.lower().encode() for path, name in signature_headers.items()}
        self._get_paths = get_paths
        # Paths where a webhook without a signature is answered with UNSIGNED.
        self._unsigned_paths = unsigned_paths
        self._health_path = health_path
        self._metrics = metrics
        self._refused = CountedLog(log, "webhook")
        self._evicted = CountedLog(log, "connections_evicted")

    def judge(self, method: str, path: str, headers: Headers) -> Response | None:
        """Refuse by the header alone, so that no body of a stranger is buffered."""
        signature_header = self._headers.get(path)
        if signature_header is None:
            if path != self._health_path:
                return NOT_FOUND
            return HEALTHY if method in {"GET", "HEAD"} else NOT_ALLOWED_HEALTH
        if method != "POST":
            if path not in self._get_paths:
                return NOT_ALLOWED
            if method != "GET":
                return NOT_ALLOWED_BESIDE_GET
        # A loop, because a generator is slower, and this runs twice for every webhook.
        for name, _ in headers:
            if name == signature_header:
                return None
        return UNSIGNED if path in self._unsigned_paths else NOT_SIGNED

    def count(self, method: str | None, path: str | None, response: Response) -> None:
        """Count a request that was refused by its header, or whose body never arrived."""
        status = response.status
        route = path if path in self._headers else None
        if route is None and path is not None and path == self._health_path:
            self.count_request(method, path, status)
            return
        self.count_request(method, route or UNMATCHED, status)
        if route is None or status == NOT_ALLOWED.status:
            return
        outcome = _OUTCOMES.get(status, "incomplete")
        why = None
        if response is NOT_SIGNED or response is UNSIGNED:
            outcome, why = "invalid_signature", "missing"
            self._metrics.verifications.labels(why, "none").inc()
        self._metrics.events.labels("unknown", outcome).inc()
        self.log(route, outcome, why, status)

    def count_request(self, method: str | None, route: str, status: int) -> None:
        """Count the response to a request."""
        label = "POST" if method == "POST" else "other"
        self._metrics.http_requests.labels(route, label, str(status)).inc()

    def log(self, path: str, outcome: EventOutcome, why: str | None, status: int) -> None:
        """Log a refused, unverified request, or count it for a later line."""
        route = path if len(self._headers) > 1 else None
        self._refused.info(route=route, outcome=outcome, why=why, status=status)

    def count_eviction(self, cause: Eviction) -> None:
        """Count a connection that was closed to make room for another."""
        self._metrics.evictions.labels(cause).inc()
        self._evicted.info(cause=cause)

    def flush_log(self) -> None:
        """Log the refusals and evictions that were counted since their last line."""
        self._refused.flush()
        self._evicted.flush()
