"""The commands of the quick start, run as the page has them, except for their ports.

Free ports let several runs go on at once.
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
VHOST = "readme"
SET_UP = "make env\n. .venv/bin/activate\n"
LOCAL_BROKER = "amqp://guest:guest@localhost:5672/"
REHEARSE = """
export SMS_BRIDGE_CONFIG=config.yaml SMS_BRIDGE_SMS_API__BASE_URL=http://localhost:8025
sms-bridge sandbox --preset twilio --key any-token --webhook-secret any-token \
  --webhook-url http://localhost:8080/webhooks/twilio > sandbox.log 2>&1 &
sms-bridge all > bridge.log 2>&1 &
curl -sf --retry 60 --retry-connrefused --retry-delay 1 -o /dev/null localhost:9090/readyz
sms-bridge listen --count 2 > events.json 2> listen.log &
until [ -s listen.log ]; do sleep 0.2; done
SEND
order() { curl -sSf -H 'Content-Type: application/json' -d "$2" localhost:8025/sandbox/$1; }
order replies '{"from": "+491713920001", "text": "Yes"}'
order receipts '{"to": "+491713920001", "delivery": "delivered"}'
wait $!
echo
cat events.json
"""
SEND = """\
curl -sf --retry 30 --retry-connrefused --retry-delay 1 -o /dev/null localhost:9090/readyz
sms-bridge send --to +491713920001 --from Acme --text Hi --wait
"""


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


async def _follow(script: str, *, environ: dict[str, str], folder: Path, guard: Guard) -> list[str]:
    """Run a script of commands to its end, and return the lines that it prints."""
    (folder / "commands.sh").write_text(f"{script}\necho all commands done\n", encoding="utf-8")
    child = Child(["bash", "commands.sh"], guard=guard, log=folder / "run.log", environ=environ)

    def shown() -> list[str]:
        return child.log.read_text(encoding="utf-8", errors="replace").splitlines()

    async def is_done() -> bool:
        assert child.exit_code in {None, 0}, child.tail(40)
        return "all commands done" in shown()

    try:
        await eventually(is_done, what="the end of the commands", seconds=240)
        return shown()
    finally:
        child.kill()


def _beginning(start: str, lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(start)]


async def test_the_quick_start_can_be_followed(broker: Broker, guard: Guard, folder: Path) -> None:
    """The blocks up to `init` send a message, receive a reply, and show a retry.

    The retry comes after five seconds.
    """
    send_and_receive, make_it_fail, *_ = _blocks("docs/quick-start.md")
    script = (send_and_receive + make_it_fail).replace(LOCAL_BROKER, broker.url + VHOST)
    script, environ = _on_free_ports(script, make_environ({}))
    lines = await _follow(script, environ=environ, folder=folder, guard=guard)
    outcomes = [json.loads(line) for line in _beginning('{"message_id"', lines)]
    events = [json.loads(line) for line in _beginning('{"routing_key"', lines)]

    assert [(one["outcome"], one["attempts"]) for one in outcomes] == [("sent", 1), ("sent", 2)]
    assert _beginning('{"answers"', lines) == ['{"answers":[200]}']
    assert [event["body"]["data"]["text"] for event in events] == ["Yes"]


async def test_the_twilio_tutorial_can_be_rehearsed(
    broker: Broker, guard: Guard, folder: Path
) -> None:
    """The tutorial's configuration sends, and receives a reply and a receipt, from the sandbox."""
    (config,) = _blocks("docs/twilio.md", "yaml")
    (send,) = re.findall(r"^sms-bridge send .*$", "".join(_blocks("docs/twilio.md")), re.MULTILINE)
    assert config.count("https://sms.example.com") == 1
    config = config.replace("https://sms.example.com", "http://localhost:8080")
    config = config.replace("/run/secrets", str(folder)).replace(
        "amqp://localhost:5672/", broker.url + VHOST
    )
    (folder / "twilio-auth-token").write_text("any-token", encoding="ascii")
    script = f"{SET_UP}cat > config.yaml <<'END'\n{config}END\n{REHEARSE}"
    script = script.replace("SEND", send.replace("TO", "+491713920001").replace("FROM", "Acme"))
    script, environ = _on_free_ports(script, make_environ({}))
    lines = await _follow(script, environ=environ, folder=folder, guard=guard)
    (outcome,) = (json.loads(line) for line in _beginning('{"message_id"', lines))
    reply, receipt = (json.loads(line)["body"] for line in _beginning('{"routing_key"', lines))

    assert outcome["outcome"] == "sent"
    assert (reply["type"], reply["data"]["text"]) == ("message.received", "Yes")
    assert receipt["type"] == "receipt.delivered"
    assert receipt["data"]["message_id"] == outcome["message_id"]


def _names_in(folder: Path) -> set[str]:
    return {f"/{path.name}" for path in folder.iterdir()}


async def test_a_configuration_is_made_and_a_message_sent(
    broker: Broker, folder: Path, service: Service, canaries: Canaries
) -> None:
    """The answers to `init` in the quick start make a bridge that sends."""
    (block,) = (one for one in _blocks("docs/quick-start.md") if "sms-bridge init" in one)
    assert block.splitlines()[-1] == "sms-bridge all"
    script = f"{SET_UP}{block.rstrip()} &\n{SEND}kill %1\nwait %1\n"
    script, environ = _on_free_ports(script, make_environ({}) | {"COLUMNS": "200"})
    (folder / "commands.sh").write_text(script)
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
