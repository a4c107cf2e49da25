"""The way of a delivery, one step after the other: identify, wait until allowed, send, settle.

`consumer` and `held` take each delivery from the wire and begin a task, in which
`Pipeline.process` runs.
"""

import asyncio
import time
from typing import Final, TypeGuard

from bridge.config import WorkerSettings
from bridge.errors import BrokerError, CopyRefusedError, InvalidMessageError
from bridge.telemetry.logs import Log
from bridge.worker.announcer import Announcer
from bridge.worker.deduplicator import New, Released, Repeat, Wait
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import Envelope, read_envelope
from bridge.worker.identification import Identification
from bridge.worker.message_identity import MessageIdentity
from bridge.worker.outcomes import Dead, Outcome, Retried
from bridge.worker.request import RequestReader
from bridge.worker.sent_messages import Accepted
from bridge.worker.service.account import Account
from bridge.worker.settle import Settler, accepted, count_attempt
from bridge.worker.spans import WorkerSpans

log = Log(__name__)

# A longer step of the retry ladder is cut to this where a message keeps its place: the broker waits
# 30 minutes for an ack (consumer_timeout), and others may be held behind it.
MOST_WAIT_SECONDS: Final = 600.0


class Pipeline:
    """Takes one delivery from its identification to its ack.

    `spans` is None where none are exported. `short_codes`: whether they are recipients.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        identification: Identification,
        account: Account,
        settler: Settler,
        announcer: Announcer,
        spans: WorkerSpans | None,
        short_codes: bool,
    ) -> None:
        self._settings = settings
        self._reader = RequestReader(settings, short_codes=short_codes)
        self._identification = identification
        self._deduplicator = identification.deduplicator
        self._account = account
        self._settler = settler
        self._announcer = announcer
        self._spans = spans
        self._is_ordered = settings.ordering == "recipient"

    async def process(self, delivery: Delivery) -> None:
        """Send one message, or store what replaces it, and ack it when that is confirmed.

        Raises `BrokerError` or `CancelledError` where it stays unacked, and so comes again.
        """
        if self._spans is not None:
            self._spans.begin(delivery)
        identity = self._identification.identity_of(delivery)
        match await self._identification.identify(delivery, identity):
            case New() as new:
                outcome = await self._send_and_store(delivery, new)
                at = self._settle(delivery, new, outcome)
                await self._announcer.announce(
                    delivery.properties, delivery.envelope, outcome, at, trace=delivery.trace
                )
            case Repeat(first=first):
                await self._settle_repeat(delivery, identity, first)
            case Wait():
                await self._put_off_repeat(delivery, identity)

    # A new message

    async def _send_and_store(self, delivery: Delivery, new: New) -> Outcome:
        """Send a message, unless its outcome is decided already, and store what replaces it."""
        outcome = recalled = _go_on_with(delivery, new.released)
        try:
            if outcome is None:
                outcome = await self._send(delivery)
            while self._is_ordered and _is_tried_again(outcome):
                await self._wait_for_next_try(delivery, outcome, is_reported=outcome is recalled)
                delivery.envelope = count_attempt(delivery.envelope, outcome)
                outcome = None
                outcome = await self._send(delivery)
            await self._settler.replace(delivery, outcome)
        except BaseException as error:
            self._release(delivery, new, outcome, is_refused=isinstance(error, CopyRefusedError))
            raise
        return outcome

    async def _send(self, delivery: Delivery) -> Outcome:
        """Read a message and send it when that is allowed; any fault of it becomes an outcome."""
        try:
            delivery.envelope = self._read_envelope(delivery)
            request = self._reader.read(delivery.body)
            return await self._account.send(delivery, request)
        except InvalidMessageError as error:
            return Dead(reason="invalid", detail=str(error))
        except BrokerError:
            raise
        except Exception as error:  # a bug of ours must not hold the message for ever
            log.exception("internal_error", message_id=delivery.envelope.key)
            name = type(error).__name__
            return Dead(reason="internal_error", detail=f"a bug in the bridge: {name}")

    def _settle(self, delivery: Delivery, new: New, outcome: Outcome) -> float:
        """Ack a message that is sent or replaced; return when, in unix seconds."""
        acked = self._settler.ack(delivery, outcome)
        # The ack leaves at the end of this turn of the event loop; the next POST is after it.
        asyncio.get_running_loop().call_soon(delivery.free_slot)
        at = time.time()
        acceptance = accepted(delivery.envelope, outcome, at)
        self._identification.settle(new.in_flight, acceptance, acked=acked)
        return at

    def _release(
        self, delivery: Delivery, new: New, outcome: Outcome | None, *, is_refused: bool
    ) -> None:
        """Remember how a message goes on that is not settled."""
        released = Released(
            delivery.envelope,
            _rest_of(delivery, outcome),
            delivery.replacement,
            # A try is counted when its wait is over.
            waits_in_place=self._is_ordered and _is_tried_again(outcome),
        )
        delivery.free_slot()
        self._identification.release(new.in_flight, released, is_refused=is_refused)

    def _read_envelope(self, delivery: Delivery) -> Envelope:
        urgent_queue = self._settings.urgent_queue
        return read_envelope(delivery.properties, delivery.envelope, urgent_queue=urgent_queue)

    async def _wait_for_next_try(
        self, delivery: Delivery, outcome: Retried, *, is_reported: bool
    ) -> None:
        """Wait as long as on the ladder, but in place: later messages of the key wait behind it.

        A pause, in which nothing was posted, is no try to report. `is_reported`: the try was, and
        its wait was cut short. Raises BrokerError when the delivery goes back to the queue.
        """
        delivery.free_slot()
        was_posted = outcome.burned or outcome.status is not None
        if was_posted and not is_reported:
            self._settler.report_try(delivery, outcome)
            delivery.begin_again()
            if self._spans is not None:
                self._spans.begin(delivery)
        if delivery.goes_back:
            raise BrokerError("all that waits goes back to the queue")
        with delivery.waits("next_try"):
            await asyncio.sleep(min(outcome.delay_seconds, MOST_WAIT_SECONDS))

    # A repeat

    async def _settle_repeat(
        self, delivery: Delivery, identity: MessageIdentity, first: Accepted | None
    ) -> None:
        """Ack a repeat of a settled message, and answer it as the first was."""
        acked = self._settler.ack(delivery, None)
        self._deduplicator.note_repeat(identity, acked=acked)
        await self._announcer.answer_repeat(
            delivery.properties, delivery.envelope, first, trace=delivery.trace
        )

    async def _put_off_repeat(self, delivery: Delivery, identity: MessageIdentity) -> None:
        """Replace a repeat by a copy that comes when its first may be settled."""
        released = self._deduplicator.take_released_repeat(
            identity, redelivered=delivery.redelivered
        )
        outcome = _go_on_with(delivery, released) or self._outcome_of_repeat(delivery)
        try:
            await self._settler.replace(delivery, outcome)
        except BaseException:
            released = Released(delivery.envelope, outcome, delivery.replacement)
            self._deduplicator.release_repeat(identity, released)
            raise
        self._settler.ack(delivery, outcome)

    def _outcome_of_repeat(self, delivery: Delivery) -> Outcome:
        try:
            delivery.envelope = self._read_envelope(delivery)
        except InvalidMessageError as error:
            return Dead(reason="invalid", detail=str(error))
        return Retried(
            reason="paused",
            delay_seconds=self._settings.retry_delays[0],
            detail="the first message with its id is still being worked on",
        )


def _go_on_with(delivery: Delivery, released: Released | None) -> Outcome | None:
    """Restore the state of a delivery that was released before; return its outcome if decided."""
    if released is None:
        return None
    delivery.envelope, delivery.replacement = released.envelope, released.replacement
    return released.outcome


def _is_tried_again(outcome: Outcome | None) -> TypeGuard[Retried]:
    """Say whether there is another try; a message that is not due yet has no place in the order."""
    return isinstance(outcome, Retried) and outcome.reason != "not_before"


def _rest_of(delivery: Delivery, outcome: Outcome | None) -> Outcome | None:
    """Shorten a wait for the next try by the time that has passed, however often it is cut."""
    waited_seconds = delivery.waited_seconds.get("next_try")
    if waited_seconds is None or not _is_tried_again(outcome):
        return outcome
    delay_seconds = min(outcome.delay_seconds, MOST_WAIT_SECONDS) - waited_seconds
    return outcome._replace(delay_seconds=max(0.0, delay_seconds))
