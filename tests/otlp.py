"""An OTLP receiver that records spans, which it accepts over HTTP as protobuf."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

# Limits how long an unanswered request waits.
HANG_SECONDS = 30.0


@dataclass(frozen=True)
class Received:
    """A span with its resource. Ids are in hex, times in seconds."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    started_at: float
    ended_at: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    links: Sequence[tuple[str, str]] = ()
    is_error: bool = False

    def is_named_by(self, traceparent: str) -> bool:
        """Whether a traceparent names this span."""
        return traceparent.split("-")[1:3] == [self.trace_id, self.span_id]


@dataclass
class Receiver:
    """The received spans, and the status of each answer. With None, it does not answer."""

    url: str = ""
    status: int | None = 200
    requests: int = 0
    paths: set[str] = field(default_factory=set)
    spans: list[Received] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)

    def take(self, path: str, body: bytes) -> None:
        """Read a request, and record its spans."""
        self.requests += 1
        self.paths.add(path)
        self.bodies.append(body)
        if self.status == 200:
            self.spans += read_spans(ExportTraceServiceRequest.FromString(body))


def read_spans(request: ExportTraceServiceRequest) -> list[Received]:
    return [
        _read(span, _attributes(of_resource.resource.attributes))
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


@contextmanager
def otlp_receiver(given: Receiver | None = None) -> Iterator[Receiver]:
    """Run a receiver in its own threads."""
    receiver = given or Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Read a request, and answer with the receiver's status."""
            receiver.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            if receiver.status is None:
                receiver.let_go.wait(HANG_SECONDS)
                return
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.let_go.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _read(span: Span, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        started_at=span.start_time_unix_nano / 1e9,
        ended_at=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        resource=resource,
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "") for pair in pairs}
