"""The commands that README.md and docs show: each is run, or listed with why it is not.

They run in a folder of their own against a real broker, a stand-in for the SMS service and both
roles. A new command that is neither run nor listed fails.
"""

import ast
import asyncio
import json
import os
import re
import shlex
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import httpx
import pytest

from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import Child, Guard, free_ports
from tests.accounts import virtual_host
from tests.amqp_client import Amqp, open_amqp
from tests.erlang import version
from tests.forked import ForkedChild, forked_commands
from tests.integration.conftest import (
    SECONDS,
    Canaries,
    Launcher,
    StartService,
    eventually,
    make_environ,
)

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
VHOST = "VHOST"

# Programs that are not here, or take too long.
ABSENT = {
    "docker": "is not here; `make image-proof` follows the recipe without it",
    "helm": "installs into a cluster: `make chart-cluster`",
    "kubectl": "asks a cluster: `make chart-cluster`; what it runs in a pod is run here",
    "make": "takes minutes; tests/test_docs.py sees that the targets exist",
}
# Commands that cannot end well here, by their beginning.
NOT_HERE = {
    "sms-bridge init": "asks a person: tests/integration/test_init.py",
    "sms-bridge init --yes --preset telnyx": "asks the service: tests/integration/test_init.py",
    "sms-bridge status --watch": "until Ctrl-C: tests/integration/test_status.py",
}
# Pages whose commands have a test that knows what they lead to.
ELSEWHERE = {
    "docs/configuration.md": "tests/integration/test_readme.py",
    "docs/quick-start.md": "tests/integration/test_readme.py",
    "docs/providers/plain-text.md": "tests/providers/test_own_service.py",
    "docs/providers/your-own-service.md": "tests/providers/test_own_service.py",
    "docs/twilio.md": "tests/integration/test_readme.py",
}
# Pages that change a broker of the reader's, at an address that is not here.
NOT_FOLLOWED = {"docs/migrating.md": "has another worker's queues and bindings"}
PROGRAMS = {"curl", "rabbitmqctl", "sed", "sms-bridge"}
FUNCTION = re.compile(r"(\w+)\(\) \{.*\}")
SANDBOX = "sms-bridge sandbox"
DEFINITIONS = "topology show --format definitions"
# To the number of docs/sandbox.md.
REQUEST = {"to": "+491713920001", "from": "Acme", "text": "Hi"}


def _commands(page: str) -> list[str]:
    found: list[str] = []
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", PAGES[page], re.MULTILINE | re.DOTALL):
        lines = iter(block.replace("\\\n", " ").splitlines())
        for line in lines:
            command = re.sub(r"(^|\s+)#( .*)?$", "", line).strip()
            if (here := re.search(r"<<(\w+)", command)) is not None:
                # What it is given is a part of it.
                while (given := next(lines)).strip() != here[1]:
                    command += f"\n{given}"
            if command:
                found.append(command)
    return found


def _runnable(command: str) -> str | None:
    if command.startswith("kubectl ") and " exec " in command:
        _, _, command = command.partition(" -- ")
    command = command.split(" | kubectl ")[0]
    is_listed = command.split()[0] in ABSENT or any(_is(command, row) for row in NOT_HERE)
    return None if is_listed else command


def _is(command: str, row: str) -> bool:
    # A row without options is for that command alone.
    return command == row or (" --" in row and command.startswith(row))


def _all_listed() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for command in _commands(page):
            yield page, command


RUN_HERE = sorted(
    {
        page
        for page, command in _all_listed()
        if page not in ELSEWHERE | NOT_FOLLOWED and _runnable(command)
    }
)
# Those of the providers start nothing but a stand-in.
PROVIDERS = [page for page in RUN_HERE if page.startswith("docs/providers/")]


def test_every_command_is_run_or_listed() -> None:
    """No page shows a command that no test runs and that no table above accounts for."""
    unknown = []
    for page in PAGES:
        commands = _commands(page)
        functions = {found[1] for one in commands if (found := FUNCTION.fullmatch(one))}
        for command in commands:
            part = _runnable(command)
            if part is None or page in ELSEWHERE | NOT_FOLLOWED or FUNCTION.fullmatch(part):
                continue
            if part.split()[0] not in PROGRAMS | functions:
                unknown.append((page, command))

    assert unknown == []


def test_the_tables_list_what_is_there() -> None:
    shown = [command for _, command in _all_listed()]
    programs = {command.split()[0] for command in shown}
    named = {*ELSEWHERE.values(), *re.findall(r"tests/[\w/]+\.py", str({**ABSENT, **NOT_HERE}))}

    assert programs >= ABSENT.keys()
    assert {row for row in NOT_HERE if not any(_is(one, row) for one in shown)} == set()
    assert {page for page in ELSEWHERE | NOT_FOLLOWED if not _commands(page)} == set()
    assert {name for name in named if not _has_tests(ROOT / name)} == set()
    assert len(RUN_HERE) > len(PROVIDERS) + 3


def _has_tests(file: Path) -> bool:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(getattr(node, "name", "").startswith("test_") for node in ast.walk(tree))


@dataclass
class Reader:
    """Somebody who copies what the pages show, into a shell in a folder of their own."""

    folder: Path
    environ: dict[str, str]
    guard: Guard
    http: httpx.AsyncClient
    broker: Broker
    is_old_broker: bool
    prelude: str = ""
    port: int = 0
    sandbox: Child | None = None
    started: int = 0

    async def follow(self, page: str) -> None:
        try:
            for command in filter(None, map(_runnable, _commands(page))):
                await self._run(command.replace("/tmp/", f"{self.folder}/"))
        finally:
            await self._end_sandbox()

    async def _run(self, command: str) -> None:
        if FUNCTION.fullmatch(command):
            self.prelude += f"{command}\n"
        elif command.startswith(SANDBOX):
            await self._start_sandbox(command)
        elif command.startswith("rabbitmqctl "):
            words = shlex.split(command)[1:]
            files = [str(self.folder / word) if word.endswith(".json") else word for word in words]
            await asyncio.to_thread(self.broker.ctl, *files)
        else:
            script = ["bash", "-o", "pipefail", "-c", self._here(self.prelude + command)]
            async with asyncio.timeout(SECONDS):
                done = await anyio.run_process(
                    script, cwd=self.folder, env=self.environ, check=False
                )
            said = (done.stdout + done.stderr).decode()
            assert done.returncode == 0, f"{command}: ended with {done.returncode}\n{said}"

    def _here(self, command: str) -> str:
        if self.is_old_broker:
            # As the page says.
            command = command.replace(DEFINITIONS, f"{DEFINITIONS} --no-policy")
        return command.replace("localhost:8025", f"localhost:{self.port}")

    async def _start_sandbox(self, command: str) -> None:
        await self._end_sandbox()
        (self.port,) = free_ports(1)
        self.started += 1
        log = self.folder / f"sandbox-{self.started}.log"
        words = [*shlex.split(command), "--port", str(self.port)]
        self.sandbox = child = ForkedChild(
            words[1:], guard=self.guard, log=log, environ=self.environ
        )

        async def listens() -> bool:
            assert child.exit_code is None, f"{command}: {child.tail()}"
            return "sandbox: http://" in child.tail(40)

        await eventually(listens, what=command)
        if "--preset" not in words:
            # That a page may ask for.
            url = f"http://127.0.0.1:{self.port}/v1/messages"
            key = {"Authorization": "Bearer any-key"}
            taken = await self.http.post(url, json=REQUEST, headers=key)
            assert taken.is_success, taken.text

    async def _end_sandbox(self) -> None:
        child, self.sandbox = self.sandbox, None
        if child is not None:
            await asyncio.to_thread(child.end, grace_seconds=SECONDS)
            assert child.exit_code == 0, child.tail()


@dataclass
class Site:
    """A virtual host, both roles, and what a reader of the pages has in the environment."""

    amqp: Amqp
    environ: dict[str, str]
    is_old_broker: bool


@pytest.fixture(scope="module")
async def site(
    managed_broker: Broker,
    launcher: Launcher,
    start_service: StartService,
    canaries: Canaries,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Site]:
    """Run both roles on a virtual host with the name that the pages have for it."""
    with (
        virtual_host(managed_broker, VHOST) as url,
        forked_commands(tmp_path_factory.mktemp("bin") / "bin") as programs,
    ):
        service = await start_service(canaries.key)
        settings: dict[str, object] = {
            "rabbitmq.url": url,
            "sms_api.base_url": service.url,
            "sms_api.key": canaries.key,
            "webhook.secrets": [canaries.secret],
        }
        roles = await launcher.role("all", settings=settings)
        admin_port = int(roles.logged("started")[0]["admin_port"])
        home = tmp_path_factory.mktemp("home")
        # An answer that is no success ends curl with an error.
        (home / ".curlrc").write_text("fail\n", encoding="ascii")
        environ = make_environ(settings | {"admin.port": str(admin_port)}) | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "CURL_HOME": str(home),
        }
        async with open_amqp(url) as amqp:
            yield Site(amqp, environ, version(managed_broker).startswith("3."))
        assert await roles.stop() == 0


@pytest.fixture
def reader(
    site: Site, guard: Guard, http: httpx.AsyncClient, managed_broker: Broker, tmp_path: Path
) -> Reader:
    return Reader(tmp_path, site.environ, guard, http, managed_broker, site.is_old_broker)


@pytest.mark.parametrize("page", [page for page in RUN_HERE if page not in PROVIDERS])
async def test_a_page_can_be_followed(
    page: str, site: Site, reader: Reader, canaries: Canaries
) -> None:
    if page == "docs/dead-letters.md":
        await _make_dead_letters(site, canaries)
    if page == "docs/pause-and-drain.md":
        await _start_campaign(site, reader.folder, canaries)

    await reader.follow(page)


async def _make_dead_letters(site: Site, canaries: Canaries) -> None:
    """Publish dead letters with the reasons that the page names."""
    long_ago = (datetime.now(UTC) - timedelta(days=60)).isoformat()
    for reason, message_id in (("refused", "ID"), ("exhausted", "a"), ("invalid", "b")):
        headers = {"sms-bridge-reason": reason, "sms-bridge-dead-at": long_ago}
        body = json.dumps(canaries.request()).encode()
        await site.amqp.publish("sms.outbound.dead", body, message_id=message_id, headers=headers)


async def _start_campaign(site: Site, folder: Path, canaries: Canaries) -> None:
    """Publish a campaign that waits, and write the ids of its right messages to a file."""
    # What is not due waits on the ladder, where nobody sends it before it is drained.
    not_before = {"sms-bridge-not-before": (datetime.now(UTC) + timedelta(days=1)).isoformat()}
    for message_id in ("right-1", "right-2", "wrong"):
        body = json.dumps(canaries.request()).encode()
        await site.amqp.publish("sms.outbound", body, message_id=message_id, headers=not_before)
    await site.amqp.until_count("sms.outbound.retry.1h", 3)
    (folder / "right.txt").write_text("right-1\nright-2\n", encoding="ascii")


async def test_the_stand_in_plays_each_provider(reader: Reader) -> None:
    """The command on the page of a service starts the stand-in, which ends cleanly.

    The pages of the others differ in the name of the preset alone.
    """
    shown = {page: list(filter(None, map(_runnable, _commands(page)))) for page in PROVIDERS}
    await reader.follow(PROVIDERS[0])

    assert len(PROVIDERS) > 5
    assert shown == {page: [f"{SANDBOX} --preset {Path(page).stem}"] for page in PROVIDERS}
