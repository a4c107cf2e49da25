"""`sms-bridge status`: what it says of a real broker, a worker and a webhook receiver."""

import json
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import anyio.to_thread
import httpx
import pytest

from bridge.admin.pausing import this_operator
from tests.amqp_client import Amqp
from tests.integration.conftest import (
    PROGRAM,
    SIGNATURE,
    Canaries,
    Launcher,
    Running,
    Service,
    eventually,
    make_environ,
    run_program,
    unique,
)
from tests.plain_http import NO_AUTHORITIES
from tests.terminal import typing

ROOT = Path(__file__).parents[2]


@dataclass
class Scene:
    """A worker, a webhook receiver, and an operator who looks at both."""

    amqp: Amqp
    service: Service
    canaries: Canaries
    worker: Running
    webhook: Running
    settings: dict[str, object]

    @property
    def queue(self) -> str:
        return str(self.settings["worker.queue"])

    @property
    def ports(self) -> list[str]:
        return [word for one in (self.worker, self.webhook) for word in ("--admin", port_of(one))]

    async def look(self, *options: str, **changed: object) -> CompletedProcess[bytes]:
        settings = {**self.settings, **{k.replace("__", "."): v for k, v in changed.items()}}
        result = await run_program("status", *options, settings=settings)
        assert self.canaries.found_in((result.stdout + result.stderr).decode()) == set()
        return result

    async def read(self, **changed: object) -> dict[str, Any]:
        result = await self.look("--json", *self.ports, **changed)
        assert result.returncode == 0, result.stderr.decode()
        document: dict[str, Any] = json.loads(result.stdout)
        # They come by their ports, which are any.
        document["processes"].sort(key=lambda one: one["worker"] is None)
        return document

    async def publish(self, **members: str) -> str:
        request = self.canaries.request(**members)
        await self.amqp.publish(self.queue, json.dumps(request).encode())
        return request["to"]


def port_of(running: Running) -> str:
    return f"localhost:{running.logged('started')[0]['admin_port']}"


@pytest.fixture(scope="module")
async def roles(
    launcher: Launcher, session_service: Service, canaries: Canaries, amqp_url: str
) -> tuple[Running, Running, dict[str, object]]:
    name = unique("status")
    settings: dict[str, object] = {
        "worker.queue": name,
        "worker.retry_delays": ["1s", "1h"],
        "webhook.queue": f"{name}.in",
        "webhook.exchange": f"{name}.in",
        "webhook.secrets": [canaries.secret],
        "sms_api.base_url": session_service.url,
        "sms_api.key": canaries.key,
    }
    worker = await launcher.role("worker", settings=settings)
    webhook = await launcher.role("webhook", settings=settings)
    return worker, webhook, {"rabbitmq.url": amqp_url, **settings}


@pytest.fixture
async def scene(
    roles: tuple[Running, Running, dict[str, object]],
    amqp: Amqp,
    service: Service,
    canaries: Canaries,
) -> AsyncIterator[Scene]:
    worker, webhook, settings = roles
    scene = Scene(amqp, service, canaries, worker, webhook, settings)
    yield scene
    await service.forget()
    await amqp.delete([f"{scene.queue}.paused"])

    async def is_not_paused() -> bool:
        return await worker.metric("sms_bridge_worker_paused") == 0

    await eventually(is_not_paused, what="no pause is left")


def shape(value: object) -> object:
    if isinstance(value, dict):
        return {name: shape(member) for name, member in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return None


async def test_the_form_of_the_json(scene: Scene) -> None:
    to = await scene.publish()
    await scene.service.until_sent(to)
    await scene.publish(text="")
    await scene.amqp.until_count(f"{scene.queue}.dead", 1)
    body = json.dumps({"type": "message.received", "data": {"from": to, "text": "Yes"}}).encode()
    async with httpx.AsyncClient(trust_env=False, verify=NO_AUTHORITIES) as client:
        headers = {SIGNATURE: scene.canaries.sign(body)}
        answer = await client.post(scene.webhook.webhook_url, content=body, headers=headers)
    found = await scene.read()
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    (documented,) = re.findall(r"<!-- status: begin -->\s+```json\n(.*?)```", page, re.DOTALL)
    pause = json.loads(documented)["processes"][0]["worker"]["pauses"][0]

    assert answer.status_code == 200
    worker, webhook = found["processes"]
    assert (worker["worker"]["sent"], worker["worker"]["dead"]) == (1, {"invalid": 1})
    assert worker["worker"]["last_sent_at"] is not None
    assert webhook["webhook"]["events"] == {"published": 1}
    queue = scene.queue
    assert [(one["name"], one["role"], one["ready"]) for one in found["queues"]] == [
        (queue, "requests", 0),
        (f"{queue}.urgent", "requests", 0),
        (f"{queue}.retry.1s", "retry", 0),
        (f"{queue}.retry.1h", "retry", 0),
        (f"{queue}.urgent.retry.1s", "retry", 0),
        (f"{queue}.urgent.retry.1h", "retry", 0),
        (f"{queue}.dead", "dead_letters", 1),
        (f"{queue}.in", "events", 1),
    ]
    assert [one["consumers"] for one in found["queues"][:2]] == [1, 1]
    assert found["dead_letters"] == {"waiting": 1, "by_reason": {"invalid": 1}}
    # What is not there at the moment is put in, of the form that the facts of /readyz have.
    worker["worker"]["pauses"] = [dict.fromkeys(pause)]
    worker["worker"]["retried"] = worker["worker"]["dead"] = None
    webhook["webhook"]["events"] = found["dead_letters"]["by_reason"] = None
    found["paused_by_operator"] = {"since": None, "reason": None, "by": None}
    wanted = json.loads(documented)
    wanted["processes"][0]["worker"]["retried"] = wanted["processes"][0]["worker"]["dead"] = None
    wanted["processes"][1]["webhook"]["events"] = wanted["dead_letters"]["by_reason"] = None
    assert shape(found) == shape(wanted)
    assert [shape(one) for one in found["processes"]] == [shape(one) for one in wanted["processes"]]


async def test_pauses_are_told(scene: Scene) -> None:
    await scene.service.misbehave({"status": 401, "count": None})
    await scene.publish()
    await scene.worker.until_metric("sms_bridge_worker_paused", 1, reason="credentials_rejected")
    paused = await run_program("pause", "--reason", "wrong text", settings=scene.settings)
    await scene.worker.until_metric("sms_bridge_worker_paused", 1, reason="operator")
    found = await scene.read()
    screen = (await scene.look(*scene.ports)).stdout.decode()

    assert paused.returncode == 0
    note = found["paused_by_operator"]
    assert (found["is_paused_by_operator"], note["reason"]) == (True, "wrong text")
    own, operators = found["processes"][0]["worker"]["pauses"]
    assert (own["reason"], own["status"]) == ("credentials_rejected", 401)
    assert operators["reason"] == "operator"
    assert note["by"] == this_operator()
    assert f"PAUSED  every worker, by {note['by']} since {note['since']}" in screen
    assert f"PAUSED  1 of 1 worker, credentials_rejected since {own['since']}" in screen


async def test_who_is_silent_is_named(scene: Scene) -> None:
    silent = await scene.look(*scene.ports, "--admin", "localhost:1")
    nowhere = await scene.look(*scene.ports, rabbitmq__url="amqp://127.0.0.1:1/")
    unasked = await scene.look(admin__port="1")

    assert silent.returncode == nowhere.returncode == 1
    assert "NO ANSWER  127.0.0.1:1 (localhost:1): no connection" in silent.stdout.decode()
    assert f"\n{scene.queue} " in silent.stdout.decode()
    assert "BROKER  no connection to 127.0.0.1:1 (refused)" in nowhere.stdout.decode()
    assert "WORKER " in nowhere.stdout.decode()
    # Nobody named it; that the worker is elsewhere is told, and is no failure.
    assert unasked.returncode == 0
    assert "NOT SHOWN  1 of 1 worker that consume" in unasked.stdout.decode()


async def test_watching(scene: Scene, tmp_path: Path) -> None:
    environ = {**make_environ(scene.settings), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    program = [*PROGRAM, "status", "--watch", *scene.ports]

    def watch() -> int:
        with typing(program, folder=tmp_path, environ=environ) as person:
            person.wait_for("ready")
            person.wait_for("ready")
            anyio.from_thread.run(lambda: run_program("pause", settings=scene.settings))
            person.wait_for(f"PAUSED  every worker, by {this_operator()}")
            anyio.from_thread.run(lambda: run_program("resume", settings=scene.settings))
            return person.insist(lambda: person.signal(signal.SIGTERM))

    assert await anyio.to_thread.run_sync(watch) == 0


async def test_watching_on_a_poor_terminal(scene: Scene, tmp_path: Path) -> None:
    usual = {**make_environ(scene.settings), "LINES": "40"}
    program = [*PROGRAM, "status", "--watch", *scene.ports]

    def watch(terminal: str, columns: str) -> str:
        environ = usual | {"TERM": terminal, "COLUMNS": columns}
        with typing(program, folder=tmp_path, environ=environ) as person:
            person.wait_for("ready")
            person.wait_for("ready")
            person.insist(lambda: person.signal(signal.SIGINT))
            return person.shown

    for terminal, columns in (("dumb", "80"), ("xterm", "40")):
        shown = await anyio.to_thread.run_sync(watch, terminal, columns)
        assert "1h 0" in shown, terminal


async def test_colours(scene: Scene, tmp_path: Path) -> None:
    usual = make_environ(scene.settings) | {"TERM": "xterm"}
    program = [*PROGRAM, "status", *scene.ports]

    def has_colours(environ: dict[str, str]) -> bool:
        with typing(program, folder=tmp_path, environ=usual | environ) as person:
            assert person.exit_code() == 0
            return "\x1b[" in person.raw

    wanted = {"": True, "NO_COLOR=1": False}
    found = {
        one: await anyio.to_thread.run_sync(has_colours, dict([one.split("=")] if one else []))
        for one in wanted
    }
    assert found == wanted


async def test_watching_as_lines(scene: Scene, launcher: Launcher) -> None:
    watching = launcher.start("status", "--watch", "--json", *scene.ports, settings=scene.settings)

    async def has_looked_twice() -> bool:
        return watching.output.count("\n") >= 2

    await eventually(has_looked_twice, what="two lines")
    watching.child.signal(signal.SIGINT)

    assert await watching.ended() == 0
    looks = [json.loads(line) for line in watching.output.splitlines()]
    assert looks[0]["at"] <= looks[1]["at"]
    assert looks[1]["rates"] is not None
