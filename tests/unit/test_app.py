"""One process, as `wiring` makes it: from its start to its exit code, without a broker."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bridge.app import Bridge
from bridge.config import Role, Settings
from bridge.errors import EXIT_CLEAN, EXIT_FAILED, ConfigError
from tests.ears import Ears, listening, logging_kept

SECONDS = 20
BOTH: tuple[Role, ...] = ("worker", "webhook")
SHARED = {"admin listener", "heartbeat", "secrets"}
OF_WORKER = {"worker publish", "worker consume"}
OF_WEBHOOK = {"webhook publish", "webhook listener"}


@pytest.fixture(autouse=True)
async def ears() -> AsyncIterator[Ears]:
    """Hear what the process logs; afterwards faults of the loop go where they went before."""
    loop = asyncio.get_running_loop()
    handler = loop.get_exception_handler()
    with logging_kept(), listening() as ours:
        yield ours
    loop.set_exception_handler(handler)


def _settings(**changes: dict[str, Any]) -> Settings:
    here = {"host": "127.0.0.1", "port": 0}
    needed: dict[str, dict[str, Any]] = {
        "rabbitmq": {"url": "amqp://127.0.0.1:9/"},
        "sms_api": {"base_url": "http://127.0.0.1:9", "key": "k"},
        "webhook": {**here, "secrets": ["s"]},
        "admin": here,
    }
    return Settings.model_validate(needed | changes)


async def _run(bridge: Bridge, *, is_stopped: bool) -> int:
    stop = asyncio.Event()
    if is_stopped:
        stop.set()
    async with asyncio.timeout(SECONDS):
        return await bridge.run(stop)


@pytest.mark.parametrize(
    ("roles", "parts"),
    [
        (["worker"], SHARED | OF_WORKER),
        (["webhook"], SHARED | OF_WEBHOOK),
        (["worker", "webhook"], SHARED | OF_WORKER | OF_WEBHOOK),
    ],
    ids=["worker", "webhook", "all"],
)
async def test_a_process_has_the_parts_of_its_roles(
    ears: Ears, roles: list[Role], parts: set[str]
) -> None:
    """Each role brings its connections and its port; told to stop, all of it ends, with 0."""
    bridge = Bridge(_settings(), roles)

    assert bridge.wiring.parts.keys() == parts
    assert await _run(bridge, is_stopped=True) == EXIT_CLEAN
    assert ears.heard("stopped") == [{"clean": True}]


@pytest.mark.parametrize("part", ["heartbeat", "worker consume"])
async def test_a_part_that_fails_ends_the_process(ears: Ears, part: str) -> None:
    bridge = Bridge(_settings(), BOTH)

    async def fail() -> None:
        raise RuntimeError

    bridge.wiring.parts[part] = fail

    assert await _run(bridge, is_stopped=False) == EXIT_FAILED
    assert not bridge.wiring.health.live["tasks"]()
    ((told,), (stopped,)) = (ears.heard("component_failed"), ears.heard("stopped"))
    assert (told["component"], told["error"], stopped) == (part, "RuntimeError", {"clean": False})


@pytest.mark.parametrize(("drain_seconds", "is_told"), [(20, True), (21, False)])
async def test_a_drain_that_may_cut_a_request_off_is_told(
    ears: Ears, drain_seconds: int, *, is_told: bool
) -> None:
    """A drain no longer than one request takes may leave it in doubt, so that is logged."""
    worker = {"shutdown_timeout_seconds": drain_seconds}
    await _run(Bridge(_settings(worker=worker), ["worker"]), is_stopped=True)

    assert bool(ears.heard("drain_may_cut_off")) == is_told


async def test_a_bad_variable_of_opentelemetry_prevents_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A value that the SDK refuses is a fault of the configuration, not a traceback."""
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
    settings = _settings(tracing={"otlp_endpoint": "http://127.0.0.1:9"})

    with pytest.raises(ConfigError, match=r"tracing: an environment variable OTEL_\.\.\. .*many"):
        Bridge(settings, ["worker"])
