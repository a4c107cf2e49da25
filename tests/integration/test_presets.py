"""Every preset against the service that the sandbox plays, both ways, as a user would try it.

For each there is a worker and a sandbox, and one receiver has an endpoint for each; nothing is set
but what the sandboxes print.
"""

import asyncio
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml

from bridge.config.presets import PRESETS, Preset
from bridge.sandbox.processes import free_ports
from bridge.sandbox.service import PlayedService, ServiceAnswer
from tests.amqp_client import Amqp
from tests.integration.conftest import (
    Canaries,
    Launcher,
    Line,
    Running,
    Service,
    eventually,
    run_programs,
    unique,
)

PLAYED: tuple[Preset, ...] = tuple(preset for preset in PRESETS if preset != "generic")
# These echo no reference of ours in their receipts.
KEYLESS = {"twilio", "plivo", "telnyx"}
# For these no answer is documented that says too fast; the status does.
WITHOUT_SLOW_DOWN = {"android-sms-gateway", "httpsms"}


@dataclass
class PresetLine(Line):
    """A worker with a preset, and the service that the sandbox plays."""

    preset: Preset
    service: Service
    settings: dict[str, Any]
    exchange: str


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Write nested settings with dotted keys, as the environment has them."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        nested = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return flat


async def printed(sandbox: Running) -> tuple[dict[str, Any], dict[str, Any]]:
    async def look() -> str | None:
        assert sandbox.child.exit_code is None, sandbox.child.tail()
        found = re.search(r"for the bridge:\n\n(.+)\n\n", sandbox.output, re.DOTALL)
        return found[1] if found else None

    settings = yaml.safe_load(await eventually(look, what="the sandbox started"))
    (endpoint,) = settings.pop("webhook")["endpoints"]
    return flatten(settings), endpoint


@pytest.fixture(scope="module")
async def lines(
    launcher: Launcher, amqp: Amqp, amqp_url: str, canaries: Canaries, http: httpx.AsyncClient
) -> dict[Preset, PresetLine]:
    (port,) = free_ports(1)
    hooks = f"http://127.0.0.1:{port}/webhooks"
    exchange = unique("events")
    endpoints = []
    # So many at once as do not keep each other from being ready in time.
    places = asyncio.Semaphore(3)

    async def start(preset: Preset) -> PresetLine:
        async with places:
            return await start_in_turn(preset)

    async def start_in_turn(preset: Preset) -> PresetLine:
        options = ("--preset", preset, "--port", "0", "--webhook-url", f"{hooks}/{preset}")
        sandbox = launcher.start("sandbox", *options, settings={})
        api, endpoint = await printed(sandbox)
        endpoints.append(endpoint)
        settings = {
            **api,
            "rabbitmq.url": amqp_url,
            "worker.queue": unique(preset),
            "worker.retry_delays": ["1s"],
        }
        worker = await launcher.role("worker", settings=settings)
        service = Service(settings["sms_api.base_url"], http)
        queue = settings["worker.queue"]
        return PresetLine(amqp, canaries, worker, queue, preset, service, settings, exchange)

    started = await asyncio.gather(*(start(preset) for preset in PLAYED))
    inbound = {"port": str(port), "exchange": exchange, "queue": f"{exchange}.all"}
    receiver = {f"webhook.{name}": value for name, value in inbound.items()}
    await launcher.role("webhook", settings={**receiver, "webhook.endpoints": endpoints})
    return {line.preset: line for line in started}


@pytest.fixture(params=PLAYED)
def line(request: pytest.FixtureRequest, lines: dict[Preset, PresetLine]) -> PresetLine:
    return lines[request.param]


def answer_of(preset: Preset, name: str) -> ServiceAnswer:
    answer = PlayedService(preset).fault_answer(name, None)
    assert answer is not None
    return answer


async def test_a_message_gets_the_services_id(line: PresetLine) -> None:
    request = line.canaries.request()
    outcome = await line.outcome(request, message_id=uuid.uuid4().hex)
    (message,) = await line.service.messages(request["to"])

    assert message["text"] == request["text"]
    assert (outcome["outcome"], outcome["provider_id"]) == ("sent", message["id"])


async def test_commands_are_content(lines: dict[Preset, PresetLine]) -> None:
    """`check` finds no fault with what the sandbox prints, and `send --wait` is told `sent`."""
    settings, request = lines["twilio"].settings, lines["twilio"].canaries.request()
    send = ("send", *(f"--{name}={value}" for name, value in request.items()), "--wait")
    ran = await run_programs({"check": (("check",), settings), "send": (send, settings)})

    assert {name: (one.returncode, one.stderr) for name, one in ran.items()} == {
        "check": (0, b""),
        "send": (0, b""),
    }
    assert len(await lines["twilio"].service.messages(request["to"])) == 1


async def test_a_refusal_has_the_services_code(line: PresetLine) -> None:
    request, refusal = line.canaries.request(), answer_of(line.preset, "refused")
    await line.service.misbehave({"to": request["to"], "answer": refusal.means})
    outcome = await line.outcome(request, message_id=uuid.uuid4().hex)
    letter = await line.amqp.take(f"{line.queue}.dead", message_id=outcome["message_id"])

    assert (outcome["reason"], outcome["status"]) == ("refused", refusal.status)
    assert letter.headers["sms-bridge-reason"] == "refused"
    assert letter.headers.get("sms-bridge-code") == refusal.code == outcome.get("code")


async def test_what_comes_too_fast_is_sent_later(line: PresetLine) -> None:
    request = line.canaries.request()
    too_fast: dict[str, object] = {"answer": "slow_down"}
    if line.preset in WITHOUT_SLOW_DOWN:
        too_fast = {"status": 429}
    wait = {"count": 1, "headers": {"Retry-After": "1"}}
    await line.service.misbehave({"to": request["to"], **too_fast, **wait})
    outcome = await line.outcome(request, message_id=uuid.uuid4().hex)
    posts = await line.service.requests(request["to"])

    assert (outcome["outcome"], outcome["attempts"]) == ("sent", 1)
    assert len(posts) == 2
    assert len(await line.service.messages(request["to"])) == 1


async def test_a_reply_reaches_the_exchange(line: PresetLine, http: httpx.AsyncClient) -> None:
    reply = {"from": line.canaries.number(), "text": line.canaries.text()}
    url = f"{line.service.url}/sandbox/replies"
    good = await http.post(url, json=reply)
    forged = await http.post(url, json={**reply, "forged": True})
    message = await line.amqp.take(f"{line.exchange}.all", type="message.received")

    assert good.json() == {"answers": [200]}
    assert forged.json() == {"answers": [401]}
    event = json.loads(message.body)
    if line.preset != "generic":
        assert event["provider"] == line.preset
    assert event["data"]["text"] == reply["text"]
    assert event["data"]["from"] == reply["from"]


@pytest.mark.parametrize("delivery", ["delivered", "failed"])
async def test_a_receipt_says_what_became_of_a_message(
    line: PresetLine, delivery: str, http: httpx.AsyncClient
) -> None:
    request = line.canaries.request()
    outcome = await line.outcome(request, message_id=uuid.uuid4().hex)
    order = {"to": request["to"], "delivery": delivery}
    answer = await http.post(f"{line.service.url}/sandbox/receipts", json=order)
    event = await line.amqp.take(f"{line.exchange}.all")
    ours = None if line.preset in KEYLESS else outcome["message_id"]

    assert answer.json() == {"answers": [200]}
    assert event.headers["sms-bridge-delivery"] == delivery
    assert event.headers["sms-bridge-provider-id"] == outcome["provider_id"]
    assert event.headers.get("sms-bridge-message-id") == ours
