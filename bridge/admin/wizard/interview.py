"""Goes through the questions: what an option answers is not asked, what is wrong is asked again."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from bridge.admin.wizard.checking import check_answer
from bridge.admin.wizard.questions import (
    GROUPS,
    NO_WEBHOOKS,
    QUESTIONS,
    Answers,
    Group,
    Name,
    Question,
)
from bridge.errors import ConfigError


class Terminal(Protocol):
    """Where a person sits; each call may end in KeyboardInterrupt or EOFError."""

    def say(self, text: str) -> None:
        """Show lines."""

    def ask(self, prompt: str) -> str:
        """Ask for a line."""

    def ask_secret(self, prompt: str) -> str:
        """Ask for a line that is not shown as it is typed."""


class Interview:
    """Collects the answers, each checked at once; `secrets` are files that are to be written.

    `given` are those of options. Without a terminal what is not given has its default, and
    `answer_all` raises ConfigError with a line for whatever is missing or wrong. `check_output` is
    called once it is clear what will be written, and raises where that cannot be.
    """

    def __init__(
        self,
        given: Mapping[Name, str],
        terminal: Terminal | None,
        check_output: Callable[[Answers], None],
    ) -> None:
        self._given = given
        self._terminal = terminal
        self._check_output = check_output
        self._faults: list[str] = []
        self.answers: Answers = {}
        self.secrets: dict[Path, str] = {}

    def answer_all(self) -> None:
        """Have every question answered that applies."""
        for number, group in enumerate(GROUPS, start=1):
            self._answer_group(group, number)
            if number == 1 and "where" in self.answers:
                self._check_output(self.answers)
        asked = self.answers.keys()
        for question in QUESTIONS:
            if question.name in self._given and question.name not in asked and not self._faults:
                self._faults.append(
                    f"--{question.name}: does not belong to the other answers; leave it out"
                )
        if self._faults:
            raise ConfigError(*self._faults)

    def _answer_group(self, group: Group, number: int) -> None:
        is_told = False
        for question in group.questions:
            if not question.applies(self.answers):
                continue
            if question.name in self._given:
                self._take(question, self._given[question.name])
            elif self._terminal is None:
                self._take_default(question)
            else:
                if not is_told:
                    self._terminal.say(f"\n{number}/{len(GROUPS)}  {group.title}")
                    is_told = True
                self._ask_until_right(question, self._terminal)

    def _take(self, question: Question, value: str) -> None:
        """Take what an option says, or note what is wrong with it."""
        try:
            self._accept(question, value)
        except ConfigError as error:
            self._faults += error.faults
            # What hangs on it is not judged by it.
            self.answers.pop(question.name, None)

    def _take_default(self, question: Question) -> None:
        default = question.default(self.answers)
        if default is not None:
            self._take(question, default)
        elif self._is_settled(question):
            words = " ".join(question.explain(self.answers).split())
            self._faults.append(f"--{question.name}: is missing. {words}")

    def _is_settled(self, question: Question) -> bool:
        """Whether nothing is at fault that decides whether it is to be asked at all."""
        decides: Name = "where" if question.name in {"image", "broker"} else "preset"
        return decides in self.answers

    def _ask_until_right(self, question: Question, terminal: Terminal) -> None:
        default = question.default(self.answers)
        for line in question.explain(self.answers).splitlines():
            terminal.say(f"     {line}")
        shown = f" [{default}]" if default else ""
        while True:
            value = terminal.ask(f"  {question.prompt}{shown}: ").strip() or default
            if value is None:
                terminal.say("  ! an answer is needed")
                continue
            try:
                self._accept(question, value, terminal)
            except ConfigError as error:
                self.answers.pop(question.name, None)
                for fault in error.faults:
                    terminal.say(f"  ! {fault}")
            else:
                return

    def _accept(self, question: Question, value: str, terminal: Terminal | None = None) -> None:
        """Take a value and check it, with the content of its file if that has yet to be written."""
        is_path = question.is_secret_file and value != NO_WEBHOOKS
        path = Path(value).expanduser().absolute() if is_path else None
        self.answers[question.name] = value if path is None else str(path)
        if path is None or terminal is None or path.exists() or path in self.secrets:
            check_answer(question.name, self.answers, self.secrets)
            return
        if not path.parent.is_dir():
            raise ConfigError(f"{path.parent}: is no folder; make it first, or name another file")
        secret = terminal.ask_secret("  There is no such file. What shall it hold (not shown): ")
        if not secret.strip():
            raise ConfigError(f"{path}: is not there; name a file that is, or say what it holds")
        check_answer(question.name, self.answers, self.secrets | {path: secret.strip()})
        self.secrets[path] = secret.strip()
