"""The programs of `examples`, run as they are against a real broker, worker and webhook receiver.

Those in Python and the shell take part in every run. The others need runtimes and packages that
take long to fetch: `make examples` sets SMS_BRIDGE_TEST_EXAMPLES, and has them built.
"""

import asyncio
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from urllib.parse import urlencode

import aio_pika
import anyio
import httpx
import pytest
from twilio.request_validator import RequestValidator

from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import Child, Guard
from tests.accounts import virtual_host
from tests.amqp_client import Amqp, open_amqp
from tests.erlang import evaluate
from tests.integration.conftest import (
    SECONDS,
    SIGNATURE,
    Canaries,
    Launcher,
    Running,
    Service,
    eventually,
    make_environ,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
IS_EVERY_LANGUAGE = "SMS_BRIDGE_TEST_EXAMPLES" in os.environ
# Where Debian's package php-amqplib has what Composer would put into the folder.
PHP_CLIENT = Path("/usr/share/php/PhpAmqpLib/autoload.php")
BUILD_SECONDS = 300.0
TEAM_QUEUE = "my-team.sms"
DEAD_LETTERS = "my-team.sms.dead"
TWILIO_URL = "https://sms.example.com/twilio"
DELIVERY_LIMIT = 5
QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
ARGUMENTS = QUORUM | {
    "x-delivery-limit": DELIVERY_LIMIT,
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": DEAD_LETTERS,
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}
UNACKED = "lists:sum([N || [{_, N}] <- rabbit_channel:info_all([messages_unacknowledged])])"
# What a body, a shell or a command line could break.
AWKWARD = " \"Grüße\" $HOME \\ 👋\n'two'"


MAVEN = "mvn -q -B dependency:copy-dependencies -DoutputDirectory=lib"


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
    # Compiled beforehand: from source each start takes a busy machine half a minute.
    "java": Language(
        ("java", "-cp", "lib/*:bin", "Publish"),
        ("java", "-cp", "lib/*:bin", "Subscribe"),
        build=("sh", "-ec", f"{MAVEN}; javac -cp 'lib/*' -d bin *.java"),
        needs=("javac", "mvn"),
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


@contextmanager
def _place(broker: Broker, name: str) -> Iterator[Place]:
    web = (broker.management_url or "").replace("//", "//guest:guest@")
    with virtual_host(broker, name) as url:
        environ = {"AMQP_URL": url, "RABBITMQ_API": f"{web}/api", "VHOST": name}
        yield Place(name, url, make_environ({}) | environ)


@pytest.fixture(scope="module")
def served(managed_broker: Broker) -> Iterator[Place]:
    """Make the virtual host in which the bridge runs, with the names that are its defaults."""
    with _place(managed_broker, "examples-served") as place:
        yield place


@pytest.fixture(scope="module")
def unserved(managed_broker: Broker) -> Iterator[Place]:
    """Make a virtual host without a worker."""
    with _place(managed_broker, "examples-unserved") as place:
        yield place


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
    twilio = {"path": "/twilio", "preset": "twilio", "public_url": TWILIO_URL}
    vonage = {"path": "/vonage", "preset": "vonage", "signature": {"preset": "plain"}}
    endpoints = [one | {"secrets": [canaries.secret]} for one in (twilio, vonage)]
    base |= {"webhook.endpoints": endpoints}
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
    built: tuple[Language, Path], unserved: Place, canaries: Canaries
) -> None:
    """Without a queue the publisher ends with an error, rather than wait for an outcome."""
    done = await _programs(built, unserved).publish(canaries.number(), canaries.text())

    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr


@dataclass(frozen=True)
class Subscriber:
    """A subscriber that consumes, and the queue that it has made."""

    child: Child
    amqp: Amqp
    broker: Broker
    file: Path

    async def until_settled(self) -> None:
        """Return when nothing is in the queue, ready or unacked."""

        async def is_so() -> bool:
            # Asked of the channels themselves: what queues tell of this is some seconds old.
            held = await asyncio.to_thread(evaluate, self.broker, UNACKED)
            return held == "0" and await self.amqp.count(TEAM_QUEUE) == 0

        await eventually(is_so, what="no message unacked")

    async def until_written(self, count: int) -> list[dict[str, Any]]:
        """Return the lines of the file, once there are as many."""

        async def are_written() -> list[dict[str, Any]] | None:
            lines = self.file.read_text("utf-8").splitlines() if self.file.exists() else []
            return [json.loads(line) for line in lines] if len(lines) >= count else None

        return await eventually(are_written, what=f"{count} lines")

    def failures(self) -> int:
        """Count the times that the handling of an event failed."""
        return self.child.log.read_text("utf-8").count("not handled")

    async def until_failed(self, count: int) -> None:
        async def is_so() -> bool:
            return self.failures() >= count

        await eventually(is_so, what=f"{count} failures")


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
                # Queues that are there with other arguments would be refused.
                await amqp.channel.declare_queue(DEAD_LETTERS, durable=True, arguments=QUORUM)
                found = await amqp.channel.declare_queue(
                    TEAM_QUEUE, durable=True, arguments=ARGUMENTS
                )
                return bool(found.declaration_result.consumer_count)

            await eventually(consumes, what="a consumer")
            return Subscriber(child, amqp, managed_broker, file)

        yield start
        for child in children:
            child.end(grace_seconds=10)
        await amqp.delete([TEAM_QUEUE, DEAD_LETTERS])


async def test_services_differ_and_their_events_do_not(
    subscribe: Subscribe,
    bridge: Running,
    http: httpx.AsyncClient,
    canaries: Canaries,
    tmp_path: Path,
) -> None:
    """A person opts out at Twilio, and another writes to Vonage."""
    subscriber = await subscribe(tmp_path / "events")
    sid, url = f"SM{uuid.uuid4().hex}", bridge.webhook_url.removesuffix("/webhooks")
    form = {"AccountSid": f"AC{0:032}", "MessageSid": sid, "From": canaries.number()}
    form |= {"To": "+12025550102", "Body": "STOP", "OptOutType": "STOP"}
    signature = RequestValidator(canaries.secret).compute_signature(TWILIO_URL, form)
    answer = await http.post(f"{url}/twilio", data=form, headers={"X-Twilio-Signature": signature})
    assert answer.status_code == 200

    text = canaries.text() + AWKWARD
    document = {"message_uuid": f"{sid}-2", "from": canaries.number()[1:], "to": "12025550102"}
    body = json.dumps(document | {"text": text}).encode()
    headers = {"Content-Type": "application/json", SIGNATURE: canaries.sign(body)}
    answer = await http.post(f"{url}/vonage", content=body, headers=headers)
    assert answer.status_code == 200

    written = {line["id"]: line for line in await subscriber.until_written(3)}
    await subscriber.until_settled()
    received = "message.received"

    assert written == {
        sid: {"id": sid, "type": received, "from": form["From"], "text": "STOP"},
        f"{sid}:opt_out": {"id": f"{sid}:opt_out", "type": "opt_out", "from": form["From"]},
        f"{sid}-2": {
            "id": f"{sid}-2",
            "type": received,
            "from": f"+{document['from']}",
            "text": text,
        },
    }


def _event(canaries: Canaries, event_id: str, event_type: str, **data: str) -> dict[str, Any]:
    """Make up an event of the form that all services' presets have."""
    data = {"from": canaries.number(), "to": "+12025550100", "provider_id": event_id} | data
    raw = {
        "body": urlencode({"From": data["from"], "Body": data.get("text", "")}),
        "content_type": "application/x-www-form-urlencoded; charset=UTF-8",
        "encoding": "utf-8",
    }
    return {
        "type": event_type,
        "id": event_id,
        "provider": "twilio",
        "received_at": "2026-11-26T12:00:00Z",
        "data": data,
        "raw": raw,
    }


async def _publish(amqp: Amqp, event: dict[str, Any]) -> None:
    message = aio_pika.Message(
        json.dumps(event).encode(),
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        type=event["type"],
        headers={"sms-bridge-event-id": event["id"]},
    )
    exchange = await amqp.channel.get_exchange("sms.inbound", ensure=False)
    await exchange.publish(message, event["type"])


async def test_a_repeat_is_handled_once_and_an_opt_out_on_its_own(
    subscribe: Subscribe, canaries: Canaries, tmp_path: Path
) -> None:
    subscriber = await subscribe(tmp_path / "events")
    text = _event(canaries, "SM-1", "message.received", text=canaries.text() + AWKWARD)
    image = _event(canaries, "SM-2", "message.received")
    stop = _event(canaries, "SM-3:opt_out", "opt_out", keyword="STOP")
    for event in (text, text, image, stop, text, stop, text | {"id": "SM-4"}):
        await _publish(subscriber.amqp, event)

    written = await subscriber.until_written(4)
    await subscriber.until_settled()
    sender = text["data"]["from"]

    assert written == [
        {"id": "SM-1", "type": text["type"], "from": sender, "text": text["data"]["text"]},
        {"id": "SM-2", "type": text["type"], "from": image["data"]["from"], "text": ""},
        {"id": "SM-3:opt_out", "type": "opt_out", "from": stop["data"]["from"]},
        {"id": "SM-4", "type": text["type"], "from": sender, "text": text["data"]["text"]},
    ]


POISON = (
    b"no JSON",
    b"",
    b"From=%2B12025550101&Body=Hi",
    b"[" * 100_000,
    b"[]",
    b"null",
    b'{"type": "message.received"}',
    b'{"type": "message.received", "data": {"text": "Hi"}}',
    b'{"type": "message.received", "data": []}',
)
NO_UTF8 = b'{"type": "message.received", "data": {"from": "+12025550101", "text": "\xff"}}'


async def test_what_cannot_be_read_becomes_a_dead_letter(
    built: tuple[Language, Path], subscribe: Subscribe, canaries: Canaries, tmp_path: Path
) -> None:
    """The program goes on, and the events around are handled."""
    subscriber = await subscribe(tmp_path / "events")
    # The shell's tries these as often as an event that fails, which takes seconds for each.
    poison = POISON[:1] if not built[0].hands_over_headers else (*POISON, NO_UTF8)
    events = [_event(canaries, f"SM-{n}", "message.received") for n in range(len(poison))]
    for body, event in zip(poison, events, strict=True):
        await subscriber.amqp.publish(TEAM_QUEUE, body, content_type="application/json")
        await _publish(subscriber.amqp, event)

    written = await subscriber.until_written(len(events))
    await subscriber.amqp.until_count(DEAD_LETTERS, len(poison))
    await subscriber.until_settled()
    dead = await subscriber.amqp.take_all(DEAD_LETTERS)

    assert sorted(letter.body for letter in dead) == sorted(poison)
    assert {line["id"] for line in written} == {event["id"] for event in events}
    assert subscriber.child.exit_code is None


async def test_an_event_that_fails_is_tried_again(
    subscribe: Subscribe, canaries: Canaries, tmp_path: Path
) -> None:
    """Its handling fails until there is a folder for the file; the repeat comes after it."""
    subscriber = await subscribe(tmp_path / "later" / "events")
    event = _event(canaries, "SM-1", "message.received", text=canaries.text())
    await _publish(subscriber.amqp, event)
    await subscriber.until_failed(2)
    (tmp_path / "later").mkdir()

    (written,) = await subscriber.until_written(1)
    await _publish(subscriber.amqp, event)
    await subscriber.until_settled()

    assert written["id"] == "SM-1"
    assert len(await subscriber.until_written(1)) == 1
    assert await subscriber.amqp.count(DEAD_LETTERS) == 0


async def test_an_event_that_fails_again_and_again_becomes_a_dead_letter(
    subscribe: Subscribe, canaries: Canaries
) -> None:
    """On a full disk, events are tried a few times; the program goes on, and none is lost."""
    subscriber = await subscribe(Path("/dev/full"))
    event = _event(canaries, "SM-1", "message.received", text=canaries.text())
    await _publish(subscriber.amqp, event)
    await subscriber.amqp.until_count(DEAD_LETTERS, 1)
    await subscriber.until_settled()
    (dead,) = await subscriber.amqp.take_all(DEAD_LETTERS)

    assert json.loads(dead.body) == event
    assert dead.headers["sms-bridge-event-id"] == "SM-1"
    assert subscriber.failures() == DELIVERY_LIMIT + 1
    assert subscriber.child.exit_code is None
