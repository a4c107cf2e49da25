"""Starts and ends, brokers that come late, go away or freeze, and set-ups that are wrong."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aio_pika
import anyio.to_thread
import httpx
import pytest
from yarl import URL

from bridge.amqp.connecting import open_connection
from bridge.config import RabbitMQSettings
from bridge.errors import ConnectError
from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import Guard
from bridge.topology.declarations import dead_queue
from tests.amqp_client import Amqp, open_amqp
from tests.certificates import make_certificate
from tests.integration.conftest import (
    SIGNATURE,
    Canaries,
    Launcher,
    Running,
    Service,
    eventually,
    run_program,
    run_programs,
    unique,
)

# What `webhook.response_timeout_seconds` promises, and something for a busy computer.
ANSWER_SECONDS = 2.5 + 5


@dataclass
class Stage:
    """A worker and a webhook receiver in front of a broker of their own."""

    broker: Broker
    worker: Running
    webhook: Running
    names: tuple[str, str]
    http: httpx.AsyncClient
    canaries: Canaries
    seen: dict[str, Any] = field(default_factory=dict)

    def event(self) -> bytes:
        data = {"from": self.canaries.number(), "text": self.canaries.text()}
        return json.dumps({"type": "t", "id": uuid.uuid4().hex, "data": data}).encode()

    async def post(self, body: bytes) -> tuple[int, bool, float]:
        return await _post(self.http, self.webhook, body, self.canaries)

    async def accepts(self, body: bytes) -> bool:
        """Post a webhook and say whether it was taken."""
        return (await self.post(body))[0] == 200

    async def start_broker(self) -> None:
        await anyio.to_thread.run_sync(self.broker.start)

    async def health(self) -> dict[str, int]:
        roles = {"worker": self.worker, "webhook": self.webhook}
        return {
            f"{name}{path}": (await role.ask(path)).status_code
            for name, role in roles.items()
            for path in ("/startupz", "/livez", "/readyz")
        }


async def _post(
    http: httpx.AsyncClient, role: Running, body: bytes, canaries: Canaries
) -> tuple[int, bool, float]:
    started = time.monotonic()
    headers = {SIGNATURE: canaries.sign(body)}
    answer = await http.post(role.webhook_url, content=body, headers=headers)
    seconds = time.monotonic() - started
    return answer.status_code, answer.headers.get("retry-after", "").isdigit(), seconds


@pytest.fixture(scope="module")
async def stage(
    launcher: Launcher,
    session_service: Service,
    canaries: Canaries,
    http: httpx.AsyncClient,
    guard: Guard,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Stage]:
    """Start both roles, look at them, and only then start their broker."""
    broker = Broker(tmp_path_factory.mktemp("broker"), guard=guard)
    queue, exchange = unique("late"), unique("late-events")
    worker_settings = {
        "rabbitmq.url": broker.url,
        "worker.queue": queue,
        "worker.retry_delays": ["1s", "2s"],
        "sms_api.base_url": session_service.url,
        "sms_api.key": canaries.key,
    }
    webhook_settings = {
        "rabbitmq.url": broker.url,
        "webhook.exchange": exchange,
        "webhook.queue": exchange,
        "webhook.secrets": [canaries.secret],
    }
    worker = launcher.start("worker", settings=worker_settings)
    webhook = launcher.start("webhook", settings=webhook_settings)
    ours = Stage(broker, worker, webhook, (queue, exchange), http, canaries)
    await worker.until_logged("broker_unavailable")
    await webhook.until_logged("broker_unavailable")
    ours.seen["health"] = await ours.health()
    ours.seen["answer"] = await ours.post(ours.event())
    try:
        await ours.start_broker()
        await asyncio.gather(worker.until_ready(), webhook.until_ready())
        yield ours
        codes = await asyncio.gather(worker.stop(), webhook.stop())
    finally:
        await anyio.to_thread.run_sync(broker.close)

    assert list(codes) == [0, 0]


async def _is_unready(role: Running) -> bool:
    return (await role.ask("/readyz")).status_code == 503


# The broker comes late


async def test_a_role_lives_without_a_broker(stage: Stage) -> None:
    assert {check for check, status in stage.seen["health"].items() if status != 200} == {
        "worker/readyz"
    }


async def test_a_webhook_before_the_broker_is_put_off(stage: Stage) -> None:
    """Before the broker is there a webhook is asked to come again, in time."""
    status, says_when, seconds = stage.seen["answer"]

    assert (status, says_when) == (503, True)
    assert seconds < ANSWER_SECONDS


async def test_the_worker_works_when_the_broker_has_come(
    stage: Stage, session_service: Service
) -> None:
    """A worker that was there first sends as soon as there is a broker."""
    request = stage.canaries.request()
    async with open_amqp(stage.broker.url) as amqp:
        await amqp.publish(stage.names[0], json.dumps(request).encode())

    assert await session_service.until_sent(request["to"])


async def test_a_role_outlives_its_broker(stage: Stage, service: Service) -> None:
    """Of requests and events that a kill cuts off, each is sent once, and each is stored."""
    queue, exchange = stage.names
    events = [stage.event() for _ in range(5)]
    for event in events:
        await eventually(partial(stage.accepts, event), what="an event taken")
    await anyio.to_thread.run_sync(stage.broker.flush)
    requests = [stage.canaries.request() for _ in range(20)]
    await service.misbehave({"status": 202, "latency_seconds": 1})
    async with open_amqp(stage.broker.url) as amqp:
        for request in requests:
            body = json.dumps(request).encode()
            await amqp.publish(queue, body, message_id=uuid.uuid4().hex)
    await service.until_requested(requests[0]["to"])
    await anyio.to_thread.run_sync(stage.broker.kill)
    await eventually(lambda: _is_unready(stage.worker), what="the loss noticed")
    health = await stage.health()
    await stage.start_broker()
    await stage.worker.until_ready()
    for request in requests:
        await service.until_sent(request["to"])

    async def is_worked_off() -> bool:
        busy = await stage.worker.metric("sms_bridge_worker_messages_in_progress")
        async with open_amqp(stage.broker.url) as amqp:
            return not busy and await amqp.count(queue) == 0

    await eventually(is_worked_off, what="nothing left to do")
    async with open_amqp(stage.broker.url) as amqp:
        stored = {message.body for message in await amqp.take_all(exchange)}

    assert {check for check, status in health.items() if status != 200} == {"worker/readyz"}
    assert [len(await service.messages(request["to"])) for request in requests] == [1] * 20
    assert stored >= {*events}


# Ends


def _worker_settings(service: Service, canaries: Canaries, queue: str) -> dict[str, object]:
    return {
        "worker.queue": queue,
        "worker.retry_delays": ["60s"],
        "sms_api.base_url": service.url,
        "sms_api.key": canaries.key,
    }


async def test_a_drain_finishes_what_is_posted_and_gives_back_what_waits(
    launcher: Launcher, amqp: Amqp, canaries: Canaries, service: Service
) -> None:
    """During the drain the worker lives and is not ready; then it ends with 0."""
    queue = unique("drained")
    posted, waiting = canaries.request(), canaries.request()
    await service.misbehave({"to": posted["to"], "status": 202, "latency_seconds": 1.5})
    settings = _worker_settings(service, canaries, queue)
    worker = await launcher.role("worker", settings=settings, is_forked=False)
    due = str(time.time() + 40)
    body = json.dumps(waiting).encode()
    await amqp.publish(queue, body, headers={"sms-bridge-not-before": due})
    await worker.until_metric("sms_bridge_worker_messages_in_progress", 1)
    await amqp.publish(queue, json.dumps(posted).encode())
    await service.until_requested(posted["to"])
    await worker.keep_what_it_shows()
    worker.child.signal(signal.SIGTERM)
    await eventually(lambda: _is_unready(worker), what="the drain seen")
    is_alive = (await worker.ask("/livez")).status_code == 200
    code = await worker.ended()
    await amqp.until_count(queue, 1)

    assert (is_alive, code) == (True, 0)
    assert json.loads((await amqp.take(queue)).body)["to"] == waiting["to"]
    assert len(await service.messages(posted["to"])) == 1
    assert await service.messages(waiting["to"]) == []


async def _hanging_worker(
    launcher: Launcher, amqp: Amqp, canaries: Canaries, service: Service, settings: dict[str, str]
) -> tuple[Running, str]:
    """Start a worker and have it wait for an answer that does not come."""
    queue, request = unique("hanging"), canaries.request()
    await service.misbehave({"to": request["to"], "mode": "hang"})
    merged = _worker_settings(service, canaries, queue) | settings
    worker = await launcher.role("worker", settings=merged)
    await amqp.publish(queue, json.dumps(request).encode(), message_id=uuid.uuid4().hex)
    await service.until_requested(request["to"])
    return worker, queue


async def test_a_drain_that_takes_too_long_is_told(
    launcher: Launcher, amqp: Amqp, canaries: Canaries, service: Service
) -> None:
    """When the time is up the worker ends with 75, and the message is the broker's again."""
    settings = {"worker.shutdown_timeout_seconds": "1"}
    worker, queue = await _hanging_worker(launcher, amqp, canaries, service, settings)
    code = await worker.stop()
    await amqp.until_count(queue, 1)

    assert code == 75


async def test_the_second_signal_ends_at_once(
    launcher: Launcher, amqp: Amqp, canaries: Canaries, service: Service
) -> None:
    worker, queue = await _hanging_worker(launcher, amqp, canaries, service, {})
    await worker.keep_what_it_shows()
    worker.child.signal(signal.SIGINT)
    await eventually(lambda: _is_unready(worker), what="the drain seen")
    started = time.monotonic()
    worker.child.signal(signal.SIGTERM)
    await worker.ended()
    seconds = time.monotonic() - started
    await amqp.until_count(queue, 1)

    # The drain would take 25 s; to exit takes a busy computer some.
    assert seconds < 10


async def test_a_webhook_that_is_coming_in_is_finished(
    launcher: Launcher, amqp: Amqp, canaries: Canaries
) -> None:
    exchange = unique("ending")
    settings = {
        "webhook.exchange": exchange,
        "webhook.queue": exchange,
        "webhook.secrets": [canaries.secret],
    }
    role = await launcher.role("webhook", settings=settings)
    await role.until_metric("sms_bridge_amqp_connection_up", 1)
    body = b'{"type": "t", "data": {}}'
    head = (
        f"POST /webhooks HTTP/1.1\r\nHost: localhost\r\n{SIGNATURE}: {canaries.sign(body)}\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(role.webhook_url).port)
    writer.write(head.encode())
    # The header was read, and the body is waited for.
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body[:5])
    await role.keep_what_it_shows()
    role.child.signal(signal.SIGTERM)
    await eventually(lambda: _is_unready(role), what="the drain seen")
    writer.write(body[5:])
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    code = await role.ended()

    assert (answer[:13], code) == (b"HTTP/1.1 200 ", 0)
    assert (await amqp.take(exchange)).body == body


# Both roles at once


async def test_all_runs_both_roles(
    launcher: Launcher,
    amqp: Amqp,
    canaries: Canaries,
    service: Service,
    http: httpx.AsyncClient,
) -> None:
    """One process sends and receives, with the metrics of both on one admin port."""
    name, request, body = unique("both"), canaries.request(), canaries.text().encode()
    settings = _worker_settings(service, canaries, name) | {
        "webhook.exchange": f"{name}.events",
        "webhook.queue": f"{name}.events",
        "webhook.secrets": [canaries.secret],
    }
    role = await launcher.role("all", settings=settings)
    await amqp.publish(name, json.dumps(request).encode())

    async def is_accepted() -> bool:
        return (await _post(http, role, body, canaries))[0] == 200

    await eventually(is_accepted, what="the webhook taken")
    text = (await role.ask("/metrics")).text

    assert await service.until_sent(request["to"])
    assert (await amqp.take(f"{name}.events")).body == body
    assert "sms_bridge_worker_consumer_up" in text
    assert "sms_bridge_webhook_events_total" in text


# Set-ups that are wrong

WORKER = {"sms_api.base_url": "http://127.0.0.1:9", "sms_api.key": Canaries.key}
WEBHOOK = {"webhook.secrets": json.dumps([Canaries.secret])}
WRONG: dict[str, tuple[str, Mapping[str, object], list[str]]] = {
    "two-faults": (
        "worker",
        {"worker.concurrency": "0", "webhook.port": "-1"},
        ["worker.concurrency", "webhook.port"],
    ),
    "no-key": ("worker", {"sms_api.base_url": "http://a", "sms_api.key": "null"}, ["sms_api.key"]),
    "no-broker-ca": (
        "webhook",
        {"rabbitmq.url": "amqps://localhost/", "rabbitmq.tls.ca_file": "/nowhere/ca.pem"},
        ["rabbitmq.tls.ca_file"],
    ),
    "one-port": ("all", {"admin.port": "8080"}, ["admin.port"]),
    "url-with-password": (
        "worker",
        {"sms_api.base_url": f"http://a:{Canaries.password}@localhost"},
        ["sms_api.base_url"],
    ),
    "all-without-secrets": ("all", {"webhook.secrets": "null"}, ["webhook.secrets"]),
}


async def test_a_wrong_set_up_is_told(canaries: Canaries) -> None:
    """A start and `check` end with 2 and the same lines, one for each fault, naming its key."""
    base = {**WORKER, **WEBHOOK, "admin.port": "0"}
    roles = {name: () if role == "all" else ("--role", role) for name, (role, *_) in WRONG.items()}
    # Without a role's secrets `check` takes it for one that is not to run.
    roles["all-without-secrets"] = ("--role", "webhook")
    settings = {name: {**base, **wrong} for name, (_, wrong, _) in WRONG.items()}
    starts = await run_programs(
        {name: ([role], settings[name]) for name, (role, *_) in WRONG.items()}
    )
    checks = await run_programs({name: (["check", *roles[name]], settings[name]) for name in WRONG})
    for name, (*_, named) in WRONG.items():
        start, check = starts[name], checks[name]
        lines = start.stderr.decode().splitlines()

        assert (check.returncode, check.stderr) == (start.returncode, start.stderr), name
        assert start.returncode == 2, name
        assert len(lines) == len(named), name
        assert [key for key in named if not any(key in line for line in lines)] == [], name
        assert canaries.found_in((start.stdout + start.stderr).decode()) == set(), name


@pytest.mark.parametrize("key", ["admin.port", "webhook.port"])
async def test_a_taken_port_is_told(key: str, amqp_url: str) -> None:
    """A port that is in use ends the start with 1 and one line that names the setting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {
            **WEBHOOK,
            "rabbitmq.url": amqp_url,
            "admin.host": "127.0.0.1",
            "admin.port": "0",
            "webhook.host": "127.0.0.1",
            "webhook.port": "0",
            key: str(taken.getsockname()[1]),
        }
        result = await run_program("webhook", settings=settings)
    lines = result.stderr.decode().splitlines()

    assert (result.returncode, len(lines)) == (1, 1)
    assert key in lines[0]


async def test_a_wrong_password_is_told(
    launcher: Launcher, amqp_url: str, canaries: Canaries, session_service: Service
) -> None:
    url = URL(amqp_url).with_password(canaries.password)
    settings = _worker_settings(session_service, canaries, unique("refused"))
    worker = launcher.start("worker", settings={**settings, "rabbitmq.url": str(url)})
    await worker.until_logged("started")
    await worker.until_metric("sms_bridge_amqp_connections_total", 2, outcome="auth_failed")
    first = (await worker.until_logged("broker_unavailable"))["why"]

    assert "rabbitmq.password" in first
    assert (await worker.ask("/livez")).status_code == 200


# At SIGUSR1 the thread of the event loop waits for SIGUSR2, and for nothing else.
STICKS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
signal.signal(signal.SIGUSR1, lambda *_: signal.sigwait({signal.SIGUSR2}))
"""
# As the chart's livenessProbe has it: `timeoutSeconds`.
PROBE_SECONDS = 5


async def test_a_stuck_event_loop_is_not_alive(
    launcher: Launcher,
    session_service: Service,
    canaries: Canaries,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STICKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = _worker_settings(session_service, canaries, unique("stuck"))
    stuck = await launcher.role("worker", settings=settings, is_forked=False)
    await stuck.until_metric("sms_bridge_event_loop_lag_seconds_count", 1)
    stuck.child.signal(signal.SIGUSR1)

    async def is_silent() -> bool:
        # The signal may come while an answer is on its way.
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await stuck.ask("/livez")
        except TimeoutError:
            return True
        return False

    await eventually(is_silent, what="no answer")
    stuck.child.signal(signal.SIGUSR2)

    assert (await stuck.ask("/livez")).status_code == 200


# As a newer aiormq might: it opens its own stream, and all that is delivered goes past ours.
ANOTHER_STREAM = """
from aiormq.connection import Connection
made = Connection.__init__
def make(self, *args, transport_factory=None, **options):
    made(self, *args, **options)
Connection.__init__ = make
"""
# As a newer aio-pika might: there is no way to give it our stream.
NO_STREAM = """
from aio_pika import Connection
made = Connection.__init__
def make(self, *args, **options):
    made(self, *args, **options)
    self.options = self.__dict__.pop("kwargs")
Connection.__init__ = make
"""


@pytest.mark.parametrize(
    ("role", "client"),
    [("worker", ANOTHER_STREAM), ("webhook", NO_STREAM)],
    ids=["another", "none"],
)
async def test_a_client_library_that_passes_the_wire_by_is_told(
    launcher: Launcher,
    session_service: Service,
    canaries: Canaries,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    role: str,
    client: str,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(client)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = _worker_settings(session_service, canaries, unique("deaf"))
    deaf = launcher.start(role, settings={**settings, **WEBHOOK}, is_forked=False)
    await deaf.until_logged("started")
    await deaf.until_metric("sms_bridge_amqp_connections_total", 2, outcome="client_unsupported")
    first = (await deaf.until_logged("broker_unavailable"))["why"]

    assert "uv.lock" in first
    assert await deaf.metric("sms_bridge_amqp_connections_total", outcome="opened") == 0
    assert (await deaf.ask("/livez")).status_code == 200
    assert (await deaf.ask("/readyz")).status_code == (503 if role == "worker" else 200)


async def test_a_certificate_file_that_is_not_there_is_told(amqp_url: str, tmp_path: Path) -> None:
    missing = tmp_path / "ca.pem"
    url = str(URL(amqp_url).with_scheme("amqps"))
    settings = RabbitMQSettings.model_validate({"url": url, "tls": {"ca_file": str(missing)}})
    with pytest.raises(ConnectError) as caught:
        await open_connection(settings, settings.url[0], name="test")

    assert caught.value.fault == "tls_failed"
    assert f"rabbitmq.tls.ca_file: {missing} cannot be read: No such file" in str(caught.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
async def tls_port(amqp_url: str, certificate: Path) -> AsyncIterator[int]:
    broker = URL(amqp_url)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection(broker.host, broker.port)
        await asyncio.gather(pass_on(reader, inner[1]), pass_on(inner[0], writer))

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def _start_over_tls(
    launcher: Launcher, port: int, host: str, settings: Mapping[str, object]
) -> Running:
    url = URL(str(launcher.base["rabbitmq.url"])).with_scheme("amqps")
    worker = launcher.start(
        "worker",
        settings={**settings, "rabbitmq.url": str(url.with_host(host).with_port(port))},
    )
    await worker.until_logged("started")
    return worker


@pytest.mark.parametrize(
    ("host", "tls"),
    [("127.0.0.1", {}), ("localhost", {"rabbitmq.tls.server_name": "127.0.0.1"})],
    ids=["its-name", "server-name"],
)
async def test_a_broker_over_tls(
    launcher: Launcher,
    amqp: Amqp,
    service: Service,
    certificate: Path,
    tls_port: int,
    host: str,
    tls: dict[str, object],
) -> None:
    canaries, queue, large = launcher.canaries, unique("tls"), os.urandom(300_000)
    request = canaries.request()
    settings = {**_worker_settings(service, canaries, queue), **tls}
    worker = await _start_over_tls(
        launcher, tls_port, host, settings | {"rabbitmq.tls.ca_file": str(certificate)}
    )
    await worker.until_ready()
    await amqp.publish(queue, json.dumps(request).encode())
    await amqp.publish(queue, large)

    assert await service.until_sent(request["to"])
    assert (await amqp.take(f"{queue}.dead")).body == large


@pytest.mark.parametrize(
    ("host", "is_trusted"),
    [("127.0.0.1", False), ("localhost", True)],
    ids=["not-trusted", "other-name"],
)
async def test_a_certificate_that_is_not_the_brokers_is_told(
    launcher: Launcher,
    session_service: Service,
    certificate: Path,
    tls_port: int,
    host: str,
    is_trusted: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    settings = _worker_settings(session_service, launcher.canaries, unique("untrusted"))
    trust = {"rabbitmq.tls.ca_file": str(certificate)} if is_trusted else {}
    worker = await _start_over_tls(launcher, tls_port, host, settings | trust)
    await worker.until_metric("sms_bridge_amqp_connections_total", 2, outcome="tls_failed")

    assert "rabbitmq.tls" in (await worker.until_logged("broker_unavailable"))["why"]
    assert worker.logged("broker_connected") == []


@dataclass
class Verified:
    """What a worker said that may create nothing, about queues that are missing or wrong."""

    worker: Running
    queue: str
    while_missing: str
    readiness: int
    while_wrong: str


@pytest.fixture(scope="module")
async def verified(
    launcher: Launcher, amqp: Amqp, canaries: Canaries, session_service: Service
) -> Verified:
    queue = unique("verified")
    settings = _worker_settings(session_service, canaries, queue)
    worker = launcher.start("worker", settings={**settings, "rabbitmq.topology": "verify"})
    while_missing = (await worker.until_logged("topology_unusable"))["why"]
    readiness = (await worker.ask("/readyz")).status_code
    await amqp.channel.declare_queue(queue, durable=True)

    async def complaint() -> str | None:
        whys = [line["why"] for line in worker.logged("topology_unusable")]
        return next((why for why in whys if "instead of quorum" in why), None)

    while_wrong = await eventually(complaint, what="the wrong queue told")
    await amqp.delete([queue])
    quorum = {"x-queue-type": "quorum"}
    ladder = {
        "x-message-ttl": 60_000,
        "x-dead-letter-exchange": "",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
    for name, arguments in (
        (f"{queue}.dead", quorum),
        *(
            (f"{requests}{part}", quorum | more)
            for requests in (queue, f"{queue}.urgent")
            for part, more in (
                ("", {}),
                (".retry.1m", ladder | {"x-dead-letter-routing-key": requests}),
            )
        ),
    ):
        await amqp.channel.declare_queue(name, durable=True, arguments=arguments)  # type: ignore[arg-type]
    await worker.until_ready()
    return Verified(worker, queue, while_missing, readiness, while_wrong)


async def test_verify_creates_nothing_and_names_the_remedy(verified: Verified) -> None:
    assert verified.queue in verified.while_missing
    assert "rabbitmq.topology" in verified.while_missing
    assert verified.readiness == 503


async def test_verify_names_the_difference(verified: Verified) -> None:
    assert verified.queue in verified.while_wrong
    assert "x-queue-type" in verified.while_wrong


async def test_an_operator_may_remove_a_queue_for_good(verified: Verified, amqp_url: str) -> None:
    dead = dead_queue(verified.queue)

    async def has_missed(queue: str) -> bool:
        lines = verified.worker.logged("topology_unusable")
        return any(f"'{queue}'" in line["why"] for line in lines)

    async with open_amqp(amqp_url) as amqp:
        await amqp.channel.queue_delete(verified.queue)
        await eventually(lambda: _is_unready(verified.worker), what="the loss noticed")
        await eventually(lambda: has_missed(verified.queue), what="the queue missed")
        # What is told next shows that it has looked once more.
        await amqp.channel.queue_delete(dead)
        await eventually(lambda: has_missed(dead), what="the other queue missed")
        with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
            await amqp.count(verified.queue)
