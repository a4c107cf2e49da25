"""Publish what replaces a delivery until the broker has confirmed it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.amqp.publication import Publication
from bridge.amqp.publisher import Publisher
from bridge.errors import BrokerError, CopyRefusedError, PublishError, PublishFault, Refusal
from bridge.telemetry.logs import Log
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import REPEATED

log = Log(__name__)

# Between two tries of a copy that the broker does not take: doubled each time, up to the second.
FIRST_WAIT_SECONDS: Final = 0.5
MAX_WAIT_SECONDS: Final = 5.0
# A broker that accepts messages will not confirm later than this: the confirm is lost.
MAX_UNCONFIRMED_SECONDS: Final = 300.0
# When the broker has ended the connection so often at one copy that was published alone, the copy
# is the cause.
MAX_CONNECTIONS_ENDED: Final = 3

# Makes the properties of a copy; it is told how many bytes fit into a frame.
MakeProperties = Callable[[int], Properties]


class Storing:
    """Publishes the copies that replace deliveries.

    `block` is called with the queue and the fault when the broker does not store one, `unblock`
    when none waits for it any more.
    `queue_missing` is set when there is no queue for one. `note_repeated` is called with each copy
    that says that it may be there twice. `may_set_aside`: whether one more message may stay unacked
    because the broker refuses its copy.

    A copy that was in flight when the broker ended the channel may be the cause: it is published
    again on a channel of its own, where what the broker says is about this copy alone. A large one
    is from the first, and so is one as large as another that the broker has refused.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        block: Callable[[str, PublishFault], None],
        unblock: Callable[[], None],
        note_repeated: Callable[[Properties, Body], None],
        may_set_aside: Callable[[], bool],
    ) -> None:
        self._publisher = publisher
        self._note_repeated = note_repeated
        self._may_set_aside = may_set_aside
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
        the message again. Raises CopyRefusedError when the broker refuses this copy for itself.
        """
        wait, clock = FIRST_WAIT_SECONDS, asyncio.get_running_loop().time
        give_up_at = clock() + MAX_UNCONFIRMED_SECONDS
        tries = _Tries(
            delivery,
            queue,
            make_properties,
            self._publisher.refusals,
            is_alone=self._publisher.goes_alone(delivery.body),
        )
        with self._held_up(queue) as note_held_up:
            while (error := await self._try(tries)) is not None:
                if error.refusal is None:
                    note_held_up(error)
                elif tries.proves(error.refusal):
                    self._set_aside(delivery, queue, error.refusal)
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
                tries.is_alone = tries.is_alone or self._publisher.refusals != tries.refusals_before

    def _set_aside(self, delivery: Delivery, queue: str, refusal: Refusal) -> None:
        """Raise CopyRefusedError, unless too many messages stay unacked already."""
        is_one_too_many = not self._may_set_aside()
        log.error(
            "copy_refused",
            cause=None,
            message_id=delivery.envelope.key,
            queue=queue,
            bytes=len(delivery.body),
            why=refusal.why,
            remedy="the message stays unacked; raise max_message_size and restart the broker, or "
            "stop the worker and take the message out of its queue",
            holds_up_others=is_one_too_many or None,
        )
        if not is_one_too_many:
            raise CopyRefusedError(refusal.why)

    async def _try(self, tries: "_Tries") -> PublishError | None:
        """Publish the copy, unless there is one that may yet be confirmed, and wait for that."""
        delivery, alone = tries.delivery, tries.is_alone
        try:
            async with self._publisher.deadline_for(delivery.body, alone=alone) as deadline:
                if delivery.replacement is None:
                    delivery.replacement = await self._write(tries, deadline)
                await delivery.replacement.stored(deadline)
        except PublishError as error:
            if delivery.replacement is not None and delivery.replacement.is_refused:
                _forget_copy(delivery)
            return error
        return None

    async def _write(self, tries: "_Tries", deadline: float) -> Publication:
        delivery, queue = tries.delivery, tries.queue
        # Another broker may take less in a frame.
        properties = tries.make_properties(self._publisher.max_properties_bytes)
        written: Publication
        if tries.is_alone:
            written = await self._publisher.write_alone(
                delivery.body, routing_key=queue, properties=properties, deadline=deadline
            )
        else:
            written = await self._publisher.write(
                delivery.body,
                exchange="",
                routing_key=queue,
                properties=properties,
                deadline=deadline,
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


class _Tries:
    """What the tries of one copy have in common, and have shown so far.

    `refusals_before`: how often the broker had ended the publishing channel before the first.
    """

    def __init__(
        self,
        delivery: Delivery,
        queue: str,
        make_properties: MakeProperties,
        refusals_before: int,
        *,
        is_alone: bool,
    ) -> None:
        self.delivery = delivery
        self.queue = queue
        self.make_properties = make_properties
        self.refusals_before = refusals_before
        self.is_alone = is_alone
        self._connections_ended = 0

    def proves(self, refusal: Refusal) -> bool:
        """Say whether this refusal, after those before it, shows that the copy is the cause."""
        self._connections_ended += 1
        return refusal.is_certain or self._connections_ended >= MAX_CONNECTIONS_ENDED


def _forget_copy(delivery: Delivery) -> None:
    """Have the copy published anew; note whether the one before may be stored nevertheless."""
    if delivery.replacement is not None:
        if delivery.replacement.may_be_stored:
            delivery.envelope = delivery.envelope._replace(has_been_copied=True)
        delivery.replacement.abandon()
    delivery.replacement = None
