"""The log: one line per event, without personal data, whichever module logs."""

import ast
import asyncio
import io
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import uvloop

import bridge
from bridge.telemetry import logs
from bridge.telemetry.log_setup import configure_logging, log_loop_faults
from bridge.telemetry.logs import CountedLog, Log
from tests.ears import Ears, logging_kept

NUMBER = "+491713920001"
OURS = Log("bridge.anything")
THEIRS = logging.getLogger("library.module")
LIBRARIES = ("aiormq.connection", "httpcore.http11", "uvicorn.error", "asyncio")
LEVELS = ("debug", "info", "warning", "error")

Form = Literal["json", "console", "auto"]
Start = Callable[..., io.StringIO]


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with logging_kept():
        yield


@pytest.fixture
def start() -> Start:

    def started(
        level: str = "debug",
        form: Form = "json",
        *,
        stream: io.StringIO | None = None,
        count: Callable[[str], object] = lambda _level: None,
    ) -> io.StringIO:
        written = stream or io.StringIO()
        # basicConfig closes what it replaces; pytest still needs its own.
        logging.getLogger().handlers[:] = []
        configure_logging(level, form, stream=written, count=count)
        return written

    return started


def only_line(stream: io.StringIO) -> dict[str, Any]:
    (text,) = stream.getvalue().splitlines()
    line: dict[str, Any] = json.loads(text)
    return line


# --- The line ------------------------------------------------------------------------------------


def test_line_of_json(start: Start) -> None:
    """A line has time, level, logger, event and facts in this order; None is left out."""
    stream = start()
    OURS.info("delivery", outcome="sent", detail=None, attempts=0, again=False, text="")
    line = only_line(stream)

    assert list(line.items())[1:] == [
        *(("level", "info"), ("logger", "bridge.anything"), ("event", "delivery")),
        *(("outcome", "sent"), ("attempts", 0), ("again", False), ("text", "")),
    ]


ODD_FACTS: dict[str, object] = {
    "newline": "a\nb",
    "carriage return": "a\rb",
    "line separator": "a\u2028b\u0085c",
    "quote": 'a"b',
    "surrogate": "\ud800",
    "terminal control": "\x1b[2J",
    "object": object(),
    "bytes": b"\xff",
    "nested": {"a": [1, {"b": None}]},
    "set": {1},
    "infinite": float("inf"),
}


@pytest.mark.parametrize("fact", ODD_FACTS.values(), ids=ODD_FACTS)
def test_any_fact_is_one_line_of_json(start: Start, fact: object) -> None:
    stream = start()
    OURS.info("delivery", fact=fact)

    assert only_line(stream)["event"] == "delivery"


CONTROLS = {
    "newline": "a\nb",
    "carriage return": "a\rb",
    "line separator": "a\u2028b",
    "terminal control": "a\x1b[2Jb",
}


@pytest.mark.parametrize("fact", CONTROLS.values(), ids=CONTROLS)
def test_fact_cannot_forge_a_console_line(start: Start, fact: str) -> None:
    """On the console, too, a fact stays on its line, and its control characters are replaced."""
    stream = start(form="console")
    OURS.info("delivery", fact=fact)

    assert stream.getvalue().rstrip("\n").isprintable()


def test_no_fact_is_called_like_a_part_of_every_line(start: Start) -> None:
    stream = start()
    OURS.info("delivery")
    taken = set(only_line(stream))
    names = {
        name
        for path in Path(bridge.__file__).parent.rglob("*.py")
        for name in _facts_in(ast.parse(path.read_text(encoding="utf-8")))
    }

    assert {"message_id", "outcome", "why"} < names
    assert names & {*taken, None} == set()


def _facts_in(module: ast.Module) -> Iterator[str | None]:
    """Yield the name of each logged fact; None if the names are not literals."""
    nodes = list(ast.walk(module))
    written = defaultdict[str, list[str | None]](list)
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(node.value, ast.Dict):
                    written[target.id] += [getattr(key, "value", None) for key in node.value.keys]
    for node in nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and getattr(node.func.value, "id", "") == "log"
        ):
            if node.func.attr == "info_facts":
                yield from written.get(getattr(node.args[1], "id", ""), [None])
            yield from (keyword.arg for keyword in node.keywords)


def test_console_line(start: Start) -> None:
    """On the console a line is short: time of day, level, event, and facts if there are any."""
    stream = start(form="console")
    OURS.warning("paused", reason="outage", seconds=1.5)
    OURS.info("stopped")
    paused, stopped = stream.getvalue().splitlines()

    assert paused[8:] == " warning  paused reason=outage seconds=1.5"
    assert stopped[8:] == " info     stopped"


def test_console_line_of_a_template_with_newlines(start: Start) -> None:
    """A library's text in several lines is one line on the console."""
    stream = start(form="console")
    THEIRS.error("first\nsecond\n")

    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    ("form", "stream", "is_json"),
    [
        ("auto", io.StringIO, True),
        ("auto", Terminal, False),
        ("json", Terminal, True),
        ("console", io.StringIO, False),
    ],
    ids=["auto to a pipe", "auto to a terminal", "json", "console"],
)
def test_form(
    start: Start, form: Form, stream: Callable[[], io.StringIO], *, is_json: bool
) -> None:
    """`auto` means console lines on a terminal, and JSON otherwise."""
    written = start(form=form, stream=stream())
    OURS.info("delivery")

    assert written.getvalue().startswith("{") == is_json


# --- Levels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_level(start: Start, level: str) -> None:
    """Records below the configured level are not written."""
    stream = start(level)
    for log in (OURS.debug, OURS.info, OURS.warning):
        log("delivery")
    OURS.error("internal_error", cause=None)
    written = [json.loads(line)["level"] for line in stream.getvalue().splitlines()]

    assert written == list(LEVELS[LEVELS.index(level) :])


@pytest.mark.parametrize(
    ("name", "configured", "level", "is_written"),
    [
        # Debug records quote messages, and the bridge's own lines log requests.
        *((name, "debug", "debug", False) for name in LIBRARIES),
        *((name, "debug", "info", False) for name in ("httpx", "httpcore", "uvicorn.access")),
        *((name, "info", "warning", True) for name in ("httpx", "asyncio", "library.module")),
        *((name, "error", "warning", False) for name in ("httpx", "asyncio", "uvicorn.error")),
        # The client library logs each connection attempt as an error.
        *((name, "info", "error", False) for name in ("aiormq.connection", "aio_pika.robust")),
        *((name, "debug", "error", True) for name in ("aiormq.connection", "aio_pika.robust")),
    ],
)
def test_level_of_a_library(
    start: Start, name: str, configured: str, level: str, *, is_written: bool
) -> None:
    """Of libraries the warnings are written, and at `debug` the broker client's errors."""
    stream = start(configured)
    getattr(logging.getLogger(name), level)("something: %s", NUMBER)

    assert bool(stream.getvalue()) == is_written


def test_records_are_counted(start: Start) -> None:
    """Each written line is counted by its level."""
    counted: Counter[str] = Counter()
    start("info", count=lambda level: counted.update([level]))
    OURS.debug("not written")
    OURS.info("one")
    OURS.error("two", cause=None)
    THEIRS.error("three")

    assert counted == {"info": 1, "error": 2}


@pytest.mark.parametrize(
    ("level", "name"),
    [(15, "debug"), (25, "info"), (35, "warning"), (45, "error"), (99, "critical")],
)
def test_a_librarys_own_level_counts_as_a_known_one(start: Start, level: int, name: str) -> None:
    """The names of levels are labels of a metric, and so a closed set."""
    counted: Counter[str] = Counter()
    written = start(count=lambda level: counted.update([level]))
    THEIRS.log(level, "said")

    assert (only_line(written)["level"], counted) == (name, {name: 1})


def test_configured_again(start: Start) -> None:
    """Configuring logging again replaces the stream; no line is written twice."""
    first = start()
    second = start()
    OURS.info("delivery")

    assert (first.getvalue(), len(second.getvalue().splitlines())) == ("", 1)


# --- What is never written -----------------------------------------------------------------


class Holder:
    """An object whose repr is a phone number."""

    def __repr__(self) -> str:
        return NUMBER


def raise_it() -> None:
    raise ValueError(f"cannot send to {NUMBER}")


def log_exception() -> None:
    try:
        raise_it()
    except ValueError:
        THEIRS.exception("failed: %s", NUMBER)


def log_our_exception() -> None:
    try:
        raise_it()
    except ValueError:
        OURS.exception("internal_error", message_id="m")


def log_chain() -> None:
    try:
        try:
            raise_it()
        except ValueError as error:
            raise RuntimeError("outer") from error
    except RuntimeError:
        OURS.exception("internal_error")


def log_group() -> None:
    error = ValueError(NUMBER)
    error.add_note(NUMBER)
    OURS.error("internal_error", cause=ExceptionGroup(NUMBER, [error]))


LEAKS: dict[str, Callable[[], object]] = {
    "argument": lambda: THEIRS.error("got %s", NUMBER),
    "several arguments": lambda: THEIRS.error("got %s and %r", Holder(), NUMBER.encode()),
    "arguments by name": lambda: THEIRS.error("got %(body)s", {"body": NUMBER}),
    "arguments that do not fit": lambda: THEIRS.error("got %d %d", NUMBER),
    "exception": log_exception,
    "exception of ours": log_our_exception,
    "cause": log_chain,
    "group and note": log_group,
    "exception as the message": lambda: THEIRS.error(ValueError(NUMBER)),
    "object as the message": lambda: THEIRS.error(Holder()),
    "stack": lambda: THEIRS.error("stack", stack_info=True),
    "extra": lambda: THEIRS.error("extra", extra={"body": NUMBER}),
    "access line": lambda: logging.getLogger("uvicorn.error").warning(
        '%s - "%s %s HTTP/%s" %d', "1.2.3.4", "POST", f"/webhooks?from={NUMBER}", "1.1", 200
    ),
    "frame": lambda: logging.getLogger("aiormq.connection").info("frame %r", Holder()),
    "request": lambda: logging.getLogger("httpx").warning("%s %s", "POST", f"https://a/{NUMBER}"),
}


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_nothing_of_a_message_is_written(
    start: Start, leak: Callable[[], object], form: Form
) -> None:
    """A record is one line, and no argument, exception or object brings personal data into it."""
    stream = start(form=form)
    leak()

    assert NUMBER[1:] not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize("name", ["library.module", "bridgekeeper"])
def test_template_is_written(start: Start, name: str) -> None:
    """The template of a library's record is written, even if its name begins like the bridge's."""
    stream = start()
    logging.getLogger(name).error("got %s", NUMBER)

    assert only_line(stream)["event"] == "got %s"


def test_type_and_places_of_an_exception(start: Start) -> None:
    stream = start()
    log_our_exception()
    line = only_line(stream)

    assert line["error"] == "ValueError"
    assert line["at"][-1].startswith("test_logs.py:")
    assert line["at"][-1].endswith(" raise_it")


def test_deep_recursion_is_a_short_line(start: Start) -> None:
    """Of a long way down only the last places are written."""
    stream = start()

    def down(depth: int) -> None:
        if depth:
            down(depth - 1)
        raise_it()

    try:
        down(100)
    except ValueError:
        OURS.exception("internal_error")

    assert len(only_line(stream)["at"]) <= 12


class Broken(io.StringIO):
    """A stream that takes nothing, as a full disk."""

    def write(self, _text: str) -> int:
        raise OSError("no space left")


def test_line_that_cannot_be_written(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """When the stream takes nothing, logging's own complaint does not show the arguments."""
    start(stream=Broken())
    THEIRS.error("got %s", NUMBER)

    assert NUMBER not in capsys.readouterr().err


# --- What nobody awaited -------------------------------------------------------------------------


async def in_a_task() -> None:

    async def fail() -> None:
        raise_it()

    task = asyncio.create_task(fail())
    await asyncio.wait({task})
    del task


async def in_a_callback() -> None:

    def fail(_number: str) -> None:
        raise_it()

    asyncio.get_running_loop().call_soon(fail, NUMBER)
    await asyncio.sleep(0)


async def in_a_callback_of_a_future() -> None:

    def fail(_future: object) -> None:
        raise_it()

    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    future.add_done_callback(fail)
    future.set_result(NUMBER)
    await asyncio.sleep(0)


async def in_a_timer() -> None:
    fired = asyncio.Event()

    def fail(_number: str) -> None:
        fired.set()
        raise_it()

    asyncio.get_running_loop().call_later(0, fail, NUMBER)
    await fired.wait()


async def by_a_library() -> None:
    """Report a fault as a library does, with objects that show a number."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": "protocol failed", "exception": ValueError(NUMBER), "protocol": Holder()}
    )


async def without_an_exception() -> None:
    asyncio.get_running_loop().call_exception_handler({"message": "protocol failed"})


WAYS = {
    "task": in_a_task,
    "callback": in_a_callback,
    "callback of a future": in_a_callback_of_a_future,
    "timer": in_a_timer,
    "library": by_a_library,
    "no exception": without_an_exception,
}
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def fail_in_a_loop(way: Callable[[], Any], loop_factory: Callable[[], Any]) -> None:

    async def run() -> None:
        log_loop_faults(asyncio.get_running_loop())
        await way()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_lost_connection_that_a_library_drops_is_no_fault(
    start: Start, loop: Callable[[], Any]
) -> None:
    """A library may leave the loss of a connection in a future that it also raises."""
    stream = start()

    async def drop_a_future() -> None:
        asyncio.get_running_loop().create_future().set_exception(ConnectionResetError())

    fail_in_a_loop(drop_a_future, loop)

    assert not stream.getvalue()


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_fault_of_the_loop_holds_nothing(
    start: Start,
    capsys: pytest.CaptureFixture[str],
    way: Callable[[], Any],
    loop: Callable[[], Any],
) -> None:
    """An error that nobody awaited is one line, without the data that it held."""
    stream = start()
    fail_in_a_loop(way, loop)

    assert only_line(stream)["event"] == "unhandled_error"
    assert NUMBER[1:] not in stream.getvalue() + capsys.readouterr().err


# --- What strangers cause -------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "COUNT_SECONDS", 0.05)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(6):
        while not condition():  # noqa: ASYNC110  a condition of any kind has no event
            await asyncio.sleep(0.001)


def counted_in(ears: Ears) -> int:
    return sum(line["count"] for line in ears.heard("refused"))


@pytest.mark.usefixtures("quick")
async def test_first_of_many_is_logged_at_once_and_the_rest_counted(ears: Ears) -> None:
    """A thousand of one cause are two lines: the first, and the others with their number."""
    counted = CountedLog(Log("test"), "refused")
    for _ in range(1000):
        counted.info(why="forged", status=401)
    first = list(ears.heard("refused"))
    await until(lambda: counted_in(ears) == 1000)

    assert first == [{"why": "forged", "status": 401, "count": 1}]
    assert ears.heard("refused") == [*first, {"why": "forged", "status": 401, "count": 999}]


@pytest.mark.usefixtures("quick")
async def test_causes_are_counted_apart(ears: Ears) -> None:
    """Each set of facts has lines of its own, and nothing is kept of it once it has ended."""
    counted = CountedLog(Log("test"), "refused")
    for why in ("forged", "late", "forged", "forged"):
        counted.info(why=why)
    await until(lambda: counted_in(ears) == 4)
    lines = ears.heard("refused")
    await until(lambda: not counted._pending)
    counted.info(why="late")

    assert [(line["why"], line["count"]) for line in lines] == [
        *(("forged", 1), ("late", 1), ("forged", 2)),
    ]
    assert ears.heard("refused")[-1] == {"why": "late", "count": 1}


async def test_rest_is_told_at_the_end(ears: Ears) -> None:
    """What was only counted is logged when the program ends."""
    counted = CountedLog(Log("test"), "refused")
    for _ in range(3):
        counted.info(why="forged")
    counted.flush()
    counted.flush()

    assert [line["count"] for line in ears.heard("refused")] == [1, 2]
