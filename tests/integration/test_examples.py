"""The programs of `examples`, run as they are against a real broker, worker and webhook receiver.

Those in Python and the shell take part in every run. The others need runtimes and packages that
take long to fetch: `make examples` sets SMS_BRIDGE_TEST_EXAMPLES, and has them built.
"""

import asyncio
import base64
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import anyio
import httpx
import pytest

from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import Child, Guard
from tests.integration.conftest import (
    SECONDS,
    SIGNATURE,
    Amqp,
    Canaries,
    Launcher,
    Running,
    Service,
    eventually,
    make_environ,
    open_amqp,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
IS_EVERY_LANGUAGE = "SMS_BRIDGE_TEST_EXAMPLES" in os.environ
# Where Debian's package php-amqplib has what Composer would put into the folder.
PHP_CLIENT = Path("/usr/share/php/PhpAmqpLib/autoload.php")
BUILD_SECONDS = 300.0
TEAM_QUEUE = "my-team.sms"
# What a body, a shell or a command line could break.
AWKWARD = " \"Grüße\" $HOME \\ 👋\n'two'"


@dataclass(frozen=True)
class Language:
    """How a folder's programs are built and run, in that folder."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    build: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    hands_over_headers: bool = True


PYTHON = Language((sys.executable, "publish.py"), (sys.executable, "subscribe.py"))
LANGUAGES = {
    "python-pika": PYTHON,
    "python-aio-pika": PYTHON,
    "shell": Language(
        ("./publish.sh",),
        ("./subscribe.sh",),
        needs=("curl", "jq", "amqp-consume"),
        hands_over_headers=False,
    ),
    "node": Language(
        ("node", "publish.js"),
        ("node", "subscribe.js"),
        build=("npm", "install", "--no-package-lock", "--no-audit", "--no-fund"),
        needs=("node", "npm"),
    ),
    "go": Language(
        ("bin/publish",),
        ("bin/subscribe",),
        build=("go", "build", "-o", "bin/", "./..."),
        needs=("go",),
    ),
    "java": Language(
        ("java", "-cp", "lib/*", "Publish.java"),
        ("java", "-cp", "lib/*", "Subscribe.java"),
        build=("mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=lib"),
        needs=("java", "mvn"),
    ),
    "csharp": Language(
        ("dotnet", "bin/publish/publish.dll"),
        ("dotnet", "bin/subscribe/subscribe.dll"),
        build=(
            *("sh", "-ec"),
            "for program in publish subscribe; do dotnet build -o bin/$program $program; done",
        ),
        needs=("dotnet",),
    ),
    "php": Language(
        ("php", "publish.php"), ("php", "subscribe.php"), needs=("php", str(PHP_CLIENT))
    ),
}
ALWAYS = ("python-pika", "python-aio-pika", "shell")


def test_every_example_is_run() -> None:
    """Each folder of examples is in the list above."""
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} == LANGUAGES.keys()


@dataclass(frozen=True)
class Programs:
    """A language's programs, ready to run against one virtual host."""

    language: Language
    folder: Path
    environ: dict[str, str]

    async def publish(self, *arguments: str) -> CompletedProcess[bytes]:
        """Run the publisher to its end, which is sooner than it waits for an outcome."""
        command = [*self.language.publish, *arguments]
        async with asyncio.timeout(SECONDS):
            return await anyio.run_process(
                command, check=False, cwd=self.folder, env=self.environ, input=b""
            )

    def subscribe(self, file: Path, guard: Guard, log: Path) -> Child:
        """Start the subscriber; programs are named from their folder, and the log is elsewhere."""
        words = [*self.language.subscribe, str(file)]
        command = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *words]
        return Child(command, guard=guard, log=log, environ=self.environ)


def _is_there(need: str) -> bool:
    return shutil.which(need) is not None or Path(need).is_file()


@pytest.fixture(scope="module", params=LANGUAGES)
async def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Language, Path]:
    language = LANGUAGES[request.param]
    if request.param not in ALWAYS and not IS_EVERY_LANGUAGE:
        pytest.skip("only with `make examples`")
    if missing := [need for need in language.needs if not _is_there(need)]:
        assert request.param not in ALWAYS, f"not installed: {missing}"
        pytest.skip(f"not installed: {missing}")
    folder = tmp_path_factory.mktemp("examples") / request.param
    shutil.copytree(EXAMPLES / request.param, folder)
    if request.param == "php":
        (folder / "vendor").mkdir()
        (folder / "vendor" / "autoload.php").write_text(f"<?php require '{PHP_CLIENT}';\n")
    if language.build:
        async with asyncio.timeout(BUILD_SECONDS):
            done = await anyio.run_process(
                language.build, check=False, cwd=folder, input=b"", env=make_environ({})
            )
        assert done.returncode == 0, done.stdout + done.stderr
    return language, folder


@dataclass(frozen=True)
class Place:
    """A virtual host of the broker."""

    name: str
    url: str
    environ: dict[str, str]


def _make_place(broker: Broker, name: str) -> Place:
    broker.ctl("add_vhost", name)
    broker.ctl("set_permissions", "--vhost", name, "guest", ".*", ".*", ".*")
    web = (broker.management_url or "").replace("//", "//guest:guest@")
    environ = {"AMQP_URL": broker.url + name, "RABBITMQ_API": f"{web}/api", "VHOST": name}
    return Place(name, broker.url + name, make_environ({}) | environ)


@pytest.fixture(scope="module")
def served(managed_broker: Broker) -> Place:
    """Make the virtual host in which the bridge runs, with the names that are its defaults."""
    return _make_place(managed_broker, "examples-served")


@pytest.fixture(scope="module")
def empty(managed_broker: Broker) -> Place:
    """Make the virtual host in which there is nothing."""
    return _make_place(managed_broker, "examples-empty")


@pytest.fixture(scope="module")
def unserved(managed_broker: Broker) -> Place:
    """Make the virtual host in which there is the queue of requests, and no worker."""
    return _make_place(managed_broker, "examples-unserved")


@pytest.fixture(scope="module")
async def bridge(
    tmp_path_factory: pytest.TempPathFactory,
    guard: Guard,
    canaries: Canaries,
    http: httpx.AsyncClient,
    session_service: Service,
    served: Place,
) -> AsyncIterator[Running]:
    """Run both roles; see at the end that they stop cleanly and gave nothing away."""
    base: dict[str, object] = {"rabbitmq.url": served.url, "log.format": "json"}
    base |= {"admin.port": "0", "admin.host": "127.0.0.1", "webhook.host": "127.0.0.1"}
    base |= {"webhook.port": "0", "webhook.secrets": [canaries.secret]}
    base |= {"sms_api.base_url": session_service.url, "sms_api.key": canaries.key}
    launcher = Launcher(base, tmp_path_factory.mktemp("bridge"), guard, canaries, http)
    running = await launcher.role("all", settings={})
    yield running
    assert await launcher.end_all() == {}
    assert running.leaks() == set()


def _programs(built: tuple[Language, Path], place: Place) -> Programs:
    return Programs(*built, place.environ)


async def test_a_text_is_sent_and_its_outcome_told(
    built: tuple[Language, Path],
    served: Place,
    bridge: Running,
    service: Service,
    canaries: Canaries,
) -> None:
    """The publisher waits for the worker's reply, prints it, and ends with 0."""
    to, text, message_id = canaries.number(), canaries.text() + AWKWARD, f"order-{uuid.uuid4()}"
    done = await _programs(built, served).publish(to, text, message_id)
    (sent,) = await service.messages(to)
    outcome = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert (outcome["message_id"], outcome["outcome"]) == (message_id, "sent")
    assert (sent["from"], sent["text"], sent["idempotency_key"]) == ("Acme", text, message_id)
    assert bridge.child.exit_code is None


@pytest.fixture
async def requests(unserved: Place) -> AsyncIterator[Amqp]:
    """Play the worker: lend a client of the queue of requests, which is gone afterwards."""
    async with open_amqp(unserved.url) as amqp:
        await amqp.channel.declare_queue("sms.outbound", durable=True)
        yield amqp
        await amqp.delete(["sms.outbound"])


async def test_a_request_is_complete_and_its_own_reply_awaited(
    built: tuple[Language, Path], unserved: Place, requests: Amqp, canaries: Canaries
) -> None:
    body = canaries.request(text=canaries.text() + AWKWARD)
    now = time.time()
    outcome = {"message_id": "m-1", "outcome": "dead", "reason": "refused"}
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(
            _programs(built, unserved).publish(body["to"], body["text"], "m-1")
        )
        request = await requests.take("sms.outbound", message_id="m-1")
        replies = str(request.reply_to)
        await requests.publish(replies, b'{"outcome": "sent"}', correlation_id="another")
        answer = json.dumps(outcome).encode()
        await requests.publish(replies, answer, correlation_id=request.correlation_id)
    done = task.result()
    expires_at: Any = request.headers["sms-bridge-expires-at"]

    assert json.loads(request.body) == body
    assert request.correlation_id
    assert (request.content_type, request.delivery_mode) == ("application/json", 2)
    assert request.timestamp is not None
    assert now - 1 <= request.timestamp.timestamp() + 1 <= now + SECONDS
    assert type(expires_at) is int
    assert now + 299 <= expires_at <= now + 300 + SECONDS
    assert (json.loads(done.stdout), done.returncode) == (outcome, 1)


async def test_without_a_number_and_a_text_nothing_is_published(
    built: tuple[Language, Path], unserved: Place, requests: Amqp
) -> None:
    """A call that lacks something ends with an error at once, and leaves no broken request."""
    done = [await _programs(built, unserved).publish(*given) for given in ((), ("+491713920010",))]

    assert all(one.returncode and one.stderr and not one.stdout for one in done)
    assert await requests.count("sms.outbound") == 0


async def test_a_request_that_fits_no_queue_is_an_error(
    built: tuple[Language, Path], empty: Place, canaries: Canaries
) -> None:
    """Without a queue the publisher ends with an error, rather than wait for an outcome."""
    done = await _programs(built, empty).publish(canaries.number(), canaries.text())

    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr


@dataclass(frozen=True)
class Subscriber:
    """A subscriber that consumes, and the queue that it has made."""

    child: Child
    amqp: Amqp
    broker: Broker

    async def until_acked(self) -> None:
        async def is_so() -> bool:
            # Asked of the channels themselves: what queues tell of this is some seconds old.
            command = ("list_channels", "--no-table-headers", "messages_unacknowledged")
            rows = await asyncio.to_thread(self.broker.ctl, *command)
            return set(rows.split()) == {"0"}

        await eventually(is_so, what="no message unacked")


Subscribe = Callable[[Path], Awaitable[Subscriber]]


@pytest.fixture
async def subscribe(
    built: tuple[Language, Path],
    served: Place,
    bridge: Running,
    managed_broker: Broker,
    guard: Guard,
    tmp_path: Path,
) -> AsyncIterator[Subscribe]:
    assert bridge.child.exit_code is None
    children: list[Child] = []
    async with open_amqp(served.url) as amqp:

        async def start(file: Path) -> Subscriber:
            child = _programs(built, served).subscribe(file, guard, tmp_path / "subscriber.log")
            children.append(child)

            async def consumes() -> bool:
                assert child.exit_code is None, child.tail()
                # A queue that is there with other arguments would be refused.
                quorum: dict[str, Any] = {"x-queue-type": "quorum"}
                found = await amqp.channel.declare_queue(TEAM_QUEUE, durable=True, arguments=quorum)
                return bool(found.declaration_result.consumer_count)

            await eventually(consumes, what="a consumer")
            return Subscriber(child, amqp, managed_broker)

        yield start
        for child in children:
            child.end(grace_seconds=10)
        await amqp.delete([TEAM_QUEUE])


async def _text_back(
    bridge: Running, http: httpx.AsyncClient, canaries: Canaries, **members: str
) -> dict[str, Any]:
    """Have the service call the webhook for a text that came in."""
    data = {"from": canaries.number(), "text": canaries.text() + AWKWARD}
    event = {"type": "message.received", "data": data, **members}
    body = json.dumps(event, indent=1).encode()
    headers = {SIGNATURE: canaries.sign(body)}
    answer = await http.post(bridge.webhook_url, content=body, headers=headers)
    assert answer.status_code == 200
    return event


async def test_events_are_handled_and_acked(
    built: tuple[Language, Path],
    subscribe: Subscribe,
    bridge: Running,
    http: httpx.AsyncClient,
    canaries: Canaries,
    tmp_path: Path,
) -> None:
    file = tmp_path / "events"
    subscriber = await subscribe(file)
    first = await _text_back(bridge, http, canaries, id="evt-1")
    second = await _text_back(bridge, http, canaries)

    async def are_written() -> list[str] | None:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return lines if len(lines) == 2 else None

    written = [json.loads(line) for line in await eventually(are_written, what="two lines")]
    await subscriber.until_acked()

    assert [line["event"] for line in written] == [first, second]
    if built[0].hands_over_headers:
        assert [line["type"] for line in written] == ["message.received"] * 2
        assert [line["id"] for line in written] == ["evt-1", None]


FORM = "application/x-www-form-urlencoded; charset=UTF-8"
POISON = (b"no JSON", b"", b'{"text": "\xff"}', b"[" * 100_000)


async def test_forms_are_read_and_poison_stops_nothing(
    built: tuple[Language, Path], subscribe: Subscribe, tmp_path: Path
) -> None:
    file = tmp_path / "events"
    subscriber = await subscribe(file)
    publish = partial(subscriber.amqp.publish, TEAM_QUEUE)
    for body in POISON:
        await publish(body, content_type="application/json")
    await publish(b"From=%2B12025550101&Body=Gr%C3%BC%C3%9Fe+%26+more&Media=", content_type=FORM)
    await publish(b'{"type": "last"}', content_type="application/json")

    async def are_written() -> list[str] | None:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return lines if len(lines) == len(POISON) + 2 else None

    lines = await eventually(are_written, what="a line for each event")
    *poison, form, last = (json.loads(line) for line in lines)
    await subscriber.until_acked()

    assert last["event"] == {"type": "last"}
    if built[0].hands_over_headers:
        assert form["event"] == {"From": "+12025550101", "Body": "Grüße & more", "Media": ""}
        assert base64.b64decode(poison[0]["body"]) == POISON[0]
    else:
        assert form["body"].startswith("From=%2B12025550101")
        assert poison[0]["body"] == POISON[0].decode()


async def test_an_event_that_cannot_be_handled_stays(
    subscribe: Subscribe, bridge: Running, http: httpx.AsyncClient, canaries: Canaries
) -> None:
    """When the handling fails, here on a full disk, the program ends and the event is kept."""
    subscriber = await subscribe(Path("/dev/full"))
    await _text_back(bridge, http, canaries)

    async def has_ended() -> bool:
        return subscriber.child.exit_code is not None

    await eventually(has_ended, what="the end of the subscriber")
    await subscriber.amqp.until_count(TEAM_QUEUE, 1)

    assert subscriber.child.exit_code
