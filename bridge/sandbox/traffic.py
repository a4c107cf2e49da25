"""The demo's traffic: what is sent in both directions, and what must become of each."""

import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T")

SENT: Final = "sent"
SENDER: Final = "Demo"

MARKER: Final = re.compile(r"demo-[0-9a-f]+-[0-9]{5,}")

# Numbers that are reserved for fiction. Ordinary messages share a few phones, so that the page of
# the sandbox stays readable. A message with a fault has a number of its own, by which the sandbox
# knows it: 555-0100 to 555-0199 are free in every area code of North America.
_PHONES: Final = [f"+4917139200{n:02}" for n in range(50)]
_AREA_CODES: Final = range(200, 1000)
# How many names a line about a problem lists at most.
_SHOWN: Final = 5


class Request(NamedTuple):
    """One message on the outbound queue."""

    message_id: str
    to: str
    body: bytes
    headers: dict[str, Any]
    expected: str
    fault: dict[str, Any] | None


class Webhook(NamedTuple):
    """One order to the sandbox to send a webhook; `marker` is found again in the event's body."""

    marker: str
    path: str
    body: bytes
    orders: int
    answers: list[int]
    routing_key: str
    events: int


@dataclass(slots=True)
class Seen:
    """What was observed so far, from outside of the bridge."""

    published: int = 0
    accepted: list[str] = field(default_factory=list)
    accepted_at: list[float] = field(default_factory=list)
    dead: list[tuple[str, str]] = field(default_factory=list)
    answers: dict[str, list[int | None]] = field(default_factory=dict)
    events: list[tuple[str, str]] = field(default_factory=list)


class _Kind(NamedTuple):
    """A kind of send request: how many of a thousand, its end, the service's fault, its flaw."""

    share: int
    expected: str = SENT
    fault: Mapping[str, Any] | None = None
    flaw: Callable[[dict[str, Any]], bytes] | None = None
    expires_in_seconds: int | None = None


def _without_text(members: dict[str, Any]) -> bytes:
    return _dump({name: value for name, value in members.items() if name != "text"})


def _fault(status: int, *, count: int | None = 1, **headers: str) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return {"status": status, "count": count, "headers": named}


# A hung or cut answer does not keep the message: a second acceptance of it is never right.
_KINDS: Final[Mapping[str, _Kind]] = {
    "not JSON": _Kind(4, "invalid", flaw=lambda _members: b"to=+491713920001&text=Hi"),
    "text missing": _Kind(4, "invalid", flaw=_without_text),
    "number for string": _Kind(4, "invalid", flaw=lambda m: _dump(m | {"text": 42})),
    "unknown member": _Kind(4, "invalid", flaw=lambda m: _dump(m | {"txt": "Hi"})),
    "bad number": _Kind(4, "invalid", flaw=lambda m: _dump(m | {"to": "0171 3920001"})),
    "expired": _Kind(5, "expired", expires_in_seconds=-60),
    "refused": _Kind(20, "refused", fault=_fault(422, count=None)),
    "always 500": _Kind(5, "uncertain", fault=_fault(500, count=None)),
    "always 409": _Kind(5, "exhausted", fault=_fault(409, count=None)),
    "503": _Kind(30, fault=_fault(503)),
    "503, Retry-After": _Kind(30, fault=_fault(503, Retry_After="1")),
    "429, Retry-After": _Kind(3, fault=_fault(429, Retry_After="1")),
    "hung": _Kind(10, fault={"mode": "hang", "count": 1}),
    "cut": _Kind(10, fault={"mode": "cut", "count": 1}),
}
_ORDINARY: Final = _Kind(0)


def plan_requests(count: int, *, run: str, now: Callable[[], float] = time.time) -> list[Request]:
    """Plan the send requests, all kinds mixed; the same for the same count."""
    shares = [(kind, kind.share) for kind in _KINDS.values()]
    kinds = _mix(shares, 1000, count, rest=_ORDINARY)
    return [_make_request(number, kind, run, now()) for number, kind in enumerate(kinds)]


def _own_number(number: int) -> str:
    area = _AREA_CODES[number // 100 % len(_AREA_CODES)]
    return f"+1{area}55501{number % 100:02}"


def _make_request(number: int, kind: _Kind, run: str, now: float) -> Request:
    to = _PHONES[number % len(_PHONES)] if kind.fault is None else _own_number(number)
    members = {"to": to, "from": SENDER, "text": f"Demo message {number}"}
    headers: dict[str, Any] = {}
    if kind.expires_in_seconds is not None:
        headers["sms-bridge-expires-at"] = int(now) + kind.expires_in_seconds
    return Request(
        message_id=f"demo-{run}-{number:05}",
        to=to,
        body=_dump(members) if kind.flaw is None else kind.flaw(members),
        headers=headers,
        expected=kind.expected,
        fault=None if kind.fault is None else {"to": to, **kind.fault},
    )


def plan_faults(requests: Iterable[Request]) -> list[dict[str, Any]]:
    """List what the sandbox has to do wrong for these requests."""
    return [request.fault for request in requests if request.fault is not None]


def _reply(marker: str, *, forged: bool = False, repeat: int = 1) -> Webhook:
    order = {"from": _PHONES[0], "text": f"Reply {marker}", "forged": forged, "repeat": repeat}
    return Webhook(
        marker=marker,
        path="/sandbox/replies",
        body=_dump(order),
        orders=1,
        answers=[401 if forged else 200] * repeat,
        routing_key="message.received",
        events=0 if forged else 1,
    )


def _event(marker: str, event: object, routing_key: str, *, orders: int = 1) -> Webhook:
    return Webhook(
        marker=marker,
        path="/sandbox/events",
        body=_dump(event),
        orders=orders,
        answers=[200] * orders,
        routing_key=routing_key,
        events=orders,
    )


def _said_twice(marker: str) -> Webhook:
    # Without an id nobody can know a repeat: a person who answers YES twice said it twice.
    event = {"type": "message.received", "data": {"from": _PHONES[1], "text": f"YES {marker}"}}
    return _event(marker, event, "message.received", orders=2)


def _delivery_event(marker: str) -> Webhook:
    data = {"id": f"sms-{marker}", "status": "delivered"}
    return _event(marker, {"type": "message.delivered", "data": data}, "message.delivered")


_WEBHOOKS: Final[Mapping[Callable[[str], Webhook], int]] = {
    lambda marker: _reply(marker, forged=True): 20,
    lambda marker: _reply(marker, repeat=3): 10,
    _said_twice: 6,
    _delivery_event: 10,
    lambda marker: _event(marker, {"type": f"What? {marker}"}, "other"): 2,
    lambda marker: _event(marker, [marker], "unparsed"): 2,
}


def plan_webhooks(count: int, *, run: str) -> list[Webhook]:
    """Plan the webhooks, genuine ones and forged ones mixed; the same for the same count."""
    makers = _mix(_WEBHOOKS.items(), 200, count, rest=_reply)
    return [make(f"demo-{run}-{number:05}") for number, make in enumerate(makers)]


def _mix(shares: Iterable[tuple[T, int]], whole: int, count: int, *, rest: T) -> list[T]:
    """Give each its share of the count, at least one, and shuffle."""
    mixed = [each for each, n in shares for _ in range(max(1, round(n * count / whole)))]
    mixed += [rest] * (count - len(mixed))
    random.Random(count).shuffle(mixed)
    return mixed


def _dump(value: object) -> bytes:
    return json.dumps(value).encode()


def count_open_requests(requests: Sequence[Request], seen: Seen) -> int:
    """Count the requests that are neither accepted nor dead-lettered yet."""
    ended = {*seen.accepted, *(message_id for message_id, _ in seen.dead)}
    return sum(request.message_id not in ended for request in requests)


def count_open_webhooks(webhooks: Sequence[Webhook], seen: Seen) -> int:
    """Count the webhooks that are not answered yet, or whose event has not arrived."""
    arrived = Counter(marker for marker, _ in seen.events)
    return sum(
        len(seen.answers.get(webhook.marker, ())) < len(webhook.answers)
        or arrived[webhook.marker] < webhook.events
        for webhook in webhooks
    )


def check_requests(requests: Sequence[Request], seen: Seen) -> list[str]:
    """Say in lines which request has not come to exactly its one expected end."""
    accepted = Counter(seen.accepted)
    dead: defaultdict[str, list[str]] = defaultdict(list)
    for message_id, reason in seen.dead:
        dead[message_id].append(reason)
    strangers = (accepted.keys() | dead.keys()) - {request.message_id for request in requests}
    found = [
        (_judge(request.expected, accepted[request.message_id], dead[request.message_id]), request)
        for request in requests
    ]
    problems = [(problem, request.message_id) for problem, request in found if problem]
    return _in_lines(
        [*problems, *(("message that nobody published", name) for name in sorted(strangers))]
    )


def _judge(expected: str, accepted: int, reasons: Sequence[str]) -> str | None:
    ends = [*([SENT] * accepted), *reasons]
    if ends == [expected]:
        return None
    if not ends:
        return f"unaccounted for, expected {expected}"
    if accepted > 1:
        return "sent twice"
    return f"expected {expected}, but {' and '.join(ends)}"


def check_webhooks(webhooks: Sequence[Webhook], seen: Seen) -> list[str]:
    """Say in lines which webhook was not answered, or not published, as it should have been."""
    events: defaultdict[str, list[str]] = defaultdict(list)
    for marker, routing_key in seen.events:
        events[marker].append(routing_key)
    known = {webhook.marker for webhook in webhooks}
    problems = [
        (problem, webhook.marker)
        for webhook in webhooks
        for problem in _judge_webhook(
            webhook, seen.answers.get(webhook.marker, []), events[webhook.marker]
        )
    ]
    return _in_lines(
        [*problems, *(("event that nobody sent", m) for m in sorted(events.keys() - known))]
    )


def _judge_webhook(
    webhook: Webhook, answers: Sequence[int | None], routing_keys: Sequence[str]
) -> Iterator[str]:
    if answers != webhook.answers:
        yield f"webhook answered {_join(answers)}, expected {_join(webhook.answers)}"
    if routing_keys != [webhook.routing_key] * webhook.events:
        expected = f"{webhook.events} x {webhook.routing_key}"
        yield f"events received: {_join(routing_keys)}, expected {expected}"


def _join(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values) or "none"


def _in_lines(problems: Iterable[tuple[str, str]]) -> list[str]:
    names: defaultdict[str, list[str]] = defaultdict(list)
    for problem, name in problems:
        names[problem].append(name)
    return [
        f"{len(found)} x {problem}: {', '.join(found[:_SHOWN])}{', ...' * (len(found) > _SHOWN)}"
        for problem, found in names.items()
    ]
