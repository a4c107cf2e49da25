"""`sms-bridge topology`: what is made by hand from it is what the bridge declares itself."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aio_pika
import aiormq
import pytest
import yaml

from bridge.admin.topology_formats import custom_resources, definitions, rows
from bridge.config import Settings
from bridge.config.fields import MAX_RETRY_DELAY_SECONDS
from bridge.sandbox.broker import Broker
from bridge.topology.declarations import Topology, bridge_topology
from tests.amqp_client import open_amqp
from tests.erlang import version
from tests.integration.conftest import run_program, run_programs, unique


def _values(broker: Broker) -> dict[str, object]:
    name = unique("topology")
    return {
        "rabbitmq.url": broker.url,
        "worker.queue": name,
        "worker.retry_delays": ["5s", "2m"],
        "worker.outcome_exchange": f"{name}.outcome",
        "webhook.exchange": f"{name}.events",
        "webhook.queue": f"{name}.events",
    }


@pytest.fixture
async def values(managed_broker: Broker) -> AsyncIterator[dict[str, object]]:
    values = _values(managed_broker)
    yield values
    name = values["worker.queue"]
    async with open_amqp(managed_broker.url) as amqp:
        ladder = ("", ".retry.5s", ".retry.2m")
        parts = (*ladder, *(f".urgent{part}" for part in ladder), ".dead", ".events", ".outcome")
        await amqp.delete([f"{name}{part}" for part in parts])


def _verify(broker: Broker, *more: str) -> tuple[str, ...]:
    return ("topology", "verify", "--management-url", str(broker.management_url), *more)


async def test_imported_definitions_are_what_the_bridge_needs(
    managed_broker: Broker, values: dict[str, object], tmp_path: Path
) -> None:
    before = await run_program(*_verify(managed_broker), settings=values)
    # RabbitMQ 3 has no limit to lift, and refuses the policy.
    more = ("--no-policy",) if version(managed_broker).startswith("3.") else ()
    command = ("topology", "show", "--format", "definitions", *more)
    shown = await run_program(*command, settings=values)
    file = tmp_path / "definitions.json"
    file.write_bytes(shown.stdout)
    managed_broker.ctl("import_definitions", str(file))
    # Both ways of comparing, and a declaration, which the broker refuses when anything differs.
    after = await run_programs(
        {
            "management": (_verify(managed_broker), values),
            "amqp": ((*_verify(managed_broker)[:3], "http://127.0.0.1:9"), values),
            "declare": (("topology", "declare"), values),
        }
    )
    missing = before.stdout.decode().splitlines()

    # Two exchanges, eight queues, one binding.
    assert (before.returncode, len(missing)) == (1, 11)
    assert all(line.startswith("missing: ") for line in missing)
    assert {name: result.returncode for name, result in after.items()} == dict.fromkeys(after, 0)
    assert b"bindings were not compared" in after["amqp"].stderr
    verdicts = {name: after[name].stdout.splitlines()[-1] for name in ("management", "amqp")}
    assert verdicts == {
        "management": b"the topology matches",
        "amqp": b"the topology matches, as far as it could be compared",
    }


async def test_declare_makes_what_is_missing(
    managed_broker: Broker, values: dict[str, object]
) -> None:
    worker = await run_program("topology", "declare", "--role", "worker", settings=values)
    partly = await run_program(*_verify(managed_broker), settings=values)
    missing = [line.split()[:2] for line in partly.stdout.decode().splitlines()]

    assert (worker.returncode, partly.returncode) == (0, 1)
    assert worker.stdout.decode().count("exists: queue") == 7
    assert missing == [["missing:", kind] for kind in ("exchange", "queue", "binding")]


async def test_the_broker_takes_the_longest_retry_delay_that_we_do(
    managed_broker: Broker, values: dict[str, object]
) -> None:
    values["worker.retry_delays"] = [MAX_RETRY_DELAY_SECONDS]
    declared = await run_program("topology", "declare", "--role", "worker", settings=values)
    name = f"{values['worker.queue']}.retry.3650d"
    async with open_amqp(managed_broker.url) as amqp:
        await amqp.delete([name])
        too_long: Any = {"x-message-ttl": (MAX_RETRY_DELAY_SECONDS + 1) * 1000}
        with pytest.raises(aiormq.exceptions.ChannelPreconditionFailed):
            await amqp.channel.declare_queue(name, durable=True, arguments=too_long)

    assert (declared.returncode, declared.stderr) == (0, b"")


async def test_differences_are_told_one_by_one(
    managed_broker: Broker, values: dict[str, object]
) -> None:
    name = str(values["worker.queue"])
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-message-ttl": 7000}
    connection = await aio_pika.connect(managed_broker.url)
    async with connection:
        channel = await connection.channel()
        await channel.declare_queue(f"{name}.retry.5s", durable=True, arguments=arguments)
    result = await run_program(*_verify(managed_broker, "--role", "worker"), settings=values)
    told = [line for line in result.stdout.decode().splitlines() if "different" in line]

    assert result.returncode == 1
    assert {line.split(": ", 2)[2].split(" is ")[0] for line in told} == {
        "x-dead-letter-exchange",
        "x-dead-letter-routing-key",
        "x-dead-letter-strategy",
        "x-message-ttl",
        "x-overflow",
    }
    assert any("x-message-ttl is 7000 and must be 5000" in line for line in told)


async def test_verify_needs_the_broker_of_the_settings(
    managed_broker: Broker, values: dict[str, object]
) -> None:
    await run_program("topology", "declare", settings=values)
    away = values | {"rabbitmq.url": "amqp://127.0.0.1:9/"}
    result = await run_program(*_verify(managed_broker), settings=away)

    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.startswith(b"sms-bridge: ")
    assert b"127.0.0.1:9" in result.stderr


async def test_verify_does_not_take_one_broker_for_another(
    managed_broker: Broker, values: dict[str, object], amqp_url: str
) -> None:
    await run_program("topology", "declare", settings=values)
    elsewhere = values | {"rabbitmq.url": amqp_url}
    result = await run_program(*_verify(managed_broker), settings=elsewhere)
    told = result.stdout.decode().splitlines()

    # Two exchanges and eight queues; without the management API bindings are not compared.
    assert (result.returncode, len(told)) == (1, 10)
    assert all(line.startswith("missing: ") for line in told)
    assert b"management API: it belongs to the cluster " in result.stderr


async def test_nothing_is_asked_of_a_broker_to_show() -> None:
    settings = {"rabbitmq.url": "amqp://127.0.0.1:9/"}
    shown = await run_programs(
        {
            form: (("topology", "show", "--format", form), settings)
            for form in ("table", "definitions", "operator")
        }
    )
    document = json.loads(shown["definitions"].stdout)
    resources = list(yaml.safe_load_all(shown["operator"].stdout))
    table = shown["table"].stdout.decode().splitlines()

    assert [queue["name"] for queue in document["queues"]] == [
        *("sms.outbound", "sms.outbound.urgent"),
        *(f"sms.outbound.retry.{delay}" for delay in ("5s", "30s", "2m", "10m", "1h")),
        *(f"sms.outbound.urgent.retry.{delay}" for delay in ("5s", "30s", "2m", "10m", "1h")),
        *("sms.outbound.dead", "sms.inbound"),
    ]
    assert [line.split()[0] for line in table[1:]] == ["queue"] * 14 + ["exchange", "binding"]
    assert [one["kind"] for one in resources] == ["Queue"] * 14 + ["Exchange", "Binding", "Policy"]


def _topology() -> Topology:
    settings = Settings.model_validate({"worker": {"outcome_exchange": "sms.outcome"}})
    return bridge_topology(settings, ["worker", "webhook"])


def test_custom_resources_say_the_same() -> None:
    topology = _topology()
    given: dict[str, Any] = {"vhost": "/", "cluster": "rabbit", "namespace": "mq"}
    made = list(custom_resources(topology, policy=False, **given))
    names = [(one["kind"], one["metadata"]["name"]) for one in made]
    queues = [one["spec"] for one in made if one["kind"] == "Queue"]

    assert len(set(names)) == len(made) == len(topology.declarable) + len(topology.bindings)
    assert ("Queue", "sms-outbound-retry-5s") in names
    assert all(one["apiVersion"] == "rabbitmq.com/v1beta1" for one in made)
    assert {one["spec"]["vhost"] for one in made} == {"/"}
    assert all(
        one["spec"]["rabbitmqClusterReference"] == {"name": "rabbit", "namespace": "mq"}
        for one in made
    )
    # A queue outlives its resource, messages and all.
    assert {spec["deletionPolicy"] for spec in queues} == {"retain"}
    assert [{"x-queue-type": spec["type"], **spec.get("arguments", {})} for spec in queues] == [
        queue.arguments for queue in topology.queues
    ]


def test_a_policy_lifts_the_limit_of_every_queue() -> None:
    topology = _topology()
    given: dict[str, Any] = {"vhost": "v", "cluster": "rabbit", "namespace": None}
    (policy,) = definitions(topology, vhost="v", policy=True)["policies"]
    *_, resource = custom_resources(topology, policy=True, **given)
    names = [queue.name for queue in topology.queues]
    others = ["sms.outbound2", "my.sms.outbound", "smsXoutbound"]

    assert [n for n in names + others if re.search(policy["pattern"], n)] == names
    assert (policy["vhost"], policy["apply-to"]) == ("v", "quorum_queues")
    assert policy["definition"] == resource["spec"]["definition"] == {"delivery-limit": -1}
    assert resource["kind"] == "Policy"
    assert resource["spec"]["pattern"] == policy["pattern"]
    assert "policies" not in definitions(topology, vhost="v", policy=False)
    without = custom_resources(topology, policy=False, **given)
    assert "Policy" not in {one["kind"] for one in without}


def test_every_format_lists_everything() -> None:
    topology = _topology()
    count = len(topology.declarable) + len(topology.bindings)

    assert len(list(rows(topology))) == count
    document = definitions(topology, vhost="/", policy=False)
    assert sum(len(part) for part in document.values()) == count
