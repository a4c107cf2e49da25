"""A broker that refuses, deletes or holds up what the worker needs."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aio_pika.abc import AbstractIncomingMessage
from pamqp.common import FieldTable
from yarl import URL

from bridge.admin.admin_port_client import AdminPort, read_worker
from bridge.admin.checks.run import examine
from bridge.admin.status import StatusReader
from bridge.cli.status import format_status
from bridge.worker.fates import Answer
from bridge.worker.service.sender import Sender
from tests.alarms import USUAL_LIMIT, memory_alarm, set_memory_limit
from tests.amqp_client import open_amqp
from tests.erlang import evaluate
from tests.faults.bench import (
    CONSUME_LINK,
    Bench,
    Live,
    eventually,
    make_numbers,
    make_settings,
    running,
)
from tests.faults.traffic import NOT_SENT, REFUSED, once_each


async def test_consumer_cancelled_by_the_deletion_of_its_queue(bench: Bench) -> None:
    async with bench.worker() as live:
        await bench.amqp.channel.queue_delete(bench.queue)
        await eventually(
            lambda: live.metric("sms_bridge_worker_consumer_up") == 0,
            what="consumer_up at 0",
            seconds=5,
        )
        await live.until_consuming(seconds=15)

        numbers = await bench.publish(5)
        await bench.until_taken(numbers)
        assert live.logged("consumer_cancelled") == [{"queue": bench.queue}]


async def test_memory_alarm_during_a_storm_of_errors(bench: Bench) -> None:
    bench.service.misbehave(NOT_SENT)
    await bench.declare_main()
    numbers = await bench.publish(30)
    async with memory_alarm(bench.broker), bench.worker() as live:
        await eventually(lambda: live.paused == {"broker_blocked"}, what="broker_blocked")
        held = live.metric("sms_bridge_worker_messages_in_progress")
        posts = len(bench.service.posts(numbers))

        # A tenth more than may be in flight is taken, and what was surely not sent keeps no slot.
        assert 0 < held <= 11
        assert posts <= 11
        bench.service.behave()
        set_memory_limit(bench.broker, USUAL_LIMIT)
        await eventually(lambda: not live.paused, what="resumed")
        await bench.until_taken(numbers)
        await bench.until_settled(live)
        assert bench.sent_twice(numbers) == {}
        assert await bench.dead_letters() == []


async def test_a_copy_whose_confirm_is_late_is_published_once(bench: Bench) -> None:
    bench.service.misbehave(NOT_SENT)
    async with bench.worker(rabbitmq__publish_timeout_seconds=0.5) as live:
        numbers = await bench.publish(5)
        await eventually(lambda: len(bench.service.posts(numbers)) == 5, what="POSTs")
        bench.proxy.freeze("broker")
        await eventually(lambda: len(live.logged("publish_failed")) >= 15, what="late confirms")
        bench.service.behave()
        bench.proxy.thaw()
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        # Of two copies the second would have been taken too, and dropped.
        assert live.metric("sms_bridge_worker_messages_received_total") == 10
        assert live.metric("sms_bridge_worker_messages_processed_total", reason="duplicate") == 0
    assert bench.sent_twice(numbers) == {}
    assert await bench.dead_letters() == []


@pytest.mark.parametrize(
    ("coordination", "why"),
    [
        # The first copy is the first that is published, and the broker stops reading with it.
        ("off", "no confirm in time"),
        # A beat was, and no copy is written.
        ("on", "the broker blocks publishing (memory or disk alarm)"),
    ],
    ids=["off", "on"],
)
async def test_a_copy_outlives_its_session_in_an_alarm(
    bench: Bench, coordination: str, why: str
) -> None:
    """What comes again while its copy is unread goes on waiting for that, and makes no second."""
    bench.service.misbehave(NOT_SENT)
    await bench.declare_main()
    numbers = await bench.publish(5)
    received = "sms_bridge_worker_messages_received_total"
    processed = "sms_bridge_worker_messages_processed_total"
    async with (
        memory_alarm(bench.broker),
        bench.worker(
            rabbitmq__publish_timeout_seconds=0.5, worker__coordination=coordination
        ) as live,
    ):
        await eventually(
            lambda: any(line["why"] == why for line in live.logged("publish_failed")),
            what="a copy that is not stored",
        )
        bench.proxy.cut(CONSUME_LINK)
        await eventually(
            lambda: live.metric(processed, outcome="released") >= 5, what="all given back"
        )
        await eventually(lambda: live.metric(received, redelivered="true") >= 5, what="all back")
        bench.service.behave()
        set_memory_limit(bench.broker, USUAL_LIMIT)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        # Each message and one copy of it.
        assert live.metric(received, redelivered="false") == 10
    assert bench.sent_twice(numbers) == {}


async def test_retry_queue_deleted_by_an_operator(bench: Bench) -> None:
    """A copy that finds no queue is held until the queue is declared again, and then delivered."""
    numbers = make_numbers(5)
    bench.service.misbehave(*once_each(numbers, NOT_SENT))
    async with bench.worker() as live:
        await bench.amqp.channel.queue_delete(f"{bench.queue}.retry.1s")
        await bench.publish(numbers)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert set(bench.extra_posts(numbers).values()) == {2}
        # For a moment after the deletion the broker still routes to the queue, and nacks.
        faults = {entry["fault"] for entry in live.logged("publish_failed")} - {"nacked"}
        assert faults == {"returned"}
        assert not live.paused


async def test_dead_letter_queue_that_is_full(bench: Bench) -> None:
    await _declare_with_full_dead_queue(bench)
    bench.service.misbehave(REFUSED)
    async with bench.worker(rabbitmq__topology="off") as live:
        numbers = await bench.publish(3)
        await eventually(lambda: live.paused == {"broker_blocked"}, what="broker_blocked")
        await _each_command_names(live, bench, bench.dead_queue)
        letters: list[AbstractIncomingMessage] = []
        while len(letters) < 3:
            letters += await eventually(bench.dead_letters, what="a dead letter")
        await bench.until_settled(live)

        assert {letter.message_id for letter in letters} == {f"id-{n}" for n in numbers}
        assert await bench.dead_letters() == []
        assert bench.extra_posts(numbers) == {}
        await eventually(lambda: not live.paused, what="resumed")


async def test_a_drain_that_a_full_queue_cuts_off_names_it(bench: Bench) -> None:
    await _declare_with_full_dead_queue(bench)
    bench.service.misbehave(REFUSED)
    changed: dict[str, Any] = {"worker__shutdown_timeout_seconds": 1}
    async with bench.worker(rabbitmq__topology="off", **changed) as live:
        await bench.publish(3)
        await eventually(lambda: live.paused == {"broker_blocked"}, what="broker_blocked")
        code = await live.stop()

    assert code == 75
    assert live.logged("drain_timed_out") == [{"queue": bench.dead_queue, "fault": "nacked"}]


async def _declare_with_full_dead_queue(bench: Bench) -> None:
    declare = bench.amqp.channel.declare_queue
    full: FieldTable = {"x-max-length": 1, "x-overflow": "reject-publish"}
    retry_queues = [f"{bench.queue}.retry.1s", f"{bench.queue}.retry.2s"]
    for name in (bench.queue, bench.urgent_queue, *retry_queues):
        await declare(name, durable=True)
    await declare(bench.dead_queue, durable=True, arguments=full)


async def _each_command_names(live: Live, bench: Bench, queue: str) -> None:
    port = URL(live.admin_url).port
    settings = make_settings(bench.values(admin__port=port, rabbitmq__url=[bench.broker.url]))
    told = await read_worker(settings)
    assert told is not None
    assert told.deciding_pause is not None
    assert told.deciding_pause.model_dump(include={"reason", "queue", "fault"}) == {
        "reason": "broker_blocked",
        "queue": queue,
        "fault": "nacked",
    }
    assert live.logged("publish_failed")[0]["queue"] == queue
    assert live.logged("paused")[0] == {
        "reason": "broker_blocked",
        "queue": queue,
        "fault": "nacked",
    }
    reader = StatusReader(settings, [AdminPort("127.0.0.1", port or 0)])
    lines = " ".join(line.text.strip() for line in format_status(await reader.read()))
    await reader.aclose()
    findings = await examine(settings, ["worker"], management="http://127.0.0.1:9")
    said = [one.text for one in findings if one.subject == "worker"]
    for text in (lines, *said):
        assert f"RabbitMQ refuses messages for {queue}: it is full" in text
        assert "check_alarms" not in text
    assert len(said) == 1


async def test_a_bug_ends_as_a_dead_letter(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error makes its message a dead letter, and keeps no place of the next ones."""

    async def fail(*_: object) -> Answer:
        raise ZeroDivisionError

    monkeypatch.setattr(Sender, "send", fail)
    async with bench.worker(worker__concurrency=3) as live:
        await bench.publish(7)
        await bench.until_dead(7)
        await bench.until_settled(live)
        letters = await bench.dead_letters()
        live.ears.lines.clear()  # the log of the error that the test makes

    assert [letter.headers["sms-bridge-reason"] for letter in letters] == ["internal_error"] * 7


async def test_a_delivery_limit_drops_nothing_in_flight(bench: Bench) -> None:
    """Connections lost more often than a delivery limit allows cost no message in flight."""
    quorum: FieldTable = {"x-queue-type": "quorum"}
    declare = bench.amqp.channel.declare_queue
    await declare(bench.queue, durable=True, arguments=quorum | {"x-delivery-limit": 2})
    for name in ("urgent", "retry.1s", "retry.2s", "dead"):
        await declare(f"{bench.queue}.{name}", durable=True, arguments=quorum)
    bench.service.misbehave({"latency_seconds": 3})
    # The drain waits for redeliveries that this broker has dropped.
    changed: dict[str, Any] = {"worker__shutdown_timeout_seconds": 1}
    async with bench.worker(rabbitmq__topology="off", **changed) as live:
        numbers = await bench.publish(5)
        for count in (5, 10, 15):
            await eventually(partial(_has_received, live, count), what=f"{count} deliveries")
            bench.proxy.cut(CONSUME_LINK)
        await bench.until_taken(numbers)
        await bench.until_settled(live)

    assert bench.extra_posts(numbers) == {}


@pytest.mark.parametrize("ordering", ["none", "recipient"])
async def test_a_missing_urgent_queue_costs_the_main_one_no_delivery(
    bench: Bench, ordering: str
) -> None:
    await bench.declare_main()
    await bench.publish(5)
    values = bench.values(rabbitmq__topology="off", worker__ordering=ordering)
    settings = make_settings(values)
    async with running(settings, "worker") as live:
        await eventually(lambda: len(live.logged("urgent_queue_unusable")) >= 5, what="tries")

        assert live.metric("sms_bridge_worker_messages_received_total") == 0
        assert live.logged("protocol_poison_suspected") == []
    await eventually(lambda: _has_ready(bench, 5), what="all of them in the queue")


async def _has_ready(bench: Bench, count: int) -> bool:
    return await bench.amqp.count_if_there(bench.queue) == count


def _has_received(live: Live, count: int) -> bool:
    return live.metric("sms_bridge_worker_messages_received_total") >= count


async def test_a_killed_broker_costs_no_message_and_no_post(bench: Bench) -> None:
    bench.service.misbehave({"latency_seconds": 0.3})
    async with bench.worker() as live:
        await asyncio.to_thread(bench.broker.flush)
        numbers = await bench.publish(120)
        await eventually(lambda: len(bench.service.taken(numbers)) > 30, what="some are sent")
        bench.broker.kill()
        await asyncio.to_thread(bench.broker.start)
        await bench.until_taken(numbers)
        async with open_amqp(bench.broker.url) as amqp:
            bench.amqp = amqp
            await bench.until_settled(live)

    assert bench.extra_posts(numbers) == {}


async def test_retry_queues_survive_a_restart(bench: Bench) -> None:
    """Messages whose wait ends while the broker is down are all in the main queue afterwards."""
    async with bench.worker():
        pass
    await asyncio.to_thread(bench.broker.flush)
    publish, retry = bench.amqp.publish, f"{bench.queue}.retry.2s"
    await asyncio.gather(*(publish(retry, b"") for _ in range(50)))
    bench.broker.kill()
    await asyncio.sleep(2.2)  # the wait of each of them
    await asyncio.to_thread(bench.broker.start)
    async with open_amqp(bench.broker.url) as amqp:

        async def are_back() -> bool:
            return await amqp.count_if_there(bench.queue) >= 50

        await eventually(are_back, what="all 50 are back")


async def test_broker_password_changed_while_running(bench: Bench, tmp_path: Path) -> None:
    username, password = tmp_path / "username", tmp_path / "password"
    username.write_text("rotated\n")
    password.write_text("old password\n")
    permissions = '<<"rotated">>, <<"/">>, <<".*">>, <<".*">>, <<".*">>, <<"test">>'
    make = (
        'rabbit_auth_backend_internal:add_user(<<"rotated">>, <<"old password">>, <<"test">>), '
        f"rabbit_auth_backend_internal:set_permissions({permissions})"
    )
    evaluate(bench.broker, make)
    url = bench.proxy.url.replace("guest:guest@", "")
    files: dict[str, Any] = {
        "rabbitmq__username_file": str(username),
        "rabbitmq__password_file": str(password),
    }
    async with bench.worker(rabbitmq__url=[url], **files) as live:
        new = '<<"rotated">>, <<"new:p@ss/w%rd">>, <<"test">>'
        evaluate(bench.broker, f"rabbit_auth_backend_internal:change_password({new})")
        bench.proxy.reset()
        await eventually(
            lambda: live.metric("sms_bridge_amqp_connections_total", outcome="auth_failed"),
            what="a refused login",
        )
        password.write_text("new:p@ss/w%rd\n")
        await live.until_consuming()
        numbers = await bench.publish(3)
        await bench.until_taken(numbers)
