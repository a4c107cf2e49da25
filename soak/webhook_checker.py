"""Judges webhooks by the answers to each event and the stored events.

A pure function of `Evidence`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

# Prefix of events that only probe the status. They may be stored or not.
PROBE: Final = "probe-"


@dataclass(slots=True)
class Event:
    """The answers to a signed event: 200, 503, 4xx, or None without an answer.

    `again` counts the repeats after a 200.
    """

    answers: Counter[int | None] = field(default_factory=Counter)
    again: int = 0

    @property
    def is_accepted(self) -> bool:
        """Whether the event was answered 200."""
        return self.answers[200] > 0

    @property
    def unsure(self) -> int:
        """Number of attempts after which the event may or may not be stored."""
        return sum(n for status, n in self.answers.items() if status is None or status >= 500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The facts, collected after the last webhook. `stored` counts the copies by event id."""

    events: Mapping[str, Event]
    stored: Mapping[str, int]
    forged: Mapping[int | None, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The counts, and a line in `problems` for each broken promise."""

    events: int
    tries: int
    answers: dict[str, int]
    accepted: int
    again: int
    refused: int
    stored: int
    copies: int
    excess: list[str]
    missing: list[str]
    unexpected: list[str]
    forged: int
    forged_accepted: int
    problems: list[str] = field(default_factory=list)


def check(evidence: Evidence) -> Verdict:
    """Compare the answers with the stored events."""
    events, stored = evidence.events, evidence.stored
    answers: Counter[int | None] = Counter()
    for event in events.values():
        answers.update(event.answers)
    verdict = Verdict(
        events=len(events),
        tries=answers.total(),
        answers={str(s): n for s, n in sorted(answers.items(), key=lambda item: str(item[0]))},
        accepted=sum(event.is_accepted for event in events.values()),
        again=sum(event.again for event in events.values()),
        refused=sum(n for status, n in answers.items() if status and 400 <= status < 500),
        stored=sum(event_id in events for event_id in stored),
        copies=sum(max(0, n - 1) for event_id, n in stored.items() if event_id in events),
        excess=sorted(i for i, event in events.items() if stored.get(i, 0) > 1 + event.unsure),
        missing=sorted(i for i, event in events.items() if event.is_accepted and i not in stored),
        unexpected=sorted(i for i in set(stored) - set(events) if not i.startswith(PROBE)),
        forged=sum(evidence.forged.values()),
        forged_accepted=sum(n for status, n in evidence.forged.items() if status != 401),
    )
    verdict.problems = list(_find_problems(verdict))
    return verdict


def _find_problems(verdict: Verdict) -> Iterator[str]:
    if not verdict.events:
        yield "no event was sent"
    if verdict.missing:
        yield f"{len(verdict.missing)} events were answered 200, but are not stored"
    if verdict.refused:
        yield f"signed events were refused {verdict.refused} times"
    if count := verdict.events - verdict.accepted:
        yield f"{count} events were never answered 200"
    if verdict.excess:
        yield f"{len(verdict.excess)} events have more copies than unanswered attempts"
    if verdict.unexpected:
        yield f"{len(verdict.unexpected)} stored events were never sent"
    if verdict.forged_accepted:
        yield f"{verdict.forged_accepted} forged events were not answered 401"
