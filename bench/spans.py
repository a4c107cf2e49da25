"""A receiver of spans that does little work, because it shares the cores with the workers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bridge.config import ENV_PREFIX
from tests.otlp import Receiver, otlp_receiver

RATIO = f"{ENV_PREFIX}TRACING__SAMPLE_RATIO"
ENDPOINT = f"{ENV_PREFIX}TRACING__OTLP_ENDPOINT"


@dataclass
class CountingReceiver(Receiver):
    """Counts spans and keeps none."""

    count: int = 0

    def take(self, path: str, body: bytes) -> None:  # noqa: ARG002  all come to one path
        """Count the spans of a request."""
        request = ExportTraceServiceRequest.FromString(body)
        self.count += sum(
            len(of_scope.spans)
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
        )


@contextmanager
def traced_to(
    receiver: CountingReceiver, environ: Mapping[str, str]
) -> Iterator[Mapping[str, str]]:
    """Run the receiver if the worker's environment has a sample ratio, and add its address."""
    if RATIO not in environ:
        yield environ
        return
    with otlp_receiver(receiver):
        yield {**environ, ENDPOINT: receiver.url}
