"""No operator's command costs a message, however often it is run, cut short or killed.

The queues have a delivery limit, as RabbitMQ 4 gives each quorum queue one: a message that came
back more often is dropped.
"""

import asyncio
import fcntl
import json
import os
import sys
import termios
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import anyio
import pytest
from aiormq.exceptions import DeliveryError

from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import Child, Guard
from tests.accounts import account
from tests.amqp_client import Amqp, open_amqp
from tests.forked import ForkedChild
from tests.integration.conftest import (
    PROGRAM,
    Launcher,
    eventually,
    make_environ,
    run_program,
    unique,
)

BODY = b'{"to": "+491713920010", "from": "Acme", "text": "Zikadensommer"}'
# The smallest with which nothing is lost, unless the environment wants RabbitMQ's own, 20.
LIMIT = int(os.environ.get("SMS_BRIDGE_TEST_DELIVERY_LIMIT", "5"))
# A message that each run returned would be lost.
RUNS = LIMIT + 2
LETTERS = 60
# The smallest pipe, and more than a row of `dlq list` has.
PIPE_BYTES = 4096
ROW_BYTES = 200


@dataclass
class Queues:
    """A main queue and its dead letters, both with a delivery limit."""

    amqp: Amqp
    url: str
    main: str
    ids: list[str] = field(default_factory=list)

    @property
    def dead(self) -> str:
        return f"{self.main}.dead"

    @property
    def settings(self) -> dict[str, object]:
        return {
            "rabbitmq.url": self.url,
            "worker.queue": self.main,
            "worker.retry_delays": ["1h"],
        }

    async def declare(self, queue: str, **arguments: object) -> None:
        await self.amqp.channel.queue_delete(queue)
        own: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": LIMIT}
        own |= {name.replace("_", "-"): value for name, value in arguments.items()}
        await self.amqp.channel.declare_queue(queue, durable=True, arguments=own)

    async def fill(self, queue: str, count: int, *, body: bytes = BODY) -> None:
        ids = [uuid.uuid4().hex for _ in range(count)]
        self.ids += ids
        headers = {"sms-bridge-reason": "refused", "sms-bridge-attempts": 1}
        await asyncio.gather(
            *(self.amqp.publish(queue, body, message_id=one, headers=headers) for one in ids)
        )

    async def run(self, *command: str) -> CompletedProcess[bytes]:
        return await run_program(*command, settings=self.settings)

    async def fill_up(self, queue: str) -> None:
        with suppress(DeliveryError):
            while True:
                await self.amqp.publish(queue, BODY, message_id=uuid.uuid4().hex)

    async def until_nobody_takes(self) -> None:
        async def is_so() -> bool:
            facts = [
                (await self.amqp.channel.declare_queue(queue, passive=True)).declaration_result
                for queue in (self.main, self.dead)
            ]
            return not any(one.consumer_count for one in facts)

        await eventually(is_so, what="the broker noticed the end")

    async def left(self, *queues: str) -> list[str | None]:
        await self.until_nobody_takes()
        return [
            message.message_id for queue in queues for message in await self.amqp.take_all(queue)
        ]


@pytest.fixture
async def queues(amqp: Amqp, amqp_url: str) -> AsyncIterator[Queues]:
    ours = Queues(amqp, amqp_url, unique("kept"))
    await ours.declare(ours.main)
    await ours.declare(ours.dead)
    yield ours
    await amqp.delete([ours.main, ours.dead])


async def test_looks_cost_nothing_and_a_list_keeps_the_order(queues: Queues) -> None:
    await queues.fill(queues.dead, 2 * LETTERS)
    looks: list[tuple[tuple[str, ...], int | None]] = [
        (("list", "--json", "--limit", "40"), 40),
        (("list", "--json", "--reason", "expired"), 0),
        (("list", "--json", "--limit", "10000"), 2 * LETTERS),
        (("list", "--json", "--limit", "10000"), 2 * LETTERS),
        (("show", queues.ids[7]), None),
        (("replay", "--reason", "expired", "--yes"), None),
        (("replay",), None),
        (("discard",), None),
    ]
    assert len(looks) >= RUNS
    for command, count in looks:
        result = await queues.run("dlq", *command)
        assert result.returncode == 0
        if count is not None:
            shown = [json.loads(line)["message_id"] for line in result.stdout.splitlines()]
            assert shown == queues.ids[:count]
        await queues.until_nobody_takes()

    assert Counter(await queues.left(queues.dead)) == Counter(queues.ids)


@asynccontextmanager
async def _unread(queues: Queues, folder: Path, guard: Guard) -> AsyncIterator[Child]:
    pipe = folder / uuid.uuid4().hex
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    command = ("dlq", "list", "--limit", "10000")
    listing = ForkedChild(command, guard=guard, log=pipe, environ=make_environ(queues.settings))

    async def is_full() -> bool:
        unread = fcntl.ioctl(reading, termios.FIONREAD, bytes(4))
        return int.from_bytes(unread, sys.byteorder) > PIPE_BYTES - ROW_BYTES

    async def has_ended() -> bool:
        return listing.exit_code is not None

    try:
        await eventually(is_full, what="the pipe is full")
        yield listing
    finally:
        os.close(reading)
    await eventually(has_ended, what="the end of the list")
    await queues.until_nobody_takes()


async def test_a_list_is_cut_short_often(queues: Queues, tmp_path: Path, guard: Guard) -> None:
    await queues.fill(queues.dead, 2 * LETTERS)
    for _ in range(RUNS):
        async with _unread(queues, tmp_path, guard):
            pass

    assert Counter(await queues.left(queues.dead)) == Counter(queues.ids)


async def test_a_list_is_killed_often(queues: Queues, tmp_path: Path, guard: Guard) -> None:
    await queues.fill(queues.dead, 2 * LETTERS)
    for _ in range(RUNS):
        async with _unread(queues, tmp_path, guard) as listing:
            listing.kill()

    # A copy may be there beside the letter that it was to replace.
    assert set(await queues.left(queues.dead)) == set(queues.ids)


async def test_a_discard_without_a_file_takes_nothing(queues: Queues, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("mine", encoding="ascii")
    await queues.fill(queues.dead, LETTERS)
    result = await queues.run("dlq", "discard", "--to", str(file), "--yes")
    left = await queues.amqp.take_all(queues.dead)

    assert result.returncode == 1
    assert b"--to" in result.stderr
    assert [message.message_id for message in left] == queues.ids
    assert {message.redelivered for message in left} == {False}


async def test_a_few_are_replayed_often(queues: Queues) -> None:
    await queues.fill(queues.dead, LETTERS)
    for _ in range(RUNS):
        result = await queues.run("dlq", "replay", "--limit", "1", "--yes")
        assert result.stdout == b"replayed 1\n"

    assert await queues.amqp.count(queues.main) == RUNS
    assert Counter(await queues.left(queues.main, queues.dead)) == Counter(queues.ids)


async def test_a_full_queue_takes_no_replay_often(queues: Queues) -> None:
    await queues.declare(queues.main, x_max_length=1, x_overflow="reject-publish")
    await queues.fill_up(queues.main)
    full = await queues.amqp.count(queues.main)
    await queues.fill(queues.dead, LETTERS)
    for _ in range(RUNS):
        result = await queues.run("dlq", "replay", "--yes")
        assert (result.returncode, result.stdout) == (1, b"replayed 0\n")
        assert f"queue {queues.main}: not stored" in result.stderr.decode()
        await queues.until_nobody_takes()

    assert await queues.amqp.count(queues.main) == full
    assert Counter(await queues.left(queues.dead)) == Counter(queues.ids)


async def test_a_full_queue_of_dead_letters_takes_no_drain_often(
    queues: Queues, tmp_path: Path
) -> None:
    await queues.declare(queues.dead, x_max_length=1, x_overflow="reject-publish")
    await queues.fill_up(queues.dead)
    await queues.fill(queues.main, LETTERS)
    for number in range(RUNS):
        file = str(tmp_path / f"{number}.jsonl")
        result = await queues.run("drain", "--reason", "wrong text", "--yes", "--file", file)
        assert (result.returncode, result.stdout) == (1, b"moved 0\n")
        assert f"queue {queues.dead}: not stored" in result.stderr.decode()
        await queues.until_nobody_takes()

    assert Counter(await queues.left(queues.main)) == Counter(queues.ids)


async def test_a_full_queue_of_dead_letters_is_looked_at_often(queues: Queues) -> None:
    await queues.declare(queues.dead, x_max_length=LETTERS, x_overflow="reject-publish")
    await queues.fill(queues.dead, LETTERS)
    await queues.fill_up(queues.dead)
    there = await queues.amqp.count(queues.dead)
    for _ in range(RUNS):
        result = await queues.run("dlq", "list", "--limit", "10000", "--json")
        assert (result.returncode, len(result.stdout.splitlines())) == (0, there)

    left = await queues.left(queues.dead)
    assert (len(left), set(queues.ids) - set(left)) == (there, set())


async def test_a_low_limit_drops_no_letter(queues: Queues) -> None:
    await queues.declare(queues.dead, x_delivery_limit=1)
    await queues.fill(queues.dead, LETTERS)
    for _ in range(3):
        assert (await queues.run("dlq", "list", "--reason", "expired")).returncode == 0
    result = await queues.run("dlq", "list", "--json", "--limit", str(LETTERS))
    shown = [json.loads(line)["message_id"] for line in result.stdout.splitlines()]
    for command in (("list", "--limit", "7"), ("replay",), ("discard",), ("list", "--limit", "9")):
        assert (await queues.run("dlq", *command)).returncode == 0

    assert shown == queues.ids
    assert Counter(await queues.left(queues.dead)) == Counter(queues.ids)


async def test_a_slow_replay_is_killed_often(queues: Queues, launcher: Launcher) -> None:
    await queues.fill(queues.dead, LETTERS)
    for number in range(RUNS):
        command = ("dlq", "replay", "--yes", "--rate", "5")
        replay = launcher.start(*command, settings=queues.settings)
        launcher.started.remove(replay)

        async def has_moved(count: int = number + 1) -> bool:
            return await queues.amqp.count(queues.main) >= count

        await eventually(has_moved, what="letters replayed")
        replay.child.kill()
        await queues.until_nobody_takes()

    assert set(await queues.left(queues.main, queues.dead)) == set(queues.ids)


async def test_without_a_place_for_copies_nothing_is_taken(
    managed_broker: Broker, tmp_path: Path
) -> None:
    async with open_amqp(managed_broker.url) as admin:
        with account(managed_broker, "^$", "^$", ".*") as url:
            queues = Queues(admin, url, unique("kept"))
            await queues.declare(queues.main)
            await queues.declare(queues.dead)
            await queues.fill(queues.dead, 3)
            await queues.fill(queues.main, 3)
            for command in (
                ("dlq", "list"),
                ("dlq", "show", queues.ids[0]),
                ("dlq", "replay", "--yes"),
                ("dlq", "discard", "--yes", "--to", str(tmp_path / "a")),
                (
                    "drain",
                    "--reason",
                    "wrong text",
                    "--yes",
                    "--file",
                    str(tmp_path / "b"),
                ),
            ):
                result = await queues.run(*command)
                assert result.returncode == 1
                assert "access to exchange 'amq.default' in vhost '/' refused" in (
                    result.stderr.decode()
                )
                assert "nothing was taken" in result.stderr.decode()
        left = [await admin.take_all(queue) for queue in (queues.dead, queues.main)]
        await admin.delete([queues.main, queues.dead])

    assert [message.message_id for part in left for message in part] == queues.ids
    assert {message.redelivered for part in left for message in part} == {False}


# How much memory

# Of the toolbox's container (helm/sms-bridge/values.yaml).
CONTAINER_BYTES = 256 * 1024 * 1024
LARGE_LETTERS = 20
# Runs a command and prints, as the last line, how many KiB of memory it had at most.
MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


async def _memory_of(queues: Queues, *command: str) -> int:
    environ = make_environ(queues.settings)
    args = [sys.executable, "-c", MEASURED, *PROGRAM, *command]
    async with asyncio.timeout(120):
        result = await anyio.run_process(args, env=environ)
    return int(result.stdout.split()[-1]) * 1024


async def test_large_letters_fit_into_the_container(queues: Queues, tmp_path: Path) -> None:
    """Letters of 10 MiB behind small ones are handled in less memory than the toolbox has.

    All of them together, beside the program, are more than it has.
    """
    body = json.dumps({"to": "+491713920010", "text": "x" * (10 * 1024 * 1024)}).encode()
    await queues.fill(queues.main, 100)
    for _ in range(LARGE_LETTERS):
        await queues.fill(queues.main, 1, body=body)
    drained, gone = str(tmp_path / "drained"), str(tmp_path / "gone")
    used = {}
    for name, command in {
        "drain": ("drain", "--reason", "too large", "--yes", "--file", drained),
        "list": ("dlq", "list", "--limit", "1000"),
        "replay": ("dlq", "replay", "--yes", "--limit", "103"),
        "discard": ("dlq", "discard", "--yes", "--to", gone, "--limit", "3"),
    }.items():
        used[name] = await _memory_of(queues, *command)
        await queues.until_nobody_takes()

    await anyio.Path(gone).unlink()

    assert max(used.values()) < CONTAINER_BYTES, used
    assert await queues.amqp.count(queues.main) == 103
    assert await queues.amqp.count(queues.dead) == LARGE_LETTERS - 6
