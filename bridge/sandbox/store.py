"""The sandbox's memory: bounded lists of records, the faults, and a feed of changes."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

from bridge.deadline import wait_at_most
from bridge.sandbox.orders import Fault
from bridge.sandbox.records import AcceptedMessage, ReceivedRequest, SentWebhook

# The number of the newest requests that are kept with headers and bodies.
MAX_EXCHANGES: Final = 1000
MAX_WEBHOOKS: Final = 10_000
# A page that misses more changes than this gets a new snapshot.
MAX_CHANGES: Final = 4096
_BURST_SECONDS: Final = 0.01


class Change(NamedTuple):
    """A change of one record; `render` returns the record's current JSON."""

    kind: str
    render: Callable[[], object]


class ChangeFeed:
    """Numbers all changes and keeps the newest, for pages and waiting requests."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self.last = 0
        self._changes: deque[Change] = deque(maxlen=max_changes)
        self._changed = asyncio.Event()

    def publish(self, kind: str, render: Callable[[], object]) -> None:
        """Add a change with the next number, and wake all waiting readers."""
        self._changes.append(Change(kind, render))
        self._advance()

    def restart(self) -> None:
        """Drop all changes, so that every reader needs a new snapshot."""
        self._changes.clear()
        self._advance()

    def _advance(self) -> None:
        self.last += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def after(self, number: int) -> Sequence[Change] | None:
        """Return the changes after a number, or None if some of them are no longer kept."""
        missed = self.last - number
        if not 0 <= missed <= len(self._changes):
            return None
        return [self._changes[index] for index in range(-missed, 0)]

    async def wait(self, number: int, seconds: float) -> bool:
        """Wait for a change after a number; return False if there is none in time."""
        if self.last > number:
            return True
        return await wait_at_most(seconds, self._changed)


class SandboxStore:
    """All records, oldest first, with at most `max_messages` messages and as many requests.

    `faults` are the remaining faults. `read` maps a phone number to its newest message that has
    been seen on a page.
    """

    def __init__(self, max_messages: int) -> None:
        self.feed = ChangeFeed()
        self.messages: deque[AcceptedMessage] = deque(maxlen=max_messages)
        self.requests: deque[ReceivedRequest] = deque(maxlen=max_messages)
        self.webhooks: deque[SentWebhook] = deque(maxlen=MAX_WEBHOOKS)
        self.faults: list[Fault] = []
        self.read: dict[str, int] = {}
        self._with_exchange: deque[ReceivedRequest] = deque()

    def add_message(self, message: AcceptedMessage) -> None:
        message.number = self.feed.last + 1
        self.messages.append(message)
        self.feed.publish("message", message.for_page)

    def add_request(self, request: ReceivedRequest) -> None:
        """Keep a request; later changes are published with `request_changed`."""
        request.number = self.feed.last + 1
        self.requests.append(request)
        self._with_exchange.append(request)
        if len(self._with_exchange) > MAX_EXCHANGES:
            self._with_exchange.popleft().exchange = None
        self.request_changed(request)

    def request_changed(self, request: ReceivedRequest) -> None:
        self.feed.publish("request", request.as_json)

    def add_webhook(self, webhook: SentWebhook) -> None:
        """Keep a webhook; its answers are published with `webhook_changed`."""
        webhook.number = self.feed.last + 1
        self.webhooks.append(webhook)
        self.webhook_changed(webhook)

    def webhook_changed(self, webhook: SentWebhook) -> None:
        self.feed.publish("webhook", webhook.as_json)

    def mark_read(self, to: str, number: int) -> None:
        seen = self.read[to] = max(number, self.read.pop(to, 0))
        if len(self.read) > (self.messages.maxlen or len(self.read)):
            del self.read[next(iter(self.read))]
        self.feed.publish("read", lambda: {"to": to, "number": seen})

    def forget_messages(self) -> None:
        """Drop the messages, and the webhooks that the page shows beside them."""
        self.messages.clear()
        self.webhooks.clear()
        self.read.clear()
        self.feed.restart()

    def forget_requests(self) -> None:
        self.requests.clear()
        self._with_exchange.clear()
        self.feed.restart()

    def find_request(self, number: int) -> ReceivedRequest | None:
        """Return the request with a number, if it is kept with headers and bodies."""
        return next((one for one in self._with_exchange if one.number == number), None)

    def holds_key(self, key: str | None) -> bool:
        # Newest first, because a repeat follows soon.
        return key is not None and any(
            message.idempotency_key == key for message in reversed(self.messages)
        )

    def newest(self, message_id: str | None, to: str | None) -> AcceptedMessage | None:
        """Return the newest message with this id and phone number; None matches any."""
        fitting = (
            message
            for message in reversed(self.messages)
            if message_id in {None, message.id} and to in {None, message.to}
        )
        return next(fitting, None)

    def messages_after(self, number: int, to: str | None) -> list[AcceptedMessage]:
        """Return the messages after a number of the feed, for the phone number `to` or for all."""
        newer = takewhile(lambda message: message.number > number, reversed(self.messages))
        return [message for message in newer if to in {None, message.to}][::-1]

    async def wait_for_messages(
        self, number: int, to: str | None, seconds: float
    ) -> list[AcceptedMessage]:
        """Return `messages_after` as soon as there are any, or an empty list after a timeout."""
        ends = time.monotonic() + seconds
        while True:
            # Read first, so that a message that arrives meanwhile ends the wait.
            at = self.feed.last
            if found := self.messages_after(number, to):
                return found
            if not await self.feed.wait(at, max(0, ends - time.monotonic())):
                return []
            # Look once after a burst of changes.
            await asyncio.sleep(_BURST_SECONDS)

    def repeats(self) -> Iterator[AcceptedMessage]:
        """Yield the messages that repeat an earlier one, oldest first."""
        seen = set()
        for message in self.messages:
            if message.repeat_key in seen:
                yield message
            seen.add(message.repeat_key)

    def set_faults(self, faults: list[Fault]) -> None:
        self.faults = faults
        self._faults_changed()

    def take_fault(self, to: str) -> Fault | None:
        """Return the first fault that applies to a number, and count it down."""
        for fault in self.faults:
            if fault.to in {None, to}:
                if fault.count is not None:
                    fault.count -= 1
                    if fault.count == 0:
                        self.faults.remove(fault)
                    self._faults_changed()
                return fault
        return None

    def _faults_changed(self) -> None:
        self.feed.publish("faults", self.render_faults)

    def render_faults(self) -> list[dict[str, Any]]:
        """Return the remaining faults, as the page shows them."""
        return [fault.model_dump(exclude_unset=True) for fault in self.faults]
