"""Which queues have too few members on a cluster, without a broker."""

import re

import pytest

from bridge.admin.checks.management_api import judge_members, judge_online
from bridge.admin.management import Members

A, B, C, D = (f"rabbit@{letter}" for letter in "abcd")


def on(*nodes: str) -> Members:
    return Members(nodes, nodes)


@pytest.mark.parametrize(
    ("held", "nodes", "grown"),
    [
        pytest.param([A], [A, B, C], [B, C], id="one-of-three"),
        pytest.param([B, C], [A, B, C], [A], id="two-of-three"),
        pytest.param([D], [A, B, C, D], [A, B], id="one-of-four"),
        pytest.param([A], [A, B], [B], id="one-of-two"),
        pytest.param([A, B], [A, B], [], id="both-of-two"),
        pytest.param([B, C, D], [A, B, C, D], [], id="three-of-four"),
        pytest.param([], [A, B, C], [], id="not-named"),
    ],
)
def test_missing_members_are_grown(held: list[str], nodes: list[str], grown: list[str]) -> None:
    found = list(judge_members({"sms.outbound": on(*held)}, nodes, vhost="/"))
    fixes = [fix for one in found for fix in (one.fix or "").split("; ")]

    assert [fix.split()[2] for fix in fixes] == grown
    assert {one.result for one in found} <= {"warn"}


def test_queues_that_miss_the_same_are_told_together() -> None:
    queues = {"sms.outbound": on(A), "sms.outbound.dead": on(A), "sms.inbound": on(A, B, C)}
    (found,) = judge_members(queues, [A, B, C], vhost="a.b/c")
    vhost, pattern = re.findall(r"'([^']*)'", (found.fix or "").partition("; ")[0])

    assert found.text.startswith("sms.outbound, sms.outbound.dead: on 1 of 3 nodes; ")
    assert [name for name in (*queues, "sms_outbound") if re.search(pattern, name)] == [
        "sms.outbound",
        "sms.outbound.dead",
    ]
    assert [name for name in ("a.b/c", "aXb/c", "a.b/cd") if re.search(vhost, name)] == ["a.b/c"]


@pytest.mark.parametrize(
    ("online", "results"), [([A, B, C], []), ([A, B], ["warn"]), ([C], ["fail"]), ([], ["fail"])]
)
def test_members_that_are_away_are_told(online: list[str], results: list[str]) -> None:
    found = list(judge_online({"sms.outbound": Members((A, B, C), tuple(online))}))

    assert [one.result for one in found] == results
    assert all(node in one.text for one in found for node in {A, B, C} - set(online))
