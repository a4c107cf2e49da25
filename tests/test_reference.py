"""The reference pages match the code: each table has exactly the existing entries."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest

from bridge.config import Settings
from bridge.outcome_event import ReceiptOutcome
from bridge.webhook.receipts import DeliveryState
from bridge.worker import envelope
from bridge.worker.delivery import WaitCause
from bridge.worker.fates import DeadReason, FinalOutcome
from tests.reference_pages import NOT_WRITTEN, pages

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "reference.md").read_text(encoding="utf-8")
# The tables of a section, by the heading of their first column.
SECTIONS = {
    heading: {
        column: re.findall(r"^\| `([^`]+)`", rows, re.MULTILINE)
        for column, rows in re.findall(
            r"^\| (\w+) \|.*\n\|[-| ]+\n((?:\|.*\n?)+)", text, re.MULTILINE
        )
    }
    for heading, text in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE)
}


def test_generated_pages_are_up_to_date() -> None:
    """`make reference-pages` updates the pages.

    Write the meaning of a new log event into its row.
    """
    generated = pages()
    stale = [path.name for path, text in generated.items() if path.read_text("utf-8") != text]
    incomplete = [path.name for path, text in generated.items() if NOT_WRITTEN in text]

    assert (stale, incomplete) == ([], [])


OUTCOMES = [*get_args(FinalOutcome), *get_args(ReceiptOutcome)]
ROWS: dict[tuple[str, str], Iterable[str]] = {
    ("A dead letter: headers", "reason"): get_args(DeadReason),
    ("An outcome", "outcome"): OUTCOMES,
}


@pytest.mark.parametrize(("heading", "column"), ROWS)
def test_a_table_has_what_there_is(heading: str, column: str) -> None:
    """Every reason and outcome has exactly one row."""
    assert sorted(SECTIONS[heading][column]) == sorted(ROWS[heading, column])


def test_every_cause_of_a_wait_is_explained() -> None:
    """docs/monitoring.md has a row for each cause of a wait."""
    page = (DOCS / "monitoring.md").read_text(encoding="utf-8")
    (rows,) = re.findall(r"^\| Cause \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)

    assert sorted(re.findall(r"^\| `(\w+)`", rows, re.MULTILINE)) == sorted(get_args(WaitCause))


def test_every_header_of_ours_is_in_some_table() -> None:
    told = {row for tables in SECTIONS.values() for row in tables.get("header", [])}
    known = {value for value in vars(envelope).values() if _is_header(value)}
    known.discard(envelope.PRIORITY)

    assert known - told == set()
    assert {name for name in told if _is_header(name)} - known == {
        f"{envelope.PREFIX}{name}"
        for name in ("body-sha256", "event-id", "delivery", "provider-id", "message-id")
    }


def _is_header(value: object) -> bool:
    return isinstance(value, str) and value.startswith(envelope.PREFIX) and value != envelope.PREFIX


def test_the_names_on_the_broker_are_the_defaults() -> None:
    settings = Settings()
    queue = settings.worker.queue
    inbound = {settings.webhook.exchange, settings.webhook.queue}
    own = {queue, "sms.outcome"} | {
        f"{queue}.{name}"
        for name in (
            "retry.<delay>",
            "dead",
            "paused",
            "active",
            "workers",
            "urgent",
        )
    }

    assert set(SECTIONS["Names on the broker"]["name"]) == own | inbound
    assert "`5s 30s 2m 10m 1h`" in PAGE
    assert f"`worker.max_text_length` is {settings.worker.max_text_length} by default" in PAGE
    assert all(f"`{word}`" in PAGE for word in get_args(DeliveryState))
