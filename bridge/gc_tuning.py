"""When a process searches for reference cycles: at quiet moments, for messages wait meanwhile.

Python by itself searches when so many more objects were made than freed. Here that is when most
messages are in hand at once, so that the search takes longest: tens of milliseconds.
"""

import asyncio
import gc
from typing import Final, NoReturn

# Where so much is left over between two searches, Python searches by itself.
MOST_OBJECTS: Final = 100_000
# Between two searches. What is left over meanwhile, mostly of closed channels, is freed in a few
# milliseconds, and is far less than what counts as quiet.
REST_SECONDS: Final = 2.0
# So many more objects than at the last search are a few dozen messages in hand.
QUIET_OBJECTS: Final = 3_000
# How long to wait between two looks whether it is quiet, and after how many it need not be.
LOOK_SECONDS: Final = 0.1
MOST_LOOKS: Final = 100


def forgo_until_started() -> None:
    """Search for nothing while the process starts: what is made stays."""
    gc.disable()


def begin() -> None:
    """Search from now on, but never through what is there already."""
    gc.freeze()
    gc.set_threshold(MOST_OBJECTS)
    gc.enable()


async def collect_when_quiet() -> NoReturn:
    """Search every few seconds, when few messages are in hand; for ever."""
    while True:
        await asyncio.sleep(REST_SECONDS)
        for _ in range(MOST_LOOKS):
            if gc.get_count()[0] <= QUIET_OBJECTS:
                break
            await asyncio.sleep(LOOK_SECONDS)
        gc.collect()
