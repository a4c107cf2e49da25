"""Responses that are made for a handler."""

import json

from bridge.http.messages import problem


def test_problem_says_status_and_title() -> None:
    """An error answer is problem+json with a title, its status and the headers given."""
    answer = problem(503, "busy", Retry_After="3")

    assert (
        answer.status,
        json.loads(answer.body),
        answer.headers["content-type"],
        answer.headers["Retry-After"],
    ) == (503, {"title": "busy", "status": 503}, "application/problem+json", "3")
