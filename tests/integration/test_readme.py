"""The commands of README.md, run as they stand there, on ports that are free."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import Child, Guard, free_ports
from tests.integration.conftest import eventually, make_environ

ROOT = Path(__file__).parents[2]
RUN_IT = re.search(
    r"^## Run it\n(.*?)^## ", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
)
# Set-up, stand-in, roles, first message, in this order.
BLOCKS = re.findall(r"^```sh\n(.*?)^```", RUN_IT[1] if RUN_IT else "", re.MULTILINE | re.DOTALL)
# What the text says to wait for.
UNTIL_READY = "until curl -sf localhost:9090/readyz >/dev/null; do sleep 0.2; done\n"
UNTIL_LISTENING = "until grep -q 'listening on the exchange' errors.log; do sleep 0.2; done\n"
# In a file of its own, for curl's meter ends no line.
ERRORS_APART = "exec 2>>errors.log\n"
VHOST = "readme"


@pytest.fixture
def environ(managed_broker: Broker, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Lend the environment of a reader: a checkout, and a RabbitMQ of their own."""
    managed_broker.ctl("add_vhost", VHOST)
    managed_broker.ctl("set_permissions", "--vhost", VHOST, "guest", ".*", ".*", ".*")
    for name in ("config.example.yaml", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    yield make_environ({"rabbitmq.url": managed_broker.url + VHOST})
    managed_broker.ctl("delete_vhost", VHOST)


async def test_the_first_message_goes_out_and_an_event_comes_in(
    environ: dict[str, str], guard: Guard, tmp_path: Path
) -> None:
    """Who copies the commands below "Run it" sends a message, and sees its outcome and an event."""
    sandbox, public, admin = free_ports(3)
    set_up, stand_in, roles, first = BLOCKS
    # The environment is there: making it anew would take it from the tests that run.
    assert "make env" in set_up
    script = set_up.replace("make env", ": make env") + stand_in + roles + UNTIL_READY + first
    after = "sms-bridge listen &"
    assert script.count(after) == 1
    script = re.sub(rf"({after}.*\n)", rf"\1{UNTIL_LISTENING}", script)
    for port, free in ((8025, sandbox), (8080, public), (9090, admin)):
        assert f"localhost:{port}" in script
        script = script.replace(f"localhost:{port}", f"localhost:{free}")
    ports = {"SMS_BRIDGE_WEBHOOK__PORT": str(public), "SMS_BRIDGE_ADMIN__PORT": str(admin)}
    script = script.replace("sms-bridge sandbox", f"sms-bridge sandbox --port {sandbox}")
    (tmp_path / "commands.sh").write_text(
        f"set -e\n{ERRORS_APART}{script}\necho all commands done\nwait\n"
    )
    child = Child(
        ["bash", "commands.sh"], guard=guard, log=tmp_path / "run.log", environ=environ | ports
    )

    def shown() -> list[str]:
        return child.log.read_text(encoding="utf-8", errors="replace").splitlines()

    async def is_done() -> list[str] | None:
        assert child.exit_code is None, child.tail(40)
        lines = shown()
        events = [line for line in lines if '"routing_key"' in line]
        return events if events and "all commands done" in lines else None

    try:
        (event,) = await eventually(is_done, what="an event", seconds=60)
        outcomes = [json.loads(line) for line in shown() if line.startswith('{"message_id"')]
    finally:
        child.kill()

    assert [outcome["outcome"] for outcome in outcomes] == ["sent"]
    assert json.loads(event)["body"]["data"]["text"] == "Yes"
