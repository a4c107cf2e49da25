"""RabbitMQ itself shows the metrics that the alerts on the broker read."""

import json
import re
import urllib.request
from pathlib import Path

import aio_pika
import pytest
import yaml
from pamqp.common import FieldTable

from bridge.sandbox.broker import Broker, private_broker
from bridge.sandbox.processes import free_ports, wait_until
from tests.chart.promql import BROKER_METRICS, FILES, Selector, selectors

DEPLOYMENT = Path(__file__).parents[2] / "docs" / "deployment.md"
# Those behind the first are there with `worker.priorities`, or with `worker.lanes`.
QUEUES = ("sms.outbound", "sms.outbound.urgent", "sms.outbound.normal", "sms.outbound.lane.0")


def serve_metrics(broker: Broker) -> str:
    """Start RabbitMQ again with its exporter; return the exporter's address."""
    (port,) = free_ports(1)
    settings = f"prometheus.tcp.ip = 127.0.0.1\nprometheus.tcp.port = {port}\n"
    for variable, text, how in (
        ("RABBITMQ_CONFIG_FILE", settings, "[append]"),
        ("RABBITMQ_ENABLED_PLUGINS_FILE", "[rabbitmq_prometheus].\n", "[]"),
    ):
        # Erlang reads a JSON string as Python wrote it.
        written = f"file:write_file(os:getenv({json.dumps(variable)}), {json.dumps(text)}, {how})."
        assert broker.ctl("eval", written).strip() == "ok"
    broker.stop()
    broker.start()
    return f"http://127.0.0.1:{port}"


@pytest.mark.anyio
async def test_the_broker_shows_what_its_alerts_read() -> None:
    """Each series that they select is there, at the address that the documents name.

    Takes the start of a broker of its own, and the seconds until it has all its metrics.
    """
    (path,) = set(re.findall(r"`(/metrics/detailed[^`]*)`", DEPLOYMENT.read_text()))
    alerts = yaml.safe_load((FILES / "broker-alerts.yaml").read_text())
    read = {s for g in alerts["groups"] for r in g["rules"] for s in selectors(r["expr"])}
    with private_broker() as broker:
        address = serve_metrics(broker)
        async with await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel()
            for queue in QUEUES:
                kind: FieldTable = {"x-queue-type": "quorum"}
                await channel.declare_queue(queue, durable=True, arguments=kind)
                await channel.default_exchange.publish(aio_pika.Message(b"{}"), queue)

        def selects_one(selector: Selector, text: str) -> bool:
            series = re.findall(rf"^{selector.name}\{{(.*)\}} \S+$", text, re.MULTILINE)
            return any(
                selector.selects(selector.name, dict(re.findall(r'(\w+)="([^"]*)"', labels)))
                for labels in series
            )

        def complete() -> bool:
            with urllib.request.urlopen(address + path, timeout=5) as answer:
                text = answer.read().decode()
            # A metric is there some time before it has the series of every queue.
            return all(selects_one(selector, text) for selector in read)

        assert {selector.name for selector in read} == set(BROKER_METRICS)
        assert wait_until(complete, seconds=30)
