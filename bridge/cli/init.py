"""`sms-bridge init`: a configuration that works, written from the answers to five questions."""

import getpass
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bridge.cli.options import examples
from bridge.errors import ConfigError
from bridge.exit_codes import EXIT_FAILED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.admin.wizard.interview import Terminal
    from bridge.admin.wizard.questions import Answers, Name

app = typer.Typer()

_HELP: Final = """\
Ask five questions and write config.yaml, or for Kubernetes the chart's values.yaml.

Where it runs, the broker, the SMS service, its API key, its webhooks: each question says what to
look for, and each answer is checked at once. No secret goes into what is written, only the names of
files or of Kubernetes' Secrets; a file that is not there can be written on the way, for its owner
alone. Ctrl-C leaves everything as it was.

Each option is an answer, and is not asked again. With --yes, or without a terminal, nothing is
asked: what has a default takes it, and what is missing is told.
"""


_Where = Annotated[str | None, typer.Option(metavar="PLACE", help="host or kubernetes.")]
_Image = Annotated[str | None, typer.Option(help="The image, for Kubernetes.")]
_Broker = Annotated[
    str | None, typer.Option(metavar="URL", help="RabbitMQ's address, without user and password.")
]
_BrokerUser = Annotated[str | None, typer.Option(metavar="NAME", help="Its user.")]
_BrokerPasswordFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Holds the user's password.")
]
_BrokerSecretName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The Secret with username and password, for Kubernetes."),
]
_Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help="The service, as sms_api.preset names it.")
]
_BaseUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="Its address, where the preset knows none.")
]
_Account = Annotated[str | None, typer.Option(help="Your account there, where it wants one.")]
_Username = Annotated[str | None, typer.Option(help="Your user there, where it wants one.")]
_KeyFile = Annotated[str | None, typer.Option(metavar="FILE", help="Holds the API key.")]
_KeySecretName = Annotated[
    str | None,
    typer.Option(metavar="NAME/KEY", help="The Secret with the API key, for Kubernetes."),
]
_WebhookSecretFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Holds the webhook secret; none: no webhooks."),
]
_WebhookSecretName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME/KEY",
        help="The Secret with the webhook secret, for Kubernetes; none: no webhooks.",
    ),
]
_PublicUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="What the service calls, where it signs that too."),
]
_Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="In place of config.yaml or values.yaml.")
]


@app.command(
    help=_HELP,
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
    where: _Where = None,
    image: _Image = None,
    broker: _Broker = None,
    broker_user: _BrokerUser = None,
    broker_password_file: _BrokerPasswordFile = None,
    broker_secret_name: _BrokerSecretName = None,
    preset: _Preset = None,
    base_url: _BaseUrl = None,
    account: _Account = None,
    username: _Username = None,
    key_file: _KeyFile = None,
    key_secret_name: _KeySecretName = None,
    webhook_secret_file: _WebhookSecretFile = None,
    webhook_secret_name: _WebhookSecretName = None,
    public_url: _PublicUrl = None,
    output: _Output = None,
    force: Annotated[bool, typer.Option("--force", help="Replace it if it exists.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="End with `check --online`, without asking.")
    ] = False,
) -> None:
    """Ask five questions and write a configuration; _HELP says the rest."""
    given: dict[Name, str | None] = {
        "where": where,
        "image": image,
        "broker": broker,
        "broker-user": broker_user,
        "broker-password-file": broker_password_file,
        "broker-secret-name": broker_secret_name,
        "preset": preset,
        "base-url": base_url,
        "account": account,
        "username": username,
        "key-file": key_file,
        "key-secret-name": key_secret_name,
        "webhook-secret-file": webhook_secret_file,
        "webhook-secret-name": webhook_secret_name,
        "public-url": public_url,
    }
    answers = {name: value for name, value in given.items() if value is not None}
    terminal = _Tty() if not yes and sys.stdin.isatty() and sys.stdout.isatty() else None
    try:
        path, told = _configure(answers, terminal, output, force=force, check=check)
    except (KeyboardInterrupt, EOFError):
        typer.echo("\nEnded; nothing was written.", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    if told["where"] == "kubernetes":
        _print_next_steps(told, path)
    else:
        _check(path, terminal, wanted=check)


class _Tty:
    """The terminal that the command runs in."""

    def say(self, text: str) -> None:
        typer.echo(text)

    def ask(self, prompt: str) -> str:
        # Gives `input` its line editing.
        import readline  # noqa: F401

        return input(prompt)

    def ask_secret(self, prompt: str) -> str:
        return getpass.getpass(prompt)


def _configure(
    given: "Mapping[Name, str]",
    terminal: "Terminal | None",
    output: Path | None,
    *,
    force: bool,
    check: bool,
) -> "tuple[Path, Answers]":
    """Ask, then write; nothing is written before the last answer is right."""
    from bridge.admin.wizard.documents import write_document
    from bridge.admin.wizard.drafts import default_output
    from bridge.admin.wizard.interview import Interview
    from bridge.admin.wizard.new_files import (
        PLAIN_MODE,
        SECRET_MODE,
        NewFile,
        already_there,
        write_files,
    )

    def check_output(answers: "Answers") -> None:
        path = output or default_output(answers)
        if not force and (path.exists() or path.is_symlink()):
            raise already_there(path)
        if not path.parent.is_dir():
            raise ConfigError(f"--output: {path.parent} is no folder; make it first")
        if check and answers["where"] == "kubernetes":
            raise ConfigError("--check: is for --where host; of Kubernetes the last lines say how")

    if terminal is not None:
        terminal.say("Five questions; Enter takes what is in brackets, Ctrl-C ends it all.")
    interview = Interview(given, terminal, check_output)
    interview.answer_all()
    path = (output or default_output(interview.answers)).resolve()
    secrets = [NewFile(file, f"{text}\n", SECRET_MODE) for file, text in interview.secrets.items()]
    mode = path.stat().st_mode & 0o777 if path.exists() else PLAIN_MODE
    document = NewFile(path, write_document(interview.answers), mode, replaces=force)
    write_files([*secrets, document])
    for file in (*interview.secrets, path):
        typer.echo(f"written: {file}")
    return path, interview.answers


def _check(path: Path, terminal: "Terminal | None", *, wanted: bool) -> None:
    """Check what was written as `sms-bridge check` would, with the environment over it."""
    import os

    from bridge.cli.check import try_everything
    from bridge.config import load_settings
    from bridge.start_checks import check_roles

    settings = load_settings(path, os.environ)
    check_roles(settings, ["worker", "webhook"])
    command = f"sms-bridge check --config {shlex.quote(str(path))} --online"
    if not wanted and terminal is not None:
        answer = terminal.ask("\nTry broker, API and clock now? Nothing is sent. [Y/n]: ")
        wanted = answer.strip().lower() in {"", "y", "yes"}
    if not wanted:
        typer.echo(f"next: {command}")
        return
    if not try_everything(settings):
        typer.echo(f"Mend what failed, then: {command}")
        raise typer.Exit(EXIT_FAILED)
    typer.echo(f"next: sms-bridge --config {shlex.quote(str(path))} all")


def _print_next_steps(answers: "Answers", path: Path) -> None:
    from bridge.admin.wizard.drafts import secrets_to_make

    typer.echo("next: make the Secrets, each FILE holding one value alone, and install:")
    for name, keys in secrets_to_make(answers).items():
        files = " ".join(f"--from-file={key}=FILE" for key in keys)
        typer.echo(f"  kubectl --namespace sms create secret generic {name} {files}")
    values = shlex.quote(str(path))
    typer.echo(f"  helm install sms-bridge helm/sms-bridge --namespace sms --values {values}")
    worker = "deployment/sms-bridge-worker"
    typer.echo(f"  kubectl --namespace sms exec {worker} -- sms-bridge check --online")
