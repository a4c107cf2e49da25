"""The documents match the code: everything that they name exists."""

import ast
import pkgutil
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import yaml
from typer._click.core import Command
from typer._click.exceptions import UsageError
from typer.core import TyperGroup
from typer.main import get_command

from bridge import errors
from bridge.__main__ import app
from bridge.config import Settings, WebhookSettings, WorkerSettings
from bridge.worker.fates import DeadReason, PauseReason, RetryReason

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
OTHERS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/README.md",
    "examples/pitfalls.md",
)
PAGES = [*DOCS, *(ROOT / name for name in OTHERS)]


def shown_in_full(path: Path) -> str:
    """Identify a page by its path, because there are several README.md."""
    return str(path.relative_to(ROOT))


NAMED = re.compile(r"((?:tests|soak)/[\w/]+\.py)::(\w+)")


def test_tests_that_are_named_exist() -> None:
    missing = {
        f"{shown_in_full(page)}: {file}::{test}"
        for page in PAGES
        for file, test in NAMED.findall(page.read_text(encoding="utf-8"))
        if test not in _tests_in(ROOT / file)
    }

    assert missing == set()


ROW = re.compile(r"^\| (?:(\d+) \| )?(.+?) \| (.+) \|$", re.MULTILINE)


def _evidence_of(section: str) -> dict[str, str]:
    """Read a table of the evidence page: number, claim and evidence."""
    text = (ROOT / "docs" / "evidence" / "README.md").read_text(encoding="utf-8")
    table = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0].partition("--|\n")[2]
    return {f"{number} {claim}".strip(): shown for number, claim, shown in ROW.findall(table)}


def test_every_guarantee_is_shown() -> None:
    """Each guarantee has a row of evidence with the same words and a test."""
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    guarantees = re.findall(r"^(\d+)\. \*\*(.+?)\*\*", text, re.MULTILINE)
    evidence = _evidence_of("Guarantees")

    assert list(evidence) == [" ".join(one) for one in guarantees]
    assert [claim for claim, shown in evidence.items() if not NAMED.search(shown)] == []


def test_every_fault_is_shown() -> None:
    """Each fault has a row of evidence with a test."""
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    faults = re.findall(r"^### (.+)$", text, re.MULTILINE)
    evidence = _evidence_of("Faults")

    assert [claim.removeprefix("[").partition("]")[0] for claim in evidence] == faults
    assert [claim for claim, shown in evidence.items() if not NAMED.search(shown)] == []


def test_every_row_of_the_fault_matrix_is_shown() -> None:
    """Each row names a test, a soak run, or why there is none."""
    text = (ROOT / "docs" / "evidence" / "faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!fault )(.+) \| .+ \| (.+) \|$", text, re.MULTILINE)

    assert len(rows) > 100
    for fault, shown in rows:
        assert NAMED.search(shown) or re.search("`make soak|`tests/|^not tested: ", shown), fault


# In pages and in module docstrings.
PATH = re.compile(r"(?<![\w/-])(?:bench|bridge|docs|helm|tests)/[\w/-]+\.(?:json|md|py|tpl|yaml)\b")
SOURCES = sorted((ROOT / "bridge").rglob("*.py"))


def test_files_that_are_named_exist() -> None:
    missing = {
        (str(text), name)
        for text in (*PAGES, *SOURCES)
        for name in PATH.findall(text.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file()
    }

    assert missing == set()


# Dotted names below `bridge`, such as `worker.dispatcher.Dispatcher`. Settings look similar.
CODE = re.compile(r"`((?:worker|webhook|amqp|http|topology)\.[\w.]+)`")


def test_code_that_the_architecture_names_exists() -> None:
    settings = {"worker": WorkerSettings.model_fields, "webhook": WebhookSettings.model_fields}
    named = CODE.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    parts = [name.split(".") for name in named]
    code = [".".join(one) for one in parts if one[1] not in settings.get(one[0], {})]

    assert len(code) > 30
    for name in code:
        pkgutil.resolve_name(f"bridge.{name}")


def test_contributing_names_each_module_with_its_folder() -> None:
    """Readers need not search for a file."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

    assert re.findall(r"`(\w+\.py)`", text) == []


def test_each_version_has_its_notes() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    notes = (ROOT / "docs" / "upgrading.md").read_text(encoding="utf-8")
    _, of_versions = notes.split("\n## From version to version\n")
    versions = re.findall(r"^## \[?([^\]\s]+)", changes, re.MULTILINE)

    assert versions
    assert re.findall(r"^### (\S+)$", of_versions, re.MULTILINE) == versions


# As the text of pages writes them.
REASONED = re.compile(r"(?:[Rr]easons?|[Dd]ead letter|[Pp]auses?) `(\w+)`")
REASONS = {*get_args(DeadReason), *get_args(RetryReason), *get_args(PauseReason)}


def test_reasons_that_are_named_exist() -> None:
    """Every reason for a pause, retry or dead letter on a page exists."""
    named = {
        (shown_in_full(page), reason)
        for page in PAGES
        for reason in REASONED.findall(page.read_text(encoding="utf-8"))
    }

    assert {one for one in named if one[1] not in REASONS} == set()


def test_every_reason_is_explained() -> None:
    letters, retries, pauses = (
        [row.split("`")[1] for row in table.splitlines()]
        for page in ("dead-letters", "status")
        for table in re.findall(
            r"^\| reason \|.*\n\|[-|]+\n((?:\|.*\n)+)",
            (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )

    assert sorted(letters) == sorted(get_args(DeadReason))
    assert sorted(retries) == sorted(get_args(RetryReason))
    assert sorted(pauses) == sorted(get_args(PauseReason))


# Figures of more than one digit, except units and limits, which are not results.
FIGURE = re.compile(r"(?<![\d,.])\d[\d,]*\d\b")
NO_RESULTS = {"32"}


@pytest.mark.parametrize("page", ["benchmarks", "comparison", "scaling"])
def test_figures_are_those_of_the_benchmarks(page: str) -> None:
    measured_part, _, _ = (
        (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").partition("\n## On paper\n")
    )
    figures = set(FIGURE.findall(measured_part))
    measured = set(FIGURE.findall((ROOT / "docs/evidence/benchmarks.md").read_text("utf-8")))

    assert len(figures) > 5
    assert figures - NO_RESULTS <= measured


def test_targets_that_are_named_exist() -> None:
    """Every `make` command in the documents has a target."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    commands = {
        command
        for page in PAGES
        for command in re.findall(
            r"(?:^|`| )make ((?:[a-z][a-z0-9-]* ?)+)", _code(page), re.MULTILINE
        )
    }
    named = {word for command in commands for word in command.split()}

    assert {"demo", "test", "image", "release-image"} <= named
    assert named <= targets


PROGRAM = get_command(app)
assert isinstance(PROGRAM, TyperGroup)
COMMANDS = list(PROGRAM.commands)
# With or without the program's name. A pipe, a redirection or a comment ends a command.
COMMAND = re.compile(
    rf"(?:^|`|bin/| -- ) *((?:sms-bridge|{'|'.join(COMMANDS)}) (?:(?! \d>)[^`|>;&#\n])+)",
    re.MULTILINE,
)


def test_commands_that_are_named_exist() -> None:
    """Every command on a page exists, with its options and values."""
    commands = {command for page in PAGES for command in _commands_in(_code(page))}
    faults = {command: _fault_in(command) for command in commands}

    assert {command: fault for command, fault in faults.items() if fault} == {}


YAML = re.compile(r"^ *```yaml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def test_settings_that_are_shown_can_be_loaded() -> None:
    """Every example of config.yaml can be loaded. The pages on deployment show chart values."""
    shown = [
        yaml.safe_load(textwrap.dedent(block))
        for page in PAGES
        if page.name not in {"deployment.md", "deployment-options.md"}
        for block in YAML.findall(page.read_text(encoding="utf-8"))
    ]

    assert len(shown) > 5
    for settings in shown:
        Settings.model_validate(settings)


def test_every_exit_code_is_listed() -> None:
    """The page of commands explains exactly the existing exit codes."""
    codes = [code for name, code in vars(errors).items() if name.startswith("EXIT_")]
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")

    assert re.findall(r"^\| `(\d+)` \|", text, re.MULTILINE) == [
        str(code) for code in sorted(codes)
    ]


def test_examples_of_the_help_exist() -> None:
    examples = {
        example
        for command in _all_commands(PROGRAM)
        for example in _commands_in(re.sub(r"#.*", "", command.epilog or ""))
    }
    faults = {command: _fault_in(command) for command in examples}

    assert len(examples) > 20
    assert {command: fault for command, fault in faults.items() if fault} == {}


def _commands_in(code: str) -> set[str]:
    return {found.strip() for found in COMMAND.findall(code)}


def _all_commands(command: Command) -> Iterator[Command]:
    yield command
    if isinstance(command, TyperGroup):
        for one in command.commands.values():
            yield from _all_commands(one)


def _fault_in(named: str) -> str | None:
    words = shlex.split(re.sub(r"[\[\]]", "", named.removeprefix("sms-bridge ")))
    command: Command = PROGRAM
    while words and isinstance(command, TyperGroup) and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    # Resilient, because eager options such as --version run during parsing.
    context = command.make_context(named, [], resilient_parsing=True)
    parser = command.make_parser(context)
    context.resilient_parsing = False
    try:
        given, left, _ = parser.parse_args(words)
        for parameter in command.params:
            value = given.get(parameter.name or "")
            # A value in capitals, as in `--reason R`, is a placeholder.
            if isinstance(value, str | list) and not "".join(value).isupper():
                parameter.process_value(context, value)
    except UsageError as error:
        return error.format_message()
    return f"there is no {left[0]}" if left else None


def _code(page: Path) -> str:
    # A command may continue on the next line.
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    spans = [f"`{span}`" for span in re.findall(r"`([^`\n]+)`", text)]
    return "\n".join(re.sub(r"#.*", "", line) for line in [*"".join(blocks).splitlines(), *spans])


@cache
def _tests_in(file: Path) -> set[str]:
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


# Numbers reserved for fiction: 555-0100 to 555-0199 in any North American area code or without one,
# and the drama numbers of Ofcom and the Bundesnetzagentur. +999 is no country's code, and serves
# tests that need more numbers.
FICTION = re.compile(
    r"1[2-9]\d\d55501\d{0,2}|155501\d\d|447700900\d{0,3}|49171392(?:00\d{0,2})?|999\d+|"
    # In examples that Twilio has published with signatures.
    r"14158675309|18005551212"
)
# With a plus, also in form encoding. Mobile numbers of Germany and Britain also without a plus.
NUMBER = re.compile(r"(?:\+|%2[Bb])([1-9]\d{6,})|(?<![\w.+-])((?:491[5-7]|447)\d{6,})(?![\w.])")
# Signed times are not phone numbers.
NO_NUMBER = {"1700000000"}
BINARY = {".png", ".svg", ".sum", ".mod", ".lock", ".woff2"}


def test_numbers_are_reserved_for_fiction() -> None:
    """No example has a real number, because whoever runs the example would send it a text."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout that lists its files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if name]
    real = {
        f"{name}: {number}"
        for name in names
        if (path := ROOT / name).is_file() and path.suffix not in BINARY
        for found in NUMBER.finditer(path.read_text(encoding="utf-8", errors="replace"))
        if not FICTION.fullmatch(number := found[1] or found[2]) and number not in NO_NUMBER
    }

    assert real == set()
