"""The tasks of the client library: none ends unheard, and whoever awaits one gets its error."""

import asyncio
import gc
from typing import Any

import aiormq
import pytest
from aiormq.base import FutureStore

import bridge.amqp.client  # noqa: F401  it hears them


async def test_no_task_of_the_library_ends_unheard() -> None:
    """A task that fails, and that nobody awaits, is no unhandled error; its error is awaited."""
    loop = asyncio.get_running_loop()
    unheard: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _loop, context: unheard.append(context))

    async def fail() -> None:
        raise TimeoutError

    try:
        store = FutureStore(loop)
        task: Any = store.create_task(fail())
        with pytest.raises(TimeoutError):
            await store.create_task(fail())
        await asyncio.wait([task.task])
        del task
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)

    assert unheard == []


async def test_a_reader_whose_close_is_not_answered_ends_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader of a channel that takes too long to close, as on a slow broker."""
    loop = asyncio.get_running_loop()
    unheard: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _loop, context: unheard.append(context))
    monkeypatch.setattr(aiormq.Channel, "CHANNEL_CLOSE_TIMEOUT", 0.01)

    async def hang(_channel: aiormq.Channel, _exc: object = None) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(aiormq.Channel, "_on_close", hang)

    class Connector:
        """As much of a connection as a channel needs."""

        publisher_confirms = True
        connection_tune = type("Tune", (), {"frame_max": 4096, "heartbeat": 10})
        write_queue: asyncio.Queue[object] = asyncio.Queue()
        _future_store_child = FutureStore(loop).get_child

    connector: Any = Connector()
    connector.loop = loop
    try:
        channel = aiormq.Channel(connector, 1)
        reader = channel._Channel__reader_task.task  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        channel.frames.put_nowait((0, aiormq.spec.Channel.CloseOk()))
        await asyncio.wait([reader])
        await asyncio.sleep(0)
        # Nobody has taken its error while asyncio still means to tell of it.
        assert not reader._log_traceback
        assert isinstance(reader.exception(), TimeoutError)
        del reader, channel
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)

    assert unheard == []
