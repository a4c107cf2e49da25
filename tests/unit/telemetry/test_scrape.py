"""Reading a /metrics page."""

import pytest

from bridge.telemetry.scrape import Scrape

PAGE = """\
# TYPE sent_total counter
sent_total{queue="q",reason="none"} 3.0
sent_total{queue="q",reason="refused"} 0.0
sent_total{queue="other",reason="none"} 4.0
"""


def test_samples_are_added_up() -> None:
    """All samples of a name are added, or those with the given labels."""
    scrape = Scrape(PAGE)

    assert scrape.total("sent_total") == 7
    assert scrape.total("sent_total", queue="q") == 3
    assert scrape.total("sent") == 0


def test_zeros_are_left_out() -> None:
    """A label value with a count of zero is left out."""
    assert Scrape(PAGE).by("reason", "sent_total", queue="q") == {"none": 3}


def test_another_page_is_refused() -> None:
    """A page in another format is an error, not an empty scrape."""
    with pytest.raises(ValueError, match="no metrics"):
        Scrape("<html><body>hello</body></html>")
