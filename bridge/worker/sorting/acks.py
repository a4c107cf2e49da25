"""Ack what is sorted in as few acks as can be.

Each ack is an entry in the log of a quorum queue, as each publish is; one for many deliveries
(`multiple`, AMQP 0-9-1, 1.8.3.13) is one entry.
"""

from collections.abc import Iterable

from bridge.worker.session import Session


class Acks:
    """The deliveries of one session that are not acked; `note` each of them when it comes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # In the order in which they came, which is that of their tags.
        self._open: dict[int, None] = {}

    def note(self, tag: int) -> None:
        """Note a delivery: no ack of a later one may be its ack, too, before it is done."""
        self._open[tag] = None

    def ack(self, tags: Iterable[int]) -> bool:
        """Write the acks of these, or return False: the broker delivers the messages again."""
        done, is_written, last = set(tags), True, None
        for tag in self._open:
            if tag not in done:
                break
            last = tag
        if last is not None:
            is_written = self.session.ack(last, multiple=True)
            for tag in [tag for tag in self._open if tag <= last]:
                del self._open[tag]
                done.discard(tag)
        for tag in done:
            del self._open[tag]
            is_written = self.session.ack(tag)
        return is_written
