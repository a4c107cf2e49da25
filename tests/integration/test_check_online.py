"""`sms-bridge check --online`: what is wrong with a set-up is found, and nothing is changed."""

import asyncio
import contextlib
import json
import re
import shlex
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aio_pika
import httpx
import pytest
from yarl import URL

from bridge.admin.checks.broker import MANY_EVENTS, read_certificate
from bridge.admin.checks.findings import Finding, judge_certificate
from bridge.admin.checks.run import examine
from bridge.amqp.connecting import close_quietly, open_first_connection
from bridge.config import Role, Settings
from bridge.errors import BrokerError
from bridge.sandbox.broker import Broker
from bridge.topology.declarations import bridge_topology
from bridge.topology.upkeep import provide
from tests.alarms import memory_alarm
from tests.amqp_client import open_amqp
from tests.certificates import make_certificate
from tests.integration.conftest import (
    Canaries,
    Service,
    eventually,
    run_program,
    run_programs,
    unique,
)

BOTH: tuple[Role, ...] = ("worker", "webhook")
# What follows the worker's queue name in the names of the queues that something consumes.
CONSUMED = ("", ".urgent", ".dead", ".events")


class Site:
    """A set-up of a test's own on the managed broker."""

    def __init__(self, broker: Broker, api: str, http: httpx.AsyncClient) -> None:
        self.broker = broker
        self.name = unique("check")
        self.values: dict[str, Any] = {
            "rabbitmq": {"url": broker.url},
            "sms_api": {"base_url": api, "key": "canary-key-7f3a"},
            "worker": {"queue": self.name, "retry_delays": [5]},
            "webhook": {
                "exchange": f"{self.name}.events",
                "queue": f"{self.name}.events",
                "secrets": ["canary-secret-91bc"],
            },
        }
        self._http = http

    def settings(self, **changed: dict[str, Any]) -> Settings:
        sections = {**self.values, **{name: {} for name in changed if name not in self.values}}
        return Settings.model_validate(
            {name: {**values, **changed.get(name, {})} for name, values in sections.items()}
        )

    async def declare(self) -> None:
        connection = await open_first_connection(self.settings().rabbitmq, name="test")
        try:
            await provide(connection, bridge_topology(self.settings(), BOTH), "declare")
        finally:
            await close_quietly(connection)

    async def examine(self, *roles: Role, **changed: dict[str, Any]) -> dict[str, list[Finding]]:
        found = await examine(
            self.settings(**changed), roles or BOTH, management=self.broker.management_url
        )
        return {
            result: [finding for finding in found if finding.result == result]
            for result in ("ok", "warn", "fail")
        }

    async def put(self, path: str, document: dict[str, Any]) -> None:
        await self._ask("PUT", path, document)

    async def delete(self, path: str) -> None:
        await self._ask("DELETE", path)

    async def drop_policy(self, name: str) -> None:
        policies = await self._ask("GET", "policies")
        if name in {policy["name"] for policy in policies}:
            await self._ask("DELETE", f"policies/%2F/{name}")
            await self.until_in_force(name, {})

    async def until_in_force(self, queue: str, definition: dict[str, object]) -> None:
        async def is_told() -> bool:
            # From RabbitMQ 4 on it is told at once, without the statistics; before, only with them.
            query = "?disable_stats=true" if await self.has_a_default_limit() else ""
            found = await self._ask("GET", f"queues/%2F/{queue}{query}")
            told = found.get("effective_policy_definition")
            # It writes nothing at all as an empty list in places.
            return told is not None and (told or {}) == definition

        await eventually(is_told, what=f"a policy in force on {queue}")

    async def definitions(self) -> Any:
        queues = await self._ask("GET", "queues?disable_stats=true&enable_queue_totals=true")
        return (await self._ask("GET", "definitions"), queues)

    async def has_a_default_limit(self) -> bool:
        overview = await self._ask("GET", "overview")
        return int(overview["rabbitmq_version"].partition(".")[0]) >= 4

    async def _ask(self, method: str, path: str, document: Any = None) -> Any:
        answer = await self._http.request(
            method,
            f"{self.broker.management_url}/api/{path}",
            json=document,
            auth=("guest", "guest"),
        )
        answer.raise_for_status()
        return answer.json() if answer.content else None


@pytest.fixture
async def site(
    managed_broker: Broker, session_service: Service, http: httpx.AsyncClient
) -> AsyncIterator[Site]:
    site = Site(managed_broker, session_service.url, http)
    await site.declare()
    if await site.has_a_default_limit():
        # As the documents say for RabbitMQ 4; 3.10 would take it for a limit of zero.
        for suffix in CONSUMED:
            await _policy(suffix, **{"delivery-limit": -1})(site)
    yield site
    connection = await aio_pika.connect(managed_broker.url)
    async with connection:
        channel = await connection.channel()
        for queue in bridge_topology(site.settings(), BOTH).queues:
            await channel.queue_delete(queue.name)
        await channel.exchange_delete(f"{site.name}.events")


def _said(findings: list[Finding]) -> str:
    return "\n".join(f"{one.subject}: {one.text}; {one.fix}" for one in findings)


async def test_a_good_set_up_passes(site: Site, service: Service, http: httpx.AsyncClient) -> None:
    before = await site.definitions()
    found = await site.examine()
    after = await site.definitions()
    attempts = (await http.get(f"{service.url}/sandbox/requests")).json()["requests"]

    assert found["fail"] == []
    # Nobody consumes the three queues.
    assert [one.subject for one in found["warn"]] == [
        f"queue {site.name}",
        f"queue {site.name}.urgent",
        f"queue {site.name}.events",
    ]
    assert {one.subject.split()[0] for one in found["ok"]} == {
        *("broker", "topology", "permissions", "management", "queue", "exchange"),
        *("clock", "SMS", "worker"),
    }
    assert after == before
    assert attempts == []


async def test_a_role_is_checked_alone(site: Site) -> None:
    found = await site.examine("webhook", sms_api={"base_url": "http://127.0.0.1:9"})

    assert found["fail"] == []
    assert "SMS API" not in _said(found["ok"])


async def test_events_that_pile_up_are_told(site: Site) -> None:
    """Without a consumer, and with one that is stuck."""
    queue = f"{site.name}.events"

    async def said() -> str:
        found = await site.examine("webhook")
        return _said([one for one in found["warn"] if one.subject == f"queue {queue}"])

    async with open_amqp(site.broker.url) as amqp:
        assert "it has no consumer, so events pile up" in await said()
        await amqp.channel.set_qos(prefetch_count=1)
        stuck = await amqp.channel.get_queue(queue)
        await stuck.consume(asyncio.Queue[object]().put)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(MANY_EVENTS):
                tasks.create_task(amqp.publish(queue, b"{}"))
        await amqp.until_count(queue, MANY_EVENTS - 1)
        assert await said() == ""
        await amqp.publish(queue, b"{}")
        await amqp.until_count(queue, MANY_EVENTS)
        assert "1 consumer, 1000 messages waiting: they are too slow, or stuck" in await said()


async def test_an_alarm_is_told_with_all_else(site: Site) -> None:
    """The command in the remedy shows the alarm: `check_local_alarms` of RabbitMQ 4.3 does not."""
    await site.declare()
    async with memory_alarm(site.broker):
        found = await site.examine()
        [command] = re.findall(r"`rabbitmq-diagnostics (\w+)`", _said(found["fail"]))
        with pytest.raises(BrokerError, match="Memory alarm"):
            await asyncio.to_thread(site.broker.ctl, command, tool="rabbitmq-diagnostics")

    assert "accepts no messages (memory or disk alarm)" in _said(found["fail"])
    assert "queues and exchanges match" in _said(found["ok"])


Break = Callable[[Site], Awaitable[None]]


def _policy(queue: str, **definition: object) -> Break:
    return _policy_for(queue, "^{}$", definition)


def _policy_for(queue: str, pattern: str, definition: dict[str, object]) -> Break:
    async def apply(site: Site) -> None:
        name = f"{site.name}{queue}"
        document = {
            "pattern": pattern.format(name.replace(".", "[.]")),
            "definition": definition,
            "apply-to": "queues",
        }
        await site.put(f"policies/%2F/{name}", document)
        await site.until_in_force(name, definition)

    return apply


def _queue(queue: str, **arguments: object) -> Break:
    async def replace(site: Site) -> None:
        connection = await aio_pika.connect(site.broker.url)
        async with connection:
            channel = await connection.channel()
            await channel.queue_delete(f"{site.name}{queue}")
            given: Any = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
            await channel.declare_queue(f"{site.name}{queue}", durable=True, arguments=given)

    return replace


@pytest.mark.parametrize(
    ("wrong", "subject", "text"),
    [
        (_policy("", **{"message-ttl": 60000}), "", "message-ttl"),
        (_policy(".dead", **{"delivery-limit": 3}), ".dead", "4 times"),
        (_policy(".dead", expires=3600000), ".dead", "unused"),
        (_queue(".retry.5s", queue_type="classic", message_ttl=5000), ".retry.5s", "x-queue-type"),
    ],
    ids=["ttl", "delivery-limit", "expires", "retry"],
)
async def test_what_would_lose_messages_is_found(
    site: Site, wrong: Break, subject: str, text: str
) -> None:
    await wrong(site)
    found = [one for one in (await site.examine())["fail"] if text in one.text]

    assert {one.subject for one in found} == {f"queue {site.name}{subject}"}
    assert all(one.fix for one in found)


async def test_an_alternate_exchange_that_is_missing_is_found(site: Site) -> None:
    """RabbitMQ drops what no queue takes, because the exchange that should catch it is missing."""
    exchange = f"{site.name}.events"
    document = {
        "pattern": f"^{re.escape(exchange)}$",
        "definition": {"alternate-exchange": "caught"},
        "apply-to": "exchanges",
    }
    await site.put(f"policies/%2F/{exchange}", document)

    async def is_found() -> bool:
        found = (await site.examine("webhook"))["warn"]
        return "its alternate exchange caught does not exist" in _said(found)

    try:
        await eventually(is_found, what="the alternate exchange")
    finally:
        await site.delete(f"policies/%2F/{exchange}")


@pytest.mark.parametrize(
    ("arguments", "subject", "texts"),
    [
        (
            {"queue_type": "classic", "message_ttl": 60000},
            "",
            ["x-queue-type is classic instead of quorum: ", "its disk", "dropped after 60 s"],
        ),
        (
            {"queue_type": "quorum", "max_length": 10, "message_ttl": 60000, "delivery_limit": 5},
            ".events",
            ["drop-head", "dropped after 60 s", "x-delivery-limit is 5: "],
        ),
    ],
    ids=["outbound", "inbound"],
)
async def test_what_others_have_declared_is_a_warning(
    site: Site, arguments: dict[str, object], subject: str, texts: list[str]
) -> None:
    await _queue(subject, **arguments)(site)
    found = await site.examine()
    told = _said([one for one in found["warn"] if one.subject == f"queue {site.name}{subject}"])

    assert [one for one in found["fail"] if "no queue is bound" not in one.text] == []
    assert [text for text in texts if text not in told] == []


async def test_the_default_limit_is_found_and_the_remedy_cures_it(
    managed_broker: Broker, site: Site
) -> None:
    """On RabbitMQ 4, a queue without a policy drops a message: a warning whose remedy works.

    The bridge itself has declared these queues, so that nothing fails by it.
    """
    for queue in CONSUMED:
        await site.drop_policy(f"{site.name}{queue}")
    before = await site.examine()
    found = [one for one in before["warn"] if one.subject == "delivery limit"]
    for one in found:
        assert one.fix
        await asyncio.to_thread(managed_broker.ctl, *shlex.split(one.fix)[1:])
        for queue in CONSUMED:
            await site.until_in_force(f"{site.name}{queue}", {"delivery-limit": -1})
    after = await site.examine()

    assert before["fail"] == after["fail"] == []
    assert len(found) == await site.has_a_default_limit()
    for one in found:
        assert "returned 21 times" in one.text
        assert one.text.endswith(": " + ", ".join(f"{site.name}{queue}" for queue in CONSUMED))
    assert "is returned" not in _said(after["warn"])


async def test_the_default_limit_under_a_policy(site: Site) -> None:
    await _policy(".dead", **{"max-length": 1000, "overflow": "reject-publish"})(site)
    found = [one for one in (await site.examine())["warn"] if one.subject == "delivery limit"]

    assert [one.fix for one in found] == [
        f"add delivery-limit -1 to the policy {site.name}.dead, in force on {site.name}.dead"
    ] * await site.has_a_default_limit()


@pytest.mark.parametrize(
    "pattern",
    ["^{}[[:cntrl:]]*$", r"^\Qcheck.\E{}\z"],
    ids=["class", "quoted"],
)
async def test_patterns_are_the_brokers_to_match(site: Site, pattern: str) -> None:
    if "\\Q" in pattern:
        pattern = pattern.replace("{}", site.name.removeprefix("check."))
    await _policy_for("", pattern, {"max-length": 3})(site)
    found = [one for one in (await site.examine())["fail"] if "drop-head" in one.text]

    assert [one.subject for one in found] == [f"queue {site.name}"]


async def test_the_policy_with_the_highest_priority_alone_is_in_force(site: Site) -> None:
    await _policy("", **{"max-length": 3, "overflow": "reject-publish"})(site)
    other = {"pattern": "^check", "definition": {"max-length": 3}, "apply-to": "all"}
    await site.put(f"policies/%2F/{site.name}-low", other | {"priority": -1})
    try:
        found = await site.examine()
    finally:
        await site.delete(f"policies/%2F/{site.name}-low")

    # The other policy is in force on the queues that have none of a higher priority.
    subjects = [one.subject for one in found["fail"] if "drop-head" in one.text]
    assert f"queue {site.name}" not in subjects


async def test_a_limit_of_the_queue_of_requests_refuses_retries(site: Site) -> None:
    await _policy("", **{"max-length": 10, "overflow": "reject-publish"})(site)
    found = await site.examine()
    told = [one.text for one in found["warn"] if one.subject == f"queue {site.name}"]

    assert found["fail"] == []
    assert [text for text in told if "and returning retries" in text] != []


async def test_a_stream_of_requests_is_found(site: Site) -> None:
    await _queue("", queue_type="stream")(site)
    found = [one for one in (await site.examine())["fail"] if "it is a stream" in one.text]

    assert [one.subject for one in found] == [f"queue {site.name}"]
    assert "worker.queue" in (found[0].fix or "")


async def test_what_is_missing_is_told_and_not_made(managed_broker: Broker, site: Site) -> None:
    """Missing queues are a warning where the role makes them, else a failure; none is made.

    Where nothing is there yet, as before the first start, all of it is one warning.
    """
    name = unique("absent")
    absent = {"queue": name, "retry_delays": [5]}
    first = await site.examine("worker", worker=absent)
    declare = await site.examine(worker=absent)
    verify = await site.examine(
        "worker", worker=absent, rabbitmq={"url": managed_broker.url, "topology": "verify"}
    )
    definitions, _ = await site.definitions()

    assert (first["fail"], declare["fail"]) == ([], [])
    assert [one.text for one in first["warn"] if one.subject == "topology"] == [
        "none of the 5 queues and exchanges exists; a role declares what it needs when it starts"
    ]
    assert len([one for one in declare["warn"] if "missing" in one.text]) == 5
    assert len([one for one in verify["fail"] if "missing" in one.text]) == 5
    assert name not in json.dumps(definitions)


async def test_missing_permissions_are_named(managed_broker: Broker, site: Site) -> None:
    user = unique("user").replace(".", "-")
    await site.put(f"users/{user}", {"password": "canary-password-c04e", "tags": ""})
    await site.put(
        f"permissions/%2F/{user}", {"configure": "^$", "write": "^$", "read": "^nothing$"}
    )
    before = await site.definitions()
    found = await site.examine(
        rabbitmq={
            "url": managed_broker.url,
            "username": user,
            "password": "canary-password-c04e",
        },
        worker={"ordering": "recipient"},
    )
    after = await site.definitions()
    refused = {one.text for one in found["fail"] if one.subject == "permissions"}
    better = {one.text for one in found["warn"] if one.subject == "permissions"}
    talk, mark = f"{site.name}.workers", f"{site.name}.paused"

    assert refused == {
        f"the user may not {what}"
        for what in (
            f"read {site.name}",
            f"read {site.name}.urgent",
            "write amq.default",
            f"write {site.name}.events",
            f"write queue {site.name}.events and read exchange {site.name}.events",
            f"configure exchange {site.name}.events",
            *(
                f"configure queue {site.name}{part}"
                for part in (
                    *("", ".urgent", ".active", ".retry.5s", ".urgent.retry.5s"),
                    *(".dead", ".events"),
                )
            ),
        )
    }
    pausing = "`sms-bridge pause` and `resume` need a user with this permission"
    assert better == {
        f"the user may not configure queue {mark}: {pausing}",
        f"the user may not read {mark}: the reason for an operator's pause cannot be shown",
        *(
            f"the user may not {what}: workers do not coordinate"
            for what in (
                f"configure exchange {talk}",
                f"configure queue {talk}.check",
                f"write {talk}",
                f"write queue {talk}.check and read exchange {talk}",
                f"read {talk}.check",
            )
        ),
    }
    assert after == before
    assert any(one.subject.startswith("management") for one in found["warn"])
    # RabbitMQ asks for a permission to declare passively since version 4.2.6.
    hidden = {one.subject for one in found["warn"] if "cannot be checked: the user" in one.text}
    pauses = [one.text for one in found["warn"] if one.subject == "pause"]
    if not hidden:
        assert pauses == []
        return
    assert hidden == {
        f"exchange {site.name}.events",
        *(f"queue {site.name}{part}" for part in (*CONSUMED, ".retry.5s", ".urgent.retry.5s")),
    }
    assert len(pauses) == 1
    assert pauses[0].startswith(f"unknown, because there is no permission on {mark}; ")


async def test_one_broker_of_two_that_is_away_is_a_warning(site: Site) -> None:
    away = "amqp://guest:guest@127.0.0.1:9/"
    found = await site.examine(rabbitmq={"url": [away, site.broker.url]})

    assert found["fail"] == []
    assert "127.0.0.1:9" in _said(found["warn"])


async def test_without_a_broker_it_fails(site: Site, canaries: Canaries) -> None:
    password = canaries.password
    settings = {
        "rabbitmq.url": f"amqp://guest:{password}@127.0.0.1:9/",
        "sms_api.base_url": site.values["sms_api"]["base_url"],
        "sms_api.key": canaries.key,
    }
    command = ("check", "--online", "--role", "worker", "--json")
    result = await run_program(*command, settings=settings)
    found = json.loads(result.stdout)["findings"]
    failed = [one["subject"] for one in found if one["result"] == "fail"]

    assert (result.returncode, failed) == (1, ["broker 127.0.0.1:9"])
    assert canaries.found_in((result.stdout + result.stderr).decode()) == set()


async def test_it_is_shown_a_line_each(site: Site, canaries: Canaries) -> None:
    settings = {
        "rabbitmq.url": site.broker.url,
        "worker.queue": site.name,
        "worker.retry_delays": ["5s"],
        "sms_api.base_url": site.values["sms_api"]["base_url"],
        "sms_api.key": canaries.key,
        "admin.port": 9,
    }
    command = ("check", "--online", "--management-url", str(site.broker.management_url))
    result = await run_program(*command, settings=settings)
    lines = result.stdout.decode().splitlines()

    assert (result.returncode, result.stderr) == (0, b"")
    # The findings alone: settings are what plain `check` prints.
    assert {line.split()[0] for line in lines} <= {"ok", "warn", "fail"}
    assert any(line.startswith("ok    broker ") for line in lines)
    assert any(line.startswith(f"warn  queue {site.name}: it has no consumer") for line in lines)
    assert (
        "ok    worker: no worker answers on this computer; each worker's /readyz says whether "
        "it is paused"
    ) in lines


async def test_quiet_prints_only_what_is_wrong(site: Site, canaries: Canaries) -> None:
    settings = {
        "rabbitmq.url": site.broker.url,
        "worker.queue": site.name,
        "worker.retry_delays": ["5s"],
        "sms_api.base_url": site.values["sms_api"]["base_url"],
        "sms_api.key": canaries.key,
    }
    online = ("--online", "--management-url", str(site.broker.management_url))
    results = await run_programs(
        {
            "offline": (("check", "--quiet"), settings),
            "online": (("check", "--quiet", *online), settings),
            "json": (("check", "--quiet", "--json", *online), settings),
        }
    )
    document = json.loads(results["json"].stdout)
    warnings = [
        f"warn  queue {queue}: it has no consumer, so nothing is sent; 0 messages waiting; "
        "start a worker; if one is running, its /readyz says why it does not consume"
        for queue in (site.name, f"{site.name}.urgent")
    ]

    assert {result.returncode for result in results.values()} == {0}
    assert results["offline"].stdout == b""
    assert results["online"].stdout.decode().splitlines() == warnings
    assert [finding["result"] for finding in document["findings"]] == ["warn", "warn"]
    assert document["configuration"] is None


async def test_a_wrong_configuration_is_told_first() -> None:
    result = await run_program("check", "--online", settings={"worker.queue": "q"})

    assert (result.returncode, result.stdout) == (2, b"")
    assert all(line.startswith(b"sms-bridge: ") for line in result.stderr.splitlines())
    assert b"sms_api.base_url" in result.stderr
    assert b"webhook.secrets" in result.stderr


# The API


@asynccontextmanager
async def _api(head: bytes, **tls: Any) -> AsyncIterator[tuple[int, list[bytes]]]:
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n" + head + b"\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, **tls)
    async with server:
        yield server.sockets[0].getsockname()[1], requests


async def test_a_wrong_clock_is_found(site: Site) -> None:
    date = b"Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"
    async with _api(date) as (port, requests):
        found = await site.examine(
            "worker", sms_api={"base_url": f"http://127.0.0.1:{port}", "key": "canary-key-7f3a"}
        )

    assert any(one.subject == "clock" and "ahead" in one.text for one in found["warn"])
    assert [request.split(b" ")[0] for request in requests] == [b"HEAD"]
    assert b"canary" not in b"".join(requests)


async def test_an_api_that_is_not_there_is_found(site: Site) -> None:
    for base_url, text in (
        ("http://sms-bridge.invalid", "name cannot be resolved"),
        ("http://127.0.0.1:9", "no connection"),
    ):
        found = await site.examine("worker", sms_api={"base_url": base_url, "key": "k"})

        assert text in _said(found["fail"])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


async def test_the_brokers_certificate_is_read(certificate: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    settings = Settings.model_validate({"rabbitmq": {"tls": {"ca_file": certificate}}})
    async with _api(b"", ssl=context) as (port, _):
        url = URL(f"amqps://127.0.0.1:{port}/")
        found = await read_certificate(settings.rabbitmq, url)

    assert found is not None
    assert judge_certificate("broker", found).result == "warn"


@pytest.mark.parametrize(
    ("trusted", "result", "text"),
    [(False, "fail", "certificate is refused"), (True, "warn", "certificate expires in")],
    ids=["not-trusted", "ends-soon"],
)
async def test_certificates_are_looked_at(
    site: Site,
    certificate: Path,
    trusted: bool,  # noqa: FBT001  a parameter of the test
    result: str,
    text: str,
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    async with _api(b"", ssl=context) as (port, _):
        ca_file = str(certificate) if trusted else None
        api = {"base_url": f"https://127.0.0.1:{port}", "key": "k", "ca_file": ca_file}
        found = await site.examine("worker", sms_api=api)

    assert text in _said(found[result])
