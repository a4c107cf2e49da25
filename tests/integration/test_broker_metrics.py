"""RabbitMQ itself shows the metrics that the alerts on the broker read."""

import re
import urllib.request
from pathlib import Path

import aio_pika
import pytest
import yaml
from pamqp.common import FieldTable

from bridge.sandbox.broker import private_broker
from bridge.sandbox.processes import free_ports, wait_until
from tests.chart.promql import BROKER_METRICS, FILES, Selector, selectors

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring.md"
QUEUES = ("sms.outbound", "sms.outbound.urgent")


@pytest.mark.anyio
async def test_the_broker_shows_what_its_alerts_read() -> None:
    (path,) = set(re.findall(r"`(/metrics/detailed[^`]*)`", MONITORING.read_text()))
    alerts = yaml.safe_load((FILES / "broker-alerts.yaml").read_text())
    read = {s for g in alerts["groups"] for r in g["rules"] for s in selectors(r["expr"])}
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    settings = ("prometheus.tcp.ip = 127.0.0.1", f"prometheus.tcp.port = {port}")
    with private_broker(plugins=["rabbitmq_prometheus"], configuration=settings) as broker:
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
