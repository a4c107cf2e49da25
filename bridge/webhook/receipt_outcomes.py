"""Publishes outcome events for delivery receipts, on the worker's outcome exchange."""

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Final

from bridge.amqp.publication import Publication
from bridge.amqp.publisher import Publisher
from bridge.errors import ExchangeRefusedError, PublishError
from bridge.outcome_event import OutcomeEvent, ReceiptOutcome, outcome_properties
from bridge.telemetry.trace_context import TraceHeaders
from bridge.webhook.event import Event
from bridge.webhook.receipts import Delivery, Receipt
from bridge.webhook.recent_events import RecentEvents

# Outcome events of one webhook in flight at once. Services bundle up to this many receipts.
MAX_AT_ONCE: Final = 100
_OUTCOMES: Final[dict[Delivery | None, ReceiptOutcome]] = {
    "delivered": "delivered",
    "failed": "undelivered",
}


class ReceiptOutcomes:
    """Publishes an outcome event for each receipt with a final delivery state."""

    def __init__(self, exchange: str, *, publisher: Publisher, recent: RecentEvents) -> None:
        self._exchange = exchange
        self._publisher = publisher
        self._recent = recent

    async def publish(
        self, event: Event, trace: TraceHeaders, *, at: float, deadline: float
    ) -> bool:
        """Publish all outcome events and await their confirms; return whether any was new.

        Each is remembered by itself, so that a repeated webhook publishes the missing ones. `at` is
        the time of receipt in unix seconds, `deadline` a time of the event loop's clock. Raises
        PublishError, or TimeoutError as `RecentEvents.once` does.
        """
        outcomes, is_new = list(_outcomes(event.receipts, at)), False
        for begin in range(0, len(outcomes), MAX_AT_ONCE):
            publishes = (
                self._publish(outcomes[number], _key(event, number), trace, deadline)
                for number in range(begin, min(begin + MAX_AT_ONCE, len(outcomes)))
            )
            is_new |= any(await all_of(*publishes))
        return is_new

    async def _publish(
        self,
        outcome: OutcomeEvent,
        key: bytes | None,
        trace: TraceHeaders,
        deadline: float,
    ) -> bool:
        def write() -> Awaitable[Publication]:
            return self._publisher.write(
                outcome.body(),
                exchange=self._exchange,
                routing_key=outcome.outcome,
                properties=outcome_properties(trace),
                deadline=deadline,
            )

        try:
            return await self._recent.once(key, write, deadline=deadline)
        except ExchangeRefusedError:
            # The event itself must not wait for a permission; the publisher has logged it.
            return False
        except PublishError as error:
            if error.fault != "returned":
                raise
            # No queue is bound for it: nobody asked, and another try would end the same.
            return False


async def all_of(*publishes: Awaitable[bool]) -> list[bool]:
    """Wait until all of them have ended; return what they return, or raise what the first raised.

    None is cut short because another failed: what it has written may yet be confirmed.
    """
    ends = await asyncio.gather(*publishes, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return [end is True for end in ends]


def _outcomes(receipts: tuple[Receipt, ...], at: float) -> Iterator[OutcomeEvent]:
    for receipt in receipts:
        outcome = _OUTCOMES.get(receipt.delivery)
        if outcome is not None:
            yield OutcomeEvent(
                outcome,
                at=at,
                message_id=receipt.message_id,
                provider_id=receipt.provider_id,
                code=receipt.code,
            )


def _key(event: Event, number: int) -> bytes | None:
    """Return the repeat key of the outcome event of one receipt."""
    key = event.repeat_key
    return None if key is None else key + number.to_bytes(4)
