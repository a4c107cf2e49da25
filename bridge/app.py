"""Puts the objects together, runs the roles, owns the signals and the drain."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import uvloop

from bridge import __version__
from bridge.amqp.link import Link
from bridge.amqp.login import tls_context
from bridge.amqp.publisher import Publisher
from bridge.config import Role, Settings, SmsApiSettings
from bridge.credentials import Credential, check_header_value, load_authorities
from bridge.errors import ConfigError
from bridge.http_server.admin import LIMITS as ADMIN_LIMITS
from bridge.http_server.admin import Health, admin_handler
from bridge.http_server.limits import fit_open_files
from bridge.http_server.listener import Listener
from bridge.http_server.service import Hooks
from bridge.inbound.metrics import WebhookMetrics
from bridge.inbound.own_queue import watched
from bridge.inbound.schemes import Scheme, decode_secret, scheme_from
from bridge.inbound.webhook import Receiver, webhook_limits
from bridge.logs import LineWriter, Log, configure_logging, log_loop_faults
from bridge.metrics import BridgeMetrics, Registry, new_registry
from bridge.outbound.metrics import WorkerMetrics
from bridge.outbound.pace import Pace
from bridge.outbound.sender import Sender
from bridge.outbound.transport import open_transport
from bridge.outbound.worker import Worker
from bridge.topology.declarations import bridge_topology, dead_queue, name_of, retry_queue
from bridge.topology.upkeep import Upkeep

log = Log(__name__)

EXIT_CLEAN: Final = 0
EXIT_FAILED: Final = 1
EXIT_DRAIN_TIMED_OUT: Final = 75
REREAD_SECONDS: Final = 5.0
# Of one reading: files that change each time they are looked at are left to the next.
MAX_LOOKS: Final = 3
# For what comes after the drain: closing connections and the admin port.
CLOSE_SECONDS: Final = 4.0
# Open files besides connections of the ports and to the API: the broker, secrets, the log, DNS.
OWN_DESCRIPTORS: Final = 64
# What a role that nobody has configured lacks first.
_MISSING: Final[Mapping[Role, str]] = {
    "worker": "sms_api.base_url: is missing; the worker needs it",
    "webhook": "webhook.secrets: is missing; set webhook.secrets or webhook.secret_files",
}


def run(settings: Settings, roles: Collection[Role]) -> int:
    """Run the roles until a signal and return the exit code.

    Raises ConfigError before anything is started when a role lacks what it needs.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, roles))


async def _run(settings: Settings, roles: Collection[Role]) -> int:
    bridge = Bridge(settings, roles)
    # What is there by now stays: it need not be looked at with every search for garbage.
    gc.freeze()
    stop = asyncio.Event()
    _own_signals(stop)
    return await bridge.run(stop)


def _own_signals(stop: asyncio.Event) -> None:
    """Drain at the first SIGTERM or SIGINT, leave at once at the second."""

    def on_signal(name: str) -> None:
        log.info("signal", signal=name)
        if stop.is_set():
            logging.shutdown()
            os._exit(EXIT_DRAIN_TIMED_OUT)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)


@dataclass(slots=True)
class _WatchedSecret:
    label: str
    credential: Credential
    on_change: Callable[[], None]
    is_failing: bool = False


class Secrets:
    """The secrets of a process, read again now and then; the last good one stays in use."""

    def __init__(self, metrics: BridgeMetrics) -> None:
        self._metrics = metrics
        self._watched: list[_WatchedSecret] = []

    def watch(self, label: str, credential: Credential, on_change: Callable[[], None]) -> None:
        """Read this one again too, and call back after each change."""
        self._watched.append(_WatchedSecret(label, credential, on_change))

    async def follow(self) -> NoReturn:
        """Read all of them every few seconds."""
        while True:
            self.reread()
            await asyncio.sleep(REREAD_SECONDS)

    def reread(self) -> None:
        """Read all of them again, until nothing is new.

        Files that are exchanged together may be read half before and half after. Nothing is
        verified in between, so all that matters is that the last look finds them as they are.
        """
        for _ in range(MAX_LOOKS):
            changed = [self._reread(secret) for secret in self._watched]
            if not any(changed):
                return

    def _reread(self, secret: _WatchedSecret) -> bool:
        try:
            changed = secret.credential.reread()
        except ConfigError as error:
            self._metrics.secret_reloads.labels(secret.label, "failed").inc()
            if not secret.is_failing:
                log.warning("secret_not_read", why=str(error))
            secret.is_failing = True
            return False
        secret.is_failing = False
        read_at = secret.credential.read_at
        self._metrics.secret_last_reload.labels(secret.label).set(read_at)
        if changed:
            self._metrics.secret_reloads.labels(secret.label, "changed").inc()
            log.info("secret_changed", secret=secret.label)
            secret.on_change()
        return changed


class Bridge:
    """One process: its roles, its connections, its admin port."""

    def __init__(self, settings: Settings, roles: Collection[Role]) -> None:
        check_start(settings, roles)
        self._settings = settings
        self._registry = new_registry()
        self._metrics = _bridge_metrics(settings, roles, self._registry)
        configure_logging(
            settings.log.level,
            settings.log.format,
            stream=LineWriter(sys.stdout, dropped=self._metrics.log_lines_dropped.inc),
            count=lambda level: self._metrics.log_records.labels(level).inc(),
        )
        self._health = Health(self._metrics)
        self._links: list[Link] = []
        self._publishers: list[Publisher] = []
        self._secrets = Secrets(self._metrics)
        for login in _broker_secrets(settings):
            self._secrets.watch("rabbitmq", login, lambda: None)
        self._running: dict[str, Coroutine[Any, Any, None]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._worker = self._make_worker() if "worker" in roles else None
        self._webhook_port = self._make_webhook() if "webhook" in roles else None
        self._admin_port = self._make_admin()

    async def run(self, stop: asyncio.Event) -> int:
        """Run everything until `stop` is set, or until a part of it fails; then drain."""
        log_loop_faults(asyncio.get_running_loop())
        self._tasks = {name: asyncio.create_task(part) for name, part in self._running.items()}
        self._health.live["tasks"] = lambda: not any(t.done() for t in self._tasks.values())
        self._log_start()
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait({waiting, *self._tasks.values()}, return_when=asyncio.FIRST_COMPLETED)
        failed = self._log_failures()
        clean = await self._drain()
        await self._close(waiting)
        log.info("stopped", clean=clean and not failed)
        if failed:
            return EXIT_FAILED
        return EXIT_CLEAN if clean else EXIT_DRAIN_TIMED_OUT

    # Putting together

    def _make_worker(self) -> Worker:
        settings = self._settings
        metrics = WorkerMetrics(
            self._registry,
            queue=settings.worker.queue,
            retry_queues=[
                retry_queue(settings.worker.queue, delay) for delay in settings.worker.retry_delays
            ],
            dead=dead_queue(settings.worker.queue),
        )
        credential = api_key(settings.sms_api)
        pace = Pace(
            settings.worker.rate_limit,
            outage_after_seconds=settings.worker.outage_after,
            first_step_seconds=settings.worker.retry_delays[0],
            metrics=metrics,
        )
        self._secrets.watch("sms_api", credential, pace.renew_key)
        publisher = self._make_publisher()
        worker = Worker(
            settings.worker,
            settings.rabbitmq,
            sender=Sender(
                settings.sms_api,
                transport=open_transport(
                    settings.sms_api, max_connections=settings.worker.most_in_flight
                ),
                credential=credential,
                metrics=metrics,
            ),
            pace=pace,
            publisher=publisher,
            upkeep=self._make_upkeep("worker"),
            metrics=metrics,
        )
        if settings.sms_api.timeout_seconds >= settings.worker.shutdown_timeout_seconds:
            # What a drain cuts off may have been sent.
            longer = "make worker.shutdown_timeout_seconds longer than sms_api.timeout_seconds"
            log.warning("drain_may_cut_off", remedy=longer)
        self._link("worker publish", publisher.serve)
        self._link("worker consume", worker.serve)
        self._health.ready["consumer"] = lambda: worker.consumer.is_registered or pace.is_holding
        self._health.facts["worker"] = lambda: {
            "queue": settings.worker.queue,
            "paused": pace.paused or ("broker_blocked" if pace.broker_blocked else None),
        }
        return worker

    def _make_webhook(self) -> Listener:
        settings = self._settings.webhook
        scheme = scheme_from(settings.signature, settings.public_url)
        secrets = webhook_secrets(self._settings, scheme)
        publisher = self._make_publisher()
        metrics = WebhookMetrics(
            self._registry,
            path=settings.path,
            event_types=settings.event_types,
            queues=() if settings.queue is None else (settings.queue,),
        )
        receiver = Receiver(
            settings,
            scheme=scheme,
            secrets=secrets,
            publisher=publisher,
            upkeep=self._make_upkeep("webhook"),
            metrics=metrics,
        )
        for secret in secrets:
            self._secrets.watch("webhook", secret, receiver.read_secrets)
        self._link("webhook publish", watched(receiver.serve, settings.queue, metrics))
        limits = fit_open_files(
            webhook_limits(settings),
            reserved=self._count_reserved(),
            setting="webhook.max_connections",
        )
        listener = Listener(
            receiver.answer,
            limits,
            section="webhook",
            host=settings.host,
            port=settings.port,
            drain_timeout_seconds=settings.shutdown_timeout_seconds,
            hooks=Hooks(
                judge=receiver.refusals.judge,
                on_refusal=receiver.refusals.count,
                on_eviction=receiver.refusals.count_eviction,
            ),
        )
        self._running["webhook listener"] = _serve_webhooks(listener, receiver)
        self._health.ready["listener"] = lambda: listener.is_accepting
        return listener

    def _count_reserved(self) -> int:
        """Count the descriptors that everything but the public port may need."""
        posts = 0 if self._worker is None else self._settings.worker.most_in_flight
        return OWN_DESCRIPTORS + ADMIN_LIMITS.max_connections + posts

    def _make_admin(self) -> Listener:
        settings = self._settings.admin
        self._metrics.connection_up.set_function(lambda: all(link.is_up for link in self._links))
        self._metrics.connection_blocked.set_function(
            lambda: any(link.is_blocked for link in self._links)
        )
        self._metrics.unconfirmed.set_function(
            lambda: sum(publisher.unconfirmed for publisher in self._publishers)
        )
        listener = Listener(
            admin_handler(self._health, self._registry),
            ADMIN_LIMITS,
            section="admin",
            host=settings.host,
            port=settings.port,
        )
        self._running["admin listener"] = listener.run()
        self._running["heartbeat"] = self._health.beat()
        self._running["secrets"] = self._secrets.follow()
        return listener

    def _make_publisher(self) -> Publisher:
        publisher = Publisher(
            self._metrics, timeout_seconds=self._settings.rabbitmq.publish_timeout_seconds
        )
        self._publishers.append(publisher)
        return publisher

    def _make_upkeep(self, role: Role) -> Upkeep:
        needed = bridge_topology(self._settings, [role])
        return Upkeep(needed, self._settings.rabbitmq.topology, metrics=self._metrics)

    def _link(self, name: str, serve: Callable[..., Coroutine[Any, Any, None]]) -> None:
        link = Link(name, self._settings.rabbitmq, self._metrics)
        self._links.append(link)
        self._running[name] = link.run(serve)

    def _log_start(self) -> None:
        webhook = self._webhook_port
        log.info(
            "started",
            version=__version__,
            worker=self._worker is not None,
            webhook_port=None if webhook is None else webhook.port,
            admin_port=self._admin_port.port,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    # Running

    def _log_failures(self) -> bool:
        failed = {name: task for name, task in self._tasks.items() if task.done()}
        for name, task in failed.items():
            error = None if task.cancelled() else task.exception()
            log.critical("part_failed", part=name, cause=error)
        return bool(failed)

    # Ending

    async def _drain(self) -> bool:
        """Not ready, stop taking, finish, settle; return whether all was finished in time."""
        self._health.is_draining = True
        self._metrics.shutdown_timestamp.set(time.time())
        drained = await asyncio.gather(self._drain_worker(), self._drain_webhook())
        return all(drained)

    async def _drain_worker(self) -> bool:
        if self._worker is None:
            return True
        return await self._worker.drain(self._settings.worker.shutdown_timeout_seconds)

    async def _drain_webhook(self) -> bool:
        if self._webhook_port is None:
            return True
        self._webhook_port.stop()
        listening = self._tasks["webhook listener"]
        timeout = self._settings.webhook.shutdown_timeout_seconds
        done, _ = await asyncio.wait({listening}, timeout=timeout)
        return bool(done) and not self._webhook_port.has_cut_off

    async def _close(self, *others: asyncio.Task[Any]) -> None:
        self._admin_port.stop()
        tasks = [task for name, task in self._tasks.items() if name != "admin listener"]
        for task in (*tasks, *others):
            task.cancel()
        await asyncio.wait({*self._tasks.values(), *others}, timeout=CLOSE_SECONDS)
        if self._worker is not None:
            with contextlib.suppress(Exception):
                await self._worker.aclose()


async def _serve_webhooks(listener: Listener, receiver: Receiver) -> None:
    """Run the public port; at its end log what was only counted."""
    try:
        await listener.run()
    finally:
        receiver.refusals.flush_log()


def _bridge_metrics(
    settings: Settings, roles: Collection[Role], registry: Registry
) -> BridgeMetrics:
    topology = bridge_topology(settings, roles)
    return BridgeMetrics(
        registry,
        component="all" if len(roles) > 1 else next(iter(roles)),
        version=__version__,
        revision=os.environ.get("SMS_BRIDGE_REVISION", "unknown"),
        exchanges=(
            "default",
            settings.webhook.exchange,
            settings.worker.outcome_exchange or "sms.outcome",
        ),
        entities=[name_of(entity) for entity in (*topology.declarable, *topology.bindings)],
    )


def _broker_secrets(settings: Settings) -> list[Credential]:
    """Read the files of the broker's login; each connection reads them anew by itself.

    They are watched all the same: one that cannot be read shows before a connection needs it.
    """
    files = {
        "rabbitmq.username_file": settings.rabbitmq.username_file,
        "rabbitmq.password_file": settings.rabbitmq.password_file,
    }
    return [Credential(key, file=file) for key, file in files.items() if file is not None]


def api_key(settings: SmsApiSettings) -> Credential:
    """Read the API key that the worker needs, or raise ConfigError that says what is missing."""
    if settings.base_url is None:
        raise ConfigError(_MISSING["worker"])
    name = "sms_api.key" if settings.key_file is None else "sms_api.key_file"
    return Credential(name, value=settings.key, file=settings.key_file, check=check_header_value)


def webhook_secrets(settings: Settings, scheme: Scheme) -> list[Credential]:
    """Read the secrets that the webhook receiver needs; the first one counts as current."""
    webhook = settings.webhook

    def check(key: str, value: str) -> str:
        decode_secret(scheme, value, setting=key)
        return value

    if webhook.secret_files is not None:
        files = enumerate(webhook.secret_files)
        return [
            Credential(f"webhook.secret_files.{number}", file=file, check=check)
            for number, file in files
        ]
    if webhook.secrets is None:
        raise ConfigError(_MISSING["webhook"])
    return [
        Credential(f"webhook.secrets.{number}", value=value, check=check)
        for number, value in enumerate(webhook.secrets)
    ]


def check_start(settings: Settings, roles: Collection[Role]) -> None:
    """Try all that these roles need to start; only whether their ports are free shows later.

    Raises ConfigError with one line for each fault.
    """
    steps: list[Callable[[Settings], object]] = [_broker_secrets, _check_broker_tls]
    if "worker" in roles:
        steps += [_check_api_key, _check_api_tls]
    if "webhook" in roles:
        steps += [_check_webhook_secrets, _check_ports]
    faults: list[str] = []
    for step in steps:
        try:
            step(settings)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*faults)


def _check_broker_tls(settings: Settings) -> None:
    tls = settings.rabbitmq.tls
    if any((tls.ca_file, tls.cert_file, tls.key_file)):
        tls_context(settings.rabbitmq)


def _check_api_key(settings: Settings) -> None:
    api_key(settings.sms_api)


def _check_api_tls(settings: Settings) -> None:
    if settings.sms_api.ca_file is not None:
        load_authorities("sms_api.ca_file", settings.sms_api.ca_file)


def _check_webhook_secrets(settings: Settings) -> None:
    webhook_secrets(settings, scheme_from(settings.webhook.signature, settings.webhook.public_url))


def _check_ports(settings: Settings) -> None:
    webhook, admin = settings.webhook, settings.admin
    hosts = {webhook.host, admin.host}
    is_one_family = (":" in webhook.host) == (":" in admin.host)
    # `::` is every address, of IPv4 too.
    is_one_address = (
        len(hosts) == 1 or "::" in hosts or (is_one_family and "0.0.0.0" in hosts)  # noqa: S104
    )
    if webhook.port == admin.port != 0 and is_one_address:
        raise ConfigError("admin.port: is webhook.port too; set another one, or 0 for any free one")


def check_roles(settings: Settings, roles: Collection[Role]) -> dict[Role, str | None]:
    """Say for each role why it is not configured at all, or None when it could start.

    Raises ConfigError when one that is configured, even in part, could not: somebody meant to
    run it.
    """
    api, webhook = settings.sms_api, settings.webhook
    parts: dict[Role, tuple[object, ...]] = {
        "worker": (api.base_url, api.key, api.key_file),
        "webhook": (webhook.secrets, webhook.secret_files),
    }
    missing = {role: None if any(parts[role]) else _MISSING[role] for role in roles}
    check_start(settings, [role for role, why in missing.items() if why is None])
    if missing.get("webhook"):
        scheme_from(webhook.signature, webhook.public_url)
    return missing
