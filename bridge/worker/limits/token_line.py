"""The lines in which deliveries wait for a rate limit, and the token that lets one of them go."""

import asyncio
from typing import Final

from bridge.worker.limits.slots import Slots
from bridge.worker.limits.token_bucket import TokenBucket

# A timer may go off so much before its time, and the token is there by then but for this.
EARLY_SECONDS: Final = 0.001
# How long to wait for a token before looking again: the rate may be another one meanwhile.
LOOK_AGAIN_SECONDS: Final = 1.0


class Line:
    """The deliveries that wait for the same tokens, in order of arrival, the urgent ones first.

    The first waits until there is a token, and takes it when it goes: were it taken before, those
    that come in the meantime could go beside it, one more than the burst.
    """

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
        return self._seconds_until(self.waiting + 1)

    def urgent_wait_seconds(self) -> float:
        """Return how long an urgent one that comes now waits, which passes all that are not."""
        return self._seconds_until(self._urgent_waiting + self._first_place.taken + 1)

    def _seconds_until(self, tokens: int) -> float:
        return max((bucket.seconds_until(tokens) for bucket in self.buckets), default=0.0)

    async def come_first(self, *, is_urgent: bool) -> None:
        """Wait to be the first of the line, then until there is a token; `leave` must be called."""
        self.waiting += 1
        self._urgent_waiting += is_urgent
        try:
            await self._first_place.acquire(is_urgent=is_urgent)
        except BaseException:
            self.waiting -= 1
            raise
        finally:
            self._urgent_waiting -= is_urgent
        try:
            wait = self._seconds_until(1)
            while wait > EARLY_SECONDS:
                await asyncio.sleep(min(wait, LOOK_AGAIN_SECONDS))
                wait = self._seconds_until(1)
        except BaseException:
            self.leave(with_token=False)
            raise

    def leave(self, *, with_token: bool) -> None:
        """Let the next one be the first; a token that this one does not take is there for it."""
        if with_token:
            for bucket in self.buckets:
                bucket.take()
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
        self._lines: list[Line] = []

    async def wait_in(self, line: Line, *, is_urgent: bool) -> None:
        """Wait for the first place of one more line, and for a token there."""
        await line.come_first(is_urgent=is_urgent)
        self._lines.append(line)

    def spend(self) -> None:
        """Go, and let the next one in line wait for a token of its own."""
        self.is_spent = True
        self._leave(with_token=True)

    def give_back(self) -> None:
        """Stay after all, and let the next one in line have the token."""
        self._leave(with_token=False)

    def _leave(self, *, with_token: bool) -> None:
        while self._lines:
            self._lines.pop().leave(with_token=with_token)
