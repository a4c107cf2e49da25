"""What the sandbox knows until it ends: its messages, the attempts, the faults still to come."""

from collections import deque
from collections.abc import Iterator

from bridge.sandbox.faults import Fault
from bridge.sandbox.messages import Attempt, Message


class Memory:
    """Messages and attempts, oldest first and at most so many of each, faults, and the API key.

    `key` is the only API key that is accepted; None accepts any.
    """

    def __init__(self, max_messages: int, *, key: str | None) -> None:
        self.key = key
        self.messages: deque[Message] = deque(maxlen=max_messages)
        self.attempts: deque[Attempt] = deque(maxlen=max_messages)
        self.faults: list[Fault] = []

    def holds_key(self, key: str | None) -> bool:
        """Say whether a message with this key was taken; none is like another without a key."""
        # The newest first: a repeat follows soon.
        return key is not None and any(
            message.idempotency_key == key for message in reversed(self.messages)
        )

    def newest(self, message_id: str | None, to: str | None) -> Message | None:
        """Return the newest message with an id and for a number; None is any."""
        fitting = (
            message
            for message in reversed(self.messages)
            if message_id in {None, message.id} and to in {None, message.to}
        )
        return next(fitting, None)

    def repeats(self) -> Iterator[Message]:
        """Yield the messages that repeat an earlier one, oldest first."""
        seen = set()
        for message in self.messages:
            if message.repeat_key in seen:
                yield message
            seen.add(message.repeat_key)

    def take_fault(self, to: str) -> Fault | None:
        """Return the first fault that fits a number, and count it down."""
        for fault in self.faults:
            if fault.to in {None, to}:
                self._count_down(fault)
                return fault
        return None

    def _count_down(self, fault: Fault) -> None:
        if fault.count is not None:
            fault.count -= 1
            if fault.count == 0:
                self.faults.remove(fault)
