"""Publish what replaces a delivery until the broker has confirmed it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from bridge.amqp.properties import Properties
from bridge.amqp.publication import Publication
from bridge.amqp.publisher import Publisher
from bridge.amqp.wire import Body
from bridge.errors import BrokerError, PublishError, PublishFault
from bridge.logs import Log
from bridge.outbound.delivery import Delivery
from bridge.outbound.envelope import REPEATED

log = Log(__name__)

# Between two tries of a copy that the broker does not take: doubled each time, up to the second.
FIRST_WAIT_SECONDS: Final = 0.5
MAX_WAIT_SECONDS: Final = 5.0
# A broker that accepts messages will not confirm later than this: the confirm is lost.
MAX_UNCONFIRMED_SECONDS: Final = 300.0

# Makes the properties of a copy; it is told how many bytes fit into a frame.
MakeProperties = Callable[[int], Properties]


class Storing:
    """Publishes the copies that replace deliveries.

    `block` is called with the queue and the fault when the broker does not store one, `unblock`
    when none waits for it any more.
    `queue_missing` is set when there is no queue for one. `note_repeated` is called with each copy
    that says that it may be there twice.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        block: Callable[[str, PublishFault], None],
        unblock: Callable[[], None],
        note_repeated: Callable[[Properties, Body], None],
    ) -> None:
        self._publisher = publisher
        self._note_repeated = note_repeated
        self._block = block
        self._unblock = unblock
        self._waiting: set[object] = set()
        self.queue_missing = asyncio.Event()

    async def store(
        self, delivery: Delivery, *, queue: str, make_properties: MakeProperties
    ) -> None:
        """Publish a delivery's copy to a queue, and return when it is confirmed.

        A copy that may yet be confirmed is waited for, and not published anew: the broker would
        store both. Raises BrokerError when the delivery's session is over: then the broker delivers
        the message again.
        """
        wait, clock = FIRST_WAIT_SECONDS, asyncio.get_running_loop().time
        give_up_at = clock() + MAX_UNCONFIRMED_SECONDS
        with self._held_up(queue) as note_held_up:
            while (error := await self._try(delivery, queue, make_properties)) is not None:
                note_held_up(error)
                if delivery.is_stale:
                    raise BrokerError("the channel is gone")
                if self._publisher.is_blocked:
                    # What is written has not been read yet.
                    give_up_at = clock() + MAX_UNCONFIRMED_SECONDS
                elif clock() >= give_up_at:
                    give_up_at = clock() + MAX_UNCONFIRMED_SECONDS
                    # Its own copy, or one of an earlier delivery that another worker has now.
                    self._publisher.abandon(delivery.envelope.id_of_copies)
                    _forget_copy(delivery)
                    continue
                if delivery.replacement is None:
                    await asyncio.sleep(wait)
                    wait = min(wait * 2, MAX_WAIT_SECONDS)

    def give_up(self, delivery: Delivery, make_properties: MakeProperties) -> None:
        """Note that a copy may be stored of a delivery that goes back for another worker."""
        if delivery.replacement is not None and delivery.replacement.may_be_stored:
            properties = make_properties(self._publisher.max_properties_bytes)
            self._note_repeated(properties, delivery.body)

    async def _try(
        self, delivery: Delivery, queue: str, make_properties: MakeProperties
    ) -> PublishError | None:
        """Publish the copy, unless there is one that may yet be confirmed, and wait for that."""
        try:
            async with self._publisher.deadline_for(delivery.body) as deadline:
                if delivery.replacement is None:
                    delivery.replacement = await self._write(
                        delivery, queue, make_properties, deadline
                    )
                await delivery.replacement.stored(deadline)
        except PublishError as error:
            if delivery.replacement is not None and delivery.replacement.is_refused:
                _forget_copy(delivery)
            return error
        return None

    async def _write(
        self, delivery: Delivery, queue: str, make_properties: MakeProperties, deadline: float
    ) -> Publication:
        # Another broker may take less in a frame.
        properties = make_properties(self._publisher.max_properties_bytes)
        written = await self._publisher.write(
            delivery.body, exchange="", routing_key=queue, properties=properties, deadline=deadline
        )
        if REPEATED in (properties.headers or {}):
            self._note_repeated(properties, delivery.body)
        return written

    @contextmanager
    def _held_up(self, queue: str) -> Iterator[Callable[[PublishError], None]]:
        """Call `block` when a copy cannot be stored, and `unblock` when none is waited for."""
        waiting = object()

        def note(error: PublishError) -> None:
            log.warning("not_stored", queue=queue, fault=error.fault, why=str(error))
            if error.fault == "returned":
                self.queue_missing.set()
            self._waiting.add(waiting)
            self._block(queue, error.fault)

        try:
            yield note
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                if not self._waiting:
                    self._unblock()


def _forget_copy(delivery: Delivery) -> None:
    """Have the copy published anew; note whether the one before may be stored nevertheless."""
    if delivery.replacement is not None and delivery.replacement.may_be_stored:
        delivery.envelope = delivery.envelope._replace(has_been_copied=True)
    delivery.replacement = None
