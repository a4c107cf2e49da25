"""A worker that speaks to a service of another shape, from the queue to the dead letters."""

import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import pytest

from tests.amqp_client import Amqp
from tests.integration.conftest import (
    Canaries,
    HttpStub,
    Launcher,
    Line,
    Post,
    http_answer,
    http_stub,
    run_program,
    unique,
)

ACCOUNT = "AC00000000000000000000000000000001"


class Twilio:
    """A stub of Twilio's resource Message, which answers as it is told for a number."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, dict[str, Any]]] = {}
        self.stub: HttpStub

    def answer(self, post: Post) -> bytes:
        accepted = 201, {"sid": f"SM{len(self.stub.posts)}"}
        status, answer = self.answers.get(members_of(post)["To"], accepted)
        return http_answer(status, json.dumps(answer).encode())

    def refuse(self, to: str, status: int, code: int) -> None:
        """Answer a number with an error of Twilio's form, whose text names the number."""
        message = f"The 'To' number {to} cannot be sent to."
        self.answers[to] = status, {"code": code, "message": message, "status": status}

    def found(self, to: str) -> list[Post]:
        return [post for post in self.stub.posts if members_of(post)["To"] == to]


def members_of(post: Post) -> dict[str, str]:
    pairs = parse_qs(post.body.decode(), strict_parsing=True)
    return {name: values[0] for name, values in pairs.items()}


@pytest.fixture(scope="module")
async def twilio() -> AsyncIterator[Twilio]:
    ours = Twilio()
    async with http_stub(ours.answer) as ours.stub:
        yield ours


@dataclass
class TwilioLine(Line):
    """A worker with the preset `twilio`."""

    settings: dict[str, Any]


@pytest.fixture(scope="module")
async def line(
    launcher: Launcher, amqp: Amqp, amqp_url: str, canaries: Canaries, twilio: Twilio
) -> TwilioLine:
    queue = unique("twilio")
    settings: dict[str, Any] = {
        "rabbitmq.url": amqp_url,
        "worker.queue": queue,
        "worker.retry_delays": ["1s"],
        "sms_api.preset": "twilio",
        "sms_api.base_url": twilio.stub.url,
        "sms_api.account": ACCOUNT,
        "sms_api.key": canaries.key,
    }
    worker = await launcher.role("worker", settings=settings)
    return TwilioLine(amqp, canaries, worker, queue, settings)


async def test_why_it_was_refused_is_told(line: TwilioLine, twilio: Twilio) -> None:
    request, message_id = line.canaries.request(), uuid.uuid4().hex
    twilio.refuse(request["to"], 400, 21610)
    outcome = await line.outcome(request, message_id=message_id)
    logged = await line.worker.until_logged("delivery", message_id=message_id)
    listing = ("dlq", "list", "--json", "--id", message_id)
    listed = await run_program(*listing, settings=line.settings)
    assert listed.returncode == 0, listed.stderr
    row = await run_program("dlq", "list", "--id", message_id, settings=line.settings)
    letter = await line.amqp.take(f"{line.queue}.dead", message_id=message_id)

    told = "The recipient replied STOP."
    assert (outcome["reason"], outcome["status"], outcome["code"]) == ("refused", 400, "21610")
    assert (logged["status"], logged["code"]) == (400, "21610")
    assert json.loads(listed.stdout)["code"] == "21610"
    assert letter.headers["sms-bridge-code"] == "21610"
    assert outcome["meaning"] == logged["meaning"] == json.loads(listed.stdout)["meaning"] == told
    assert letter.headers["sms-bridge-meaning"] == told
    assert told in row.stdout.decode()
    assert "cannot" not in f"{letter.headers} {logged} {outcome}"
    await line.worker.until_metric("sms_bridge_worker_provider_errors_total", 1, code="21610")


async def test_what_may_have_been_sent_is_not_sent_again(line: TwilioLine, twilio: Twilio) -> None:
    """A service without an idempotency key is never sent twice what it may have taken."""
    request = line.canaries.request()
    twilio.refuse(request["to"], 500, 20500)
    outcome = await line.outcome(request, message_id=uuid.uuid4().hex)

    assert (outcome["outcome"], outcome["reason"], outcome["code"]) == (
        "dead",
        "uncertain",
        "20500",
    )
    assert len(twilio.found(request["to"])) == 1
