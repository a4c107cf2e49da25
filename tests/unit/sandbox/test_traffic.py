"""The demo's plan covers every kind of end, and its check finds every deviation."""

from collections import Counter

import pytest

from bridge.sandbox.traffic import (
    MARKER,
    Request,
    Seen,
    Webhook,
    check_requests,
    check_webhooks,
    count_open_requests,
    count_open_webhooks,
    plan_faults,
    plan_requests,
    plan_webhooks,
)

REQUESTS = plan_requests(1000, run="ab", now=lambda: 1_000_000.0)
WEBHOOKS = plan_webhooks(200, run="ab")


def _ideal(requests: list[Request], webhooks: list[Webhook]) -> Seen:
    """Return what is seen when everything goes as planned."""
    return Seen(
        published=len(requests),
        accepted=[r.message_id for r in requests if r.expected == "sent"],
        dead=[(r.message_id, r.expected) for r in requests if r.expected != "sent"],
        answers={w.marker: list(w.answers) for w in webhooks},
        events=[(w.marker, w.routing_key) for w in webhooks for _ in range(w.events)],
    )


def _one(expected: str) -> Request:
    return next(r for r in REQUESTS if r.expected == expected)


def test_plans_every_end() -> None:
    """A thousand requests hold the planned number of each end."""
    assert Counter(r.expected for r in REQUESTS) == {
        "sent": 945,
        "invalid": 20,
        "refused": 20,
        "expired": 5,
        "uncertain": 5,
        "exhausted": 5,
    }


@pytest.mark.parametrize("count", [50, 137, 1000])
def test_plans_as_many_as_asked_with_every_kind(count: int) -> None:
    """A short demo, too, has every kind of request and webhook."""
    requests = plan_requests(count, run="ab")
    webhooks = plan_webhooks(count, run="ab")

    assert len({r.message_id for r in requests}) == count
    assert len({w.marker for w in webhooks}) == count
    assert {r.expected for r in requests} == {r.expected for r in REQUESTS}
    assert {w.routing_key for w in webhooks} == {w.routing_key for w in WEBHOOKS}


def test_a_fault_meets_one_message_only() -> None:
    """Each fault names a number that no other message goes to."""
    receivers = Counter(r.to for r in REQUESTS)
    faults = plan_faults(REQUESTS)

    assert len(faults) == 113
    assert all(receivers[fault["to"]] == 1 for fault in faults)


def test_no_fault_keeps_a_message_that_it_does_not_answer() -> None:
    """A second acceptance of a message is always a fault of the bridge."""
    assert {fault.get("mode", "answer") for fault in plan_faults(REQUESTS)} == {
        "answer",
        "hang",
        "cut",
    }


def test_twenty_webhooks_are_forged() -> None:
    """Forged webhooks expect a refusal and no event."""
    forged = [w for w in WEBHOOKS if w.answers == [401]]

    assert len(forged) == 20
    assert {w.events for w in forged} == {0}


def test_every_marker_is_found_in_the_body() -> None:
    """The subscriber can tell which webhook an event came from."""
    assert all(MARKER.search(w.body.decode()) for w in WEBHOOKS)


def test_nothing_is_open_and_nothing_wrong_when_all_goes_as_planned() -> None:
    """The ideal run has no open message and no complaint."""
    seen = _ideal(REQUESTS, WEBHOOKS)

    assert count_open_requests(REQUESTS, seen) == 0
    assert count_open_webhooks(WEBHOOKS, seen) == 0
    assert check_requests(REQUESTS, seen) == []
    assert check_webhooks(WEBHOOKS, seen) == []


def test_everything_is_open_at_the_start() -> None:
    """Before anything is seen, every message and webhook is open."""
    assert count_open_requests(REQUESTS, Seen()) == 1000
    assert count_open_webhooks(WEBHOOKS, Seen()) == 200


@pytest.mark.parametrize(
    ("expected", "accepted", "dead", "problem"),
    [
        ("sent", 0, [], "1 x unaccounted for, expected sent: "),
        ("sent", 2, [], "1 x sent twice: "),
        ("sent", 1, ["uncertain"], "1 x expected sent, but sent and uncertain: "),
        ("sent", 0, ["exhausted"], "1 x expected sent, but exhausted: "),
        ("refused", 0, ["invalid"], "1 x expected refused, but invalid: "),
        ("refused", 1, [], "1 x expected refused, but sent: "),
        ("refused", 0, ["refused", "refused"], "1 x expected refused, but refused and refused: "),
    ],
)
def test_finds_a_request_with_another_end(
    expected: str, accepted: int, dead: list[str], problem: str
) -> None:
    """A request that is lost, doubled or misjudged is named with what was expected."""
    request = _one(expected)
    seen = _ideal(REQUESTS, [])
    seen.accepted = [a for a in seen.accepted if a != request.message_id]
    seen.accepted += [request.message_id] * accepted
    seen.dead = [d for d in seen.dead if d[0] != request.message_id]
    seen.dead += [(request.message_id, reason) for reason in dead]

    assert check_requests(REQUESTS, seen) == [problem + request.message_id]


def test_finds_messages_that_nobody_published() -> None:
    """What the service accepted and nobody published is named."""
    seen = _ideal(REQUESTS, [])
    seen.accepted.append("stranger")

    assert check_requests(REQUESTS, seen) == ["1 x message that nobody published: stranger"]


def test_names_five_and_counts_all() -> None:
    """A long list of lost messages is one line with the first five."""
    seen = _ideal(REQUESTS, [])
    seen.accepted = seen.accepted[10:]
    line = check_requests(REQUESTS, seen)[0]

    assert line.startswith("10 x unaccounted for")
    assert line.count("demo-ab-") == 5
    assert line.endswith(", ...")


def _marker(events: int) -> str:
    return next(w.marker for w in WEBHOOKS if w.events == events)


@pytest.mark.parametrize(
    ("events", "received", "problem"),
    [
        (0, ["message.received"], "events received: message.received, expected 0 x "),
        (1, [], "events received: none, expected 1 x message.received"),
        (1, ["other"], "events received: other, expected 1 x message.received"),
        (2, ["message.received"], "events received: message.received, expected 2 x "),
    ],
    ids=["forged one published", "lost", "wrong routing key", "said twice, published once"],
)
def test_finds_a_webhook_with_other_events(events: int, received: list[str], problem: str) -> None:
    """An event that is lost, doubled, forged or misrouted is named."""
    marker = _marker(events)
    seen = _ideal([], WEBHOOKS)
    seen.events = [e for e in seen.events if e[0] != marker] + [(marker, key) for key in received]
    lines = check_webhooks(WEBHOOKS, seen)

    assert len(lines) == 1
    assert lines[0].startswith(f"1 x {problem}")
    assert lines[0].endswith(marker)


@pytest.mark.parametrize("answers", [[], [None], [503], [200, 200]])
def test_finds_a_webhook_with_another_answer(answers: list[int | None]) -> None:
    """A webhook that got no answer, or not the expected one, is named."""
    marker = _marker(0)
    seen = _ideal([], WEBHOOKS)
    seen.answers[marker] = answers

    assert len(check_webhooks(WEBHOOKS, seen)) == 1


def test_finds_an_event_that_nobody_sent() -> None:
    """An event without a webhook is named."""
    seen = _ideal([], WEBHOOKS)
    seen.events.append(("demo-ab-99999", "message.received"))

    assert check_webhooks(WEBHOOKS, seen) == ["1 x event that nobody sent: demo-ab-99999"]
