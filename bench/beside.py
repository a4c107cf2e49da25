"""Runs the worker with several settings at the same time, each with its own queue and API.

A slowdown of the machine affects all of them, so their ratios vary far less than those of
consecutive runs.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bench.api import Api
from bench.lineup import Contestant, Task
from bench.outbound import WARM_UP, check_posts
from bench.rig import Program, Rig
from bench.rounds import BenchError, Row
from bridge.config import ENV_PREFIX
from tests.otlp import Receiver, otlp_receiver

POLL_SECONDS: Final = 0.05
RUN_SECONDS: Final = 600
SPANS_PER_MESSAGE: Final = 2
RATIO = f"{ENV_PREFIX}TRACING__SAMPLE_RATIO"
ENDPOINT = f"{ENV_PREFIX}TRACING__OTLP_ENDPOINT"


@dataclass
class CountingReceiver(Receiver):
    """Counts spans without keeping them."""

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
    """Run the receiver if the environment has a sample ratio, and add its address."""
    if RATIO not in environ:
        yield environ
        return
    with otlp_receiver(receiver):
        yield {**environ, ENDPOINT: receiver.url}


@dataclass(frozen=True, slots=True)
class Share:
    """Figures of a worker, including its exporter thread, while all workers ran."""

    messages: int
    cpu_rate: float
    peak_mib: float
    spans: int


@dataclass(frozen=True, slots=True)
class _Mark:
    messages: int
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class _Worker:
    contestant: Contestant
    queue: str
    api: Api
    program: Program

    def look(self) -> _Mark:
        return _Mark(self.api.count(), self.program.usage().cpu_seconds)


def drain_beside(
    rig: Rig, contestants: Sequence[Contestant], *, in_flight: int, messages: int
) -> dict[str, Row]:
    """Fill all queues, start all workers, and measure from when all are warm until one is done.

    Raises BenchError if a message is not POSTed exactly once, or if a span is missing.
    """
    receivers = [CountingReceiver() for _ in contestants]
    # Start all receivers before the first worker.
    for one in contestants:
        rig.queues.make_outbound(messages, queue=_queue_of(one))
    with ExitStack() as apis:
        with ExitStack() as stack:
            workers = [
                stack.enter_context(_running(rig, one, receiver, apis, in_flight=in_flight))
                for one, receiver in zip(contestants, receivers, strict=True)
            ]
            begun, ended = _measure(workers, messages)
            for worker in workers:
                worker.program.settle()
            peaks = [worker.program.usage().peak_mib for worker in workers]
        rows = {}
        # A worker exports its last spans when it ends.
        for worker, receiver, peak in zip(workers, receivers, peaks, strict=True):
            _check(rig, worker, receiver, messages)
            first, last = begun[worker.queue], ended[worker.queue]
            rate = (last.messages - first.messages) / (last.cpu_seconds - first.cpu_seconds)
            share = Share(last.messages - first.messages, rate, peak, receiver.count)
            rows[worker.contestant.name] = asdict(share)
    return rows


@contextmanager
def _running(
    rig: Rig,
    contestant: Contestant,
    receiver: CountingReceiver,
    apis: ExitStack,
    *,
    in_flight: int,
) -> Iterator[_Worker]:
    queue = _queue_of(contestant)
    api = apis.enter_context(rig.api())
    task = Task(amqp_url=rig.broker.url, api_url=api.url("http"), in_flight=in_flight)
    own = {f"{ENV_PREFIX}WORKER__QUEUE": queue}
    with traced_to(receiver, contestant.environ) as environ:
        placed = replace(contestant, environ={**environ, **own})
        with rig.running(placed, task) as program:
            yield _Worker(contestant, queue, api, program)


def _queue_of(contestant: Contestant) -> str:
    return f"bench.{contestant.name.replace(' ', '-')}"


def _measure(
    workers: Sequence[_Worker], messages: int
) -> tuple[dict[str, _Mark], dict[str, _Mark]]:
    """Return the counts when all workers were warm, and when the first was done."""
    deadline = time.monotonic() + RUN_SECONDS
    begun: dict[str, _Mark] = {}
    ended: dict[str, _Mark] = {}
    while True:
        marks = {worker.queue: worker.look() for worker in workers}
        counts = [mark.messages for mark in marks.values()]
        if not begun and min(counts) >= messages * WARM_UP:
            begun = marks
        if not ended and max(counts) >= messages:
            if not begun:
                raise BenchError(
                    f"a worker finished before all were warm: {counts}. Use more messages."
                )
            ended = marks
        if min(counts) >= messages:
            return begun, ended
        if time.monotonic() > deadline:
            raise BenchError(f"the workers POSTed {counts} of {messages} messages")
        time.sleep(POLL_SECONDS)


def _check(rig: Rig, worker: _Worker, receiver: CountingReceiver, messages: int) -> None:
    posts = worker.api.posts(messages)
    check_posts(rig, worker.contestant, posts, messages, queue=worker.queue)
    wanted = SPANS_PER_MESSAGE * sum(post.is_sampled for post in posts)
    if receiver.count != wanted:
        raise BenchError(
            f"{worker.contestant.name}: of {wanted} spans {receiver.count} were exported"
        )
