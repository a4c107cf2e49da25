"""`sms-bridge drain` while the broker dies, or accepts no messages."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import aio_pika
import pytest

from bridge.admin import replacement
from bridge.admin.drain import MAX_ROUND, Drain, count_waiting
from bridge.admin.move import open_mover
from bridge.admin.replacement import NewLinesFile
from bridge.amqp.connecting import close_quietly, open_first_connection
from bridge.config import Settings
from bridge.errors import BrokerError
from bridge.topology.declarations import worker_topology
from bridge.topology.upkeep import provide
from tests.alarms import memory_alarm
from tests.amqp_client import open_amqp
from tests.faults.bench import Bench, eventually, make_settings

# More than a few rounds.
CAMPAIGN = 1500
# How often it is run at most.
TRIES = 4


async def _publish(settings: Settings, count: int) -> list[str]:
    ids = [f"id-{number}" for number in range(count)]
    connection = await open_first_connection(settings.rabbitmq, name="test")
    try:
        assert await provide(connection, worker_topology(settings.worker), "declare") == []
        channel = await connection.channel()
        for start in range(0, count, 500):
            await asyncio.gather(
                *(
                    channel.default_exchange.publish(
                        aio_pika.Message(b"{}", message_id=one, delivery_mode=2),
                        settings.worker.queue,
                    )
                    for one in ids[start : start + 500]
                )
            )
    finally:
        await close_quietly(connection)
    return ids


async def _drain(settings: Settings, file: Path) -> int:
    worker = settings.worker
    async with open_mover(settings, "drain") as mover:
        waiting = await count_waiting(mover.connection, worker)
        with NewLinesFile(file, option="--file") as listed:
            drain = Drain(worker, mover, "wrong text", listed, limit=None)
            async for _ in drain.run(waiting):
                pass
        return (await count_waiting(mover.connection, worker)).total


async def _ids_in(bench: Bench, queue: str) -> list[str | None]:
    # The broker may have been killed: a new connection.
    async with open_amqp(bench.broker.url) as amqp:
        return [message.message_id for message in await amqp.take_all(queue)]


def _lines_of(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _listed(*files: Path) -> set[str]:
    return {
        json.loads(line)["message_id"]
        for file in files
        if file.exists()
        for line in file.read_text(encoding="ascii").splitlines()
    }


async def test_the_broker_is_killed_in_a_drain(bench: Bench, tmp_path: Path) -> None:
    settings = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    queue = settings.worker.queue
    ids = await _publish(settings, CAMPAIGN)
    await asyncio.to_thread(bench.broker.flush)
    files = [tmp_path / f"{number}.jsonl" for number in range(TRIES)]
    draining = asyncio.create_task(_drain(settings, files[0]))
    await eventually(lambda: _lines_of(files[0]) >= MAX_ROUND, what="rounds written down")
    assert not draining.done()
    await asyncio.to_thread(bench.broker.kill)
    with pytest.raises(BrokerError):
        async with asyncio.timeout(60):
            await draining
    await asyncio.to_thread(bench.broker.start)
    # A quorum queue that has just recovered may count less than it has; a drain says what is left.
    for file in files[1:]:
        if not await _drain(settings, file):
            break
    times = Counter(await _ids_in(bench, f"{queue}.dead"))

    assert set(times) == set(ids) == _listed(*files)
    assert await _ids_in(bench, queue) == []
    assert times.total() - CAMPAIGN <= MAX_ROUND


async def test_nothing_leaves_its_queue_in_an_alarm(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that accepts no messages ends a drain, which names the alarm; nothing is lost."""
    monkeypatch.setattr(replacement, "PUBLISH_SECONDS", 2.0)
    settings = make_settings(bench.values(rabbitmq__url=[bench.broker.url]))
    ids = await _publish(settings, 20)
    async with memory_alarm(bench.broker):
        with pytest.raises(BrokerError, match=r"not stored.*memory or disk alarm"):
            await _drain(settings, tmp_path / "drained.jsonl")
    left = await _ids_in(bench, settings.worker.queue)

    assert set(left) == set(ids)
    assert not (tmp_path / "drained.jsonl").exists()
