"""How long a server's certificate is still valid."""

import time

import pytest

from bridge.admin.checks.findings import judge_certificate

DAY_SECONDS = 86400


@pytest.mark.parametrize(
    ("days", "result", "text"),
    [(13.9, "warn", "ends in 13 days"), (14.1, "ok", "valid until"), (-1, "warn", "in 0 days")],
)
def test_a_certificate_that_ends_soon_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, days: float, result: str, text: str
) -> None:
    # 1 June 2030.
    ends = 1_906_502_400
    monkeypatch.setattr(time, "time", lambda: ends - days * DAY_SECONDS)
    found = judge_certificate("broker", {"notAfter": "Jun  1 00:00:00 2030 GMT"})

    assert (found.result, found.subject) == (result, "broker")
    assert text in found.text
    assert "2030-06-01" in found.text
