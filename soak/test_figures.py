"""Tables in the documentation are replaced between their marks, and nowhere else."""

import pytest

from soak.figures import PAGE, format_table, merge_rows, read_rows, replace_table
from soak.scenes import MARK as SCENES_MARK
from soak.scenes import SCENES
from soak.side_by_side import MARK as SIDE_BY_SIDE_MARK

TABLE = "| name | value |\n| --- | --- |\n| one | 1 |\n| two | 2 |"
EMPTY = "before\n\n<!-- figures: begin -->\n<!-- figures: end -->\nafter\n"


def test_a_table_goes_between_its_marks() -> None:
    """What stood between the marks goes, and what is around them stays."""
    table = format_table(("name", "value"), [("one", "1"), ("two", "2")])
    page = replace_table(EMPTY, "figures", "an older table")

    assert table == TABLE
    assert replace_table(page, "figures", table) == (
        f"before\n\n<!-- figures: begin -->\n{TABLE}\n<!-- figures: end -->\nafter\n"
    )


def test_rows_are_merged_in_order() -> None:
    """A new row takes the place of its old one; one that nobody names any more is dropped."""
    page = replace_table(EMPTY, "figures", TABLE)
    rows = [("three", "3"), ("two", "new")]

    assert merge_rows(page, "figures", rows, ["three", "two", "one"]) == [
        *rows,
        ("one", "1"),
    ]
    assert merge_rows(page, "figures", rows, ["two", "three"]) == rows[::-1]
    assert merge_rows(EMPTY, "figures", rows, ["two", "three"]) == rows[::-1]


def test_a_page_without_marks_is_refused() -> None:
    """Nothing is written to a page that has no place for it."""
    with pytest.raises(ValueError, match="substring not found"):
        replace_table("a page", "figures", TABLE)


def test_the_page_has_a_place_for_each_command() -> None:
    """Both commands find their marks, and the page names no scene that there is not."""
    page = PAGE.read_text(encoding="utf-8")

    read_rows(page, SIDE_BY_SIDE_MARK)
    assert {row[0] for row in read_rows(page, SCENES_MARK)} <= {*SCENES}
