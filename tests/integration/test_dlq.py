"""`sms-bridge dlq`: dead letters are looked at, sent again and removed, and none is ever lost."""

import asyncio
import json
import stat
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import aio_pika
import pytest

from bridge.admin import dead_letters
from bridge.admin.dead_letters import (
    MAX_ROUND,
    LetterFilter,
    Look,
    Replay,
    Tally,
    open_dead_letters,
)
from bridge.admin.move import Action, MessageMover, TakenMessage
from bridge.admin.replacement import Replaced
from bridge.amqp.field_values import tolerate_broken_properties
from bridge.config import Settings
from bridge.sandbox.broker import Broker
from tests.accounts import account
from tests.amqp_client import Amqp, open_amqp
from tests.integration.conftest import Canaries, Launcher, Service, eventually, run_program, unique

BODY = b'{"to": "+491713920010", "from": "Acme", "text": "Zikadensommer"}'
# The smallest with which nothing is lost.
LIMIT = 5
REASONS = ("refused", "exhausted", "invalid")
# RabbitMQ hands a quorum queue at most 32 acks of a channel at once.
MANY_FOR_A_QUORUM_QUEUE = 48
# Without a wait for the acks about every third round left some.
ROUNDS_OF_REMOVALS = 4


@dataclass
class Graveyard:
    """A dead-letter queue of a test's own, with its main queue."""

    amqp: Amqp
    url: str
    queue: str

    @property
    def dead(self) -> str:
        return f"{self.queue}.dead"

    @property
    def values(self) -> dict[str, object]:
        return {"rabbitmq.url": self.url, "worker.queue": self.queue}

    @property
    def settings(self) -> Settings:
        return Settings.model_validate(
            {"rabbitmq": {"url": self.url}, "worker": {"queue": self.queue}}
        )

    async def bury(
        self,
        reason: str = "refused",
        *,
        body: bytes = BODY,
        age: float = 60,
        message_id: str | None = None,
        **headers: object,
    ) -> str:
        message_id = message_id or uuid.uuid4().hex
        dead_at = datetime.now(UTC) - timedelta(seconds=age)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        known = {
            "sms-bridge-reason": reason,
            "sms-bridge-detail": "answered 422",
            "sms-bridge-attempts": 1,
            "sms-bridge-uncertain-attempts": 0,
            "sms-bridge-first-delivered-at": "1700000000.000",
            "sms-bridge-copies": 3,
            "sms-bridge-status": 422,
            "sms-bridge-code": "21211",
            "sms-bridge-dead-at": dead_at.isoformat(),
        }
        await self.amqp.publish(self.dead, body, message_id=message_id, headers=known | given)
        return message_id

    async def fill(self, count: int) -> set[str]:
        ids: set[str] = set()
        for start in range(0, count, 500):
            part = range(start, min(start + 500, count))
            ids |= set(await asyncio.gather(*(self.bury(REASONS[n % len(REASONS)]) for n in part)))
        return ids

    async def until_at_rest(self, *counts: int) -> None:
        for queue, count in zip((self.queue, self.dead), counts, strict=True):
            await self.amqp.until_count(queue, count)


@pytest.fixture
async def graveyard(amqp: Amqp, amqp_url: str) -> AsyncIterator[Graveyard]:
    ours = Graveyard(amqp, amqp_url, unique("dlq"))
    quorum: dict[str, Any] = {"x-queue-type": "quorum"}
    await amqp.channel.declare_queue(ours.queue, durable=True, arguments=quorum)
    await amqp.channel.declare_queue(
        ours.dead, durable=True, arguments=quorum | {"x-delivery-limit": LIMIT}
    )
    yield ours
    await amqp.delete([ours.queue, ours.dead])


async def _look(graveyard: Graveyard) -> list[str | None]:
    look = Look(LetterFilter(), sys.maxsize)
    async with open_dead_letters(graveyard.settings) as letters:
        return [row["message_id"] async for _ in letters.run(look) for row in look.rows]


# list and show


@pytest.fixture
async def shown(graveyard: Graveyard) -> dict[str, CompletedProcess[bytes]]:
    old = await graveyard.bury("refused", age=7200)
    await graveyard.bury("exhausted", sms_bridge_status=503)
    commands: Mapping[str, tuple[str, ...]] = {
        "plain": ("list",),
        "revealed": ("list", "--reveal", "--older-than", "1h"),
        "json": ("list", "--json"),
        "one": ("show", old),
        "one-revealed": ("show", old, "--reveal"),
        "no-such": ("show", "no-such-id"),
    }
    # One after the other: each holds all dead letters while it reads, and another sees none.
    return {
        name: await run_program("dlq", *command, settings=graveyard.values)
        for name, command in commands.items()
    }


async def test_dead_letters_are_shown(
    graveyard: Graveyard, shown: dict[str, CompletedProcess[bytes]], canaries: Canaries
) -> None:
    rows = shown["plain"].stdout.decode().splitlines()
    first, second = (json.loads(line) for line in shown["json"].stdout.splitlines())
    masked, revealed = (json.loads(shown[name].stdout) for name in ("one", "one-revealed"))

    assert {name: result.returncode for name, result in shown.items() if result.returncode} == {
        "no-such": 1
    }
    columns = ["AGE", "REASON", "TRIES", "STATUS", "CODE", "TO", "MESSAGE", "ID", "DETAIL"]
    assert rows[0].split() == columns
    assert rows[1].split()[:5] == ["2h", "refused", "1", "422", "21211"]
    assert first["message_id"] in rows[1]
    assert (second["reason"], second["status"], second["attempts"]) == ("exhausted", 503, 1)
    assert len(shown["revealed"].stdout.splitlines()) == 2
    assert "+491713920010" in shown["revealed"].stdout.decode()
    assert revealed["body"] == BODY.decode()
    assert revealed["headers"]["sms-bridge-copies"] == masked["headers"]["sms-bridge-copies"] == 3
    assert "no-such-id" in shown["no-such"].stderr.decode()
    assert len(shown["no-such"].stderr.splitlines()) == 1
    for name in ("plain", "json", "one", "no-such"):
        output = shown[name].stdout + shown[name].stderr
        assert "1713920010" not in output.decode()
        assert canaries.found_in(output.decode()) == set()
    await graveyard.until_at_rest(0, 2)


async def test_a_list_tells_letters_with_one_id(graveyard: Graveyard) -> None:
    ids = [await graveyard.bury(), await graveyard.bury()]
    await graveyard.bury(message_id=ids[0])
    result = await run_program("dlq", "list", settings=graveyard.values)
    some = await run_program("dlq", "list", "--limit", "2", settings=graveyard.values)

    assert [row.split()[6] for row in result.stdout.decode().splitlines()[1:]] == [*ids, ids[0]]
    assert b"1 of them repeats the id of another" in result.stderr
    assert b"repeat" not in some.stderr


async def test_a_body_that_is_no_text_is_shown(graveyard: Graveyard) -> None:
    # The publisher of this test cannot write a header of bytes without it.
    tolerate_broken_properties()
    message_id = await graveyard.bury(
        "invalid", body=b"\xff\x00", sms_bridge_detail=b"\xfe", sms_bridge_attempts="many"
    )
    listed = await run_program("dlq", "list", "--json", settings=graveyard.values)
    shown = await run_program("dlq", "show", message_id, "--reveal", settings=graveyard.values)
    row, record = json.loads(listed.stdout), json.loads(shown.stdout)

    assert (row["message_id"], row["attempts"], row["to"]) == (message_id, None, None)
    assert record["headers"]["sms-bridge-detail"] == {"base64": "/g=="}
    assert record["body_base64"] == "/wA="


async def test_a_queue_that_is_not_there_is_named(amqp_url: str) -> None:
    settings = {"rabbitmq.url": amqp_url, "worker.queue": unique("missing")}
    result = await run_program("dlq", "list", settings=settings)

    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode() == (
        f"sms-bridge: queue {settings['worker.queue']}.dead: does not exist; check worker.queue; "
        "a worker declares it when it starts, and so does `sms-bridge topology declare`\n"
    )


async def test_a_missing_permission_is_told_before_anything(managed_broker: Broker) -> None:
    queue = unique("forbidden")
    async with open_amqp(managed_broker.url) as admin:
        await admin.channel.declare_queue(f"{queue}.dead", durable=True)
        await admin.publish(f"{queue}.dead", BODY)
        with account(managed_broker, "^$", ".*", "^$") as url:
            settings = {"rabbitmq.url": url, "worker.queue": queue}
            result = await run_program("dlq", "list", settings=settings)
        await admin.delete([f"{queue}.dead"])

    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode() == (
        f"sms-bridge: queue {queue}.dead: no permission to read; grant it with rabbitmqctl "
        "set_permissions, or set rabbitmq.username to a user with this permission\n"
    )


@pytest.mark.parametrize(("command", "options"), [("replay", ("--yes",)), ("discard", ("--json",))])
async def test_an_id_that_is_not_there_is_told(
    graveyard: Graveyard, tmp_path: Path, command: str, options: tuple[str, ...]
) -> None:
    await graveyard.bury("refused")
    where = ("--to", str(tmp_path / "x")) if command == "discard" else ()
    args = ("dlq", command, "--id", "nobody", *options, *where)
    result = await run_program(*args, settings=graveyard.values)

    assert result.returncode == 1
    assert result.stderr.decode() == (
        "sms-bridge: no dead letter has the id nobody; `sms-bridge dlq list` shows them\n"
    )
    await graveyard.amqp.until_count(graveyard.dead, 1)


async def test_an_id_that_is_left_out_is_there(graveyard: Graveyard) -> None:
    message_id = await graveyard.bury("uncertain")
    args = ("dlq", "replay", "--id", message_id, "--yes")
    result = await run_program(*args, settings=graveyard.values)

    assert (result.returncode, result.stderr) == (0, b"")
    assert b"may have been sent already: 1" in result.stdout


# replay


async def _replay(graveyard: Graveyard, **options: Any) -> Tally:
    given: dict[str, Any] = {"selection": LetterFilter(), "apply": True, **options}
    replay = Replay(queues=[graveyard.queue], **given)
    async with open_dead_letters(graveyard.settings) as letters:
        async for _ in letters.run(replay):
            pass
    return replay.tally


async def test_a_replay_counts_for_a_script(graveyard: Graveyard) -> None:
    await graveyard.bury("exhausted")
    await graveyard.bury("uncertain")
    command = ("dlq", "replay", "--json")
    asked = await run_program(*command, settings=graveyard.values)
    done = await run_program(*command, "--yes", settings=graveyard.values)
    counts = {
        "taken": {"exhausted": 1},
        "maybe_sent": {"uncertain": 1},
        "expired": 0,
        "repeats": 0,
    }

    assert (asked.returncode, asked.stderr, done.returncode, done.stderr) == (0, b"", 0, b"")
    assert json.loads(asked.stdout) == {"applied": False, "done": 0, **counts}
    assert json.loads(done.stdout) == {"applied": True, "done": 1, **counts}


async def test_a_replayed_letter_starts_anew(graveyard: Graveyard) -> None:
    message_id = await graveyard.bury(
        sms_bridge_ordering_key="a", x_death=[{"count": 1}], sms_bridge_on_uncertain="park"
    )
    result = await run_program("dlq", "replay", "--yes", settings=graveyard.values)
    (message,) = await graveyard.amqp.take_all(graveyard.queue)

    assert (result.returncode, result.stdout) == (0, b"replayed 1\n")
    assert (message.message_id, message.body) == (message_id, BODY)
    assert message.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert message.headers == {
        "sms-bridge-ordering-key": "a",
        "sms-bridge-on-uncertain": "park",
        "sms-bridge-copies": 3,
    }
    await graveyard.until_at_rest(0, 0)


async def test_a_dead_request_is_sent_after_a_replay(
    launcher: Launcher, service: Service, canaries: Canaries, amqp: Amqp
) -> None:
    queue, request = unique("replay"), canaries.request()
    settings: dict[str, object] = {
        "worker.queue": queue,
        "worker.retry_delays": ["1s"],
        "sms_api.base_url": service.url,
        "sms_api.key": canaries.key,
    }
    await service.misbehave({"to": request["to"], "status": 422, "count": 1})
    await launcher.role("worker", settings=settings)
    body = json.dumps(request).encode()
    await amqp.publish(queue, body, message_id=uuid.uuid4().hex)
    await amqp.until_count(f"{queue}.dead", 1)
    await run_program("dlq", "replay", "--yes", settings={**launcher.base, **settings})
    message = await service.until_sent(request["to"])
    attempts = await service.requests(request["to"])

    assert [attempt["idempotency_key"] for attempt in attempts] == [message["idempotency_key"]] * 2
    await amqp.until_count(f"{queue}.dead", 0)


@pytest.mark.parametrize("include", [False, True], ids=["left-out", "included"])
async def test_what_may_have_been_sent_is_replayed_on_demand_only(
    graveyard: Graveyard,
    include: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    await graveyard.bury("uncertain")
    await graveyard.bury("exhausted", sms_bridge_uncertain_attempts=1)
    tally = await _replay(graveyard, include_uncertain=include)

    assert tally.maybe_sent.total() == (0 if include else 2)
    await graveyard.until_at_rest(*((2, 0) if include else (0, 2)))


async def test_uncertain_ones_are_not_replayed_by_their_reason_alone(graveyard: Graveyard) -> None:
    command = ("dlq", "replay", "--reason", "uncertain", "--yes")
    result = await run_program(*command, settings=graveyard.values)

    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert b"--include-uncertain" in result.stderr


async def test_what_would_only_die_again_is_left_out(graveyard: Graveyard) -> None:
    await graveyard.bury("expired", sms_bridge_expires_at="1700000000")
    tally = await _replay(graveyard)

    assert (tally.expired, tally.taken.total()) == (1, 0)
    await graveyard.until_at_rest(0, 1)


async def test_a_letter_that_is_there_twice_is_replayed_once(graveyard: Graveyard) -> None:
    first = await graveyard.bury("exhausted")
    other = await graveyard.bury("exhausted")
    await graveyard.bury("exhausted", message_id=first)
    command = ("dlq", "replay", "--reason", "exhausted")
    asked = await run_program(*command, settings=graveyard.values)
    done = await run_program(*command, "--yes", settings=graveyard.values)
    sent = await graveyard.amqp.take_all(graveyard.queue)
    left = await graveyard.amqp.take_all(graveyard.dead)

    assert (asked.returncode, done.returncode) == (0, 0)
    for output, verb in ((asked.stdout, b"would replay 2"), (done.stdout, b"replayed 2\n")):
        assert verb in output
        assert b"skipped, same id as a replayed letter: 1;" in output
        assert b"--include-repeats" in output
        assert (b"dlq discard" in output) == (output is done.stdout)
    assert [message.message_id for message in sent] == [first, other]
    assert [message.message_id for message in left] == [first]


async def test_repeats_are_replayed_on_demand(graveyard: Graveyard) -> None:
    for _ in range(2):
        await graveyard.bury(message_id="same")
        await graveyard.amqp.publish(graveyard.dead, BODY)
    meant = await _replay(graveyard, apply=False)
    await graveyard.until_at_rest(0, 4)
    tally = await _replay(graveyard, include_repeats=True)

    assert (meant.taken.total(), meant.repeats) == (3, 1)
    assert (tally.taken.total(), tally.repeats) == (4, 0)
    await graveyard.until_at_rest(4, 0)


async def test_ids_are_remembered_up_to_a_bound(
    graveyard: Graveyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MAX_REMEMBERED_IDS", 2)
    for message_id in ("a", "b", "c", "b", "a"):
        await graveyard.bury(message_id=message_id)
    tally = await _replay(graveyard)

    assert (tally.taken.total(), tally.repeats) == (4, 1)
    await graveyard.until_at_rest(4, 1)


async def test_a_replay_takes_what_is_meant_only(graveyard: Graveyard) -> None:
    await graveyard.fill(9)
    tally = await _replay(graveyard, selection=LetterFilter(reasons=["exhausted"]), limit=2)

    assert dict(tally.taken) == {"exhausted": 2}
    await graveyard.until_at_rest(2, 7)


async def test_a_replay_keeps_to_its_rate(graveyard: Graveyard) -> None:
    await graveyard.fill(11)
    started = time.monotonic()
    await _replay(graveyard, per_second=20)

    assert time.monotonic() - started >= 0.5
    await graveyard.until_at_rest(11, 0)


async def test_a_replay_without_a_queue_loses_nothing(graveyard: Graveyard) -> None:
    await graveyard.fill(60)
    await graveyard.amqp.channel.queue_delete(graveyard.queue)
    result = await run_program("dlq", "replay", "--yes", settings=graveyard.values)
    lines = result.stderr.decode().splitlines()
    await graveyard.amqp.until_count(graveyard.dead, 60)

    assert (result.returncode, len(lines), result.stdout) == (1, 1, b"replayed 0\n")
    assert graveyard.queue in lines[0]


async def _until_moved(graveyard: Graveyard, count: int) -> None:
    async def has_moved() -> bool:
        return await graveyard.amqp.count(graveyard.queue) >= count

    await eventually(has_moved, what=f"{count} letters replayed")


async def test_a_killed_replay_loses_nothing(graveyard: Graveyard, launcher: Launcher) -> None:
    """Killed three times, then run to its end: all 1,000 are there, doubles have one key.

    Takes four runs of the program.
    """
    ids = await graveyard.fill(1000)
    command = ("dlq", "replay", "--yes", "--rate", "1000")
    for moved in (200, 450, 700):
        replay = launcher.start(*command, settings=graveyard.values)
        launcher.started.remove(replay)
        await _until_moved(graveyard, moved)
        replay.child.kill()

    async def is_given_back() -> bool:
        declared = await graveyard.amqp.channel.declare_queue(graveyard.dead, passive=True)
        return declared.declaration_result.consumer_count == 0

    # With the consumer the broker takes back what it held.
    await eventually(is_given_back, what="the broker noticed the end")
    moved = await graveyard.amqp.count(graveyard.queue)
    last = await run_program(*command, settings=graveyard.values)
    messages = await graveyard.amqp.take_all(graveyard.queue)
    times = Counter(message.message_id for message in messages)

    assert (moved >= 700, last.returncode) == (True, 0)
    assert set(times) == ids
    assert times.total() - 1000 <= 3 * MAX_ROUND
    assert {message.body for message in messages} == {BODY}
    await graveyard.amqp.until_count(graveyard.dead, 0)


# discard


async def test_what_is_discarded_is_in_a_file_of_ours_alone(
    graveyard: Graveyard, tmp_path: Path
) -> None:
    kept = await graveyard.bury("exhausted")
    gone = await graveyard.bury("invalid", body=b"\xff")
    file = tmp_path / "gone.jsonl"
    command = ("dlq", "discard", "--reason", "invalid", "--to", str(file))
    result = await run_program(*command, "--yes", settings=graveyard.values)
    (record,) = [json.loads(line) for line in file.read_text(encoding="ascii").splitlines()]
    (left,) = await graveyard.amqp.take_all(graveyard.dead)

    assert result.returncode == 0
    assert b"discarded 1" in result.stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (record["message_id"], record["reason"]) == (gone, "invalid")
    assert record["body_base64"] == "/w=="
    assert record["headers"]["sms-bridge-attempts"] == 1
    assert left.message_id == kept


async def test_a_discard_names_its_file_for_a_script(graveyard: Graveyard, tmp_path: Path) -> None:
    await graveyard.bury("invalid")
    file = tmp_path / "gone.jsonl"
    command = ("dlq", "discard", "--json", "--yes", "--to", str(file))
    done = await run_program(*command, settings=graveyard.values)
    await graveyard.bury("invalid")
    again = await run_program(*command, settings=graveyard.values)

    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "applied": True,
        "done": 1,
        "file": str(file),
        "taken": {"invalid": 1},
        "maybe_sent": {},
        "expired": 0,
        "repeats": 0,
    }
    assert again.returncode == 1
    assert json.loads(again.stdout) == {"applied": True, "done": 0}
    assert b"--to" in again.stderr


class _Remove(Action):
    """Removes all letters."""

    max_returns = 1

    def next_round(self) -> int:
        return MAX_ROUND

    async def act(self, _: MessageMover, messages: Sequence[TakenMessage], /) -> Replaced:
        return Replaced([message.tag for message in messages])

    def renewed(self, _: TakenMessage) -> None:
        return None


async def test_what_was_removed_does_not_come_back(graveyard: Graveyard) -> None:
    """A broker keeps acks back for a moment, and would forget them with the channel.

    Takes seconds: it shows in some rounds only, and each waits for a queue.
    """
    for _ in range(ROUNDS_OF_REMOVALS):
        await graveyard.fill(MANY_FOR_A_QUORUM_QUEUE)
        await graveyard.amqp.until_count(graveyard.dead, MANY_FOR_A_QUORUM_QUEUE)
        async with open_dead_letters(graveyard.settings) as letters:
            async for _ in letters.run(_Remove()):
                pass
        assert await _look(graveyard) == []


async def test_a_killed_discard_loses_nothing(
    graveyard: Graveyard, launcher: Launcher, tmp_path: Path
) -> None:
    ids = await graveyard.fill(1000)
    file = tmp_path / "gone.jsonl"
    discard = launcher.start(
        "dlq", "discard", "--yes", "--to", str(file), settings=graveyard.values
    )
    launcher.started.remove(discard)

    async def has_begun() -> bool:
        return file.exists() and file.stat().st_size > 0

    await eventually(has_begun, what="letters written")
    discard.child.kill()
    lines = file.read_text(encoding="ascii").splitlines()
    complete = [json.loads(line)["message_id"] for line in lines if line.endswith("}")]

    async def is_given_back() -> bool:
        return set(complete) | set(await _look(graveyard)) == ids

    await eventually(is_given_back, what="every letter in the file or in the queue")
