"""The message ids that a run has seen, to recognise a message that died twice."""

from typing import Final

from bridge.admin.dead_letters.letter import DeadLetter

# At most 13 MiB of usual ids, 33 MiB of the longest.
MAX_REMEMBERED_IDS: Final = 100_000


class RememberedIds:
    """The ids that were met, the last `MAX_REMEMBERED_IDS` of them.

    A copy whose confirm was lost is published again, so a message can have died twice.
    """

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def knows(self, letter: DeadLetter) -> bool:
        """Say whether a letter's id was added before; a letter without an id was not."""
        return letter.message_id in self._ids

    def add(self, letter: DeadLetter) -> None:
        """Remember a letter's id, and forget the oldest one over the bound."""
        if letter.message_id is None:
            return
        self._ids[letter.message_id] = None
        if len(self._ids) > MAX_REMEMBERED_IDS:
            del self._ids[next(iter(self._ids))]
