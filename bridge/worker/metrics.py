"""The Prometheus metrics of the worker."""

from collections.abc import Sequence
from typing import Final, get_args

from bridge.telemetry.metrics import AGE_SECONDS, MetricSet, Registry
from bridge.worker.delivery import WaitCause
from bridge.worker.fates import (
    DeliveryOutcome,
    FinalOutcome,
    PauseReason,
    ReleaseReason,
    Result,
    RetryReason,
    WorkersDeadReason,
)
from bridge.worker.request import Encoding

# Upper bounds of buckets.
HTTP_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30)
WORK_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# Few buckets, because there is one histogram per cause; the sums matter most.
WAIT_SECONDS: Final = (0.1, 1, 10)
ATTEMPTS: Final = (1, 2, 3, 5, 8, 13, 21)

PROCESSED: Final[Sequence[tuple[DeliveryOutcome, str]]] = (
    ("sent", "none"),
    *(("retried", reason) for reason in get_args(RetryReason)),
    *(("dead", reason) for reason in get_args(WorkersDeadReason)),
    *(("released", reason) for reason in get_args(ReleaseReason)),
    ("dropped", "duplicate"),
)
# Any other status counts as `other`.
PROVIDER_CODES: Final = frozenset(
    (
        *(200, 201, 202, 204, 400, 401, 402, 403, 404, 408, 409),
        *(413, 415, 422, 429, 500, 502, 503, 504),
    )
)


class WorkerMetrics(MetricSet):
    """The Prometheus metrics of the worker.

    `error_codes`: the API's error codes that have a label of their own; any other counts as
    `other`.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        queue: str,
        urgent_queue: str | None = None,
        retry_queues: Sequence[str],
        dead: str,
        error_codes: Sequence[str] = (),
    ) -> None:
        super().__init__(registry)
        self._error_codes = frozenset(error_codes)
        self._flow(queue, (queue,) if urgent_queue is None else (queue, urgent_queue))
        self._provider([*error_codes, "other"])
        self._state(queue, urgent_queue, retry_queues, dead)
        self._coordination()

    def _flow(self, queue: str, queues: Sequence[str]) -> None:
        self.received = self._counter(
            "sms_bridge_worker_messages_received_total",
            "Deliveries that the worker has received from RabbitMQ.",
            ("queue", "redelivered"),
            [(one, again) for one in queues for again in ("true", "false")],
        )
        self.processed = self._counter(
            "sms_bridge_worker_messages_processed_total",
            "Deliveries that were settled or released, by outcome and reason.",
            ("queue", "outcome", "reason"),
            [(one, *pair) for one in queues for pair in PROCESSED],
        )
        self.retry_copies = self._counter(
            "sms_bridge_worker_ladder_messages_total",
            "Copies that this worker has stored in retry queues or received back from them.",
            ("queue", "event"),
            [(one, event) for one in queues for event in ("stored", "returned")],
        )
        self.in_progress = self._gauge(
            "sms_bridge_worker_messages_in_progress",
            "Deliveries that the worker has received and not yet settled.",
            ("queue",),
            [queue],
        )
        self.concurrency_limit = self._gauge(
            "sms_bridge_worker_concurrency_limit",
            "Maximum number of requests in flight. With `worker.concurrency: auto`, it varies.",
            ("queue",),
            [queue],
        )
        self.processing_duration = self._histogram(
            "sms_bridge_worker_processing_duration_seconds",
            "Time from a delivery to its ack, in seconds.",
            WORK_SECONDS,
            ("queue", "outcome"),
            [(one, outcome) for one in queues for outcome in get_args(DeliveryOutcome)],
        )
        self.wait_duration = self._histogram(
            "sms_bridge_worker_wait_duration_seconds",
            "Time that deliveries waited in this worker, in seconds, by cause of the wait.",
            WAIT_SECONDS,
            ("queue", "cause"),
            [(one, cause) for one in queues for cause in get_args(WaitCause)],
        )
        self.queue_age = self._histogram(
            "sms_bridge_worker_queue_age_seconds",
            "Time from publishing a message to its first delivery, in seconds.",
            AGE_SECONDS,
            ("queue",),
            queues,
        )
        self.acceptance_latency = self._histogram(
            "sms_bridge_worker_acceptance_latency_seconds",
            "Time from publishing a message to its acceptance by the service, in seconds.",
            AGE_SECONDS,
            ("queue",),
            queues,
        )
        self.without_timestamp = self._counter(
            "sms_bridge_worker_messages_without_timestamp_total",
            "First deliveries of messages whose timestamp is missing or implausible.",
            ("queue",),
            queues,
        )
        self.attempts_per_message = self._histogram(
            "sms_bridge_worker_attempts_per_message",
            "Number of attempts per finished request.",
            ATTEMPTS,
            ("outcome",),
            get_args(FinalOutcome),
        )
        self.segments = self._counter(
            "sms_bridge_worker_segments_total",
            "SMS segments of accepted texts, by encoding.",
            ("encoding",),
            get_args(Encoding),
        )

    def count_error(self, code: str) -> None:
        """Count a response by the API's own error code."""
        self.provider_errors.labels(code if code in self._error_codes else "other").inc()

    def _provider(self, error_codes: Sequence[str]) -> None:
        self.provider_requests = self._counter(
            "sms_bridge_worker_provider_requests_total",
            "POSTs to the SMS service, by result.",
            ("result",),
            get_args(Result),
        )
        self.provider_responses = self._counter(
            "sms_bridge_worker_provider_responses_total",
            "Responses from the SMS service, by HTTP status.",
            ("code",),
            [*map(str, sorted(PROVIDER_CODES)), "other"],
        )
        self.provider_errors = self._counter(
            "sms_bridge_worker_provider_errors_total",
            "Responses from the SMS service with an error code, by code.",
            ("code",),
            error_codes,
        )
        self.provider_pages = self._counter(
            "sms_bridge_worker_provider_pages_total",
            "Responses that contain a web page but count as sent because of their HTTP status.",
        )
        self.provider_duration = self._histogram(
            "sms_bridge_worker_provider_request_duration_seconds",
            "Duration of a POST, in seconds.",
            HTTP_SECONDS,
            ("result",),
            get_args(Result),
        )
        self.provider_in_flight = self._gauge(
            "sms_bridge_worker_provider_requests_in_flight", "POSTs waiting for a response."
        )
        self.throttled = self._counter(
            "sms_bridge_worker_throttled_seconds_total",
            "Time that deliveries waited for a rate limit or for Retry-After, in seconds.",
            ("cause",),
            ("local_limit", "retry_after"),
        )
        self.paused = self._gauge(
            "sms_bridge_worker_paused",
            "1 while the worker is paused for this reason.",
            ("reason",),
            get_args(PauseReason),
        )
        self.paused_since = self._gauge(
            "sms_bridge_worker_paused_timestamp_seconds",
            "Unix time when the pause for this reason began, or 0 if there is none.",
            ("reason",),
            get_args(PauseReason),
        )
        self.pauses = self._counter(
            "sms_bridge_worker_pauses_total",
            "Pauses that have begun, by reason.",
            ("reason",),
            get_args(PauseReason),
        )

        self.outage_suspected = self._gauge(
            "sms_bridge_worker_outage_suspected",
            "1 if the last ten or more requests have failed, but the worker is not paused yet.",
        )

    def _state(
        self,
        queue: str,
        urgent_queue: str | None,
        retry_queues: Sequence[str],
        dead: str,
    ) -> None:
        urgent = [] if urgent_queue is None else [urgent_queue]
        self.oldest_held = self._gauge(
            "sms_bridge_worker_oldest_held_message_timestamp_seconds",
            "Unix time when the oldest unsettled delivery was published, or 0 if there is none.",
            ("queue",),
            [queue],
        )
        self.queue_ready = self._gauge(
            "sms_bridge_worker_queue_messages_ready",
            "Messages waiting in a queue. Every replica reports the same: use max by (queue).",
            ("queue", "role"),
            [
                (queue, "main"),
                *((name, "urgent") for name in urgent),
                *((name, "retry") for name in retry_queues),
                (dead, "dead_letter"),
            ],
        )
        self.queue_consumers = self._gauge(
            "sms_bridge_worker_queue_consumers",
            "Consumers of a queue. For quorum queues, RabbitMQ also counts cancelled consumers "
            "with unacked messages.",
            ("queue",),
            [queue, *urgent],
        )
        self.queue_stats_timestamp = self._gauge(
            "sms_bridge_worker_queue_stats_timestamp_seconds",
            "Unix time when the worker last read the queue sizes.",
        )
        self.active = self._gauge(
            "sms_bridge_worker_active",
            "With `worker.ordering: recipient`, 1 while this worker is the active worker, and 0 "
            "while it stands by or has no connection.",
            ("queue",),
            [queue],
        )
        self.consumer_up = self._gauge(
            "sms_bridge_worker_consumer_up",
            "1 while this worker is registered as a consumer of the queue.",
            ("queue",),
            [queue, *urgent],
        )
        self.last_delivery = self._gauge(
            "sms_bridge_worker_last_delivery_timestamp_seconds",
            "Unix time of the last delivery.",
            ("queue",),
            [queue],
        )
        self.last_sent = self._gauge(
            "sms_bridge_worker_last_sent_timestamp_seconds",
            "Unix time when the service last accepted a message.",
            ("queue",),
            [queue],
        )
        self.copies_refused = self._gauge(
            "sms_bridge_worker_copies_refused",
            "Messages that stay unacked because RabbitMQ refuses to store their copies.",
            ("queue",),
            [queue],
        )
        self.poison_suspected = self._gauge(
            "sms_bridge_worker_protocol_poison_suspected",
            "1 if connections keep ending before any delivery arrives.",
        )

    def _coordination(self) -> None:
        self.peers = self._gauge(
            "sms_bridge_worker_peers", "Other workers of the queue that this worker knows about."
        )
        self.coordination_up = self._gauge(
            "sms_bridge_worker_coordination_up",
            "1 while this worker and the other workers of the queue can exchange messages.",
        )
        self.redelivery_questions = self._counter(
            "sms_bridge_worker_redelivery_questions_total",
            "Questions to other workers about redelivered messages, by answer. `none` means that a "
            "worker did not answer in time.",
            ("answer",),
            ("unknown", "done", "kept", "none"),
        )
        self.peer_messages_malformed = self._counter(
            "sms_bridge_worker_peer_messages_malformed_total",
            "Malformed messages from the workers' exchange, which the worker ignored.",
        )
