"""The permissions that the chart gives the bridge's user are enough on a real broker, and few."""

from collections.abc import Iterator
from pathlib import Path

import aio_pika
import aiormq
import pytest
import yaml

from bridge.amqp.client import Connection
from bridge.config import Settings, load_settings
from bridge.sandbox.broker import Broker
from bridge.telemetry.metrics import new_registry
from bridge.topology.declarations import Topology, webhook_topology, worker_topology
from bridge.topology.upkeep import provide
from bridge.worker.cluster.exchange import ClusterExchange
from bridge.worker.cluster.membership import Coordination, Membership
from bridge.worker.metrics import WorkerMetrics
from tests.accounts import account, virtual_host
from tests.chart.rendering import CI, MOUNTED, config, merged, nested, of_kind, render
from tests.integration.conftest import connected, eventually, run_program


@pytest.fixture
def login(mode: str, managed_broker: Broker, tmp_path: Path) -> Iterator[tuple[Settings, str, str]]:
    values = merged(CI["operators"], nested("config.rabbitmq.topology", mode))
    (permission,) = of_kind(render(values), "Permission").values()
    granted = permission["spec"]["permissions"]
    patterns = [granted[right] for right in ("configure", "write", "read")]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config(values)).replace(MOUNTED, str(tmp_path)))
    with (
        virtual_host(managed_broker, mode) as admin,
        account(managed_broker, *patterns, vhost=mode) as user,
    ):
        yield load_settings(file, {}), admin, user


def topology_of(settings: Settings) -> Topology:
    worker, webhook = worker_topology(settings.worker), webhook_topology(settings.webhook)
    return Topology(
        queues=worker.queues + webhook.queues,
        exchanges=worker.exchanges + webhook.exchanges,
        bindings=webhook.bindings,
    )


async def until_heard(queue: str, url: str) -> None:
    metrics = WorkerMetrics(new_registry(), queue=queue, retry_queues=[], dead="dead")
    membership = Membership(queue, is_enabled=True, metrics=metrics)
    exchange = ClusterExchange(Coordination(membership, [], metrics=metrics))
    async with connected(url) as connection:

        async def serve(_connection: Connection) -> None:
            async def is_up() -> bool:
                return membership.is_up

            await eventually(is_up, what="a place among the workers")

        await exchange.beside(serve, connection)


@pytest.mark.parametrize("mode", ["declare", "verify"])
async def test_the_user_may_do_its_work_and_no_more(
    mode: str, login: tuple[Settings, str, str], tmp_path: Path
) -> None:
    """The user declares or verifies, sends to retry and dead letters, publishes, and consumes.

    It pauses the workers and has them go on, and its workers hear each other. It creates nothing
    else, and what it only verifies it can neither read nor delete, but for retries and dead
    letters, which the operators' commands move and send again.
    """
    settings, admin_url, user_url = login
    topology = topology_of(settings)
    if mode == "verify":
        async with await aio_pika.connect(admin_url, connection_class=Connection) as admin:
            # As the operator does.
            assert await provide(admin, topology, "declare") == []

    async with await aio_pika.connect(user_url, connection_class=Connection) as user:
        differences = await provide(user, topology, settings.rabbitmq.topology)
        assert {one.kind for one in differences} <= {"not_compared"}
        channel = await user.channel()
        for queue in topology.queues:
            await channel.default_exchange.publish(aio_pika.Message(b"a"), queue.name)
        for exchange in topology.exchanges:
            found = await channel.get_exchange(exchange.name, ensure=False)
            await found.publish(aio_pika.Message(b"b"), "message.received", mandatory=False)
        main = await channel.get_queue(settings.worker.queue, ensure=False)
        message = await main.get()
        await message.ack()
        as_user: dict[str, object] = {
            "rabbitmq.url": user_url,
            "worker.retry_delays": [*settings.worker.retry_delays],
        }
        listed = await run_program("dlq", "list", "--json", settings=as_user)
        assert listed.returncode == 0, listed.stderr
        replayed = await run_program("dlq", "replay", "--yes", settings=as_user)
        assert replayed.returncode == 0, replayed.stderr
        await (await main.get()).ack()

        for command in ("pause", "resume"):
            done = await run_program(command, settings=as_user)
            assert (done.returncode, done.stderr) == (0, b"")

        await until_heard(settings.worker.queue, user_url)

        with pytest.raises(aiormq.exceptions.ChannelAccessRefused):
            await (await user.channel()).declare_queue("other")
        file = str(tmp_path / "drained.jsonl")
        drain = ("drain", "--reason", "wrong text", "--yes", "--file", file)
        drained = await run_program(*drain, settings=as_user)
        assert (drained.returncode, drained.stderr) == (0, b"")
        assert "sms.outbound.retry.1h 1" in drained.stdout.decode()
        if mode == "verify":
            events = await (await user.channel()).get_queue("sms.inbound", ensure=False)
            with pytest.raises(aiormq.exceptions.ChannelAccessRefused):
                await events.get()
            with pytest.raises(aiormq.exceptions.ChannelAccessRefused):
                await (await user.channel()).queue_delete(settings.worker.queue)
