"""End a command that moves messages at the first signal, with nothing left in hand."""

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def stopped_by_signals(stop: Callable[[], None]) -> AsyncIterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; the second ends the process."""
    import asyncio

    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stop()

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    yield
