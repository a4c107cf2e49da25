"""Runs the benchmark: the worker and the receiver beside their alternatives, on one machine.

    python bench/run.py all
    python bench/run.py http receivers --rounds 5 --messages 20000
    python bench/run.py guard
    python bench/run.py profile
    python bench/run.py report      # write the page again, from the results beside it

Exit status 0: measured. 1: a measurement failed, or the worker is too slow. 2: bad usage.
"""

import argparse
import logging
import signal
import sys
from dataclasses import asdict
from statistics import median
from typing import Final

from rich.console import Console

from bench.environment import describe
from bench.instructions import has_valgrind
from bench.lineup import COMPILED, GO, REDPANDA
from bench.profiles import Profile, profile_receiver, profile_worker
from bench.rig import rigged
from bench.rounds import BenchError, Options
from bench.scenes import SCENES, guard
from bridge.errors import BridgeError

GUARD_RATIO: Final = 1.3
# No round starts after this time. A round takes 10 s, as does the start of the broker.
GUARD_SECONDS: Final = 15.0
GUARD_MESSAGES: Final = 3_000
ALONE: Final = ("all", "guard", "profile", "report")
PLAIN_WIDTH: Final = 140
PROFILE_LINES: Final = 40
EXIT_INTERRUPTED: Final = 130


def main() -> int:
    """Run the command line, and return the exit status."""
    options = _parse_arguments()
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.what == ["guard"]:
            return _guard(console, options)
        if options.what == ["profile"]:
            return _profile(console, options)
        if options.what == ["report"]:
            return _report()
        return _measure(console, options)
    except (BenchError, BridgeError) as error:
        console.print(f"FAILED: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _measure(console: Console, options: argparse.Namespace) -> int:
    # Imports matplotlib, which the guard does not need.
    from bench.report import draw, load_results, write  # noqa: PLC0415

    for path, left_out, target, need in (
        (COMPILED, "the compiled bridge", "compiled", "a C compiler"),
        (REDPANDA, "Redpanda Connect", "redpanda-connect", "Go"),
        (GO, "the Go programs", "go-contestants", "Go"),
    ):
        if not path.exists():
            console.print(f"Without {left_out}: `make {target}` needs {need}.")
    scenes = list(SCENES) if options.what == ["all"] else options.what
    if options.what == ["all"] and not has_valgrind():
        console.print("Without instruction counts: valgrind is not installed.")
        scenes = [scene for scene in scenes if not scene.endswith("instructions")]
    amount = Options(options.messages, options.rounds, options.million, options.minutes)
    results = load_results()
    with rigged() as rig:
        environment = describe(rig.broker)
        for name, value in environment.items():
            console.print(f"{name}: {value}", markup=False)
        for scene in scenes:
            rows = SCENES[scene](rig, amount, lambda line: console.print(line, markup=False))
            draw(console, scene, rows)
            results[scene] = {"environment": environment, "options": asdict(amount), "rows": rows}
            # Save the results, because the next scene may fail.
            write(results)
    return 0


def _report() -> int:
    from bench.report import load_results, write  # noqa: PLC0415

    write(load_results())
    return 0


def _guard(console: Console, options: argparse.Namespace) -> int:
    with rigged() as rig:
        ratios = guard(
            rig,
            messages=GUARD_MESSAGES,
            seconds=GUARD_SECONDS,
            tell=lambda line: console.print(line, markup=False),
        )
    ratio = median(ratios)
    is_fast = ratio >= options.least
    console.print(
        f"{'PASSED' if is_fast else 'FAILED'}: {ratio:.2f} times the bare loop's messages per CPU "
        f"second, at least {options.least} are asked for; "
        f"each round: {', '.join(f'{one:.2f}' for one in ratios)}"
    )
    return 0 if is_fast else 1


def _profile(console: Console, options: argparse.Namespace) -> int:
    with rigged() as rig:
        for title, profile in (
            ("worker", profile_worker(rig, messages=options.messages, native=options.native)),
            ("webhook", profile_receiver(rig, webhooks=options.messages, native=options.native)),
        ):
            _print_profile(console, title, profile)
    return 0


def _print_profile(console: Console, title: str, profile: Profile) -> None:
    for heading, shares in (("itself", profile.own), ("and all it calls", profile.whole)):
        console.print(f"\n{title}, {profile.samples} samples, in the function {heading}:")
        for name, share in shares[:PROFILE_LINES]:
            console.print(f"{share:7.1%}  {name}", markup=False)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure both roles beside the alternatives.")
    choices = (*SCENES, *ALONE)
    parser.add_argument("what", nargs="+", choices=choices, metavar="|".join(choices))
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--million", action="store_true", help="long-queues: also a million messages"
    )
    parser.add_argument("--minutes", type=float, default=1, help="pauses: duration per role")
    parser.add_argument("--least", type=float, default=GUARD_RATIO, help="guard: minimum ratio")
    parser.add_argument("--native", action="store_true", help="profile: also functions in C")
    options = parser.parse_args()
    if len(options.what) > 1 and set(ALONE) & set(options.what):
        parser.error(f"{', '.join(ALONE)} stand alone")
    if options.messages < 1000 or options.rounds < 1 or options.minutes <= 0:
        parser.error("--messages must be 1000 or more, --rounds 1 or more, --minutes positive")
    return options


if __name__ == "__main__":
    sys.exit(main())
