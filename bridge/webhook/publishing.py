"""Recognise events that were published before, and publish outcome events for receipts."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final

from bridge.amqp.publication import Publication
from bridge.amqp.publisher import Publisher
from bridge.errors import ExchangeRefusedError, PublishError
from bridge.outcome_event import OutcomeEvent, ReceiptOutcome, outcome_properties
from bridge.telemetry.trace_context import TraceHeaders
from bridge.ttl_cache import TtlCache
from bridge.webhook.event import WebhookEvent
from bridge.webhook.receipts import DeliveryState, Receipt

# Guaranteed number of remembered events. They take less than 24 MiB.
LEAST_RECENT_EVENTS: Final = 100_000
# Outcome events of one webhook in flight at once. Services bundle up to this many receipts.
MAX_AT_ONCE: Final = 100
_OUTCOME_OF_DELIVERY: Final[dict[DeliveryState | None, ReceiptOutcome]] = {
    "delivered": "delivered",
    "failed": "undelivered",
}


class RecentEvents:
    """The keys of events in flight and of events published lately, which identify repeats.

    Callers publish: `once` calls their `write` unless the key is known, and `follow` takes a
    publication that is already written. A repeat of an event in flight waits for its confirm.

    An event whose confirm is late stays in flight, because the broker may still store it. It is
    published again only if the broker refuses it or the channel ends. The publisher limits the
    events in flight; `LEAST_RECENT_EVENTS` and the window limit the remembered keys. An event
    without a key is always published.
    """

    def __init__(self, window_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._in_flight: dict[bytes, asyncio.Future[bool]] = {}
        self._published = TtlCache(window_seconds, clock, min_size=LEAST_RECENT_EVENTS)

    async def once(
        self, key: bytes | None, write: Callable[[], Awaitable[Publication]], *, deadline: float
    ) -> bool:
        """Publish with `write()` unless the key was published before; return whether it was new.

        `deadline` is a time of the event loop's clock. Raises PublishError, or TimeoutError if an
        earlier publish with the key is still unconfirmed at the deadline.
        """
        if key is None:
            publication = await write()
            await publication.stored(deadline)
            return True
        while (earlier := self._in_flight.get(key)) is not None:
            async with asyncio.timeout_at(deadline):
                if await asyncio.shield(earlier):
                    return False
        if self.is_remembered(key):
            return False
        await self._publish_first(key, write, deadline)
        return True

    def is_in_flight(self, key: bytes | None) -> bool:
        """Whether an event with this key is published but not confirmed."""
        return key in self._in_flight

    def is_remembered(self, key: bytes | None) -> bool:
        """Whether an event with this key was published within the window."""
        return key is not None and self._published.get(key) is not None

    def follow(self, key: bytes | None, publication: Publication) -> None:
        """Make repeats wait for this publication, and remember the key once it is confirmed.

        No event with the key may be in flight.
        """
        if key is not None:
            self._in_flight[key] = asyncio.get_running_loop().create_future()
            publication.when_known(partial(self._end, key))

    async def _publish_first(
        self, key: bytes, write: Callable[[], Awaitable[Publication]], deadline: float
    ) -> None:
        self._in_flight[key] = asyncio.get_running_loop().create_future()
        try:
            publication = await write()
        except BaseException:
            self._end(key, False)
            raise
        publication.when_known(partial(self._end, key))
        await publication.stored(deadline)

    def _end(self, key: bytes, is_stored: bool) -> None:  # noqa: FBT001  a callback
        if is_stored:
            self._published.add(key, b"")
        self._in_flight.pop(key).set_result(is_stored)


class ReceiptAnnouncer:
    """Publishes an outcome event for each receipt with a final delivery state."""

    def __init__(self, exchange: str, *, publisher: Publisher, recent: RecentEvents) -> None:
        self._exchange = exchange
        self._publisher = publisher
        self._recent = recent

    async def publish(
        self, event: WebhookEvent, trace: TraceHeaders, *, at: float, deadline: float
    ) -> bool:
        """Publish all outcome events and await their confirms; return whether any was new.

        Each is remembered by itself, so that a repeated webhook publishes the missing ones. `at` is
        the time of receipt in unix seconds, `deadline` a time of the event loop's clock. Raises
        PublishError, or TimeoutError as `RecentEvents.once` does.
        """
        outcomes, is_new = list(_outcome_events(event.receipts, at)), False
        for begin in range(0, len(outcomes), MAX_AT_ONCE):
            publishes = (
                self._publish(outcomes[number], _key(event, number), trace, deadline)
                for number in range(begin, min(begin + MAX_AT_ONCE, len(outcomes)))
            )
            is_new |= any(await all_of(*publishes))
        return is_new

    async def _publish(
        self,
        outcome_event: OutcomeEvent,
        key: bytes | None,
        trace: TraceHeaders,
        deadline: float,
    ) -> bool:
        def write() -> Awaitable[Publication]:
            return self._publisher.write(
                outcome_event.body(),
                exchange=self._exchange,
                routing_key=outcome_event.outcome,
                properties=outcome_properties(trace),
                deadline=deadline,
            )

        try:
            return await self._recent.once(key, write, deadline=deadline)
        except ExchangeRefusedError:
            # The event itself must not fail for lack of a permission; the publisher has logged it.
            return False
        except PublishError as error:
            if error.fault != "returned":
                raise
            # No queue is bound for it, and another publish would have the same result.
            return False


async def all_of(*publishes: Awaitable[bool]) -> list[bool]:
    """Wait for all publishes; return their results, or raise the first error.

    An error does not cancel the others, because their messages may still be confirmed.
    """
    ends = await asyncio.gather(*publishes, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return [end is True for end in ends]


def _outcome_events(receipts: Sequence[Receipt], at: float) -> Iterator[OutcomeEvent]:
    for receipt in receipts:
        outcome = _OUTCOME_OF_DELIVERY.get(receipt.delivery)
        if outcome is not None:
            yield OutcomeEvent(
                outcome,
                at=at,
                message_id=receipt.message_id,
                provider_id=receipt.provider_id,
                code=receipt.code,
                meaning=receipt.meaning,
            )


def _key(event: WebhookEvent, number: int) -> bytes | None:
    """Return the repeat key of the outcome event of one receipt."""
    key = event.repeat_key
    return None if key is None else key + number.to_bytes(4)
