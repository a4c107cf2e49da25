"""Every check is listed, and one that fails does not affect the others."""

import asyncio
import importlib
import inspect
import pkgutil
from collections.abc import Awaitable, Callable

import pytest

from bridge.admin import checks
from bridge.admin.checks import run
from bridge.admin.checks.findings import Finding, SetUp
from bridge.admin.checks.run import examine
from bridge.config import Settings
from bridge.errors import BrokerError, ConfigError
from tests.clock import LeapingLoop

GOOD = Finding("good", "ok", "is right")
Check = Callable[[SetUp], Awaitable[list[Finding]]]


def test_every_check_is_listed() -> None:
    modules = [
        importlib.import_module(f"{checks.__name__}.{module.name}")
        for module in pkgutil.iter_modules(checks.__path__)
    ]
    written = {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.iscoroutinefunction)
        if name.startswith("check_") and function.__module__ == module.__name__
    }

    assert written == {
        *run.ON_THE_BROKER.values(),
        *run.ON_THE_MANAGEMENT_API,
        *run.ELSEWHERE.values(),
    }


async def _pass(_: SetUp) -> list[Finding]:
    return [GOOD]


async def _hang(_: SetUp) -> list[Finding]:
    await asyncio.Event().wait()
    return []


def _raise(error: Exception) -> Check:
    async def check(_: SetUp) -> list[Finding]:
        raise error

    return check


async def _no_broker(*_: object) -> tuple[list[object], list[Finding]]:
    return [], []


def _examine(monkeypatch: pytest.MonkeyPatch, **made: Check) -> list[Finding]:
    monkeypatch.setattr(run, "connect", _no_broker)
    monkeypatch.setattr(run, "ELSEWHERE", made)
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(examine(Settings(), ["worker"]))


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (_hang, "did not answer in time"),
        (_raise(BrokerError("it is away")), "could not be checked: it is away"),
        (_raise(KeyError("canary-number")), "could not be checked: KeyError"),
    ],
    ids=["hangs", "known", "bug"],
)
def test_a_check_that_fails_takes_nothing_from_the_others(
    monkeypatch: pytest.MonkeyPatch, check: Check, text: str
) -> None:
    found = _examine(monkeypatch, before=_pass, broken=check, after=_pass)

    assert [(one.subject, one.result) for one in found] == [
        ("good", "ok"),
        ("broken", "fail"),
        ("good", "ok"),
    ]
    assert found[1].text == text


def test_a_wrong_configuration_ends_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        _examine(monkeypatch, broken=_raise(ConfigError("sms_api.ca_file: cannot be read")))
