"""The tasks of the client library: none ends unheard, and whoever awaits one gets its error."""

import asyncio
import gc
from typing import Any

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
