"""`sms-bridge init`: ask five questions and write a configuration that works."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from bridge.admin.wizard import (
    NO_WEBHOOKS,
    STEPS,
    Answers,
    WizardQuestion,
    already_there,
    check_answer,
    questions,
    secrets_to_make,
    write_document,
    write_files,
)
from bridge.cli.check import try_everything
from bridge.cli.options import examples
from bridge.config import load_settings
from bridge.errors import EXIT_FAILED, ConfigError
from bridge.start_checks import check_roles

app = typer.Typer()


def _option(text: str, metavar: str | None = None) -> object:
    return typer.Option(metavar=metavar, help=text)


@app.command(
    epilog=examples(
        "sms-bridge init",
        "sms-bridge init --preset twilio --check",
        "sms-bridge init --yes --preset telnyx --key-file key --webhook-secret-file none",
        "sms-bridge init --yes --where kubernetes --image registry.example.com/sms-bridge:0.1.0 "
        "--broker amqp://rabbitmq.messaging.svc/ --preset telnyx",
    ),
)
def init(  # noqa: PLR0913  an option each
    *,
    where: Annotated[
        str | None, _option("Where the bridge runs: host or kubernetes.", "PLACE")
    ] = None,
    image: Annotated[str | None, _option("On Kubernetes: the image.")] = None,
    broker: Annotated[
        str | None, _option("URL of RabbitMQ, without user name and password.", "URL")
    ] = None,
    broker_user: Annotated[str | None, _option("RabbitMQ user name.", "NAME")] = None,
    broker_password_file: Annotated[
        str | None, _option("File with the RabbitMQ password.", "FILE")
    ] = None,
    broker_secret_name: Annotated[
        str | None, _option("On Kubernetes: the Secret with the user name and password.", "NAME")
    ] = None,
    preset: Annotated[str | None, _option("The SMS service, as in sms_api.preset.", "NAME")] = None,
    base_url: Annotated[
        str | None, _option("Address of the service, if the preset has none.", "URL")
    ] = None,
    account: Annotated[str | None, _option("Your account at the service, if it needs one.")] = None,
    username: Annotated[
        str | None, _option("Your user name at the service, if it needs one.")
    ] = None,
    key_file: Annotated[str | None, _option("File with the API key.", "FILE")] = None,
    key_secret_name: Annotated[
        str | None, _option("On Kubernetes: the Secret with the API key.", "NAME/KEY")
    ] = None,
    webhook_secret_file: Annotated[
        str | None, _option('File with the webhook secret; "none" means no webhooks.', "FILE")
    ] = None,
    webhook_secret_name: Annotated[
        str | None,
        _option(
            'On Kubernetes: the Secret with the webhook secret; "none" means no webhooks.',
            "NAME/KEY",
        ),
    ] = None,
    public_url: Annotated[
        str | None, _option("Public address of the webhooks, if the preset needs it.", "URL")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write. Default: config.yaml or values.yaml."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Run `check --online` at the end without asking first.")
    ] = False,
) -> None:
    """Ask five questions and write config.yaml, or the chart's values.yaml for Kubernetes.

    The questions are about the place where the bridge runs, the broker, the SMS service, its API
    key and its webhooks. The configuration contains no secrets, only the names of the files or
    Kubernetes Secrets that hold them. If such a file does not exist, the command asks for the
    secret and writes the file.

    Each option answers a question in advance. With --yes, or without a terminal, the command asks
    nothing, and reports missing options.
    """
    # Each option with a text answers the question of the same name.
    given = {key.replace("_", "-"): text for key, text in locals().items() if isinstance(text, str)}
    is_asked = not yes and sys.stdin.isatty() and sys.stdout.isatty()
    interview = Interview(given, is_asked=is_asked, output=output, may_replace=force, check=check)
    try:
        interview.answer_all()
        path = interview.write()
    except (KeyboardInterrupt, EOFError, typer.Abort):
        typer.echo("\nCancelled; nothing was written.", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    if interview.answers["where"] == "kubernetes":
        _print_next_steps(interview.answers, path)
    else:
        _check_written(path, is_wanted=check, is_asked=is_asked)


class Interview:
    """Collects the answers, from options or a person; nothing is written before the last one."""

    def __init__(
        self,
        given: Mapping[str, str],
        *,
        is_asked: bool,
        output: Path | None = None,
        may_replace: bool = False,
        check: bool = False,
    ) -> None:
        self._given = given
        self._is_asked = is_asked
        self._output = output
        self._may_replace = may_replace
        self._check = check
        self.answers: Answers = {}
        # The contents of files that are not written yet.
        self._secrets: dict[Path, str] = {}

    def answer_all(self) -> None:
        """Collect all answers; raise ConfigError with a line for each fault."""
        if self._is_asked:
            typer.echo("Five questions. Enter accepts the default in brackets, Ctrl-C cancels.")
        step, seen, faults = 0, set[str](), list[str]()
        for question in questions(self.answers):
            seen.add(question.name)
            if self._is_asked and question.name not in self._given:
                if step != question.step:
                    step = question.step
                    typer.echo(f"\n{step}/{len(STEPS)}  {STEPS[step - 1]}")
                self._ask(question)
            else:
                faults += self._take(question)
            if question.name in {"where", "preset"} and question.name not in self.answers:
                # Other questions depend on these two.
                break
            if question.name == "where":
                self._path()
        foreign = [name for name in self._given if name not in seen]
        faults = faults or [
            f"--{name}: does not fit the other answers; leave it out" for name in foreign
        ]
        if faults:
            raise ConfigError(*faults)

    def _path(self) -> Path:
        """Return the path to write; raise ConfigError if it cannot be written."""
        is_for_pods = self.answers["where"] == "kubernetes"
        path = self._output or Path("values.yaml" if is_for_pods else "config.yaml")
        if not self._may_replace and (path.exists() or path.is_symlink()):
            raise already_there(path)
        if not path.parent.is_dir():
            raise ConfigError(f"--output: {path.parent} is not a folder; create it first")
        if self._check and is_for_pods:
            raise ConfigError(
                "--check: needs --where host; the last lines show how to check in a pod"
            )
        return path.resolve()

    def _take(self, question: WizardQuestion) -> tuple[str, ...]:
        """Take the answer from an option, or the default; return its faults."""
        value = self._given.get(question.name, question.default)
        if value is None:
            words = " ".join(question.explanation.split())
            return (f"--{question.name}: is missing. {words}",)
        try:
            self._accept(question, value)
        except ConfigError as error:
            return error.faults
        return ()

    def _ask(self, question: WizardQuestion) -> None:
        # Adds line editing to the prompt.
        import readline  # noqa: F401

        for line in question.explanation.splitlines():
            typer.echo(f"     {line}")
        while question.name not in self.answers:
            default = question.default
            prompt = f"  {question.prompt}"
            value: str = typer.prompt(prompt, default=default, show_default=bool(default))
            try:
                self._accept(question, value.strip())
            except ConfigError as error:
                for fault in error.faults:
                    typer.echo(f"  ! {fault}")

    def _accept(self, question: WizardQuestion, value: str) -> None:
        """Check an answer and keep it; ask for a secret whose file does not exist yet."""
        secrets = self._secrets
        if question.is_file and value != NO_WEBHOOKS:
            path = Path(value).expanduser().absolute()
            value = str(path)
            if self._is_asked and not path.exists() and path not in secrets:
                secrets = secrets | {path: _ask_secret(path)}
        check_answer(question.name, self.answers | {question.name: value}, secrets)
        self.answers[question.name] = value
        self._secrets = secrets

    def write(self) -> Path:
        path = self._path()
        write_files(self._secrets, path, write_document(self.answers), replaces=self._may_replace)
        for file in (*self._secrets, path):
            typer.echo(f"written: {file}")
        return path


def _ask_secret(path: Path) -> str:
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: is not a folder; create it first, or name another file")
    prompt = "  This file does not exist. The secret to write to it (not shown)"
    secret: str = typer.prompt(prompt, default="", show_default=False, hide_input=True)
    if not secret.strip():
        raise ConfigError(f"{path}: does not exist; name a file that exists, or type its secret")
    return secret.strip()


def _check_written(path: Path, *, is_wanted: bool, is_asked: bool) -> None:
    """Check the new configuration together with the environment, as `sms-bridge check` does."""
    settings = load_settings(path, os.environ)
    check_roles(settings, ["worker", "webhook"])
    command = f"sms-bridge check --config {shlex.quote(str(path))} --online"
    if is_asked and not is_wanted:
        prompt = "\nTry broker, API and clock now? Nothing is sent. [Y/n]"
        answer = typer.prompt(prompt, default="y", show_default=False)
        is_wanted = answer.strip().lower() in {"y", "yes"}
    if not is_wanted:
        typer.echo(f"next: {command}")
        return
    if not try_everything(settings):
        typer.echo(f"Correct what failed, then: {command}")
        raise typer.Exit(EXIT_FAILED)
    typer.echo(f"next: sms-bridge --config {shlex.quote(str(path))} all")


def _print_next_steps(answers: Answers, path: Path) -> None:
    typer.echo("next: create the Secrets (each FILE holds one value), then install:")
    for name, keys in secrets_to_make(answers).items():
        files = " ".join(f"--from-file={key}=FILE" for key in keys)
        typer.echo(f"  kubectl --namespace sms create secret generic {name} {files}")
    values = shlex.quote(str(path))
    typer.echo(f"  helm install sms-bridge helm/sms-bridge --namespace sms --values {values}")
    worker = "deployment/sms-bridge-worker"
    typer.echo(f"  kubectl --namespace sms exec {worker} -- sms-bridge check --online")
