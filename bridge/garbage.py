"""When a process searches for reference cycles: at quiet moments, for messages wait meanwhile.

Python by itself searches when so many more objects were made than freed. Here that is when most
messages are in hand at once, so that the search takes longest: tens of milliseconds.
"""

import asyncio
import gc
from typing import Final, NoReturn

# Without a quiet moment, and where there is much garbage at once, Python searches by itself.
MOST_OBJECTS: Final = 100_000
LOOK_SECONDS: Final = 1.0
# So many more objects than at the last search are a few messages in hand; a search for what they
# refer to takes a few milliseconds.
QUIET_OBJECTS: Final = 2_000
# A search is not put off for longer than this.
MOST_SECONDS: Final = 15.0
# Then all objects are searched, also those that have lived through other searches: of what was made
# after the start these are thousands.
ALL_SECONDS: Final = 300.0
_YOUNG, _ALL = 1, 2


def forgo_until_started() -> None:
    """Search for nothing while the process starts: what is made stays."""
    gc.disable()


def begin() -> None:
    """Search from now on, but never through what is there already."""
    gc.freeze()
    gc.set_threshold(MOST_OBJECTS)
    gc.enable()


async def collect_when_quiet() -> NoReturn:
    """Search each second, unless many messages are in hand; for ever."""
    now = asyncio.get_running_loop().time
    searched_at = searched_all_at = now()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if gc.get_count()[0] > QUIET_OBJECTS and now() - searched_at < MOST_SECONDS:
            continue
        searched_at = now()
        if searched_at - searched_all_at < ALL_SECONDS:
            gc.collect(_YOUNG)
        else:
            searched_all_at = searched_at
            gc.collect(_ALL)
