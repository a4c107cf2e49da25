"""What the sandbox knows until it ends: messages, requests, webhooks, faults still to come."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from bridge.sandbox.faults import Fault
from bridge.sandbox.feed import Feed
from bridge.sandbox.messages import Attempt, Message
from bridge.sandbox.webhooks import SentWebhook

# Of so many requests, the newest, headers and bodies are kept.
MAX_EXCHANGES: Final = 1000
MAX_WEBHOOKS: Final = 10_000
_BURST_SECONDS: Final = 0.01


class Memory:
    """Messages and attempts, oldest first and at most so many of each, faults, and the API key.

    `key` is the only API key that is accepted; None accepts any. `feed` is told of all that
    changes, and `read` holds for numbers up to which message somebody has seen it on the page.
    """

    def __init__(self, max_messages: int, *, key: str | None) -> None:
        self.key = key
        self.feed = Feed()
        self.messages: deque[Message] = deque(maxlen=max_messages)
        self.attempts: deque[Attempt] = deque(maxlen=max_messages)
        self.webhooks: deque[SentWebhook] = deque(maxlen=MAX_WEBHOOKS)
        self.faults: list[Fault] = []
        self.read: dict[str, int] = {}
        self._with_exchange: deque[Attempt] = deque()

    def keep(self, message: Message) -> None:
        """Keep a message that was taken."""
        message = message._replace(number=self.feed.last + 1)
        self.messages.append(message)
        self.feed.tell("message", message.for_page)

    def record(self, attempt: Attempt) -> None:
        """Keep an attempt; `tell_of` says later what became of it."""
        attempt.number = self.feed.last + 1
        self.attempts.append(attempt)
        self._with_exchange.append(attempt)
        if len(self._with_exchange) > MAX_EXCHANGES:
            self._with_exchange.popleft().exchange = None
        self.feed.tell("request", attempt.for_page)

    def tell_of(self, attempt: Attempt) -> None:
        """Tell what has become of an attempt."""
        self.feed.tell("request", attempt.for_page)

    def find_attempt(self, number: int) -> Attempt | None:
        """Return the attempt with a number, while its exchange is kept."""
        return next((one for one in reversed(self._with_exchange) if one.number == number), None)

    def send(self, webhook: SentWebhook) -> None:
        """Keep a webhook that is on its way."""
        webhook.number = self.feed.last + 1
        self.webhooks.append(webhook)
        self.feed.tell("webhook", webhook.as_json)

    def answered(self, webhook: SentWebhook, answers: list[int | None]) -> None:
        """Keep what a webhook was answered."""
        webhook.answers = answers
        self.feed.tell("webhook", webhook.as_json)

    def mark_read(self, to: str, number: int) -> None:
        """Remember up to which message a number's were seen."""
        self.read[to] = max(number, self.read.pop(to, 0))
        if len(self.read) > (self.messages.maxlen or len(self.read)):
            del self.read[next(iter(self.read))]
        seen = self.read[to]
        self.feed.tell("read", lambda: {"to": to, "number": seen})

    def forget_messages(self) -> None:
        """Forget the messages, and the webhooks that stand beside them on the page."""
        self.messages.clear()
        self.webhooks.clear()
        self.read.clear()
        self._begin_anew()

    def forget_attempts(self) -> None:
        """Forget the attempts."""
        self.attempts.clear()
        self._with_exchange.clear()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.feed.tell("reset", dict)

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

    def since(self, number: int, to: str | None) -> list[Message]:
        """Return the messages after a number of the feed, for a number or any, oldest first."""
        found = []
        for message in reversed(self.messages):
            if message.number <= number:
                break
            if to in {None, message.to}:
                found.append(message)
        return found[::-1]

    async def wait(self, number: int, to: str | None, seconds: float) -> list[Message]:
        """Wait for messages after a number of the feed, at most so long; return none after that."""
        ends = time.monotonic() + seconds
        while True:
            # Taken before the look, so that what comes after it ends the wait.
            at = self.feed.last
            if found := self.since(number, to):
                return found
            if not await self.feed.wait(at, max(0, ends - time.monotonic())):
                return []
            # All that comes in a burst is looked at once.
            await asyncio.sleep(_BURST_SECONDS)

    def repeats(self) -> Iterator[Message]:
        """Yield the messages that repeat an earlier one, oldest first."""
        seen = set()
        for message in self.messages:
            if message.repeat_key in seen:
                yield message
            seen.add(message.repeat_key)

    def order(self, faults: list[Fault]) -> None:
        """Put these faults in the place of all others."""
        self.faults = faults
        self._tell_faults()

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
            self._tell_faults()

    def _tell_faults(self) -> None:
        self.feed.tell("faults", self.show_faults)

    def show_faults(self) -> list[dict[str, Any]]:
        """Return the faults still to come, as the page shows them."""
        return [fault.model_dump(exclude_unset=True) for fault in self.faults]
