"""Whose fault an ambiguous status is: the set-up's (a revoked key, a wrong path) or one message's.

Evidence decides, not time: such a status is the message's own fault when the message gets one
again, and the same key was accepted with another message between its two tries. Between means that
the other request left after the first answer had come, and was accepted before the second try left;
what was in flight when a key was revoked proves nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MAX_SUSPECTS: Final = 10_000


@dataclass(slots=True)
class _Suspect:
    """A message with ambiguous statuses: how many in a row, and the number of the last request."""

    times: int = 0
    answered_at: int = 0
    is_proven: bool = False


class Evidence:
    """Remembers messages with ambiguous statuses by their key; bounded, the oldest go first.

    Their recipients are remembered too, but only to choose a better probe. What is forgotten is
    found out again, at the cost of one more try. Time is counted in requests since the start.
    """

    def __init__(self) -> None:
        self._requests = 0
        # When the latest request that was accepted had left.
        self._accepted_at = 0
        self._key_changed_at = 0
        self._suspects: OrderedDict[str, _Suspect] = OrderedDict()
        self._recipients: OrderedDict[str, None] = OrderedDict()

    def is_suspect(self, key: str, recipient: str) -> bool:
        """Whether the message, or another one to its recipient, got such a status."""
        return key in self._suspects or recipient in self._recipients

    def begin(self, key: str) -> int:
        """Note that a request leaves; return its number, for `accept` and `suspect`."""
        self._requests += 1
        if self._suspects and (suspect := self._suspects.get(key)) is not None:
            suspect.is_proven = self._accepted_at > suspect.answered_at
        return self._requests

    def accept(self, key: str, recipient: str, *, request_number: int) -> None:
        """Note that a message was accepted."""
        self._accepted_at = max(self._accepted_at, request_number)
        if self._recipients:
            self._recipients.pop(recipient, None)
        if self._suspects:
            self.clear(key)

    def suspect(self, key: str, recipient: str, *, request_number: int) -> bool:
        """Note an ambiguous status, and say whether it is proven to be the message's own."""
        if request_number <= self._key_changed_at:
            return False
        suspect = self._suspects.setdefault(key, _Suspect())
        self._suspects.move_to_end(key)
        suspect.times += 1
        suspect.answered_at = self._requests
        self._recipients[recipient] = None
        self._recipients.move_to_end(recipient)
        for memory in (self._suspects, self._recipients):
            if len(memory) > MAX_SUSPECTS:
                memory.popitem(last=False)
        return suspect.is_proven

    def times(self, key: str) -> int:
        """Return how many such statuses in a row a message has got, as far as is known."""
        suspect = self._suspects.get(key)
        return 0 if suspect is None else suspect.times

    def clear(self, key: str) -> None:
        """Forget a message: its fate is known."""
        self._suspects.pop(key, None)

    def renew(self) -> None:
        """Forget all: the key has changed, and for the new one nothing is known."""
        self._key_changed_at = self._requests
        self._suspects.clear()
        self._recipients.clear()
