"""One dead letter, read from its properties and headers, and the filter that selects letters."""

import json
from collections.abc import Collection
from dataclasses import dataclass

from bridge.admin.rounds import Taken
from bridge.amqp.properties import Properties
from bridge.amqp.wire import LARGE_BODY_BYTES, Body
from bridge.worker import envelope
from bridge.worker.envelope import read_moment


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One message of the dead-letter queue. Moments are unix seconds."""

    taken: Taken
    message_id: str | None
    reason: str | None
    detail: str | None
    attempts: int | None
    uncertain_attempts: int
    status: int | None
    code: str | None
    meaning: str | None
    dead_at: float | None
    expires_at: float | None

    @property
    def body(self) -> Body:
        """The body of the request, byte for byte."""
        return self.taken.body

    @property
    def properties(self) -> Properties:
        """What it came with."""
        return self.taken.properties

    @property
    def looks(self) -> int:
        """How often a quorum queue has counted that it came back."""
        return self.taken.looks

    @property
    def may_be_sent(self) -> bool:
        """Whether an attempt may have reached the phone, so that a replay may be a second SMS."""
        return self.reason == "uncertain" or self.uncertain_attempts > 0

    @property
    def to(self) -> str | None:
        """The number, when the body has one; what is too large for a request is not read."""
        if len(self.body) > LARGE_BODY_BYTES:
            return None
        try:
            document = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        number = document.get("to") if isinstance(document, dict) else None
        return number if isinstance(number, str) else None


def read_dead_letter(message: Taken) -> DeadLetter:
    """Read a dead letter's headers; one that is not in the form that we write counts as missing."""
    properties = message.properties
    headers = properties.headers or {}
    return DeadLetter(
        taken=message,
        message_id=properties.message_id or None,
        reason=_text(headers.get(envelope.REASON)),
        detail=_text(headers.get(envelope.DETAIL)),
        attempts=_count(headers.get(envelope.ATTEMPTS)),
        uncertain_attempts=_count(headers.get(envelope.UNCERTAIN_ATTEMPTS)) or 0,
        status=_count(headers.get(envelope.STATUS)),
        code=_text(headers.get(envelope.CODE)),
        meaning=_text(headers.get(envelope.MEANING)),
        dead_at=read_moment(headers, envelope.DEAD_AT),
        expires_at=read_moment(headers, envelope.EXPIRES_AT),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which dead letters to select; an age is counted from `sms-bridge-dead-at`."""

    reasons: Collection[str] = ()
    ids: Collection[str] = ()
    older_than_seconds: float | None = None
    newer_than_seconds: float | None = None

    @property
    def takes_all(self) -> bool:
        """Whether every letter is selected."""
        return not (self.reasons or self.ids or self._goes_by_age)

    @property
    def _goes_by_age(self) -> bool:
        return self.older_than_seconds is not None or self.newer_than_seconds is not None

    def takes(self, letter: DeadLetter, *, now: float) -> bool:
        """Say whether a letter is selected; without `sms-bridge-dead-at` it has no age to go by."""
        if self.reasons and letter.reason not in self.reasons:
            return False
        if self.ids and letter.message_id not in self.ids:
            return False
        return not self._goes_by_age or self._has_age(letter, now)

    def _has_age(self, letter: DeadLetter, now: float) -> bool:
        if letter.dead_at is None:
            return False
        age_seconds = now - letter.dead_at
        return (self.older_than_seconds is None or age_seconds > self.older_than_seconds) and (
            self.newer_than_seconds is None or age_seconds < self.newer_than_seconds
        )
