"""The commands of README.md and of the pages behind it, run as they stand there.

Only their ports are others, so that several runs can go on at once.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.config import load_settings
from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import Child, Guard, free_ports
from tests.accounts import virtual_host
from tests.integration.conftest import Canaries, Service, eventually, make_environ
from tests.terminal import typing

ROOT = Path(__file__).parents[2]
# In a file of its own, for curl's meter ends no line.
ERRORS_APART = "exec 2>>errors.log\n"
VHOST = "readme"


def _blocks(page: str, language: str = "sh") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def broker(managed_broker: Broker) -> Iterator[Broker]:
    """Lend a RabbitMQ with a virtual host that is a reader's own."""
    with virtual_host(managed_broker, VHOST):
        yield managed_broker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a checkout as it is after `make env`; anew it would be taken from tests that run."""
    for name in ("config.example.yaml", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    return tmp_path


def _on_free_ports(script: str, environ: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Put ports that are free in the place of those that a page names."""
    assert "make env" in script
    script = script.replace("make env", ": make env")
    sandbox, public, admin = free_ports(3)
    for port, free in ((8025, sandbox), (8080, public), (9090, admin)):
        script = script.replace(f"localhost:{port}", f"localhost:{free}")
    script = script.replace("sms-bridge sandbox", f"sms-bridge sandbox --port {sandbox}")
    ports = {"SMS_BRIDGE_WEBHOOK__PORT": str(public), "SMS_BRIDGE_ADMIN__PORT": str(admin)}
    return f"set -e\n{script}", environ | ports


async def test_the_first_message_goes_out_and_events_come_in(
    broker: Broker, guard: Guard, folder: Path
) -> None:
    """Who copies the page's commands in turn sends, answers, and sees a retry.

    The retry comes after five seconds.
    """
    blocks = _blocks("docs/first-message.md")
    script = "".join(blocks)
    assert [script.count(start) for start in ("sms-bridge all ", "sms-bridge listen ")] == [1, 1]
    environ = make_environ({"rabbitmq.url": broker.url + VHOST})
    script = script.replace("/tmp/", f"{folder}/")
    script, environ = _on_free_ports(ERRORS_APART + script, environ)
    (folder / "commands.sh").write_text(f"{script}\necho all commands done\nwait\n")
    child = Child(["bash", "commands.sh"], guard=guard, log=folder / "run.log", environ=environ)

    def shown(start: str) -> list[str]:
        lines = child.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.startswith(start)]

    async def is_done() -> list[str] | None:
        assert child.exit_code is None, child.tail(40)
        events = shown('{"routing_key"')
        return events if len(events) == 2 and shown("all commands done") else None

    try:
        events = await eventually(is_done, what="two events and the end", seconds=120)
        outcomes = [json.loads(line) for line in shown('{"message_id"')]
        answers = shown('{"answers"')
    finally:
        child.kill()

    assert [(one["outcome"], one["attempts"]) for one in outcomes] == [("sent", 1), ("sent", 2)]
    assert [answer.startswith('{"answers":[200]}') for answer in answers] == [True]
    assert [json.loads(event)["body"]["data"]["text"] for event in events] == ["Yes", "Stop"]


def _names_in(folder: Path) -> set[str]:
    return {f"/{path.name}" for path in folder.iterdir()}


async def test_a_configuration_is_made_and_a_message_sent(
    broker: Broker, folder: Path, service: Service, canaries: Canaries
) -> None:
    """Who copies the commands below "Run it", and answers, has a bridge that sends."""
    (_, run_it) = _blocks("README.md")
    assert run_it.count("sms-bridge all &") == 1
    script, environ = _on_free_ports(run_it, make_environ({}) | {"COLUMNS": "200"})
    (folder / "commands.sh").write_text(f"{script}\nkill %1\nwait %1\n")
    before = _names_in(folder)
    with typing(["/bin/bash", "commands.sh"], folder=folder, environ=environ) as person:
        person.type("host or kubernetes [host]: ", "\n")
        address = broker.url.split("@")[-1]
        person.type("Address [amqp://localhost:5672/]: ", f"amqp://{address}{VHOST}\n")
        person.type("User: ", "guest\n")
        person.type("File with the password", "\n")
        person.type("(not shown): ", "guest\n")
        person.type("Service [generic]: ", "\n")
        person.type("Base URL: ", f"{service.url}\n")
        person.type("File with the key", "\n")
        person.type("(not shown): ", f"{canaries.key}\n")
        person.type("File with the secret", "\n")
        person.type("(not shown): ", f"{canaries.secret}\n")
        person.type("Nothing is sent. [Y/n]: ", "\n")
        person.wait_for('"outcome": "sent"')
        code = person.exit_code()
    (sent,) = await service.messages("+491713920001")
    made = _names_in(folder) - before

    assert code == 0
    assert sent["text"] == "Hi"
    assert canaries.key not in person.shown
    # What is made in the checkout holds secrets, and Git is not to take it.
    assert {"/config.yaml", "/sms-api-key"} <= made
    assert made <= set((ROOT / ".gitignore").read_text(encoding="utf-8").splitlines())


def test_settings_can_be_given_as_the_page_shows(tmp_path: Path) -> None:
    (text,) = _blocks("docs/configuration.md", "yaml")
    (script,) = _blocks("docs/configuration.md")
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    variables = dict(re.findall(r"^export (\S+?)='?(.*?)'?$", script, re.MULTILINE))
    settings = load_settings(tmp_path / "config.yaml", variables)

    assert settings.sms_api.base_url == "https://sms.example.com"
    assert list(settings.worker.retry_delays) == [10, 60, 3600]
    assert (settings.worker.concurrency, settings.worker.rate_limit.per_second) == (20, 30)
