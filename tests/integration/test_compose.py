"""The services of compose.yaml, with their commands and variables, as processes of this computer.

What containers would resolve by name is put in by hand: a broker with the file's definitions, and
free ports instead of the fixed ones.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest
import yaml

from bridge.sandbox.broker import Broker, private_broker
from bridge.sandbox.processes import Child, Guard, free_ports
from tests.erlang import version
from tests.integration.conftest import (
    PROGRAM,
    SECONDS,
    Canaries,
    Running,
    eventually,
    make_environ,
)

TEXT = (Path(__file__).parents[2] / "compose.yaml").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load(TEXT)
DEFINITIONS: str = COMPOSE["configs"]["rabbitmq-definitions"]["content"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    file = tmp_path_factory.mktemp("compose") / "definitions.json"
    definitions = json.loads(DEFINITIONS)
    with private_broker(management=True) as running:
        if version(running).startswith("3."):
            # It has no such limit to lift, and refuses the policy.
            del definitions["policies"]
        file.write_text(json.dumps(definitions))
        running.ctl("import_definitions", str(file))
        yield running


async def test_the_whole_flow_works(
    tmp_path: Path, guard: Guard, canaries: Canaries, http: httpx.AsyncClient, broker: Broker
) -> None:
    sandbox, public, worker_admin, webhook_admin = free_ports(4)
    here = {
        "--host=0.0.0.0": "--host=127.0.0.1",
        "--port=8025": f"--port={sandbox}",
        "127.0.0.1:8025": f"127.0.0.1:{sandbox}",
        "//sandbox:8025": f"//127.0.0.1:{sandbox}",
        "//webhook:8080": f"//127.0.0.1:{public}",
        "//rabbitmq:5672": f"//127.0.0.1:{broker.url.rpartition(':')[2].rstrip('/')}",
    }
    services = json.dumps(COMPOSE["services"])
    for there, instead in here.items():
        assert there in services
        services = services.replace(there, instead)
    found = json.loads(services)
    ports: dict[str, dict[str, str]] = {
        "sandbox": {},
        "worker": {"SMS_BRIDGE_ADMIN__PORT": str(worker_admin)},
        "webhook": {
            "SMS_BRIDGE_ADMIN__PORT": str(webhook_admin),
            "SMS_BRIDGE_WEBHOOK__PORT": str(public),
        },
    }
    environs = {name: make_environ({}) | found[name]["environment"] | ports[name] for name in ports}

    def start(name: str) -> Running:
        command = [*PROGRAM, *found[name]["command"]]
        log = tmp_path / f"{name}.log"
        child = Child(command, guard=guard, log=log, environ=environs[name])
        return Running(child, canaries, http, ())

    async def is_healthy() -> bool:
        _, _, *words = found["sandbox"]["healthcheck"]["test"]
        return (await anyio.run_process([sys.executable, *words], check=False)).returncode == 0

    running = {name: start(name) for name in ports}
    try:
        await eventually(is_healthy, what="the sandbox healthy")
        await running["worker"].until_ready()
        await running["webhook"].until_ready()

        (send,) = re.findall(
            r"^#   docker compose exec worker sms-bridge (.+)$", TEXT, re.MULTILINE
        )
        with anyio.fail_after(SECONDS):
            done = await anyio.run_process(
                [*PROGRAM, *shlex.split(send)], check=False, env=environs["worker"]
            )
        assert done.returncode == 0, done.stderr.decode()

        reply = {"from": "+491713920001", "text": "Hi"}
        answer = await http.post(f"http://127.0.0.1:{sandbox}/sandbox/replies", json=reply)
        assert answer.is_success, answer.text
        await running["webhook"].until_metric(
            "sms_bridge_webhook_events_total", 1, outcome="published"
        )
    finally:
        codes = [await process.stop() for process in running.values()]
    assert codes == [0, 0, 0]


async def test_its_user_sees_the_management_pages(http: httpx.AsyncClient, broker: Broker) -> None:
    """The user that the file makes may log in where the file's head says."""
    (user,) = json.loads(DEFINITIONS)["users"]
    answer = await http.get(
        f"{broker.management_url}/api/queues", auth=(user["name"], user["password"])
    )

    assert answer.status_code == 200
