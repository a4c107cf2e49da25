"""The options that the commands of `sms-bridge dlq` share, and the filter that they make."""

from typing import TYPE_CHECKING, Annotated, Final, get_args

import typer

from bridge.worker.fates import DeadReason

if TYPE_CHECKING:
    from bridge.admin.dead_letters.letter import Filter

REASONS: Final = get_args(DeadReason)


def _reason(value: str) -> str:
    if value not in REASONS:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, REASONS))}.")
    return value


def _age(value: str) -> float:
    from bridge.config.fields import parse_duration

    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return seconds if isinstance(seconds, float) else 0.0


Reasons = Annotated[
    list[str] | None,
    typer.Option(
        "--reason",
        parser=_reason,
        autocompletion=lambda: list(REASONS),
        metavar=f"[{'|'.join(REASONS)}]",
        help="Only this reason; may be repeated.",
    ),
]
Ids = Annotated[
    list[str] | None,
    typer.Option("--id", metavar="ID", help="Only this message id; may be repeated."),
]
OlderThan = Annotated[
    float | None,
    typer.Option(parser=_age, metavar="AGE", help="Only what died longer ago, as 90s, 5m, 2h, 7d."),
]
NewerThan = Annotated[
    float | None,
    typer.Option(parser=_age, metavar="AGE", help="Only what died after that."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would be done.")]
Reveal = Annotated[bool, typer.Option("--reveal", help="Show numbers and texts in full.")]
AtMost = Annotated[int | None, typer.Option("--limit", help="At most so many.", min=1)]


def make_filter(
    reasons: list[str] | None,
    ids: list[str] | None,
    older_than: float | None,
    newer_than: float | None,
) -> "Filter":
    """Make of the options which letters are meant; ages are in seconds."""
    from bridge.admin.dead_letters.letter import Filter

    return Filter(
        reasons=reasons or (),
        ids=ids or (),
        older_than_seconds=older_than,
        newer_than_seconds=newer_than,
    )
