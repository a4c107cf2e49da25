"""Shared by all tests: the event loop, a private RabbitMQ, and the order in which tests run."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from bridge.sandbox import processes
from bridge.sandbox.broker import Broker, private_broker
from tests.ears import Ears, listening

# No deadlines, because a busy machine is not a failure.
settings.register_profile("unhurried", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run async tests on uvloop, as the roles do."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def own_broker() -> Iterator[Broker]:
    """Run a broker for this pytest process. A test that kills or freezes it must restart it."""
    with private_broker() as broker:
        yield broker


@pytest.fixture(scope="session")
def amqp_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of RabbitMQ: SMS_BRIDGE_TEST_AMQP_URL, or that of `own_broker`."""
    url = os.environ.get("SMS_BRIDGE_TEST_AMQP_URL")
    return url or str(request.getfixturevalue("own_broker").url)


def pytest_configure() -> None:
    """Give each pytest process its own range of ports.

    Otherwise, two processes could find the same free port before either binds it.
    """
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    processes._PORTS = processes._PORTS[index::count]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the collected tests, a million objects, from garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m serial`, collect only files that contain such tests.

    Collecting all files takes 15 s, in which one core is idle.
    """
    if config.option.markexpr != "serial" or not collection_path.is_file():
        return None
    if any("::" in arg for arg in config.args):  # a test named on the command line must be found
        return None
    return "mark.serial" not in collection_path.read_text(encoding="utf-8") or None


# Tests of these files are distributed one by one, because most of them wait and share no slow
# fixtures. Other files are distributed as a whole.
_ONE_BY_ONE = ("tests/faults/", "tests/unit/worker/service/test_transport.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the slowest tests, so that no core is idle at the end.

    Tests of `faults` mostly wait, and tests of `integration` also compute, so both are spread
    evenly. The largest files of `integration` come first, because a file is distributed as a whole.
    The other slow tests come next.
    """
    places: dict[Path, float] = {}
    for folder in ("faults", "integration"):
        files = list(dict.fromkeys(item.path for item in items if item.path.parent.name == folder))
        if folder == "integration":
            files.sort(key=lambda file: file.stat().st_size, reverse=True)
        places |= {file: number / len(files) for number, file in enumerate(files)}
    for item in items:
        if item.get_closest_marker("slow") or item.nodeid.startswith(_ONE_BY_ONE):
            places.setdefault(item.path, 1.0)
    items.sort(key=lambda item: places.get(item.path, 2.0))


class _ByFolder(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Keeps each process in one of the folders `faults` and `integration` as long as possible.

    Otherwise, every process would start the second broker of `integration`. Three of eight
    processes start with `integration`, which takes a little less time than `faults`.
    """

    def _split_scope(self, nodeid: str) -> str:
        """Return the scope of a test: its file, or the test itself."""
        is_alone = self.config.option.markexpr != "serial" and nodeid.startswith(_ONE_BY_ONE)
        file: str = super()._split_scope(nodeid)
        return nodeid if is_alone else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Move the best scope for a process to the front."""
        own, other = "tests/faults/", "tests/integration/"
        if int(node.gateway.id.removeprefix("gw")) % 3 == 1:
            own, other = other, own
        # The first of equal scopes. False sorts before True.
        best = min(
            self.workqueue, key=lambda name: (not name.startswith(own), name.startswith(other))
        )
        self.workqueue.move_to_end(best, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByFolder | None:
    """Distribute tests by folder with `--dist loadfile`."""
    return _ByFolder(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Restore SIGINT, because child processes inherit an ignored signal from a background shell."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def ears() -> Iterator[Ears]:
    """Record the bridge's log."""
    with listening() as ears:
        yield ears
