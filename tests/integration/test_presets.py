"""Every preset from the queue to the service that the sandbox plays, as a user would try it.

For each there is a worker and a sandbox, and nothing is set but what the sandbox prints.
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

from bridge.config import SmsApiSettings
from bridge.config.presets import PRESETS, Preset
from bridge.sandbox.answers import Answer, Answers
from tests.integration.conftest import (
    Amqp,
    Canaries,
    Launcher,
    Running,
    Service,
    eventually,
    run_programs,
    unique,
)

# For these no answer is documented that says too fast; the status does.
WITHOUT_SLOW_DOWN = {"android-sms-gateway", "httpsms"}


@dataclass
class Line:
    """A worker with a preset, its queue, and the service that the sandbox plays."""

    preset: Preset
    service: Service
    worker: Running
    settings: dict[str, Any]
    amqp: Amqp
    canaries: Canaries

    @property
    def queue(self) -> str:
        """Where requests are published."""
        return str(self.settings["worker.queue"])

    async def outcome(self, request: dict[str, str]) -> dict[str, Any]:
        """Publish a send request and return its outcome event."""
        replies = await self.amqp.channel.declare_queue(exclusive=True)
        properties = {"message_id": uuid.uuid4().hex, "reply_to": replies.name}
        await self.amqp.publish(self.queue, json.dumps(request).encode(), **properties)
        message = await self.amqp.take(replies.name)
        event: dict[str, Any] = json.loads(message.body)
        return event


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Write nested settings with dotted keys, as the environment has them."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        nested = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return flat


async def printed(sandbox: Running) -> dict[str, Any]:
    """Return the configuration that a sandbox prints when it has started."""

    async def look() -> str | None:
        assert sandbox.child.exit_code is None, sandbox.child.tail()
        found = re.search(r"configuration:\n\n(.+)\n\n", sandbox.output, re.DOTALL)
        return found[1] if found else None

    return flatten(yaml.safe_load(await eventually(look, what="the sandbox started")))


@pytest.fixture(scope="module")
async def lines(
    launcher: Launcher, amqp: Amqp, amqp_url: str, canaries: Canaries, http: httpx.AsyncClient
) -> dict[Preset, Line]:
    """Start a sandbox and a worker for each preset: twenty processes take their seconds."""

    async def start(preset: Preset) -> Line:
        sandbox = launcher.start("sandbox", "--preset", preset, "--port", "0", settings={})
        settings = {
            **await printed(sandbox),
            "rabbitmq.url": amqp_url,
            "worker.queue": unique(preset),
            "worker.retry_delays": ["1s"],
        }
        worker = await launcher.role("worker", settings=settings)
        service = Service(settings["sms_api.base_url"], http)
        return Line(preset, service, worker, settings, amqp, canaries)

    presets = [preset for preset in PRESETS if preset != "generic"]
    started = await asyncio.gather(*(start(preset) for preset in presets))
    return {line.preset: line for line in started}


@pytest.fixture(params=[preset for preset in PRESETS if preset != "generic"])
def line(request: pytest.FixtureRequest, lines: dict[Preset, Line]) -> Line:
    """Lend the line of one preset."""
    return lines[request.param]


def answer_of(preset: Preset, name: str) -> Answer:
    """Return a documented answer."""
    return Answers(SmsApiSettings.model_validate({"preset": preset})).named(name)


async def test_a_message_gets_the_services_id(line: Line) -> None:
    """What is sent arrives as it was, and the outcome event has the id that the service gave."""
    request = line.canaries.request()
    outcome = await line.outcome(request)
    (message,) = await line.service.messages(request["to"])

    assert message["text"] == request["text"]
    assert (outcome["outcome"], outcome["provider_id"]) == ("sent", message["id"])


async def test_commands_are_content(lines: dict[Preset, Line]) -> None:
    """`check` finds no fault with what the sandbox prints, and `send --wait` is told `sent`."""
    settings, request = lines["twilio"].settings, lines["twilio"].canaries.request()
    send = ("send", *(f"--{name}={value}" for name, value in request.items()), "--wait")
    ran = await run_programs({"check": (("check",), settings), "send": (send, settings)})

    assert {name: (one.returncode, one.stderr) for name, one in ran.items()} == {
        "check": (0, b""),
        "send": (0, b""),
    }
    assert len(await lines["twilio"].service.messages(request["to"])) == 1


async def test_a_refusal_has_the_services_code(line: Line) -> None:
    """What the service refuses is a dead letter with its status, and its code where it has any."""
    request, refusal = line.canaries.request(), answer_of(line.preset, "refused")
    await line.service.misbehave({"to": request["to"], "answer": refusal.means})
    outcome = await line.outcome(request)
    letter = await line.amqp.take(f"{line.queue}.dead", message_id=outcome["message_id"])

    assert (outcome["reason"], outcome["status"]) == ("refused", refusal.status)
    assert letter.headers["sms-bridge-reason"] == "refused"
    assert letter.headers.get("sms-bridge-code") == refusal.code == outcome.get("code")


async def test_what_comes_too_fast_is_sent_later(line: Line) -> None:
    """An answer that says too fast burns no attempt: the message is sent when it is time."""
    request = line.canaries.request()
    too_fast: dict[str, object] = {"answer": "slow_down"}
    if line.preset in WITHOUT_SLOW_DOWN:
        too_fast = {"status": 429}
    wait = {"count": 1, "headers": {"Retry-After": "1"}}
    await line.service.misbehave({"to": request["to"], **too_fast, **wait})
    outcome = await line.outcome(request)
    posts = await line.service.requests(request["to"])

    assert (outcome["outcome"], outcome["attempts"]) == ("sent", 1)
    assert len(posts) == 2
    assert len(await line.service.messages(request["to"])) == 1
