"""Identify each delivery as a new message, a repeat, or a repeat of a message in flight.

Uses this process's deduplicator and the answers of the other workers of the queue.
"""

from bridge.worker.cluster.deduplication import ClusterDeduplicator, RepeatedCopies
from bridge.worker.cluster.questions import RedeliveryQuestions
from bridge.worker.deduplicator import (
    Deduplicator,
    IdentityOf,
    InFlight,
    MessageIdentity,
    New,
    Released,
    Verdict,
    WaitForOriginal,
)
from bridge.worker.delivery import Delivery
from bridge.worker.sent_messages import Accepted
from bridge.worker.service.account import Account


class Identification:
    """Decides whether a delivery may be processed, and reports its end to the other workers.

    `cluster` is None if messages published twice are not looked for at other workers.
    `identity_of` identifies a message by its id and body, or by its text and number.
    """

    def __init__(
        self,
        *,
        deduplicator: Deduplicator,
        questions: RedeliveryQuestions,
        repeated_copies: RepeatedCopies,
        cluster: ClusterDeduplicator | None,
        account: Account,
        identity_of: IdentityOf,
    ) -> None:
        self._is_stopping = False
        self.deduplicator = deduplicator
        self._identity_of = identity_of
        self._questions = questions
        self._repeated_copies = repeated_copies
        self._cluster = cluster
        self._account = account

    def stop(self) -> None:
        """Start a drain: ask other workers nothing more, and wait for messages in flight."""
        self._is_stopping = True

    async def learn(self, delivery: Delivery) -> None:
        """Ask the other workers what they know of a redelivery, and pass it to the deduplicator."""
        if not self._is_stopping:
            await self._questions.learn_of(delivery, self.identity_of(delivery))
            delivery.is_asked_for = True

    def identity_of(self, delivery: Delivery) -> MessageIdentity:
        return self._identity_of(delivery.envelope, delivery.body)

    async def claim(self, delivery: Delivery) -> Verdict:
        """Return the verdict on a delivery; a new message is in flight here from now on.

        `WaitForOriginal`: the original may stay in flight for long.
        """
        identity = self._identity_of(delivery.envelope, delivery.body)
        if identity.copies:
            # If a copy was published twice, neither of the two may be marked as redelivered.
            delivery.redelivered = self._repeated_copies.note_received(
                identity, says_so=delivery.redelivered
            )
        if delivery.redelivered and not delivery.is_asked_for:
            await self.learn(delivery)
        cluster = self._cluster
        if cluster is not None and not self._is_stopping:
            is_free = await cluster.until_ended_elsewhere(
                delivery, identity, may_wait=lambda: self._may_wait_for_first
            )
            if not is_free:
                return WaitForOriginal(None, is_redelivery=False)
        verdict = self.deduplicator.claim(identity, redelivered=delivery.redelivered)
        if isinstance(verdict, WaitForOriginal):
            verdict = await self._wait_for_first(delivery, identity, verdict)
        if cluster is not None and isinstance(verdict, New):
            cluster.take(identity)
        return verdict

    async def _wait_for_first(
        self, delivery: Delivery, identity: MessageIdentity, verdict: Verdict
    ) -> Verdict:
        # A redelivery of the delivery in flight has to wait for it in any case.
        may_wait, redelivered = self._may_wait_for_first, delivery.redelivered
        while isinstance(verdict, WaitForOriginal) and (may_wait or verdict.is_redelivery):
            if verdict.first is None:
                break
            with delivery.waits("original"):
                verdict = await self.deduplicator.claim_after(
                    verdict.first, identity, redelivered=redelivered
                )
        return verdict

    def settle(self, in_flight: InFlight, acceptance: Accepted | None, *, acked: bool) -> None:
        """Note that a message was accepted by the service, or replaced by a copy (None)."""
        identity = in_flight.identity
        self.deduplicator.settle(in_flight, acceptance, acked=acked)
        if identity.copies:
            self._repeated_copies.settle(identity)
        if self._cluster is not None:
            self._cluster.end(identity, acceptance)

    def release(self, in_flight: InFlight, released: Released, *, is_refused: bool) -> None:
        """Remember the state of a message that goes back to the queue unsettled.

        `is_refused`: it stays unacked, because the broker refuses its copy.
        """
        if is_refused:
            self.deduplicator.set_aside(in_flight, released)
        else:
            self.deduplicator.release(in_flight, released)
        if self._cluster is not None:
            self._cluster.end(in_flight.identity, None)

    @property
    def _may_wait_for_first(self) -> bool:
        """Whether a repeat may wait here until the original is settled.

        During a drain it waits: the broker redelivers nothing while the channel is open, and the
        next worker would send the message again. While the breaker is open it does not: few
        deliveries are prefetched then, a probe may wait for up to a minute, and a repeat of it
        would take the place of a delivery that could close the breaker.
        """
        return self._is_stopping or self._account.pause_reason is None
