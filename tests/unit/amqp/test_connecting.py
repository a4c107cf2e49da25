"""Which of several URLs gives the connection, without a broker."""

import asyncio
from typing import Any, cast

import pytest
from pydantic import SecretStr

from bridge.amqp import connecting
from bridge.amqp.client import Connection
from bridge.amqp.connecting import close_quietly, open_quickest
from bridge.errors import ConnectError

URLS = [SecretStr(name) for name in ("first", "second", "third")]


class Opened(Connection):
    """A connection that was opened to a URL of these tests; it can be closed, and nothing else."""

    def __init__(self) -> None:
        super().__init__(cast("Any", "amqp://test/"))
        self.was_closed = False

    @property
    def is_closed(self) -> bool:
        return self.was_closed

    async def close(self, _exc: object = None) -> None:
        self.was_closed = True


class Brokers:
    """What becomes of the attempts: `after` so many seconds, None for never; `refusing` raise."""

    def __init__(self, after: dict[str, float | None], *, refusing: tuple[str, ...] = ()) -> None:
        self.opened: dict[str, Opened] = {}
        self.tried: list[str] = []
        self._after = after
        self._refusing = refusing

    async def open(self, url: SecretStr) -> Connection:
        name = url.get_secret_value()
        self.tried.append(name)
        seconds = self._after.get(name, 0)
        await (asyncio.Event().wait() if seconds is None else asyncio.sleep(seconds))
        if name in self._refusing:
            raise ConnectError("refused", name)
        return self.opened.setdefault(name, Opened())


@pytest.fixture(autouse=True)
def _short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "NEXT_LOGIN_SECONDS", 0.05)


async def test_the_first_that_answers_is_alone_tried() -> None:
    """One that answers at once costs no other broker a login."""
    brokers = Brokers({})

    url, connection = await open_quickest(URLS, brokers.open)

    assert (url, brokers.tried) == (URLS[0], ["first"])
    assert not connection.is_closed


@pytest.mark.parametrize("refusing", [(), ("second",)])
async def test_one_that_is_silent_is_overtaken_and_left(refusing: tuple[str, ...]) -> None:
    """The next is tried beside it, at once if one refuses; what is still being opened is left."""
    silent = dict.fromkeys({"first", "second"} - {*refusing})
    brokers = Brokers(dict[str, float | None](silent), refusing=refusing)

    async with asyncio.timeout(5):
        url, _ = await open_quickest(URLS, brokers.open)

    assert url == URLS[2]
    assert list(brokers.opened) == ["third"]


async def test_two_that_answer_at_once() -> None:
    """One is taken, the other one closed."""
    gate = asyncio.Event()
    brokers = Brokers({})

    async def open_together(url: SecretStr) -> Connection:
        if len(brokers.tried) == 0:
            asyncio.get_running_loop().call_later(0.1, gate.set)
        connection = await brokers.open(url)
        await gate.wait()
        return connection

    _, won = await open_quickest(URLS, open_together)

    assert [one for one in brokers.opened.values() if not one.was_closed] == [won]


async def test_the_last_error_is_told() -> None:
    """When all have failed, it is the last URL's error that is raised."""
    brokers = Brokers({"second": 0.2}, refusing=("first", "second", "third"))

    with pytest.raises(ConnectError, match="third"):
        await open_quickest(URLS, brokers.open)

    assert brokers.tried == ["first", "second", "third"]


class Hung(Opened):
    """A connection to a broker that does not answer the first close, which ends it all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.closes = 0

    async def close(self, _exc: object = None) -> None:
        self.closes += 1
        if self.closes == 1:
            await asyncio.Event().wait()
        self.was_closed = True


async def test_a_cancelled_task_closes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a task that is cancelled leaves a hung broker after the deadline, all closed."""
    monkeypatch.setattr(connecting, "CLOSE_TIMEOUT_SECONDS", 0.01)
    connection = Hung()
    went_on = asyncio.Event()

    async def serve() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await close_quietly(connection)
            went_on.set()

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait({serving}, timeout=10)

    assert serving.cancelled()
    assert connection.is_closed
    assert went_on.is_set()
