"""`sms-bridge drain`: what waits becomes dead letters, and nothing is lost, whatever happens."""

import asyncio
import json
import signal
import stat
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import aio_pika
import pytest

from bridge.admin.drain import MAX_ROUND
from bridge.config import WorkerSettings
from bridge.sandbox.broker import Broker
from bridge.topology.declarations import Topology, worker_topology
from tests.accounts import account, permit
from tests.amqp_client import Amqp, open_amqp
from tests.integration.conftest import Canaries, Launcher, Service, eventually, run_program, unique

BODY = b'{"to": "+491713920010", "from": "Acme", "text": "Zikadensommer"}'
REASON = "wrong text in the campaign of 2026-11-22"
COMMAND = ("drain", "--reason", REASON)
QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
# Long enough that nothing comes back from it by itself.
LADDER = ("10m", "1h")
# More than a kill can leave in both places, several times over.
CAMPAIGN = 1200


@dataclass
class Campaign:
    """A queue with its ladder and its dead letters, and what was published to it."""

    amqp: Amqp
    url: str
    queue: str
    folder: Path
    ids: list[str] = field(default_factory=list)

    @property
    def dead(self) -> str:
        return f"{self.queue}.dead"

    @property
    def file(self) -> Path:
        return self.folder / "drained.jsonl"

    @property
    def settings(self) -> dict[str, object]:
        return {
            "rabbitmq.url": self.url,
            "worker.queue": self.queue,
            "worker.retry_delays": list(LADDER),
        }

    @property
    def topology(self) -> Topology:
        return worker_topology(
            WorkerSettings.model_validate({"queue": self.queue, "retry_delays": LADDER})
        )

    async def declare(self, arguments: dict[str, Any]) -> None:
        for queue in self.topology.queues:
            own = arguments if queue.name == self.queue else queue.arguments
            await self.amqp.channel.declare_queue(queue.name, durable=True, arguments=own)

    async def publish(self, count: int, *, queue: str | None = None, **properties: Any) -> None:
        for start in range(0, count, 500):
            ids = [uuid.uuid4().hex for _ in range(min(500, count - start))]
            self.ids += ids
            await asyncio.gather(
                *(
                    self.amqp.publish(queue or self.queue, BODY, message_id=one, **properties)
                    for one in ids
                )
            )

    async def run(self, *options: str) -> CompletedProcess[bytes]:
        return await run_program(*COMMAND, *options, settings=self.settings)

    async def moved(self) -> CompletedProcess[bytes]:
        result = await self.run("--yes", "--file", str(self.file))
        assert result.returncode == 0, result.stderr.decode()
        return result

    def listed(self, file: Path | None = None) -> list[dict[str, Any]]:
        lines = (file or self.file).read_text(encoding="ascii").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    async def until_at_rest(self, main: int, dead: int) -> None:
        await self.amqp.until_count(self.queue, main)
        await self.amqp.until_count(self.dead, dead)


@asynccontextmanager
async def open_campaign(
    amqp: Amqp, url: str, folder: Path, arguments: dict[str, Any]
) -> AsyncIterator[Campaign]:
    ours = Campaign(amqp, url, unique("drain"), folder)
    await ours.declare(arguments)
    yield ours
    await amqp.delete([queue.name for queue in ours.topology.queues])


@pytest.fixture
async def campaign(amqp: Amqp, amqp_url: str, tmp_path: Path) -> AsyncIterator[Campaign]:
    async with open_campaign(amqp, amqp_url, tmp_path, QUORUM) as ours:
        yield ours


# What it would do


async def test_a_dry_run_changes_nothing(
    campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await campaign.publish(3)
    await campaign.publish(2, queue=f"{campaign.queue}.retry.1h")
    monkeypatch.chdir(tmp_path)
    for options in ((), ("--dry-run",), ("--limit", "4")):
        result = await campaign.run(*options)
        said = result.stdout.decode()
        count = 4 if "--limit" in options else 5

        assert (result.returncode, result.stderr) == (0, b"")
        assert f"would move {count} of 5 waiting" in said
        assert f"({campaign.queue}.retry.1h 2, {campaign.queue} 3)" in said
        assert "nothing was changed; add --yes to do it" in said
    left = await campaign.amqp.take_all(campaign.queue)

    assert [message.message_id for message in left] == campaign.ids[:3]
    assert {message.redelivered for message in left} == {False}
    assert await campaign.amqp.count(campaign.dead) == 0
    assert _files_in(tmp_path) == []


def _files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_it_counts_for_a_script(campaign: Campaign) -> None:
    await campaign.publish(2)
    asked = await campaign.run("--json")
    done = await campaign.run("--json", "--yes", "--file", str(campaign.file))
    again = await campaign.run("--json", "--yes", "--file", str(campaign.file))
    urgent = f"{campaign.queue}.urgent"
    retries = [f"{queue}.retry.{step}" for queue in (campaign.queue, urgent) for step in LADDER]
    steps = dict.fromkeys((urgent, *retries), 0)
    waiting = {"waiting": {**steps, campaign.queue: 2}, "workers": 0}
    moved = {"moved": {campaign.queue: 2}, "maybe_sent": 0, "file": str(campaign.file)}
    empty = {"waiting": {**steps, campaign.queue: 0}, "workers": 0}

    assert (asked.returncode, done.returncode, again.returncode) == (0, 0, 0)
    assert json.loads(asked.stdout) == {"applied": False, "done": 0, **waiting}
    assert json.loads(done.stdout) == {"applied": True, "done": 2, **waiting, **moved}
    # A file that exists is in nobody's way where nothing waits.
    assert json.loads(again.stdout) == {
        "applied": True,
        "done": 0,
        "moved": {},
        "maybe_sent": 0,
        **empty,
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "Missing option '--reason'"),
        (("--reason", "call +49 171 39200 99"), "phone number"),
        (("--reason", " "), "--reason: is empty"),
        (("--reason", REASON, "--dry-run", "--yes"), "give only one of them"),
    ],
    ids=["no reason", "a number", "an empty reason", "both"],
)
async def test_what_is_not_clear_is_refused(
    campaign: Campaign, options: tuple[str, ...], said: str
) -> None:
    await campaign.publish(1)
    yes = () if "--dry-run" in options else ("--yes",)
    result = await run_program("drain", *options, *yes, settings=campaign.settings)

    assert result.returncode == 2
    assert said in result.stderr.decode()
    await campaign.amqp.until_count(campaign.queue, 1)


# What it does


@pytest.mark.parametrize("arguments", [QUORUM, {}], ids=["quorum", "classic"])
async def test_what_waits_becomes_dead_letters(
    amqp: Amqp, amqp_url: str, tmp_path: Path, canaries: Canaries, arguments: dict[str, Any]
) -> None:
    published = datetime.now(UTC).replace(microsecond=0)
    ladder = {"sms-bridge-attempts": 2, "sms-bridge-status": 503, "sms-bridge-reason": "timeout"}
    async with open_campaign(amqp, amqp_url, tmp_path, arguments) as campaign:
        own = {"sms-bridge-expires-at": "1900000000", "sms-bridge-ordering-key": "a"}
        await campaign.publish(1, queue=f"{campaign.queue}.retry.10m", headers=ladder)
        await campaign.publish(1, headers=own, timestamp=published, priority=3)
        await campaign.publish(1, headers={"sms-bridge-expires-at": "soon"})
        await amqp.publish(campaign.queue, b"\xff")
        result = await campaign.moved()
        messages = await campaign.amqp.take_all(campaign.dead)
        left = await amqp.count(campaign.queue)
        # RabbitMQ 4 hands out first what has a priority.
        messages.sort(
            key=lambda message: [*campaign.ids, message.message_id].index(message.message_id)
        )
        failed, good, broken, nameless = messages

        assert left == 0
        assert f"moved 4 ({campaign.queue}.retry.10m 1, {campaign.queue} 3)" in (
            result.stdout.decode()
        )
        assert [message.message_id for message in messages[:3]] == campaign.ids
        assert [message.body for message in messages] == [BODY, BODY, BODY, b"\xff"]
        for message in messages:
            assert message.headers["sms-bridge-reason"] == "drained"
            assert message.headers["sms-bridge-detail"] == REASON
            assert message.headers["sms-bridge-uncertain-attempts"] == 0
            assert message.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
            died = datetime.fromisoformat(str(message.headers["sms-bridge-dead-at"]))
            assert published <= died <= datetime.now(UTC)
        assert failed.headers["sms-bridge-attempts"] == 2
        assert failed.headers["sms-bridge-status"] == 503
        assert good.headers["sms-bridge-attempts"] == 0
        assert good.headers["sms-bridge-expires-at"] == "1900000000.000"
        assert good.headers["sms-bridge-ordering-key"] == "a"
        assert (good.timestamp, good.priority) == (published, 3)
        assert broken.headers["sms-bridge-expires-at"] == "soon"
        assert nameless.message_id

        records = campaign.listed()
        assert [record["message_id"] for record in records] == [
            message.message_id for message in messages
        ]
        assert records[1] == {
            "message_id": good.message_id,
            "queue": campaign.queue,
            "published_at": published.isoformat(timespec="milliseconds"),
            "not_before": None,
            "expires_at": "2030-03-17T17:46:40.000+00:00",
            "attempts": 0,
            "may_be_sent": False,
            "bytes": len(BODY),
            "moved_at": good.headers["sms-bridge-dead-at"],
        }
        assert records[0]["attempts"] == 2
        assert stat.S_IMODE(campaign.file.stat().st_mode) == 0o600
        told = campaign.file.read_text(encoding="ascii") + result.stdout.decode()
        assert canaries.found_in(told) == set()
        assert "1713920010" not in told


async def test_a_replay_brings_them_back(
    launcher: Launcher, service: Service, canaries: Canaries, campaign: Campaign
) -> None:
    requests = [canaries.request() for _ in range(3)]
    settings = {
        **campaign.settings,
        "sms_api.base_url": service.url,
        "sms_api.key": canaries.key,
    }
    paused = await run_program("pause", settings=campaign.settings)
    worker = await launcher.role("worker", settings=settings)
    ids = [uuid.uuid4().hex for _ in requests]
    for request, message_id in zip(requests, ids, strict=True):
        body = json.dumps(request).encode()
        await campaign.amqp.publish(campaign.queue, body, message_id=message_id)
    drained = await campaign.moved()
    listed = await run_program("dlq", "list", "--reason", "drained", settings=campaign.settings)
    replayed = await run_program(
        *("dlq", "replay", "--reason", "drained", "--id", ids[1], "--yes"),
        settings=campaign.settings,
    )
    await run_program("resume", settings=campaign.settings)
    sent = await service.until_sent(requests[1]["to"])
    assert await worker.stop() == 0
    await campaign.amqp.delete([f"{campaign.queue}.paused"])

    assert paused.returncode == 0
    # Nobody takes in a pause.
    assert drained.stderr == b""
    assert listed.stdout.decode().count(REASON) == 3
    assert replayed.stdout == b"replayed 1\n"
    assert sent["idempotency_key"] == ids[1]
    assert [await service.requests(request["to"]) for request in (requests[0], requests[2])] == [
        [],
        [],
    ]
    await campaign.amqp.until_count(campaign.dead, 2)


async def test_who_waits_for_the_outcome_is_told(amqp: Amqp, campaign: Campaign) -> None:
    exchange, replies = unique("outcome"), unique("replies")
    queue = await amqp.channel.declare_queue(replies)
    told = await amqp.channel.declare_exchange(exchange, "topic", durable=True)
    await queue.bind(told, "#")
    await campaign.publish(1, reply_to=replies, correlation_id="c-1")
    settings = {**campaign.settings, "worker.outcome_exchange": exchange}
    result = await run_program(*COMMAND, "--yes", "--file", str(campaign.file), settings=settings)
    await amqp.until_count(replies, 2)
    events = [await queue.get(no_ack=True) for _ in range(2)]
    await amqp.delete([replies, exchange])

    assert result.returncode == 0
    assert {(event.exchange, event.routing_key) for event in events} == {
        ("", replies),
        (exchange, "dead"),
    }
    for event in events:
        body = json.loads(event.body)
        assert (body["message_id"], body["outcome"]) == (campaign.ids[0], "dead")
        assert (body["reason"], body["attempts"]) == ("drained", 0)
        assert event.correlation_id == "c-1"


async def test_what_somebody_had_may_have_been_sent(campaign: Campaign) -> None:
    await campaign.publish(2)
    async with await aio_pika.connect(campaign.url) as dying:
        channel = await dying.channel()
        await (await channel.get_queue(campaign.queue, ensure=False)).get()
    await campaign.amqp.until_count(campaign.queue, 2)
    result = await campaign.moved()
    asked = await run_program("dlq", "replay", settings=campaign.settings)

    assert "of them may have been sent already: 1" in result.stdout.decode()
    assert Counter(record["may_be_sent"] for record in campaign.listed()) == {True: 1, False: 1}
    assert "would replay 1 (drained 1)" in asked.stdout.decode()
    assert "may have been sent already: 1 (drained 1)" in asked.stdout.decode()


async def test_a_limit_is_kept_to_the_message(campaign: Campaign) -> None:
    await campaign.publish(MAX_ROUND + 40)
    result = await campaign.run("--yes", "--limit", str(MAX_ROUND), "--file", str(campaign.file))
    left = await campaign.amqp.take_all(campaign.queue)

    assert result.returncode == 0
    assert [record["message_id"] for record in campaign.listed()] == campaign.ids[:MAX_ROUND]
    assert [message.message_id for message in left] == campaign.ids[MAX_ROUND:]
    assert {message.redelivered for message in left} == {False}


async def test_it_ends_while_publishers_go_on(campaign: Campaign) -> None:
    await campaign.publish(CAMPAIGN)
    is_over = asyncio.Event()

    async def feed() -> None:
        while not is_over.is_set():
            await campaign.publish(20)

    feeding = asyncio.create_task(feed())
    try:
        result = await campaign.moved()
    finally:
        is_over.set()
        await feeding
    left = await campaign.amqp.take_all(campaign.queue)
    moved = [record["message_id"] for record in campaign.listed()]

    assert len(moved) >= CAMPAIGN
    assert left
    assert moved + [message.message_id for message in left] == campaign.ids
    assert {message.redelivered for message in left} == {False}
    assert "are waiting now, published or returned meanwhile" in result.stderr.decode()


async def test_workers_that_go_on_are_told_of(
    launcher: Launcher, service: Service, canaries: Canaries, campaign: Campaign
) -> None:
    requests = [canaries.request() for _ in range(100)]
    settings = {
        **campaign.settings,
        "sms_api.base_url": service.url,
        "sms_api.key": canaries.key,
        # 20 seconds for all: some have to be left when two commands have run on a busy computer.
        "worker.rate_limit.per_second": 5,
        "worker.rate_limit.burst": 1,
    }
    worker = await launcher.role("worker", settings=settings)
    numbers = {uuid.uuid4().hex: request["to"] for request in requests}
    # At once: while they are published they are sent, and some have to be left.
    await asyncio.gather(
        *(
            campaign.amqp.publish(campaign.queue, json.dumps(request).encode(), message_id=one)
            for one, request in zip(numbers, requests, strict=True)
        )
    )
    asked = await campaign.run()
    await campaign.moved()
    dead = {message.message_id for message in await campaign.amqp.take_all(campaign.dead)}
    alive = {number for message_id, number in numbers.items() if message_id not in dead}

    async def are_sent() -> bool:
        return all([await service.messages(to) for to in alive])

    await eventually(are_sent, what="the others sent")
    posts = [await service.requests(number) for number in numbers.values()]
    assert await worker.stop() == 0

    assert f"{campaign.queue} has 1 consumer," in asked.stderr.decode()
    assert "stop workers with `sms-bridge pause` first" in asked.stderr.decode()
    assert dead
    assert alive
    assert sum(map(len, posts)) == len(alive)


# What goes wrong


async def _until_moved(campaign: Campaign, count: int) -> None:
    async def are_moved() -> bool:
        return await campaign.amqp.count(campaign.dead) >= count

    await eventually(are_moved, what=f"{count} moved")


async def _until_given_back(campaign: Campaign) -> None:
    async def nobody_takes() -> bool:
        declared = await campaign.amqp.channel.declare_queue(campaign.queue, passive=True)
        return declared.declaration_result.consumer_count == 0

    # With the consumer the broker takes back what it held.
    await eventually(nobody_takes, what="the broker noticed the end")


async def test_a_queue_that_another_consumer_has_for_itself(campaign: Campaign) -> None:
    await campaign.amqp.channel.queue_delete(campaign.queue)
    await campaign.declare(QUORUM | {"x-single-active-consumer": True})
    await campaign.amqp.channel.set_qos(prefetch_count=1)
    other = await campaign.amqp.channel.get_queue(campaign.queue)

    async def hold(_: aio_pika.abc.AbstractIncomingMessage) -> None:
        pass

    tag = await other.consume(hold)
    await campaign.publish(3)

    result = await campaign.run("--yes", "--file", str(campaign.file))
    await other.cancel(tag)

    assert result.returncode == 1
    assert "if the queue has a single active consumer" in result.stderr.decode()
    assert not campaign.file.exists()


@pytest.mark.parametrize("arguments", [QUORUM, {}], ids=["quorum", "classic"])
async def test_a_killed_drain_loses_nothing(
    amqp: Amqp, amqp_url: str, tmp_path: Path, launcher: Launcher, arguments: dict[str, Any]
) -> None:
    """Killed twice, then run to its end: all are dead letters and listed; doubles have one id.

    Takes four runs of the program, and thousands of messages.
    """
    async with open_campaign(amqp, amqp_url, tmp_path, arguments) as campaign:
        await campaign.publish(CAMPAIGN)
        files = [tmp_path / f"drained-{number}.jsonl" for number in range(3)]
        for file, moved in zip(files, (300, 600), strict=False):
            command = (*COMMAND, "--yes", "--file", str(file))
            running = launcher.start(*command, settings=campaign.settings)
            launcher.started.remove(running)
            await _until_moved(campaign, moved)
            running.child.kill()
            await _until_given_back(campaign)
        last = await campaign.run("--yes", "--file", str(files[2]))
        assert last.returncode == 0, last.stderr
        listed = {record["message_id"] for file in files for record in campaign.listed(file)}
        asked = await run_program("dlq", "replay", "--json", settings=campaign.settings)
        times = Counter(
            message.message_id for message in await campaign.amqp.take_all(campaign.dead)
        )
        doubled = times.total() - CAMPAIGN

        assert set(times) == set(campaign.ids) == listed
        assert max(times.values()) <= 3
        assert doubled <= 2 * MAX_ROUND
        # The second copy of each came back from who was killed.
        assert sum(json.loads(asked.stdout)["maybe_sent"].values()) >= doubled
        assert json.loads(asked.stdout)["repeats"] == 0
        await amqp.until_count(campaign.queue, 0)


async def test_a_stopped_drain_gives_nothing_back(campaign: Campaign, launcher: Launcher) -> None:
    await campaign.publish(2 * CAMPAIGN)
    command = (*COMMAND, "--yes", "--file", str(campaign.file))
    running = launcher.start(*command, settings=campaign.settings)
    launcher.started.remove(running)
    await _until_moved(campaign, 300)
    running.child.signal(signal.SIGTERM)
    code = await running.ended()
    await _until_given_back(campaign)
    left = await campaign.amqp.take_all(campaign.queue)
    moved = [message.message_id for message in await campaign.amqp.take_all(campaign.dead)]

    assert code == 1
    assert f"stopped after {len(moved)}; nothing is lost" in running.output
    assert left
    assert moved + [message.message_id for message in left] == campaign.ids
    assert {message.redelivered for message in left} == {False}
    assert len(campaign.listed()) == len(moved)


async def test_without_a_place_for_them_nothing_is_taken(campaign: Campaign) -> None:
    await campaign.publish(3)
    await campaign.amqp.channel.queue_delete(campaign.dead)
    for options in ((), ("--yes", "--file", str(campaign.file))):
        result = await campaign.run(*options)

        assert (result.returncode, result.stdout) == (1, b"")
        assert f"queue {campaign.dead}: does not exist" in result.stderr.decode()
    left = await campaign.amqp.take_all(campaign.queue)
    assert {message.redelivered for message in left} == {False}
    assert not campaign.file.exists()


async def test_a_full_dead_letter_queue_gives_back_one(amqp: Amqp, campaign: Campaign) -> None:
    await amqp.channel.queue_delete(campaign.dead)
    full: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await amqp.channel.declare_queue(campaign.dead, durable=True, arguments=full)
    await amqp.publish(campaign.dead, BODY)
    await campaign.publish(20)
    result = await campaign.run("--yes", "--file", str(campaign.file))
    await campaign.until_at_rest(20, 1)
    left = await campaign.amqp.take_all(campaign.queue)

    assert (result.returncode, result.stdout) == (1, b"moved 0\n")
    assert "not stored" in result.stderr.decode()
    assert "nothing is lost" in result.stderr.decode()
    assert Counter(message.redelivered for message in left) == {False: 19, True: 1}
    assert not campaign.file.exists()


async def test_a_file_is_never_overwritten(campaign: Campaign) -> None:
    await campaign.publish(1)
    campaign.file.write_text("mine", encoding="ascii")
    result = await campaign.run("--yes", "--file", str(campaign.file))
    (left,) = await campaign.amqp.take_all(campaign.queue)

    assert result.returncode == 1
    assert "name another file with --file" in result.stderr.decode()
    assert campaign.file.read_text(encoding="ascii") == "mine"
    assert not left.redelivered


@pytest.mark.parametrize("what", ["nothing", "not the ladder"])
async def test_a_missing_permission_is_told(
    managed_broker: Broker, tmp_path: Path, what: str
) -> None:
    with account(managed_broker) as url:
        async with (
            open_amqp(managed_broker.url) as admin,
            open_campaign(admin, url, tmp_path, QUORUM) as campaign,
        ):
            read = "^$" if what == "nothing" else f"^{campaign.queue}$"
            permit(managed_broker, url, "^$", ".*", read)
            await campaign.publish(1)
            await campaign.publish(1, queue=f"{campaign.queue}.retry.1h")
            result = await campaign.run("--yes", "--file", str(campaign.file))
            await campaign.until_at_rest(1, 0)

    assert (result.returncode, result.stdout) == (1, b"moved 0\n")
    assert "no permission to read" in result.stderr.decode()
