"""Builds the objects of one process: roles, broker connections, ports, and shared objects.

`app` runs and ends them.
"""

import asyncio
import math
import os
import sys
from collections.abc import Callable, Collection, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, get_args

from bridge import __version__
from bridge.amqp.connecting import login_files
from bridge.amqp.link import Link, leave_after_seconds
from bridge.amqp.publisher import Publisher
from bridge.config import Role, Settings
from bridge.config.loading import REVISION_VARIABLE
from bridge.credentials import Secrets
from bridge.errors import ConfigError
from bridge.http.admin_port import LIMITS as ADMIN_LIMITS
from bridge.http.admin_port import Health, admin_handler
from bridge.http.listener import Listener
from bridge.http.listener_state import Hooks, fit_open_files
from bridge.telemetry.log_setup import LineWriter, configure_logging
from bridge.telemetry.logs import Level, Log
from bridge.telemetry.metrics import BridgeMetrics, Registry, new_registry
from bridge.telemetry.trace_context import Tracer
from bridge.topology.declarations import (
    bridge_topology,
    dead_queue,
    name_of,
    retry_queues,
)
from bridge.topology.paused_queue import Note
from bridge.topology.upkeep import Upkeep
from bridge.worker.cluster.joint_pause import JointPause, setup_of
from bridge.worker.cluster.membership import Membership
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.pauses import WorkerPauses
from bridge.worker.service.account import open_account
from bridge.worker.service.shape import Shape, shape_from
from bridge.worker.spans import WorkerSpans
from bridge.worker.worker import Worker

if TYPE_CHECKING:
    from bridge.webhook.metrics import WebhookMetrics
    from bridge.webhook.receiver import Receiver

log = Log(__name__)

# Open files apart from HTTP connections: the broker, secrets, the log, DNS.
OWN_DESCRIPTORS: Final = 64

ADMIN_LISTENER: Final = "admin listener"
WEBHOOK_LISTENER: Final = "webhook listener"


class Wiring:
    """The objects of one process; `parts` maps names to the coroutines that have to run.

    Binds the ports, which close when their listeners end, and configures logging. Raises
    ConfigError if a setting or file that a role needs is missing or invalid, BridgeError if a port
    cannot be bound.
    """

    def __init__(self, settings: Settings, roles: Collection[Role]) -> None:
        self._settings = settings
        self.registry = new_registry()
        self.metrics = _bridge_metrics(settings, roles, self.registry)
        records = {level: self.metrics.log_records.labels(level) for level in get_args(Level)}
        writer = LineWriter(sys.stdout, dropped=self.metrics.log_lines_dropped.inc)
        configure_logging(
            settings.log.level,
            settings.log.format,
            stream=writer,
            count=lambda level: records[level].inc(),
            finish=writer.finish,
        )
        self.health = Health(self.metrics)
        self.parts: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        self._links: list[Link] = []
        self._publishers: list[Publisher] = []
        self._secrets = Secrets(self.metrics)
        for login in login_files(settings.rabbitmq):
            self._secrets.watch("rabbitmq", login, lambda: None)
        self._tracer = self._make_tracer(roles)
        self.worker = self._make_worker() if "worker" in roles else None
        self.webhook_listener = self._make_webhook() if "webhook" in roles else None
        self.admin_listener = self._make_admin()

    # The worker

    def _make_worker(self) -> Worker:
        settings = self._settings
        metrics = _worker_metrics(settings, self.registry)
        pauses = WorkerPauses(settings.worker, metrics)
        spans = self._make_worker_spans()
        publisher = self._make_publisher(optional_exchange=settings.worker.outcome_exchange)
        is_coordinated = settings.worker.coordination == "on"
        membership = Membership(settings.worker.queue, is_enabled=is_coordinated, metrics=metrics)
        # The account at the SMS service, and the pauses that it shares with other workers.
        shape = shape_from(settings.sms_api, settings.callback_url)
        joint_pause = self._make_joint_pause(shape, membership)
        account = open_account(
            settings,
            shape,
            cluster=joint_pause,
            pauses=pauses,
            spans=spans,
            metrics=metrics,
        )
        worker = Worker(
            settings,
            account=account,
            pauses=pauses,
            publisher=publisher,
            upkeep=self._make_upkeep("worker", pauses.wake_up.consumer),
            joint_pause=joint_pause,
            spans=spans,
            metrics=metrics,
        )
        breaker = account.breaker
        for secret in shape.login.watched:
            self._secrets.watch("sms_api", secret, partial(joint_pause.renew_key, breaker))
        _warn_of_short_drain(settings)
        publish = partial(
            worker.operator_pause.beside, partial(worker.exchange.beside, publisher.serve)
        )
        self._link("worker publish", publish)
        self._link("worker consume", worker.serve)
        self.health.ready["consumer"] = lambda: (
            worker.consumer.is_served or worker.pause_reason is not None
        )
        self.health.facts["worker"] = lambda: {
            "queue": settings.worker.queue,
            "standby": worker.is_standby,
            "paused": worker.pause_reason,
            "pauses": pauses.report.facts(),
            "outage_suspected": breaker.is_outage_suspected,
            "paused_by_operator": _shown(worker.operator_pause.note),
            "retry_after_seconds": round(breaker.retry_after_seconds, 1),
            "peers": membership.count if membership.is_up else None,
            "copies_refused": worker.copies_refused,
        }
        return worker

    def _make_joint_pause(self, shape: Shape, membership: Membership) -> JointPause:
        settings, secrets = self._settings, shape.login.watched
        return JointPause(
            membership,
            setup=lambda: setup_of(settings.sms_api, [secret.current for secret in secrets]),
            # In ordered mode, only the active worker can probe the service.
            turn_seconds=(
                math.inf
                if settings.worker.ordering == "recipient"
                else settings.worker.retry_delays[0]
            ),
        )

    def _make_worker_spans(self) -> WorkerSpans | None:
        if self._tracer is None:
            return None
        queue = self._settings.worker.queue
        return WorkerSpans(self._tracer, queue=queue, api=self._settings.sms_api)

    # The webhook receiver

    def _make_webhook(self) -> Listener:
        # Imported here, so that a worker does not load these modules.
        from bridge.webhook.metrics import WebhookMetrics, watched
        from bridge.webhook.receiver import webhook_limits

        settings = self._settings.webhook
        metrics = WebhookMetrics(
            self.registry,
            paths=[endpoint.path for endpoint in settings.all_endpoints],
            event_types=settings.known_types_of_all,
            queues=() if settings.queue is None else (settings.queue,),
            health_path=settings.health_path,
        )
        receiver = self._make_receiver(metrics)
        self._link("webhook publish", watched(receiver.serve, settings.queue, metrics))
        listener = Listener(
            receiver.answer,
            fit_open_files(
                webhook_limits(settings),
                reserved=self._count_reserved(),
                setting="webhook.max_connections",
            ),
            section="webhook",
            host=settings.host,
            port=settings.port,
            drain_timeout_seconds=settings.shutdown_timeout_seconds,
            hooks=Hooks(
                judge=receiver.judge,
                on_refusal=receiver.recorder.record_refusal,
                on_eviction=receiver.recorder.record_eviction,
            ),
        )
        self.parts[WEBHOOK_LISTENER] = partial(_serve_webhooks, listener, receiver)
        self.health.facts["webhook"] = lambda: {"refused": receiver.refused_facts()}
        self.health.ready["listener"] = lambda: listener.is_accepting
        return listener

    def _make_receiver(self, metrics: "WebhookMetrics") -> "Receiver":
        from bridge.webhook.endpoint import endpoints_from
        from bridge.webhook.receiver import Receiver

        settings = self._settings.webhook
        endpoints = endpoints_from(settings)
        outcomes = self._settings.receipt_exchange
        for endpoint in endpoints:
            for secret in endpoint.secrets:
                self._secrets.watch("webhook", secret, endpoint.use_secrets)
        return Receiver(
            settings,
            endpoints=endpoints,
            publisher=self._make_publisher(
                optional_exchange=None if outcomes == settings.exchange else outcomes
            ),
            upkeep=self._make_upkeep("webhook"),
            metrics=metrics,
            outcome_exchange=outcomes,
            tracer=self._tracer,
        )

    def _count_reserved(self) -> int:
        """Return the number of file descriptors needed apart from the public port."""
        posts = 0 if self.worker is None else self._settings.worker.most_in_flight
        return OWN_DESCRIPTORS + ADMIN_LIMITS.max_connections + posts

    # Both roles

    def _make_tracer(self, roles: Collection[Role]) -> Tracer | None:
        settings = self._settings.tracing
        if settings.otlp_endpoint is None:
            return None
        # OpenTelemetry takes half a second to load, and is an optional dependency.
        try:
            from bridge.telemetry.tracing import OtlpTracer

            tracer = OtlpTracer(
                settings.otlp_endpoint,
                sample_ratio=settings.sample_ratio,
                service="sms-bridge" if len(roles) > 1 else f"sms-bridge-{next(iter(roles))}",
                version=__version__,
                dropped=self.metrics.spans_dropped,
            )
        except ValueError as error:
            raise ConfigError(
                f"tracing: an environment variable OTEL_... is not valid: {error}"
            ) from None
        self.parts["tracing"] = tracer.run
        return tracer

    def _make_admin(self) -> Listener:
        settings = self._settings.admin
        self.metrics.connection_up.set_function(lambda: all(link.is_up for link in self._links))
        self.metrics.connection_blocked.set_function(
            lambda: any(link.is_blocked for link in self._links)
        )
        self.metrics.unconfirmed.set_function(
            lambda: sum(publisher.unconfirmed for publisher in self._publishers)
        )
        listener = Listener(
            admin_handler(self.health, self.registry),
            ADMIN_LIMITS,
            section="admin",
            host=settings.host,
            port=settings.port,
        )
        self.parts[ADMIN_LISTENER] = listener.run
        self.parts["heartbeat"] = self.health.beat
        self.parts["secrets"] = self._secrets.follow
        return listener

    def _make_publisher(self, *, optional_exchange: str | None) -> Publisher:
        publisher = Publisher(
            self.metrics,
            timeout_seconds=self._settings.rabbitmq.publish_timeout_seconds,
            leave_after_seconds=leave_after_seconds(self._settings.rabbitmq),
            optional_exchange=optional_exchange,
        )
        self._publishers.append(publisher)
        return publisher

    def _make_upkeep(self, role: Role, changed: asyncio.Event | None = None) -> Upkeep:
        needed, mode = bridge_topology(self._settings, [role]), self._settings.rabbitmq.topology
        return Upkeep(needed, mode, metrics=self.metrics, changed=changed)

    def _link(self, name: str, serve: Callable[..., Coroutine[Any, Any, None]]) -> None:
        link = Link(name, self._settings.rabbitmq, self.metrics)
        self._links.append(link)
        self.parts[name] = partial(link.run, serve)


async def _serve_webhooks(listener: Listener, receiver: "Receiver") -> None:
    """Run the public port; at its end, log the events that were only counted so far."""
    try:
        await listener.run()
    finally:
        receiver.recorder.flush_log()


def _shown(note: Note | None) -> dict[str, str | None] | None:
    return None if note is None else {"reason": note.reason, "since": note.since_text}


def _warn_of_short_drain(settings: Settings) -> None:
    """Warn if a drain may abort a POST, because it would be unknown whether it was sent."""
    if settings.sms_api.timeout_seconds >= settings.worker.shutdown_timeout_seconds:
        longer = "make worker.shutdown_timeout_seconds longer than sms_api.timeout_seconds"
        log.warning("drain_may_cut_off", remedy=longer)


def _worker_metrics(settings: Settings, registry: Registry) -> WorkerMetrics:
    queue = settings.worker.queue
    return WorkerMetrics(
        registry,
        queue=queue,
        urgent_queue=settings.worker.urgent_queue,
        retry_queues=list(retry_queues(settings.worker)),
        dead=dead_queue(queue),
        error_codes=list(settings.sms_api.response.errors),
    )


def _published_to(settings: Settings, roles: Collection[Role]) -> Iterator[str]:
    """Yield the exchanges that these roles publish to, as metrics name them."""
    if "worker" in roles:
        yield "default"
    if "webhook" in roles:
        yield settings.webhook.exchange
    if settings.worker.outcome_exchange is not None:
        yield settings.worker.outcome_exchange


def _bridge_metrics(
    settings: Settings, roles: Collection[Role], registry: Registry
) -> BridgeMetrics:
    topology = bridge_topology(settings, roles)
    return BridgeMetrics(
        registry,
        component="all" if len(roles) > 1 else next(iter(roles)),
        version=__version__,
        revision=os.environ.get(REVISION_VARIABLE, "unknown"),
        exchanges=list(_published_to(settings, roles)),
        entities=[name_of(entity) for entity in (*topology.declarable, *topology.bindings)],
    )
