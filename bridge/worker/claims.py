"""Whether a delivery is a repeat: asked of the ledger, and of the other workers of the queue."""

from bridge.worker.acceptances import Accepted
from bridge.worker.cluster.asking import Asker
from bridge.worker.cluster.deduplication import Deduplication
from bridge.worker.cluster.repeated_copies import RepeatedCopies
from bridge.worker.delivery import Delivery
from bridge.worker.entry import Entry, EntryOf
from bridge.worker.ledger import Claim, Kept, Ledger, Repeat
from bridge.worker.service.breaker import CircuitBreaker


class Claims:
    """Gives each message out once at a time; `is_stopping` is set when a drain begins.

    `deduplication` is None where publishers' duplicates are not looked for at other workers.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        asker: Asker,
        repeated_copies: RepeatedCopies,
        deduplication: Deduplication | None,
        breaker: CircuitBreaker,
        entry_of: EntryOf,
    ) -> None:
        self.is_stopping = False
        self.ledger = ledger
        self._find_entry = entry_of
        self._asker = asker
        self._repeated_copies = repeated_copies
        self._deduplication = deduplication
        self._breaker = breaker

    def entry_of(self, delivery: Delivery) -> Entry:
        """Return what a delivery is known by: its id and body, or its text and number."""
        return self._find_entry(delivery.envelope, delivery.body)

    async def learn(self, delivery: Delivery) -> None:
        """Have the ledger know what other workers know of a redelivery."""
        if not self.is_stopping:
            await self._asker.learn_of(delivery, self.entry_of(delivery))
            delivery.is_asked_for = True

    async def claim(self, delivery: Delivery, entry: Entry) -> Claim | Repeat | None:
        """Take a delivery to work on, unless it is a repeat, or may be one (None)."""
        if entry.copies:
            # Of a copy that is there twice, each may come for the first time.
            delivery.redelivered = self._repeated_copies.may_be_one(
                entry, says_so=delivery.redelivered
            )
        if delivery.redelivered and not delivery.is_asked_for:
            await self.learn(delivery)
        deduplication = self._deduplication
        if deduplication is not None and not self.is_stopping:
            is_free = await deduplication.until_ended_elsewhere(
                delivery, entry, may_wait=lambda: self._may_wait_for_first
            )
            if not is_free:
                return None
        # The way of nearly every delivery: no call that it can do without.
        claim = None if delivery.redelivered else self.ledger.claim_at_once(entry)
        if claim is None:
            claim = await self.ledger.claim(
                entry,
                redelivered=delivery.redelivered,
                waits=delivery.waits,
                may_wait=self._may_wait_for_first,
            )
        if deduplication is not None and isinstance(claim, Claim):
            deduplication.take(entry)
        return claim

    def settle(
        self, claim: Claim, entry: Entry, acceptance: Accepted | None, *, acked: bool
    ) -> None:
        """Note how the claimed message ended: with an acceptance, or replaced by a copy (None)."""
        self.ledger.settle(claim, acceptance, acked=acked)
        if entry.copies:
            self._repeated_copies.settle(entry, is_sent=acceptance is not None)
        self._report_end(entry, acceptance)

    def give_back(self, claim: Claim, entry: Entry, kept: Kept, *, is_refused: bool) -> None:
        """Note what is known of a claimed message that goes back to the queue unsettled.

        `is_refused`: it stays unacked, because the broker refuses its copy.
        """
        note = self.ledger.set_aside if is_refused else self.ledger.give_back
        note(claim, kept)
        self._report_end(entry, None)

    def _report_end(self, entry: Entry, acceptance: Accepted | None) -> None:
        if self._deduplication is not None:
            self._deduplication.end(entry, acceptance)

    @property
    def _may_wait_for_first(self) -> bool:
        """Whether a repeat may be held until the first message with its id is settled.

        A drain goes on with it: what is given back here does not come again while the channel
        lives, and the next worker would send it again. In a pause few are held, and a probe for
        up to a minute: who waited for that would take the place of one that may end the pause.
        """
        return self.is_stopping or self._breaker.paused is None
