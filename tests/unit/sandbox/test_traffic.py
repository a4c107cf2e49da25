"""The demo's plan covers every kind of end, and its check finds every deviation."""

from collections import Counter

import pytest

from bridge.sandbox.demo.traffic import (
    Observed,
    check_traffic,
    plan_messages,
    plan_webhooks,
    tables,
)

MESSAGES = plan_messages(1000, run="ab")
WEBHOOKS = plan_webhooks(200, run="ab")


def _ideal() -> Observed:
    return Observed(
        published=len(MESSAGES),
        accepted=[r.message_id for r in MESSAGES if r.expected == "sent"],
        dead=[(r.message_id, r.expected) for r in MESSAGES if r.expected != "sent"],
        answers={w.marker: list(w.answers) for w in WEBHOOKS},
        events=[(w.marker, key) for w in WEBHOOKS for key in w.routing_keys],
    )


def test_plans_every_end() -> None:
    """A thousand requests hold the planned number of each end."""
    assert Counter(r.expected for r in MESSAGES) == {
        "sent": 945,
        "invalid": 20,
        "refused": 20,
        "expired": 5,
        "uncertain": 5,
        "exhausted": 5,
    }


@pytest.mark.parametrize("count", [50, 1000])
def test_plans_as_many_as_asked_with_every_kind(count: int) -> None:
    """A short demo, too, has every kind of message and webhook."""
    messages, webhooks = plan_messages(count, run="ab"), plan_webhooks(count, run="ab")
    keys = [{tuple(w.routing_keys) for w in planned} for planned in (webhooks, WEBHOOKS)]

    assert len({m.message_id for m in messages}) == len({w.marker for w in webhooks}) == count
    assert {m.expected for m in messages} == {m.expected for m in MESSAGES}
    assert keys[0] == keys[1]


def test_a_fault_meets_one_message_only() -> None:
    """Each fault names a number that no other message goes to."""
    receivers = Counter(r.to for r in MESSAGES)
    faults = [r.fault for r in MESSAGES if r.fault]

    assert len(faults) == 113
    assert all(receivers[fault["to"]] == 1 for fault in faults)
    # A second acceptance of a message is always a fault of the bridge.
    assert {fault.get("mode", "answer") for fault in faults} == {"answer", "hang", "cut"}


def test_nothing_is_wrong_when_all_goes_as_planned() -> None:
    assert check_traffic(MESSAGES, WEBHOOKS, _ideal()) == []


def test_the_tables_are_red_where_numbers_differ() -> None:
    """The summary can be drawn however early a run has failed."""
    styles = [
        {row.style for table in tables(MESSAGES, WEBHOOKS, seen) for row in table.rows}
        for seen in (_ideal(), Observed())
    ]

    assert styles == [{None}, {None, "red"}]


@pytest.mark.parametrize(
    ("expected", "accepted", "dead", "problem"),
    [
        ("sent", 0, [], "nothing, expected sent"),
        ("sent", 2, [], "sent and sent, expected sent"),
        ("sent", 1, ["uncertain"], "sent and uncertain, expected sent"),
        ("refused", 0, ["refused", "refused"], "refused and refused, expected refused"),
    ],
)
def test_finds_a_message_with_another_end(
    expected: str, accepted: int, dead: list[str], problem: str
) -> None:
    """A message that is lost, doubled or misjudged is named with what was expected."""
    name = next(m.message_id for m in MESSAGES if m.expected == expected)
    seen = _ideal()
    seen.accepted = [a for a in seen.accepted if a != name] + [name] * accepted
    seen.dead = [d for d in seen.dead if d[0] != name] + [(name, reason) for reason in dead]

    assert check_traffic(MESSAGES, WEBHOOKS, seen) == [f"1 x message: {problem}: {name}"]


def test_names_five_and_counts_all() -> None:
    """A long list of lost messages is one line with the first five."""
    seen = _ideal()
    seen.accepted = seen.accepted[10:]
    (line,) = check_traffic(MESSAGES, WEBHOOKS, seen)

    assert line.startswith("10 x message: nothing, expected sent: ")
    assert line.count("demo-ab-") == 5
    assert line.endswith(", ...")


@pytest.mark.parametrize(
    ("events", "received", "problem"),
    [
        (0, ["message.received"], "message.received, expected nothing"),
        (1, [], "nothing, expected message.received"),
        (1, ["other"], "other, expected message.received"),
        (
            2,
            ["message.received"],
            "message.received, expected message.received and message.received",
        ),
    ],
    ids=["forged one published", "lost", "wrong routing key", "said twice, published once"],
)
def test_finds_a_webhook_with_other_events(events: int, received: list[str], problem: str) -> None:
    """An event that is lost, doubled, forged or misrouted is named."""
    marker = next(w.marker for w in WEBHOOKS if len(w.routing_keys) == events)
    seen = _ideal()
    seen.events = [e for e in seen.events if e[0] != marker] + [(marker, key) for key in received]

    assert check_traffic(MESSAGES, WEBHOOKS, seen) == [
        f"1 x webhook published: {problem}: {marker}"
    ]


@pytest.mark.parametrize("answers", [[], [None], [503], [200, 200]])
def test_finds_a_webhook_with_another_answer(answers: list[int | None]) -> None:
    """A webhook that got no answer, or not the expected one, is named."""
    marker = next(w.marker for w in WEBHOOKS if w.answers == [401])
    seen = _ideal()
    seen.answers[marker] = answers
    (line,) = check_traffic(MESSAGES, WEBHOOKS, seen)

    assert line.endswith(f", expected 401: {marker}")


def test_finds_strangers() -> None:
    """A message that nobody published and an event that nobody sent are named."""
    seen = _ideal()
    seen.accepted.append("stranger")
    seen.events.append(("demo-ab-99999", "message.received"))

    assert check_traffic(MESSAGES, WEBHOOKS, seen) == [
        "1 x message: sent, expected nothing: stranger",
        "1 x webhook published: message.received, expected nothing: demo-ab-99999",
    ]
