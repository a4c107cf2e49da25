"""The counts of a soak, and its report."""

import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.table import Table

from soak import checker, webhook_checker
from soak.growth import Growth

MIB: Final = 2**20
PLAIN_WIDTH: Final = 120


def tell(text: str) -> None:
    """Print a line with the time, without buffering."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
    sys.stdout.flush()


@dataclass
class Books:
    """The counts of all rounds."""

    seconds: float = 0.0
    messages: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    worst: dict[str, int] = field(default_factory=lambda: {"kill": 0, "freeze": 0})
    waits: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    malformed: int = 0
    attacks: int = 0
    webhook_secrets: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, sms: checker.Verdict, webhooks: webhook_checker.Verdict) -> None:
        """Add the counts of a round."""
        self.messages.update(
            {
                "confirmed to the publisher": sms.confirmed,
                "sent": sms.sent,
                "lost": len(sms.lost),
                "unexpected": len(sms.unexpected),
                "waiting": sms.waiting,
                **{f"dead: {reason}": count for reason, count in sms.dead.items()},
                "dead, and yet accepted by the API": sms.dead_but_sent,
                "out of order": len(sms.out_of_order),
                "with a new key": len(sms.new_keys),
                "POSTs": sms.posts,
                **{f"POSTed again: {cause}": n for cause, n in sms.extra_posts.items()},
                **{f"SMS doubled: {cause}": n for cause, n in sms.doubled.items()},
            }
        )
        self.events.update(
            {
                "signed": webhooks.events,
                "tries": webhooks.tries,
                "refused (4xx)": webhooks.refused,
                "answered 200": webhooks.accepted,
                "answered 200 and missing": len(webhooks.missing),
                "copies, each after a 503 or no answer": webhooks.copies,
                "copies of anything else": len(webhooks.excess),
                "stored and never signed": len(webhooks.unexpected),
                "forged": webhooks.forged,
                "forged and not answered 401": webhooks.forged_accepted,
            }
        )
        self.worst["kill"] = max(self.worst["kill"], sms.worst_kill)
        self.worst["freeze"] = max(self.worst["freeze"], sms.worst_freeze)
        self.problems += [f"messages: {problem}" for problem in sms.problems]
        self.problems += [f"webhooks: {problem}" for problem in webhooks.problems]
        for message, posts in sms.histories.items():
            self.problems.append("\n  ".join([message, *(posts or ["never POSTed"])]))
        for kind, waits in sms.recovery.items():
            self.waits[kind] += waits

    def summary(self) -> str:
        """Return the counts so far in a line."""
        lost = self.messages["lost"] + self.events["answered 200 and missing"]
        return (
            f"accounted for: {self.messages['confirmed to the publisher']} messages, "
            f"{self.malformed} malformed ones, {self.events['signed']} webhooks; lost {lost}"
        )


def draw(
    title: str,
    books: Books,
    timeline: Sequence[checker.Fault],
    growths: Mapping[str, Growth],
) -> None:
    """Print counts, faults, growth and verdict."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    table = Table(title=title, title_justify="left", show_header=False)
    for section, counts in (("messages", books.messages), ("webhooks", books.events)):
        for name, count in counts.items():
            table.add_row(f"{section} {name}", f"{count:,}")
        table.add_section()
    table.add_row("most SMS doubled by one kill of a worker", str(books.worst["kill"]))
    table.add_row("most SMS doubled by one freeze of a worker", str(books.worst["freeze"]))
    table.add_row("malformed messages", f"{books.malformed:,}")
    table.add_row("attacks on the webhook port", f"{books.attacks:,}")
    table.add_row("webhook secrets", str(books.webhook_secrets))
    table.add_row("seconds", f"{books.seconds:.0f}")
    console.print(table)
    console.print(_faults(books, timeline))
    for name, growth in growths.items():
        quarters = ", ".join(f"{each / MIB:.1f}" for each in growth.quarters)
        console.print(
            f"{name}: {growth.start / MIB:.1f} MiB at the start, by quarters {quarters}, at the "
            f"end {growth.end / MIB:.1f}, at most {growth.peak / MIB:.1f}; in the second half "
            f"{growth.share:+.1%} a quarter; open files {growth.more_files:+d}"
        )
    for problem in books.problems:
        console.print(f"FAILED: {problem}", markup=False)
    if not books.problems:
        console.print("PASSED: nothing was lost, nothing was sent twice without need.")


def _faults(books: Books, timeline: Sequence[checker.Fault]) -> Table:
    table = Table(
        title="Seconds from the end of a fault to the next accepted POST", title_justify="left"
    )
    for name in ("fault", "times", "median", "most"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for kind, count in sorted(Counter(fault.kind for fault in timeline).items()):
        known = books.waits.get(kind, [])
        shown = [f"{statistics.median(known):.2f}", f"{max(known):.2f}"] if known else ["-", "-"]
        table.add_row(kind, str(count), *shown)
    return table
