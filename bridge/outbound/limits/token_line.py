"""The lines in which deliveries wait for a rate limit, and the token that lets one of them go."""

import asyncio

from bridge.outbound.limits.slots import Slots
from bridge.outbound.limits.token_bucket import TokenBucket


class Line:
    """The deliveries that wait for the same tokens, in order of arrival, the urgent ones first."""

    def __init__(self, *buckets: TokenBucket) -> None:
        self.buckets = list(buckets)
        self.waiting = 0
        self._urgent_waiting = 0
        self._first_place = Slots(1)

    @property
    def holds_up(self) -> bool:
        """Whether a delivery that comes now has to wait."""
        return self.waiting > 0 or self.wait_seconds() > 0

    def wait_seconds(self) -> float:
        """Return how long a delivery that comes now waits for its token."""
        return self._seconds_behind(self.waiting - self._first_place.taken)

    def urgent_wait_seconds(self) -> float:
        """Return how long an urgent one that comes now waits, which passes all that are not."""
        return self._seconds_behind(self._urgent_waiting)

    def _seconds_behind(self, others: int) -> float:
        return max((bucket.seconds_until(others + 1) for bucket in self.buckets), default=0.0)

    async def come_first(self, *, is_urgent: bool) -> tuple[TokenBucket, ...]:
        """Wait to be the first of the line, then for a token; return the buckets it is taken from.

        `leave` must be called then, with these buckets if the token is given back.
        """
        self.waiting += 1
        self._urgent_waiting += is_urgent
        try:
            await self._first_place.acquire(is_urgent=is_urgent)
        except BaseException:
            self.waiting -= 1
            raise
        finally:
            self._urgent_waiting -= is_urgent
        buckets = tuple(self.buckets)
        wait = max((bucket.take() for bucket in buckets), default=0.0)
        try:
            if wait:
                await asyncio.sleep(wait)
        except BaseException:
            self.leave(give_back=buckets)
            raise
        return buckets

    def leave(self, *, give_back: tuple[TokenBucket, ...] = ()) -> None:
        """Let the next one be the first, with the token of this one where it is given back."""
        for bucket in give_back:
            bucket.give_back()
        self._first_place.give_back()
        self.waiting -= 1


class SenderLine(Line):
    """The line of one sender.

    `plan` gives each message that comes its time, on credit; the line's own bucket holds the rate.
    """

    def __init__(self, bucket: TokenBucket, plan: TokenBucket) -> None:
        super().__init__(bucket)
        self.plan = plan


class Token:
    """A delivery's leave to go under the limits: the first place of some lines, a token of each.

    Spend it when the delivery goes. Until then the next one in line waits behind it.
    """

    def __init__(self) -> None:
        self.is_spent = False
        self._held: list[tuple[Line, tuple[TokenBucket, ...]]] = []

    async def wait_in(self, line: Line, *, is_urgent: bool) -> None:
        """Wait for the first place of one more line, and for a token there."""
        self._held.append((line, await line.come_first(is_urgent=is_urgent)))

    def spend(self) -> None:
        """Go, and let the next one in line wait for a token of its own."""
        self.is_spent = True
        while self._held:
            line, _ = self._held.pop()
            line.leave()

    def give_back(self) -> None:
        """Stay after all, and let the next one in line have the token."""
        while self._held:
            line, buckets = self._held.pop()
            line.leave(give_back=buckets)
