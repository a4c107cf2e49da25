"""The path of one delivery: identify, wait until allowed, send, settle.

`Consumer` and `Dispatcher` read each delivery from the connection and start a task that runs
`Pipeline.process`.
"""

import asyncio
import time
from typing import Final, TypeGuard

from bridge.config import WorkerSettings
from bridge.errors import BrokerError, CopyRefusedError, InvalidMessageError
from bridge.telemetry.logs import Log
from bridge.worker.announcer import Announcer
from bridge.worker.deduplicator import New, Released, Repeat, Verdict, WaitForOriginal
from bridge.worker.delivery import Delivery
from bridge.worker.envelope import Envelope, read_envelope
from bridge.worker.identification import Identification
from bridge.worker.outcomes import Dead, Outcome, Retried, Sent
from bridge.worker.pauses import WorkerPauses
from bridge.worker.request import RequestReader, SendRequest
from bridge.worker.sent_messages import Accepted
from bridge.worker.service.account import Account
from bridge.worker.settle import Settler, count_attempt
from bridge.worker.spans import WorkerSpans

log = Log(__name__)

# Limit of a wait between two attempts in ordered mode. The message stays unacked while it waits,
# the broker allows 30 minutes for an ack (consumer_timeout), and other messages may queue behind
# it.
MOST_WAIT_SECONDS: Final = 600.0


class Pipeline:
    """Processes one delivery from its identification to its ack.

    `spans` is None if no spans are exported. `short_codes`: whether short codes are valid
    recipients.
    """

    def __init__(  # noqa: PLR0913  the objects of the steps
        self,
        settings: WorkerSettings,
        *,
        identification: Identification,
        account: Account,
        pauses: WorkerPauses,
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
        self._pauses = pauses
        self._settler = settler
        self._announcer = announcer
        self._spans = spans
        self._is_ordered = settings.ordering == "recipient"

    async def process(self, delivery: Delivery) -> None:
        """Send one message, or publish its replacement, and ack it once that is confirmed.

        Raises `BrokerError` or `CancelledError` if the delivery stays unacked; the broker then
        delivers it again.
        """
        if self._spans is not None:
            self._spans.begin(delivery)
        match await self._claim(delivery):
            case Dead() as dead:
                await self._settle_unidentified(delivery, dead)
            case New() as new:
                outcome = await self._send_and_store(delivery, new)
                at = self._settle(delivery, new, outcome)
                await self._announcer.announce(
                    delivery.properties, delivery.envelope, outcome, at, trace=delivery.trace
                )
            case Repeat(first=first):
                await self._settle_repeat(delivery, first)
            case WaitForOriginal():
                await self._put_off_repeat(delivery)

    async def _claim(self, delivery: Delivery) -> Verdict | Dead:
        """Return the verdict on a delivery, or the outcome that a bug in its identification has.

        A redelivered message may have been sent, and nobody knows: `dlq replay` skips it then.
        """
        try:
            return await self._identification.claim(delivery)
        except BrokerError:
            raise
        except Exception as error:  # a bug of ours must not keep the message unacked for ever
            log.exception("internal_error", message_id=delivery.envelope.key)
            return _dead_by_bug(error, uncertain=delivery.redelivered)

    async def _settle_unidentified(self, delivery: Delivery, dead: Dead) -> None:
        """Settle a message that the deduplicator does not know; it was not posted."""
        await self._settler.replace(delivery, dead)
        self._settler.ack(delivery, dead)
        await self._announcer.announce(
            delivery.properties, delivery.envelope, dead, time.time(), trace=delivery.trace
        )

    # New messages

    async def _send_and_store(self, delivery: Delivery, new: New) -> Outcome:
        """Send a message, unless its outcome is decided, and publish its replacement, if any."""
        recalled = _go_on_with(delivery, new.released)
        outcome: Outcome | None = recalled
        try:
            if outcome is None:
                outcome = await self._send(delivery)
            while self._is_ordered and _is_tried_again(outcome):
                await self._wait_for_next_attempt(
                    delivery, outcome, is_reported=outcome is recalled
                )
                delivery.envelope = count_attempt(delivery.envelope, outcome)
                outcome = None
                outcome = await self._send(delivery)
            if not isinstance(outcome, Sent):
                await self._settler.replace(delivery, outcome)
        except BaseException as error:
            self._release(delivery, new, outcome, is_refused=isinstance(error, CopyRefusedError))
            raise
        return outcome

    async def _send(self, delivery: Delivery) -> Outcome:
        """Parse and send a message; an invalid message or a bug becomes an outcome.

        A bug may follow the POST, so `dlq replay` then skips the message, as one in doubt.
        """
        is_request = False
        try:
            delivery.envelope = self._read_envelope(delivery)
            request = self._reader.read(delivery.body)
            is_request = True
            account = self._account  # The choice among several accounts would be here.
            return await post_when_allowed(account, self._pauses, delivery, request)
        except InvalidMessageError as error:
            return Dead(reason="invalid", detail=str(error))
        except BrokerError:
            raise
        except Exception as error:  # a bug of ours must not keep the message unacked for ever
            log.exception("internal_error", message_id=delivery.envelope.key)
            return _dead_by_bug(error, uncertain=is_request)

    def _settle(self, delivery: Delivery, new: New, outcome: Outcome) -> float:
        """Ack a message that was sent or replaced; return the time in unix seconds."""
        acked = self._settler.ack(delivery, outcome)
        # The ack is written at the end of this event loop iteration. Freeing the slot after that
        # keeps the next POST behind the ack.
        asyncio.get_running_loop().call_soon(delivery.free_slot)
        at = time.time()
        accepted = None
        if isinstance(outcome, Sent):
            attempts = delivery.envelope.attempts + 1
            accepted = Accepted(attempts, outcome.status, outcome.provider_id, at)
        self._identification.settle(new.in_flight, accepted, acked=acked)
        return at

    def _release(
        self, delivery: Delivery, new: New, outcome: Outcome | None, *, is_refused: bool
    ) -> None:
        """Remember the state of a message that goes back to the queue unsettled."""
        released = Released(
            delivery.envelope,
            None if isinstance(outcome, Sent) else _rest_of(delivery, outcome),
            delivery.replacement,
            # An interrupted wait is resumed; its attempt is counted when the wait is over.
            waits_in_place=self._is_ordered and _is_tried_again(outcome),
        )
        delivery.free_slot()
        self._identification.release(new.in_flight, released, is_refused=is_refused)

    def _read_envelope(self, delivery: Delivery) -> Envelope:
        urgent_queue = self._settings.urgent_queue
        return read_envelope(delivery.properties, delivery.envelope, urgent_queue=urgent_queue)

    async def _wait_for_next_attempt(
        self, delivery: Delivery, outcome: Retried, *, is_reported: bool
    ) -> None:
        """Wait for the next attempt without releasing the message, so that its key stays in order.

        The wait is as long as on the retry queues. The attempt that just failed is reported, unless
        nothing was posted or `is_reported` says that it was reported before an interrupted wait.
        Raises BrokerError if the delivery goes back to the queue.
        """
        delivery.free_slot()
        was_posted = outcome.counted or outcome.status is not None
        if was_posted and not is_reported:
            self._settler.report_retried(delivery, outcome)
            delivery.begin_again()
            if self._spans is not None:
                self._spans.begin(delivery)
        if delivery.goes_back:
            raise BrokerError("waiting deliveries go back to the queue")
        with delivery.waits("next_try"):
            await asyncio.sleep(min(outcome.delay_seconds, MOST_WAIT_SECONDS))

    # Repeats

    async def _settle_repeat(self, delivery: Delivery, first: Accepted | None) -> None:
        """Ack a repeat of a settled message, and publish the outcome of the original in reply."""
        acked = self._settler.ack(delivery, None)
        self._deduplicator.note_repeat(self._identification.identity_of(delivery), acked=acked)
        await self._announcer.answer_repeat(
            delivery.properties, delivery.envelope, first, trace=delivery.trace
        )

    async def _put_off_repeat(self, delivery: Delivery) -> None:
        """Replace a repeat by a retry copy; the original may be settled when it comes back."""
        identity = self._identification.identity_of(delivery)
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

    def _outcome_of_repeat(self, delivery: Delivery) -> Retried | Dead:
        try:
            delivery.envelope = self._read_envelope(delivery)
        except InvalidMessageError as error:
            return Dead(reason="invalid", detail=str(error))
        return Retried(
            reason="paused",
            delay_seconds=self._settings.retry_delays[0],
            detail="the first message with this id is still in progress",
        )


async def post_when_allowed(
    account: Account, pauses: WorkerPauses, delivery: Delivery, request: SendRequest
) -> Outcome:
    """Post a message, again if the account holds it here.

    Raises BrokerError if the delivery returns to the queue.
    """
    try:
        while True:
            is_held = pauses.is_on or delivery.session.is_leaving
            outcome: Outcome | None = await pauses.wait(delivery) if is_held else None
            if outcome is None:
                outcome = await account.wait_until_allowed(delivery, request)
            if outcome is None:
                outcome = await account.post(delivery, request)
            elif delivery.is_stale:
                raise BrokerError("the channel is gone")
            if outcome is not None:
                return outcome
    finally:
        account.release(delivery)


def _dead_by_bug(error: Exception, *, uncertain: bool) -> Dead:
    detail = f"a bug in the bridge: {type(error).__name__}"
    return Dead(reason="internal_error", detail=detail, uncertain=uncertain)


def _go_on_with(delivery: Delivery, released: Released | None) -> Retried | Dead | None:
    """Restore the state of a delivery that was released before; return its outcome, if decided."""
    if released is None:
        return None
    delivery.envelope, delivery.replacement = released.envelope, released.replacement
    return released.outcome


def _is_tried_again(outcome: Outcome | None) -> TypeGuard[Retried]:
    """Whether the message is sent again; one that is not due yet has no place in the order."""
    return isinstance(outcome, Retried) and outcome.reason != "not_before"


def _rest_of(delivery: Delivery, outcome: Retried | Dead | None) -> Retried | Dead | None:
    """Shorten the wait before the next attempt by the time already waited."""
    waited_seconds = delivery.waited_seconds.get("next_try")
    if waited_seconds is None or not _is_tried_again(outcome):
        return outcome
    delay_seconds = min(outcome.delay_seconds, MOST_WAIT_SECONDS) - waited_seconds
    return outcome._replace(delay_seconds=max(0.0, delay_seconds))
