"""Sends batches of spans to a collector with OpenTelemetry's exporter: OTLP, protobuf over HTTP."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from bridge.telemetry.tracing.otlp import SpanWriter
from bridge.telemetry.tracing.recorded import RecordedSpan

# For one batch, with all tries; of a try each step to the next byte has at most as long.
EXPORT_SECONDS: Final = 5.0
# What the OTLP specification puts behind a collector's address.
TRACES_PATH: Final = "/v1/traces"
SUCCESSES: Final = range(200, 300)
# Of an answer, whose body nobody needs. A connection with more to read is closed, not used again.
MAX_ANSWER_BYTES: Final = 65536


class Exporter:
    """OTLP over HTTP; calls `failed` with how many spans the collector did not take."""

    def __init__(self, endpoint: str, writer: SpanWriter, *, failed: Callable[[int], None]) -> None:
        base = endpoint.rstrip("/").removesuffix(TRACES_PATH)
        self._otlp = OTLPSpanExporter(
            base + TRACES_PATH, timeout=EXPORT_SECONDS, session=_BoundedSession()
        )
        self._writer = writer
        self._failed = failed

    def export(self, spans: Sequence[RecordedSpan]) -> None:
        """Export a batch, with tries again for `EXPORT_SECONDS`."""
        is_taken = False
        try:
            # The exporter takes no spans that are written already; what sends them does.
            answer = self._otlp._client.export(self._writer.write(spans))  # noqa: SLF001
            # It calls a redirect a success, and does not follow it.
            is_taken = answer.status_code in SUCCESSES
        finally:
            if not is_taken:
                self._failed(len(spans))

    def shutdown(self) -> None:
        """Close the connection, and end a wait for the next try."""
        self._otlp.shutdown()  # type: ignore[no-untyped-call]


class _BoundedSession(requests.Session):
    """Reads of an answer's body a bounded part: the exporter's own session would read all."""

    def request(self, *arguments: Any, **options: Any) -> requests.Response:  # noqa: ANN401
        """Send a request, and leave the body of its answer."""
        answer = super().request(*arguments, **(options | {"stream": True}))
        with answer:
            answer.raw.read(MAX_ANSWER_BYTES)
        return answer
