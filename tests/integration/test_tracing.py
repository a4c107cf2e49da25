"""The traces of messages and webhooks: from publisher to API, from service to event.

Spans go to a small receiver.
"""

import json
import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.amqp_client import Amqp
from tests.integration.conftest import (
    SIGNATURE,
    Canaries,
    Launcher,
    Running,
    Service,
    eventually,
    unique,
)
from tests.otlp import Received, Receiver, otlp_receiver

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PUBLISHER = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{PUBLISHER}-01"
UNSAMPLED = f"00-{'5' * 32}-{PUBLISHER}-00"
ACCOUNT = "AC-canary-account"
DELAY = "1s"


@dataclass
class Line:
    """Both roles, which sample every new trace, with their broker, service and receiver."""

    bridge: Running
    receiver: Receiver
    amqp: Amqp
    service: Service
    canaries: Canaries
    http: httpx.AsyncClient
    queue: str

    async def publish(self, **properties: Any) -> str:
        request = self.canaries.request()
        await self.amqp.publish(self.queue, json.dumps(request).encode(), **properties)
        return request["to"]

    async def post(self, body: bytes, *, secret: str | None = None, **headers: str) -> int:
        url = f"{self.bridge.webhook_url}/{ACCOUNT}"
        signed = {SIGNATURE: self.canaries.sign(body, secret), **headers}
        return (await self.http.post(url, content=body, headers=signed)).status_code

    async def until_spans(self, count: int, **wanted: str) -> list[Received]:
        async def look() -> list[Received] | None:
            found = [
                span
                for span in self.receiver.spans
                if all(getattr(span, name) == value for name, value in wanted.items())
            ]
            return found if len(found) >= count else None

        found = await eventually(look, what=f"{count} spans with {wanted}")
        return sorted(found, key=lambda span: span.started_at)

    async def posted(self, to: str, count: int) -> list[dict[str, str]]:
        await self.service.until_requested(to, count)
        return await self.service.headers(to)


@pytest.fixture(scope="module")
async def line(launcher: Launcher, session_service: Service, amqp: Amqp) -> AsyncIterator[Line]:
    canaries, http, name = launcher.canaries, launcher.http, unique("tracing")
    with otlp_receiver() as receiver:
        bridge = await launcher.role(
            "all",
            settings={
                "worker.queue": name,
                "worker.retry_delays": [DELAY],
                "worker.outcome_exchange": f"{name}.outcome",
                "sms_api.base_url": session_service.url,
                "sms_api.key": canaries.key,
                "webhook.path": f"/webhooks/{ACCOUNT}",
                "webhook.secrets": [canaries.secret],
                "webhook.exchange": f"{name}.inbound",
                "webhook.queue": f"{name}.inbound",
                "tracing.otlp_endpoint": receiver.url,
                "tracing.sample_ratio": 1,
            },
        )
        await bridge.until_metric("sms_bridge_amqp_connection_up", 1)
        yield Line(bridge, receiver, amqp, session_service, canaries, http, name)
    shown = json.dumps([[s.name, s.attributes, s.resource] for s in receiver.spans])

    assert canaries.found_in(shown) == set()
    assert ACCOUNT not in shown


def link_to(span: Received) -> tuple[str, str]:
    return span.trace_id, span.span_id


async def test_from_the_publisher_to_the_api(line: Line) -> None:
    message_id = uuid.uuid4().hex
    to = await line.publish(
        message_id=message_id, headers={"traceparent": SAMPLED, "tracestate": "vendor=1"}
    )
    (sent,) = await line.posted(to, 1)
    process, post = await line.until_spans(2, trace_id=TRACE_ID)

    assert (process.name, process.kind) == (f"process {line.queue}", "consumer")
    assert process.parent_id == PUBLISHER
    assert process.links == []
    assert (
        process.attributes.items()
        >= {
            "messaging.system": "rabbitmq",
            "messaging.destination.name": line.queue,
            "messaging.operation.type": "process",
            "messaging.message.id": message_id,
            "sms_bridge.outcome": "sent",
        }.items()
    )
    assert (post.name, post.kind) == ("POST", "client")
    assert (post.parent_id, post.is_error) == (process.span_id, False)
    assert (
        post.attributes.items()
        >= {
            "http.request.method": "POST",
            "http.response.status_code": 202,
            "server.address": "127.0.0.1",
        }.items()
    )
    assert process.started_at <= post.started_at <= post.ended_at <= process.ended_at
    assert post.is_named_by(sent["traceparent"])
    assert sent["tracestate"] == "vendor=1"
    assert process.resource.items() >= {"service.name": "sms-bridge"}.items()


@pytest.mark.parametrize("is_publishers", [True, False], ids=["of the publisher", "of ours"])
async def test_over_a_retry_queue(line: Line, *, is_publishers: bool) -> None:
    trace_id, message_id = uuid.uuid4().hex, uuid.uuid4().hex
    headers = {"traceparent": f"00-{trace_id}-{PUBLISHER}-01"} if is_publishers else None
    await line.service.misbehave({"count": 1, "status": 503})
    to = await line.publish(message_id=message_id, headers=headers)
    first_sent, second_sent = await line.posted(to, 2)
    if not is_publishers:
        trace_id = first_sent["traceparent"].split("-")[1]
    first, failed, second, accepted = await line.until_spans(4, trace_id=trace_id)

    assert [first.name, second.name] == [f"process {line.queue}"] * 2
    assert (first.attributes["sms_bridge.outcome"], first.is_error) == ("retried", False)
    assert (failed.parent_id, failed.is_error) == (first.span_id, True)
    assert failed.attributes["error.type"] == "503"
    assert second.links == [link_to(first)]
    assert second.parent_id == (PUBLISHER if is_publishers else first.span_id)
    assert second.attributes["sms_bridge.outcome"] == "sent"
    assert accepted.parent_id == second.span_id
    assert accepted.attributes["http.request.resend_count"] == 1
    assert failed.is_named_by(first_sent["traceparent"])
    assert accepted.is_named_by(second_sent["traceparent"])


async def test_a_dead_letter_is_an_error(line: Line) -> None:
    trace_id, message_id = uuid.uuid4().hex, uuid.uuid4().hex
    headers = {"traceparent": f"00-{trace_id}-{PUBLISHER}-01"}
    await line.amqp.publish(line.queue, b"no request", message_id=message_id, headers=headers)
    (process,) = await line.until_spans(1, trace_id=trace_id)
    letter = await line.amqp.take(f"{line.queue}.dead", message_id=message_id)

    assert process.is_error
    assert process.attributes["error.type"] == "invalid"
    assert letter.headers["traceparent"] == headers["traceparent"]
    assert process.is_named_by(str(letter.headers["sms-bridge-earlier-span"]))


async def test_an_unsampled_trace_is_passed_on(line: Line) -> None:
    to = await line.publish(headers={"traceparent": UNSAMPLED})
    (sent,) = await line.posted(to, 1)
    await line.publish(headers={"traceparent": SAMPLED.replace(TRACE_ID, "6" * 32)})
    await line.until_spans(2, trace_id="6" * 32)

    assert sent["traceparent"] == UNSAMPLED
    assert not [span for span in line.receiver.spans if span.trace_id == "5" * 32]


async def test_from_the_webhook_to_the_event(line: Line) -> None:
    trace_id, event_id = uuid.uuid4().hex, uuid.uuid4().hex
    body = json.dumps({"type": "message.received", "id": event_id}).encode()
    given = {"traceparent": f"00-{trace_id}-{PUBLISHER}-01"}
    statuses = [await line.post(body, **given) for _ in range(2)]
    event = await line.amqp.take(f"{line.queue}.inbound", body=body)
    spans = await line.until_spans(3, trace_id=trace_id)
    webhook, publish, repeat = spans

    assert statuses == [200, 200]
    assert [(span.name, span.kind) for span in spans] == [
        ("POST webhook", "server"),
        (f"publish {line.queue}.inbound", "producer"),
        ("POST webhook", "server"),
    ]
    assert (webhook.parent_id, publish.parent_id) == (PUBLISHER, webhook.span_id)
    assert publish.is_named_by(str(event.headers["traceparent"]))
    assert (
        webhook.attributes.items()
        >= {
            "http.response.status_code": 200,
            "sms_bridge.outcome": "published",
            "sms_bridge.event_id": event_id,
        }.items()
    )
    assert repeat.attributes["sms_bridge.outcome"] == "duplicate"


async def test_a_stranger_writes_no_spans(line: Line) -> None:
    """A webhook that is not verified has no span, whatever trace it names."""
    stranger, friend = uuid.uuid4().hex, uuid.uuid4().hex
    body = json.dumps({"type": "message.received"}).encode()
    forged = f"00-{stranger}-{PUBLISHER}-01"
    refused = await line.post(body, secret="wrong", traceparent=forged)
    await line.post(body, traceparent=f"00-{friend}-{PUBLISHER}-01")
    await line.until_spans(2, trace_id=friend)

    assert refused == 401
    assert not [span for span in line.receiver.spans if span.trace_id == stranger]


async def test_latencies_name_a_trace(line: Line) -> None:
    trace_id = uuid.uuid4().hex
    await line.publish(headers={"traceparent": f"00-{trace_id}-{PUBLISHER}-01"})
    await line.until_spans(2, trace_id=trace_id)
    port = line.bridge.logged("started")[0]["admin_port"]
    metrics = f"http://127.0.0.1:{port}/metrics"
    wanted = {"Accept": "application/openmetrics-text"}
    text = (await line.http.get(metrics, headers=wanted)).text
    named = {
        family.name
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None and sample.exemplar.labels == {"trace_id": trace_id}
    }
    plain = await line.http.get(metrics)

    assert named == {
        "sms_bridge_worker_processing_duration_seconds",
        "sms_bridge_worker_provider_request_duration_seconds",
    }
    assert trace_id not in plain.text


async def test_without_an_endpoint_nothing_is_loaded(
    launcher: Launcher, service: Service, canaries: Canaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "worker.queue": unique("untraced"),
        "sms_api.base_url": service.url,
        "sms_api.key": canaries.key,
    }
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    worker = await launcher.role("worker", settings=settings, is_forked=False)
    await worker.stop()
    loaded = set(re.findall(r"^import time:.*\| *(\S+)$", worker.output, re.MULTILINE))

    assert {"bridge.wiring", "bridge.telemetry.trace_context"} <= loaded
    assert not {name for name in loaded if name.startswith(("opentelemetry", "google", "requests"))}
    assert "bridge.telemetry.tracing" not in loaded
