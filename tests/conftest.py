"""What all tests share: the event loop, and one private RabbitMQ for those that ask for it."""

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

# A busy computer is no failure. `make test-thorough` tries many examples of each property.
settings.register_profile("unhurried", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run async tests on the event loop that the roles run on."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def own_broker() -> Iterator[Broker]:
    """Run a broker of this process's own: a test may kill or freeze it, and leaves it running."""
    with private_broker() as broker:
        yield broker


@pytest.fixture(scope="session")
def amqp_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of a real RabbitMQ: SMS_BRIDGE_TEST_AMQP_URL, else that of our own."""
    url = os.environ.get("SMS_BRIDGE_TEST_AMQP_URL")
    return url or str(request.getfixturevalue("own_broker").url)


def pytest_configure() -> None:
    """Give each of several pytest processes ports of its own.

    A free port is found some time before a server takes it, and another process may find it too.
    """
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    processes._PORTS = processes._PORTS[index::count]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage only behind what is collected, which is a million objects and stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read only the files that have some, where no more than what is marked `serial` is run.

    All of them take a quarter of a minute, in which one core is idle.
    """
    if config.option.markexpr != "serial" or not collection_path.is_file():
        return None
    if any("::" in arg for arg in config.args):  # what is named so has to be found
        return None
    return "mark.serial" not in collection_path.read_text(encoding="utf-8") or None


# Of these files single tests are handed out, since most of them wait and share nothing that takes
# long to make; of all others whole files.
_ONE_BY_ONE = ("tests/faults/", "tests/unit/worker/service/test_transport.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest, so that no core is idle at the end.

    Tests of `faults` mostly wait, those of `integration` compute as well: both are spread evenly,
    or all processes would wait first and then all compute. The other slow ones come next.
    """
    places: dict[Path, float] = {}
    for folder in ("faults", "integration"):
        files = list(dict.fromkeys(item.path for item in items if item.path.parent.name == folder))
        places |= {file: number / len(files) for number, file in enumerate(files)}
    for item in items:
        if item.get_closest_marker("slow") or item.nodeid.startswith(_ONE_BY_ONE):
            places.setdefault(item.path, 1.0)
    items.sort(key=lambda item: places.get(item.path, 2.0))


class _ByFolder(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Hands out files, or single tests, of the folder with which a process has begun.

    Otherwise every process would start the second broker of `integration`, with the management API.
    Every third process begins with that folder, which takes half as long as `faults`.
    """

    def _split_scope(self, nodeid: str) -> str:
        """Return the name of what a test is handed out with."""
        is_alone = self.config.option.markexpr != "serial" and nodeid.startswith(_ONE_BY_ONE)
        file: str = super()._split_scope(nodeid)
        return nodeid if is_alone else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Put what suits a process best in front."""
        own, other = "tests/faults/", "tests/integration/"
        if int(node.gateway.id.removeprefix("gw")) % 3 == 2:
            own, other = other, own
        # The first of those that are alike: false comes before true.
        best = min(
            self.workqueue, key=lambda name: (not name.startswith(own), name.startswith(other))
        )
        self.workqueue.move_to_end(best, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByFolder | None:
    """Hand out tests by folder, unless another distribution is asked for."""
    return _ByFolder(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Let children take SIGINT: one that is ignored, as in a shell's background, is inherited."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def ears() -> Iterator[Ears]:
    """Hear what the bridge logs."""
    with listening() as ears:
        yield ears
