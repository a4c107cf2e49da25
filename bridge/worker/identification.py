"""Whether a delivery is a repeat, by the deduplicator and the other workers of the queue."""

from bridge.worker.cluster.asking import Asker
from bridge.worker.cluster.deduplication import ClusterDeduplicator
from bridge.worker.cluster.repeated_copies import RepeatedCopies
from bridge.worker.deduplicator import Deduplicator, InFlight, Released, Repeat
from bridge.worker.delivery import Delivery
from bridge.worker.message_identity import IdentityOf, MessageIdentity
from bridge.worker.sent_messages import Accepted
from bridge.worker.service.breaker import CircuitBreaker


class Identification:
    """Gives each message out once at a time; `is_stopping` is set when a drain begins.

    `deduplication` is None where publishers' duplicates are not looked for at other workers.
    """

    def __init__(
        self,
        *,
        deduplicator: Deduplicator,
        asker: Asker,
        repeated_copies: RepeatedCopies,
        deduplication: ClusterDeduplicator | None,
        breaker: CircuitBreaker,
        identity_of: IdentityOf,
    ) -> None:
        self.is_stopping = False
        self.deduplicator = deduplicator
        self._identity_of = identity_of
        self._asker = asker
        self._repeated_copies = repeated_copies
        self._deduplication = deduplication
        self._breaker = breaker

    def identity_of(self, delivery: Delivery) -> MessageIdentity:
        """Return what a delivery is known by: its id and body, or its text and number."""
        return self._identity_of(delivery.envelope, delivery.body)

    async def learn(self, delivery: Delivery) -> None:
        """Have the deduplicator know what other workers know of a redelivery."""
        if not self.is_stopping:
            await self._asker.learn_of(delivery, self.identity_of(delivery))
            delivery.is_asked_for = True

    async def claim(
        self, delivery: Delivery, identity: MessageIdentity
    ) -> InFlight | Repeat | None:
        """Take a delivery to work on, unless it is a repeat, or may be one (None)."""
        if identity.copies:
            # Of a copy that is there twice, each may come for the first time.
            delivery.redelivered = self._repeated_copies.may_be_one(
                identity, says_so=delivery.redelivered
            )
        if delivery.redelivered and not delivery.is_asked_for:
            await self.learn(delivery)
        deduplication = self._deduplication
        if deduplication is not None and not self.is_stopping:
            is_free = await deduplication.until_ended_elsewhere(
                delivery, identity, may_wait=lambda: self._may_wait_for_first
            )
            if not is_free:
                return None
        # The way of nearly every delivery: no call that it can do without.
        claim = None if delivery.redelivered else self.deduplicator.claim_at_once(identity)
        if claim is None:
            claim = await self.deduplicator.claim(
                identity,
                redelivered=delivery.redelivered,
                waits=delivery.waits,
                may_wait=self._may_wait_for_first,
            )
        if deduplication is not None and isinstance(claim, InFlight):
            deduplication.take(identity)
        return claim

    def settle(
        self,
        claim: InFlight,
        identity: MessageIdentity,
        acceptance: Accepted | None,
        *,
        acked: bool,
    ) -> None:
        """Note how the claimed message ended: with an acceptance, or replaced by a copy (None)."""
        self.deduplicator.settle(claim, acceptance, acked=acked)
        if identity.copies:
            self._repeated_copies.settle(identity, is_sent=acceptance is not None)
        self._report_end(identity, acceptance)

    def give_back(
        self, claim: InFlight, identity: MessageIdentity, kept: Released, *, is_refused: bool
    ) -> None:
        """Note what is known of a claimed message that goes back to the queue unsettled.

        `is_refused`: it stays unacked, because the broker refuses its copy.
        """
        note = self.deduplicator.set_aside if is_refused else self.deduplicator.give_back
        note(claim, kept)
        self._report_end(identity, None)

    def _report_end(self, identity: MessageIdentity, acceptance: Accepted | None) -> None:
        if self._deduplication is not None:
            self._deduplication.end(identity, acceptance)

    @property
    def _may_wait_for_first(self) -> bool:
        """Whether a repeat may be held until the first message with its id is settled.

        A drain goes on with it: what is given back here does not come again while the channel
        lives, and the next worker would send it again. In a pause few are held, and a probe for
        up to a minute: who waited for that would take the place of one that may end the pause.
        """
        return self.is_stopping or self._breaker.paused is None
