"""The demo's traffic: the messages and webhooks to send, their expected ends, and the account."""

import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from rich.table import Table

T = TypeVar("T")

SENT: Final = "sent"
MARKER: Final = re.compile(r"demo-[0-9a-f]+-[0-9]{5,}")

# Numbers reserved for fiction. Ordinary messages share a few phones, for a readable page of the
# sandbox. Messages with a fault have their own numbers, which the faults name: 555-0100 to 555-0199
# are reserved in every area code of North America.
_PHONES: Final = [f"+4917139200{n:02}" for n in range(50)]
_AREA_CODES: Final = range(200, 1000)
# The maximum number of names in a line about a problem.
_LISTED: Final = 5


class PlannedMessage(NamedTuple):
    """A message for the outbound queue; `expected` is `sent` or the reason of its dead letter."""

    message_id: str
    to: str
    body: bytes
    headers: dict[str, Any]
    expected: str
    fault: dict[str, Any] | None


class PlannedWebhook(NamedTuple):
    """A webhook to request from the sandbox `orders` times; `marker` is part of its body.

    `answers` are the expected answers of the bridge, `routing_keys` those of the expected events.
    """

    marker: str
    path: str
    body: bytes
    answers: list[int]
    routing_keys: list[str]
    orders: int = 1


@dataclass(slots=True)
class Observed:
    """The observations so far, from outside the bridge."""

    published: int = 0
    accepted: list[str] = field(default_factory=list)
    dead: list[tuple[str, str]] = field(default_factory=list)
    answers: dict[str, list[int | None]] = field(default_factory=dict)
    events: list[tuple[str, str]] = field(default_factory=list)
    retries: dict[str, int] = field(default_factory=dict)


class _Kind(NamedTuple):
    """A kind of message: number per thousand, expected end, fault, error in the body, expiry."""

    share: int
    expected: str = SENT
    fault: Mapping[str, Any] | None = None
    flaw: Callable[[dict[str, Any]], bytes] | None = None
    expires_in_seconds: int | None = None


def _fault(status: int, *, count: int | None = 1, **headers: str) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return {"status": status, "count": count, "headers": named}


# No fault accepts a message unanswered, so a second acceptance is always an error.
_KINDS: Final = (
    _Kind(4, "invalid", flaw=lambda _members: b"to=+491713920001&text=Hi"),
    _Kind(4, "invalid", flaw=lambda members: _dump({"to": members["to"], "from": "Demo"})),
    _Kind(4, "invalid", flaw=lambda members: _dump(members | {"text": 42})),
    _Kind(4, "invalid", flaw=lambda members: _dump(members | {"txt": "Hi"})),
    _Kind(4, "invalid", flaw=lambda members: _dump(members | {"to": "0171 3920001"})),
    _Kind(5, "expired", expires_in_seconds=-60),
    _Kind(20, "refused", fault=_fault(422, count=None)),
    _Kind(5, "uncertain", fault=_fault(500, count=None)),
    _Kind(5, "exhausted", fault=_fault(409, count=None)),
    _Kind(30, fault=_fault(503)),
    _Kind(30, fault=_fault(503, Retry_After="1")),
    _Kind(3, fault=_fault(429, Retry_After="1")),
    _Kind(10, fault={"mode": "hang", "count": 1}),
    _Kind(10, fault={"mode": "cut", "count": 1}),
)


def plan_messages(count: int, *, run: str) -> list[PlannedMessage]:
    """Plan messages of all kinds, mixed; the same kinds for the same count."""
    kinds = _mix([(kind, kind.share) for kind in _KINDS], 1000, count, rest=_Kind(0))
    return [_plan_message(number, kind, run) for number, kind in enumerate(kinds)]


def _plan_message(number: int, kind: _Kind, run: str) -> PlannedMessage:
    to = _PHONES[number % len(_PHONES)]
    if kind.fault is not None:
        to = f"+1{_AREA_CODES[number // 100 % len(_AREA_CODES)]}55501{number % 100:02}"
    members = {"to": to, "from": "Demo", "text": f"Demo message {number}"}
    headers: dict[str, Any] = {}
    if kind.expires_in_seconds is not None:
        headers["sms-bridge-expires-at"] = int(time.time()) + kind.expires_in_seconds
    return PlannedMessage(
        message_id=f"demo-{run}-{number:05}",
        to=to,
        body=_dump(members) if kind.flaw is None else kind.flaw(members),
        headers=headers,
        expected=kind.expected,
        fault=None if kind.fault is None else {"to": to, **kind.fault},
    )


def _reply(marker: str, *, forged: bool = False, repeat: int = 1) -> PlannedWebhook:
    order = {"from": _PHONES[0], "text": f"Reply {marker}", "forged": forged, "repeat": repeat}
    answers = [401 if forged else 200] * repeat
    routing_keys = [] if forged else ["message.received"]
    return PlannedWebhook(marker, "/sandbox/replies", _dump(order), answers, routing_keys)


def _event(marker: str, event: object, routing_key: str, *, orders: int = 1) -> PlannedWebhook:
    answers, routing_keys = [200] * orders, [routing_key] * orders
    return PlannedWebhook(marker, "/sandbox/events", _dump(event), answers, routing_keys, orders)


def _said_twice(marker: str) -> PlannedWebhook:
    # Without an id it is not a repeat: a person may answer YES twice.
    event = {"type": "message.received", "data": {"from": _PHONES[1], "text": f"YES {marker}"}}
    return _event(marker, event, "message.received", orders=2)


def _delivery_event(marker: str) -> PlannedWebhook:
    data = {"id": f"sms-{marker}", "status": "delivered"}
    return _event(marker, {"type": "message.delivered", "data": data}, "message.delivered")


# The kinds of webhooks with their number per two hundred; the others are replies.
_WEBHOOKS: Final[Mapping[Callable[[str], PlannedWebhook], int]] = {
    lambda marker: _reply(marker, forged=True): 20,
    lambda marker: _reply(marker, repeat=3): 10,
    _said_twice: 6,
    _delivery_event: 10,
    lambda marker: _event(marker, {"type": f"What? {marker}"}, "other"): 2,
    lambda marker: _event(marker, [marker], "unparsed"): 2,
}


def plan_webhooks(count: int, *, run: str) -> list[PlannedWebhook]:
    """Plan webhooks of all kinds, genuine and forged, mixed; the same kinds for the same count."""
    makers = _mix(_WEBHOOKS.items(), 200, count, rest=_reply)
    return [make(f"demo-{run}-{number:05}") for number, make in enumerate(makers)]


def _mix(shares: Iterable[tuple[T, int]], whole: int, count: int, *, rest: T) -> list[T]:
    """Repeat each by its share of the count, at least once, add `rest`, and shuffle."""
    mixed = [each for each, n in shares for _ in range(max(1, round(n * count / whole)))]
    mixed += [rest] * (count - len(mixed))
    random.Random(count).shuffle(mixed)
    return mixed


def _dump(value: object) -> bytes:
    return json.dumps(value).encode()


def check_traffic(
    messages: Sequence[PlannedMessage], webhooks: Sequence[PlannedWebhook], seen: Observed
) -> list[str]:
    """Compare everything that was planned with what was observed; return a line per problem."""
    ends = [(message_id, SENT) for message_id in seen.accepted] + seen.dead
    return [
        *_differences("message", {m.message_id: [m.expected] for m in messages}, _grouped(ends)),
        *_differences("webhook answered", {w.marker: w.answers for w in webhooks}, seen.answers),
        *_differences(
            "webhook published", {w.marker: w.routing_keys for w in webhooks}, _grouped(seen.events)
        ),
    ]


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in pairs:
        groups[name].append(value)
    return groups


def _differences(
    what: str, expected: Mapping[str, Sequence[object]], seen: Mapping[str, Sequence[object]]
) -> list[str]:
    problems: defaultdict[str, list[str]] = defaultdict(list)
    for name in [*expected, *sorted(seen.keys() - expected.keys())]:
        wanted, found = [*expected.get(name, ())], [*seen.get(name, ())]
        if wanted != found:
            problems[f"{what}: {_join(found)}, expected {_join(wanted)}"].append(name)
    return [
        f"{len(names)} x {problem}: {', '.join(names[:_LISTED])}{', ...' * (len(names) > _LISTED)}"
        for problem, names in problems.items()
    ]


def _join(values: Sequence[object]) -> str:
    return " and ".join(str(value) for value in values) or "nothing"


def tables(
    messages: Sequence[PlannedMessage], webhooks: Sequence[PlannedWebhook], seen: Observed
) -> Iterator[Table]:
    """Yield the account of each direction: expected and seen numbers, red if they differ."""
    ends = Counter(message.expected for message in messages)
    dead = Counter(reason for _, reason in seen.dead)
    retries = ", ".join(f"{reason} {count}" for reason, count in sorted(seen.retries.items()))
    outbound = Table("queue → SMS", "expected", "seen")
    _add(outbound, "published", len(messages), seen.published)
    _add(outbound, "accepted by the SMS service", ends.pop(SENT, 0), len(seen.accepted))
    for reason in sorted({*ends, *dead}):
        _add(outbound, f"dead letter: {reason}", ends[reason], dead[reason])
    _add(outbound, "sent twice", 0, sum(n > 1 for n in Counter(seen.accepted).values()))
    outbound.add_row("retries", "", f"{sum(seen.retries.values()):,} ({retries or 'none'})")
    yield outbound
    events = sum(len(webhook.routing_keys) for webhook in webhooks)
    expected = Counter(answer for webhook in webhooks for answer in webhook.answers)
    answers = Counter(answer for given in seen.answers.values() for answer in given)
    inbound = Table("SMS → queue", "expected", "seen")
    _add(inbound, "webhooks answered 200", expected[200], answers[200])
    _add(inbound, "forged webhooks answered 401", expected[401], answers[401])
    repeats = answers[200] - len(seen.events)
    _add(inbound, "repeats not published again", expected[200] - events, repeats)
    _add(inbound, "events received", events, len(seen.events))
    yield inbound


def _add(table: Table, name: str, expected: int, seen: int) -> None:
    table.add_row(name, f"{expected:,}", f"{seen:,}", style=None if expected == seen else "red")
