"""The command line, run as a user runs it."""

import asyncio
import json
import os
import re
import shlex
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aio_pika
import aiormq
import anyio
import httpx
import jsonschema
import pytest
import yaml

from bridge import is_compiled
from bridge.admin import send
from bridge.admin.admin_port_client import read_worker
from bridge.admin.broker_session import open_session
from bridge.config import Settings, load_settings
from bridge.errors import BridgeError, BrokerError
from bridge.sandbox.broker import Broker
from tests.accounts import account
from tests.alarms import memory_alarm
from tests.amqp_client import Amqp, open_amqp
from tests.erlang import evaluate
from tests.integration.conftest import (
    SECONDS,
    SIGNATURE,
    Canaries,
    Launcher,
    Running,
    Service,
    eventually,
    make_environ,
    run_process,
    run_program,
    run_programs,
    unique,
)

SCRIPT = Path(sys.executable).with_name("sms-bridge")


@dataclass
class Line:
    """Both roles in one process, and the settings by which commands find them."""

    role: Running
    settings: dict[str, object]
    queue: str


@pytest.fixture(scope="module")
async def line(
    launcher: Launcher, canaries: Canaries, session_service: Service, amqp_url: str
) -> Line:
    """Start both roles for the commands to speak to."""
    queue = unique("cli")
    settings: dict[str, object] = {
        "rabbitmq.url": amqp_url,
        "worker.queue": queue,
        "worker.retry_delays": ["1s"],
        "sms_api.base_url": session_service.url,
        "sms_api.key": canaries.key,
        "webhook.exchange": f"{queue}.events",
        "webhook.queue": f"{queue}.events",
        "webhook.secrets": [canaries.secret],
    }
    role = await launcher.role("all", settings=settings)
    await role.until_metric("sms_bridge_amqp_connection_up", 1)
    return Line(role, settings, queue)


def _send(request: dict[str, str], *more: str) -> list[str]:
    options = (("--to", request["to"]), ("--from", request["from"]), ("--text", request["text"]))
    return ["send", *(part for option in options for part in option), *more]


async def _run_on_a_full_disk(*args: str, settings: Mapping[str, object]) -> str:
    """Run a command whose output goes to a full disk, and return what it says of that."""
    environ = make_environ(settings)
    # With it Python has nothing left to write at its end.
    environ.pop("PYTHONUNBUFFERED", None)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        result = await anyio.run_process(
            [str(SCRIPT), *args], check=False, stdout=full, env=environ
        )
    finally:
        os.close(full)
    assert result.returncode == 1
    return result.stderr.decode()


# The program itself


async def test_the_script_is_the_module() -> None:
    """`sms-bridge` is the same program as `python -m bridge`."""
    script = await anyio.run_process([str(SCRIPT), "--help"], env=make_environ({}))
    module = await run_process("--help")
    as_script = module.stdout.replace(b"python -m bridge", b"sms-bridge")

    assert script.stdout == as_script


async def test_the_version_is_shown() -> None:
    """`--version` prints one line, and what is forked runs on the modules that the tests run on."""
    result = await run_program("--version")

    compiled = rb" \(compiled\)" if is_compiled() else b""
    assert re.fullmatch(rb"sms-bridge \d+\.\d+\.\d+\S*" + compiled + rb"\n", result.stdout)


async def test_commands_are_completed() -> None:
    """The shell completion offers the commands of a group."""
    variables = {
        "_SMS_BRIDGE_COMPLETE": "complete_bash",
        "COMP_WORDS": "sms-bridge dlq re",
        "COMP_CWORD": "2",
    }
    result = await anyio.run_process([str(SCRIPT)], check=False, env=make_environ({}) | variables)

    assert b"replay" in result.stdout
    assert b"discard" not in result.stdout


async def test_completion_is_installed_for_the_shell_that_is_named(tmp_path: Path) -> None:
    """`--install-completion SHELL` installs for that shell, whichever this one is."""
    home = {"HOME": str(tmp_path)}
    result = await anyio.run_process(
        [str(SCRIPT), "--install-completion", "fish"], check=False, env=make_environ({}) | home
    )
    installed = tmp_path / ".config/fish/completions/sms-bridge.fish"

    assert result.returncode == 0, result.stderr
    assert "_SMS_BRIDGE_COMPLETE" in installed.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "args",
    [("sendd",), ("send",)],
    ids=["command", "missing"],
)
async def test_bad_usage_is_told(args: tuple[str, ...]) -> None:
    """Bad usage ends with 2 and an explanation, without a traceback."""
    result = await run_program(*args)

    assert result.returncode == 2
    assert result.stderr
    assert b"Traceback" not in result.stderr


async def test_an_unknown_choice_is_told_with_the_known_ones() -> None:
    """An unknown word for an option ends with 2, and names the words that there are."""
    result = await run_program("dlq", "list", "--reason", "x")

    assert result.returncode == 2
    assert "--reason': 'x' is not one of 'invalid', 'refused', " in result.stderr.decode()


# check


async def test_check_prints_the_effective_configuration(line: Line) -> None:
    """`check` prints what is in force as YAML, defaults and all."""
    result = await run_program("check", settings=line.settings)
    shown = yaml.safe_load(result.stdout)

    assert result.returncode == 0
    assert shown["worker"]["queue"] == line.queue
    assert shown["worker"]["concurrency"] == 50


async def test_check_shows_no_secret(line: Line, canaries: Canaries) -> None:
    """`check` masks keys, secrets and passwords, also those in URLs."""
    password = canaries.password
    settings = {
        **line.settings,
        "rabbitmq.url": [f"amqp://a:{password}@one/", f"amqps://b:{password}@two/"],
        "rabbitmq.password": password,
        "sms_api.proxy": f"http://a:{password}@proxy:3128",
    }
    result = await run_program("check", settings=settings)

    assert result.returncode == 0
    assert canaries.found_in((result.stdout + result.stderr).decode()) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        {"worker.concurrency": "many"},
        {"webhook.secrets": "null", "webhook.secret_files": ["/nowhere/secret"]},
    ],
    ids=["value", "no-secret-file"],
)
async def test_check_finds_a_wrong_set_up(line: Line, wrong: dict[str, object]) -> None:
    """`check` ends with 2 and one line that names the key."""
    result = await run_program("check", settings={**line.settings, **wrong})
    lines = result.stderr.decode().splitlines()

    assert (result.returncode, len(lines)) == (2, 1)
    assert any(key.rpartition(".")[0] in lines[0] for key in wrong)


@pytest.mark.parametrize(
    ("content", "said"),
    [("worker: [", "is not YAML"), ("- a", "sections"), (None, "cannot be read")],
    ids=["no-yaml", "list", "missing"],
)
async def test_a_wrong_file_is_told(content: str | None, said: str, tmp_path: Path) -> None:
    """A file that is no configuration ends a command with 2 and one line."""
    file = tmp_path / "bridge.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    result = await run_program("check", "--config", str(file))
    lines = result.stderr.decode().splitlines()

    assert (result.returncode, len(lines)) == (2, 1)
    assert said in lines[0]


# send


async def test_send_prints_the_message_id(line: Line, canaries: Canaries, service: Service) -> None:
    """`send` publishes one request and prints the id under which it is sent."""
    request = canaries.request()
    result = await run_program(*_send(request), settings=line.settings)
    message = await service.until_sent(request["to"])

    assert result.returncode == 0
    assert result.stdout.decode().strip() == message["idempotency_key"]
    assert {name: message[name] for name in request} == request


async def test_send_waits_for_the_acceptance(
    line: Line, canaries: Canaries, service: Service
) -> None:
    """`send --wait` prints the outcome and ends with 0 when it was sent."""
    request = canaries.request()
    result = await run_program(*_send(request, "--wait"), settings=line.settings)
    message_id, outcome = result.stdout.decode().splitlines()

    assert result.returncode == 0
    assert len(await service.messages(request["to"])) == 1
    assert json.loads(outcome)["message_id"] == message_id
    assert json.loads(outcome)["outcome"] == "sent"


async def test_send_tells_of_a_death(line: Line, canaries: Canaries, service: Service) -> None:
    """`send --wait` prints the outcome and ends with 1 when the request is dead."""
    request = canaries.request()
    await service.misbehave({"to": request["to"], "status": 422})
    result = await run_program(*_send(request, "--wait"), settings=line.settings)
    outcome = json.loads(result.stdout.decode().splitlines()[-1])

    assert (result.returncode, outcome["outcome"], outcome["reason"]) == (1, "dead", "refused")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no disk that is always full")
async def test_send_to_a_full_disk_says_that_it_is_sent(
    amqp: Amqp, amqp_url: str, canaries: Canaries
) -> None:
    """A request whose id cannot be printed is told as stored, so that nobody sends it twice."""
    queue = unique("outbound")
    await amqp.channel.declare_queue(queue, durable=True)
    settings = {"rabbitmq.url": amqp_url, "worker.queue": queue}
    said = await _run_on_a_full_disk(*_send(canaries.request()), settings=settings)
    message = await amqp.take(queue)
    await amqp.delete([queue])

    assert said.startswith(
        f"sms-bridge: the request {message.message_id} is stored, and standard output cannot be "
        "written: No space left on device; "
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no disk that is always full")
async def test_a_full_disk_is_told() -> None:
    """Output that cannot be written is one line and exit 1, no traceback."""
    said = await _run_on_a_full_disk("schema", "config", settings={})

    assert said == (
        "sms-bridge: standard output: cannot be written: No space left on device; the command "
        "may have done its work: check before you run it again\n"
    )


async def test_a_broker_that_stops_ends_a_command_with_a_sentence(amqp_url: str) -> None:
    """Also where the command asks it for more before it knows."""
    settings = Settings.model_validate({"rabbitmq": {"url": amqp_url}})

    async def ask_when_it_has_ended() -> None:
        async with open_session(settings) as (connection, channel):
            replies = await channel.declare_queue(exclusive=True)
            assert connection.transport is not None
            await connection.transport.connection.close()
            await replies.get(fail=False)

    with pytest.raises(BrokerError, match="the broker ended the connection"):
        await ask_when_it_has_ended()


async def test_a_broker_that_hangs_is_no_lack_of_an_outcome(
    amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`send --wait` says that the broker gives no answer, and not that its time was over."""
    monkeypatch.setattr(send, "RPC_TIMEOUT_SECONDS", 0)
    settings = Settings.model_validate({"rabbitmq": {"url": amqp_url}})
    async with open_session(settings) as (_, channel):
        replies = await channel.declare_queue(exclusive=True)
        with pytest.raises(BrokerError, match="no answer from the broker"):
            await send._take_reply(replies)


async def test_send_gives_up_in_time_while_it_looks_for_the_reason(
    amqp: Amqp, amqp_url: str, canaries: Canaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`send --wait` ends when its time is over, also in the middle of finding out why.

    Several at once keep the event loop so busy that answers come together with the end of the time,
    which is when a library drops it.
    """
    monkeypatch.setattr(send, "LOOK_SECONDS", 0.05)
    queue = unique("in-time")
    await amqp.channel.declare_queue(queue, durable=True)
    settings = Settings.model_validate(
        {"rabbitmq": {"url": amqp_url}, "worker": {"queue": queue}, "admin": {"port": 9}}
    )
    request: dict[str, str | None] = {**canaries.request()}

    async def send_and_wait(seconds: float) -> None:
        async with send.send_request(settings, request, wants_outcome=True) as sent:
            async for _ in sent.wait(seconds):
                pass

    sends = [asyncio.create_task(send_and_wait(0.3 + number / 50)) for number in range(12)]
    done, late = await asyncio.wait(sends, timeout=SECONDS)
    for one in late:
        one.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    await amqp.delete([queue])

    assert not late
    assert {str(one.exception()).partition(" within")[0] for one in done} == {"no outcome"}


async def test_send_gives_up_in_time_while_the_broker_hangs(
    managed_broker: Broker, canaries: Canaries
) -> None:
    """The time given for the outcome counts, not the longer one for an answer of the broker."""
    queue = unique("hangs")
    settings = Settings.model_validate(
        {"rabbitmq": {"url": managed_broker.url}, "worker": {"queue": queue}, "admin": {"port": 9}}
    )
    async with open_amqp(managed_broker.url) as amqp:
        await amqp.channel.declare_queue(queue, durable=True)
        request: dict[str, str | None] = {**canaries.request()}
        async with send.send_request(settings, request, wants_outcome=True) as sent:
            managed_broker.pause()
            try:
                with pytest.raises(BridgeError, match=r"no outcome within 0\.5 s"):
                    async for _ in sent.wait(0.5):
                        pass
            finally:
                managed_broker.resume()
        await amqp.delete([queue])


@pytest.mark.parametrize(
    "members",
    [{"to": "491713920010"}, {"text": "Zikadensommer" * 200}],
    ids=["to", "long-text"],
)
async def test_send_refuses_what_the_worker_would(
    line: Line, canaries: Canaries, members: dict[str, str]
) -> None:
    """`send` ends with 2 and one line that names the field, and quotes no value."""
    command = _send(canaries.request(**members))
    result = await run_program(*command, settings=line.settings)
    (name,) = members

    assert result.returncode == 2
    assert re.fullmatch(rf"sms-bridge: {name}: [^\n]+\n", result.stderr.decode())
    assert canaries.found_in((result.stdout + result.stderr).decode()) == set()


async def test_send_needs_a_queue(amqp_url: str, canaries: Canaries) -> None:
    """`send` to a queue that is not there ends with 1 and one line that names it."""
    settings = {"rabbitmq.url": amqp_url, "worker.queue": unique("missing")}
    result = await run_program(*_send(canaries.request()), settings=settings)
    lines = result.stderr.decode().splitlines()

    assert (result.returncode, len(lines)) == (1, 1)
    assert settings["worker.queue"] in lines[0]


async def test_send_needs_a_broker(canaries: Canaries) -> None:
    """`send` without a broker ends with 1 and one line, which holds no password."""
    settings = {"rabbitmq.url": f"amqp://guest:{canaries.password}@127.0.0.1:9/"}
    result = await run_program(*_send(canaries.request()), settings=settings)

    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert canaries.found_in((result.stdout + result.stderr).decode()) == set()


async def test_send_during_an_alarm_tells_what_to_do(
    managed_broker: Broker, canaries: Canaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that the broker does not confirm is told with its id, the cause and the remedy."""
    monkeypatch.setattr(send, "PUBLISH_SECONDS", 0.5)
    queue = unique("alarm")
    settings = Settings.model_validate(
        {"rabbitmq": {"url": managed_broker.url}, "worker": {"queue": queue}}
    )
    connection = await aio_pika.connect(managed_broker.url)
    async with connection:
        await (await connection.channel()).declare_queue(queue, durable=True)
        async with memory_alarm(managed_broker):
            with pytest.raises(BrokerError) as caught:
                async with send.send_request(settings, dict(canaries.request())):
                    pass
        await (await connection.channel()).queue_delete(queue)

    text = str(caught.value)
    assert text.startswith(
        f"queue {queue}: no confirm within 0.5 s, as during a memory or disk alarm"
    )
    assert "`sms-bridge check --online`" in text
    assert re.search(r"the request [0-9a-f-]{36} may still be stored", text)


async def test_send_to_a_full_queue_tells_what_to_do(
    amqp: Amqp, amqp_url: str, canaries: Canaries
) -> None:
    queue = unique("full")
    full: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await amqp.channel.declare_queue(queue, durable=True, arguments=full)
    await amqp.publish(queue, b"in the way")
    settings = {"rabbitmq.url": amqp_url, "worker.queue": queue}
    result = await run_program(*_send(canaries.request()), settings=settings)
    await amqp.delete([queue])

    assert result.returncode == 1
    assert "check whether the queue is full" in result.stderr.decode()


async def test_send_says_that_the_worker_is_paused(
    launcher: Launcher, amqp_url: str, canaries: Canaries, service: Service
) -> None:
    """While it waits, and at the end, `send --wait` says that the worker is paused, and why.

    Takes the 6 s for which `send` waits.
    """
    queue = unique("paused")
    settings: dict[str, object] = {
        "rabbitmq.url": amqp_url,
        "worker.queue": queue,
        "sms_api.base_url": service.url,
        "sms_api.key": "not-the-key",
    }
    role = await launcher.role("worker", settings=settings)
    port = role.logged("started")[0]["admin_port"]
    command = _send(canaries.request(), "--wait", "--timeout", "6")
    result = await run_program(*command, settings={**settings, "admin.port": port})
    other = {**settings, "admin.port": port, "worker.queue": unique("other")}
    checked = await run_program(
        "check",
        "--role",
        "worker",
        "--online",
        "--quiet",
        settings={**settings, "admin.port": port},
    )
    lines = result.stderr.decode().splitlines()
    why = (
        "the worker on this computer is paused (credentials_rejected): the SMS API or a proxy "
        "refuses the key; replace the key in sms_api.key_file or sms_api.key, or correct the "
        "account"
    )

    assert result.returncode == 1
    assert lines == [
        f"sms-bridge: still waiting: {why}",
        f"sms-bridge: no outcome within 6 s ({why}); the request stays queued",
    ]
    # The id is there even for who gives up early.
    assert re.fullmatch(r"[0-9a-f-]{36}\n", result.stdout.decode())
    assert checked.returncode == 1
    assert f"fail  worker: {why}" in checked.stdout.decode().splitlines()
    assert await read_worker(load_settings(None, make_environ(other))) is None


async def test_send_says_what_it_cannot_know(amqp: Amqp, amqp_url: str, canaries: Canaries) -> None:
    """Where somebody takes from the queue on another computer, `send --wait` says who knows."""

    async def ignore(_message: object) -> None: ...

    queue = unique("elsewhere")
    declared = await amqp.channel.declare_queue(queue, durable=True)
    tag = await declared.consume(ignore, no_ack=True)
    settings = {"rabbitmq.url": amqp_url, "worker.queue": queue, "admin.port": 9}
    command = _send(canaries.request(), "--wait", "--timeout", "1")
    result = await run_program(*command, settings=settings)
    await declared.cancel(tag)
    await amqp.delete([queue])

    assert result.stderr.decode() == (
        "sms-bridge: no outcome within 1 s (no worker answers on this computer; each worker's "
        "/readyz says whether it is paused); the request stays queued\n"
    )


async def test_send_says_that_nobody_takes(amqp: Amqp, amqp_url: str, canaries: Canaries) -> None:
    """Where the reason cannot be known, `send --wait` says what RabbitMQ knows, and who knows."""
    queue = unique("nobody")
    await amqp.channel.declare_queue(queue, durable=True)
    settings = {"rabbitmq.url": amqp_url, "worker.queue": queue, "admin.port": 9}
    command = _send(canaries.request(), "--wait", "--timeout", "1")
    result = await run_program(*command, settings=settings)
    count = await amqp.count(queue)
    stored = await amqp.take(queue)
    await amqp.delete([queue])

    assert (result.returncode, count) == (1, 1)
    # The id is what the user has to look for it.
    assert str(stored.message_id) in result.stdout.decode()
    assert result.stderr.decode() == (
        f"sms-bridge: no outcome within 1 s (no worker takes from {queue}; start one; if one "
        "is running, its /readyz says why); the request stays queued\n"
    )


# listen


async def _hears(listener: Running) -> list[dict[str, Any]]:
    lines = listener.output.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


async def _listen(
    launcher: Launcher, line: Line, http: httpx.AsyncClient, *options: str
) -> Running:
    """Start `listen` and have it hear an event."""
    # Bodies are what this command is for: its output is not searched for canaries.
    settings = {**line.settings, "log.level": "info"}
    listener = launcher.start("listen", *options, settings=settings)
    launcher.started.remove(listener)
    canaries = launcher.canaries

    async def is_listening() -> bool:
        return f"listening on the exchange {line.queue}.events\n" in listener.output

    await eventually(is_listening, what="it listens")
    # What comes once it says so is heard, the very first one too.
    body = json.dumps({"type": "message.received", "id": uuid.uuid4().hex}).encode()
    headers = {SIGNATURE: canaries.sign(body)}
    await http.post(line.role.webhook_url, content=body, headers=headers)

    async def has_heard() -> bool:
        return bool(await _hears(listener))

    await eventually(has_heard, what="an event printed")
    return listener


async def test_listen_creates_nothing(amqp_url: str) -> None:
    """`listen` to an exchange that is not there ends with 1, says so, and does not make it."""
    exchange = unique("events")
    settings = {"rabbitmq.url": amqp_url, "webhook.exchange": exchange}
    result = await run_program("listen", settings=settings)
    with pytest.raises(aiormq.exceptions.ChannelNotFoundEntity):
        async with open_amqp(amqp_url) as other:
            await other.channel.declare_exchange(exchange, passive=True)

    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode() == (
        f"sms-bridge: exchange {exchange}: does not exist; check webhook.exchange, and start the "
        "webhook receiver once or run `sms-bridge topology declare`\n"
    )


async def test_listen_needs_permission(managed_broker: Broker) -> None:
    """`listen` as a user that may not says what the user lacks, and ends with 1."""
    exchange = unique("events")
    async with open_amqp(managed_broker.url) as admin:
        await admin.channel.declare_exchange(exchange, "topic", durable=True)
        with account(managed_broker, "^$", "^$", "^$") as url:
            settings = {"rabbitmq.url": url, "webhook.exchange": exchange}
            result = await run_program("listen", settings=settings)
        await admin.delete([exchange])

    assert result.returncode == 1
    assert result.stderr.decode() == (
        f"sms-bridge: exchange {exchange}: no permission to listen; the user needs to read it, "
        "and to configure, write and read queues amq.gen-*\n"
    )


async def test_send_needs_permission(managed_broker: Broker, canaries: Canaries) -> None:
    """`send` as a user that may not says what the user lacks, and ends with 1."""
    request = canaries.request()
    options = ("--to", request["to"], "--from", request["from"], "--text", request["text"])
    with account(managed_broker, "^$", "^$", "^$") as url:
        settings = {"rabbitmq.url": url, "worker.queue": unique("outbound")}
        results = [
            await run_program("send", *options, *more, settings=settings)
            for more in ((), ("--wait",))
        ]

    for result in results:
        assert (result.returncode, result.stdout) == (1, b"")
        assert "no permission to" in result.stderr.decode()
        assert "the user needs to" in result.stderr.decode()


async def test_listen_tells_the_end_of_its_connection(
    launcher: Launcher, managed_broker: Broker
) -> None:
    """A `listen` whose connection the broker ends says so and ends with 1."""
    exchange = unique("events")
    async with open_amqp(managed_broker.url) as admin:
        await admin.channel.declare_exchange(exchange, "topic", durable=True)
        settings = {"rabbitmq.url": managed_broker.url, "webhook.exchange": exchange}
        listener = launcher.start("listen", settings=settings)

        async def is_listening() -> bool:
            return "listening on" in listener.output

        await eventually(is_listening, what="it listens")
        ending = 'rabbit_networking:close_connection(P, "a test")'
        evaluate(managed_broker, f"[{ending} || P <- rabbit_networking:connections()]")
        code = await listener.ended()
    async with open_amqp(managed_broker.url) as admin:
        await admin.delete([exchange])

    assert code == 1
    assert "sms-bridge: the broker ended the con" in listener.output
    assert "Traceback" not in listener.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
async def test_listen_ends_clean(
    launcher: Launcher, line: Line, http: httpx.AsyncClient, number: signal.Signals
) -> None:
    """`listen` prints each inbound event as a line of JSON, and ends with 0 when it is told to."""
    listener = await _listen(launcher, line, http)
    event = (await _hears(listener))[0]
    listener.child.signal(number)
    code = await listener.ended()

    assert (event["routing_key"], event["type"]) == ("message.received", "message.received")
    assert event["body"]["id"] == event["event_id"]
    assert code == 0, listener.output
    assert "Traceback" not in listener.output


# sign


@pytest.mark.parametrize("source", ["file", "standard-input"])
async def test_sign_prints_the_header(canaries: Canaries, tmp_path: Path, source: str) -> None:
    """`sign` prints the header that the configured scheme asks for, byte for byte of the body."""
    body = '{"text": "Grüße"}\r\n'.encode()
    file = tmp_path / "event.json"
    file.write_bytes(body)
    settings = {"webhook.secrets": [canaries.secret, canaries.old_secret]}
    args, given = (("sign", str(file)), b"") if source == "file" else (("sign",), body)
    result = await run_program(*args, settings=settings, given=given)

    assert result.returncode == 0
    assert result.stdout.decode() == f"{SIGNATURE}: {canaries.sign(body)}\n"


async def test_the_curl_command_works(line: Line, amqp: Amqp, tmp_path: Path) -> None:
    """What `sign --curl` prints is accepted by the receiver when it is run in a shell."""
    file = tmp_path / "it's an event.json"
    body = json.dumps({"type": "message.received", "id": uuid.uuid4().hex}).encode()
    file.write_bytes(body)
    args = ("sign", str(file), "--curl", line.role.webhook_url)
    command = (await run_program(*args, settings=line.settings)).stdout.decode()
    async with asyncio.timeout(SECONDS):
        answer = await anyio.run_process(command, check=False, env=make_environ({}))

    assert shlex.split(command)[0] == "curl"
    assert answer.stdout.startswith(b"HTTP/1.1 200 "), answer.stderr
    assert (await amqp.take(f"{line.queue}.events", body=body)).body == body


# schema


async def test_events_and_outcomes_are_as_their_schemas_say(
    line: Line, amqp: Amqp, http: httpx.AsyncClient, canaries: Canaries
) -> None:
    """What the bridge publishes is valid by `schema event` and `schema asyncapi`."""
    body = json.dumps({"type": "message.received", "data": {}, "id": uuid.uuid4().hex}).encode()
    headers = {SIGNATURE: canaries.sign(body)}
    await http.post(line.role.webhook_url, content=body, headers=headers)
    event = await amqp.take(f"{line.queue}.events", body=body)
    outcome = await run_program(*_send(canaries.request(), "--wait"), settings=line.settings)
    schemas = await run_programs(
        {name: (("schema", name), line.settings) for name in ("event", "asyncapi")}
    )
    document = json.loads(schemas["asyncapi"].stdout)
    names = ("content_type", "message_id", "type")
    message = {
        "routing_key": event.routing_key,
        "properties": {name: getattr(event, name) for name in names}
        | {"delivery_mode": 2, "timestamp": event.timestamp and event.timestamp.isoformat()},
        "headers": dict(event.headers),
        "body": json.loads(body),
    }

    jsonschema.validate(message, json.loads(schemas["event"].stdout))
    jsonschema.validate(
        json.loads(outcome.stdout.decode().splitlines()[-1]),
        document["components"]["messages"]["outcome"]["payload"],
    )
    assert document["channels"]["sendRequests"]["address"] == line.queue
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(message | {"headers": {}}, json.loads(schemas["event"].stdout))


# sandbox


async def test_the_sandbox_replies_to_the_bridge(
    launcher: Launcher, line: Line, http: httpx.AsyncClient, canaries: Canaries
) -> None:
    """A reply from a phone of the sandbox is a webhook that the bridge takes; a forged one not."""
    url = ("--webhook-url", line.role.webhook_url, "--webhook-secret", canaries.secret)
    sandbox = launcher.start("sandbox", "--port", "0", *url, settings={})

    async def look() -> str | None:
        found = re.search(r"sandbox: (http://\S+)", sandbox.output)
        return found[1] if found else None

    address = await eventually(look, what="the sandbox started")
    reply = {"from": canaries.number(), "text": canaries.text()}
    good = await http.post(f"{address}/sandbox/replies", json=reply)
    forged = await http.post(f"{address}/sandbox/replies", json={**reply, "forged": True})
    sandbox.child.signal(signal.SIGTERM)
    code = await sandbox.ended()

    assert good.json() == {"answers": [200]}
    assert forged.json() == {"answers": [401]}
    assert code == 0


async def test_the_sandboxs_secret_is_in_one_place(tmp_path: Path) -> None:
    """A secret beside a file with one, or a file that is not there, is told before it starts."""
    file = f"--webhook-secret-file={tmp_path / 'secret'}"
    both = await run_program("sandbox", "--webhook-secret=a", file)
    missing = await run_program("sandbox", file)

    assert (both.returncode, missing.returncode) == (2, 2)
    assert b"--webhook-secret-file: --webhook-secret is given too; leave one out" in both.stderr
    assert b"secret cannot be read: No such file or directory" in missing.stderr


@pytest.mark.parametrize(("command", "missing"), [("sandbox", "starlette"), ("demo", "uvicorn")])
async def test_the_sandbox_says_what_to_install(command: str, missing: str) -> None:
    """Without the extra `sandbox` both commands end with 2 and the line that installs it."""
    program = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['sms-bridge', {command!r}]; "
        "from bridge.__main__ import main; main()"
    )
    result = await anyio.run_process(
        [sys.executable, "-c", program], check=False, env=make_environ({})
    )

    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.decode() == (
        f"sms-bridge: {command}: the web server of the sandbox is not installed; pip install "
        "'sms-bridge[sandbox]'\n"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--preset", "twilo"), "--preset: is unknown; did you mean twilio?"),
        (("--preset", "telnyx", "--webhook-secret", "s"), "--webhook-secret: telnyx signs with"),
        (("--preset", "twilio", "--webhook-url", "x"), "--webhook-url: must look like"),
    ],
)
async def test_a_service_that_cannot_be_played_is_told(options: tuple[str, ...], told: str) -> None:
    """An option with which the sandbox cannot work ends it with 2 and one line that names it."""
    result = await run_program("sandbox", *options)

    assert result.returncode == 2
    assert result.stdout == b""
    assert result.stderr.decode().startswith(f"sms-bridge: {told}")
    assert result.stderr.count(b"\n") == 1
