"""`sms-bridge check`: validate the configuration, and with --online try broker and API."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
import yaml

from bridge.admin.checks.findings import Finding
from bridge.admin.checks.run import examine, examine_offline
from bridge.admin.rendering import render
from bridge.cli.options import (
    AsJson,
    ConfigFile,
    ManagementUrl,
    OneRole,
    examples,
    read_settings,
    roles_of,
)
from bridge.cli.output import format_table, print_json, printable
from bridge.config import Role, Settings
from bridge.errors import EXIT_FAILED, ConfigError
from bridge.start_checks import check_roles

app = typer.Typer()


@app.command(
    epilog=examples(
        "sms-bridge check --config config.yaml",
        "sms-bridge check --changed",
        "sms-bridge check --role worker --online",
        "sms-bridge check --online --quiet",
        """sms-bridge check --render '{"to": "+491713920001", "from": "Acme", "text": "Hi"}'""",
        """sms-bridge check --render '{"to": ...}' --answer '200 {"status": "4"}'""",
        "sms-bridge check --online --json | jq '.findings[] | select(.result != \"ok\")'",
    )
)
def check(  # noqa: PLR0913  an option each
    context: typer.Context,
    *,
    role: OneRole = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online", help="Also test the broker, the queues, the API's host and the clock."
        ),
    ] = False,
    management_url: ManagementUrl = None,
    render: Annotated[
        str | None,
        typer.Option(
            metavar="BODY",
            help="Print only the request that the worker would post for this body, and the effect "
            "of each response.",
        ),
    ] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ANSWER",
            help="With --render: a response of the service, as status and body. May be repeated.",
        ),
    ] = None,
    changed: Annotated[
        bool,
        typer.Option(
            "--changed", help="Print only settings that differ from the defaults and the preset."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing except faults.")] = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Validate the configuration, and print the effective settings with masked secrets.

    The command also reads the files named in the settings. It exits with 2 if a role that is
    configured, even in part, could not start. With --role, it also exits with 2 if that role is not
    configured. With --quiet or --online, it also exits with 2 if no role is configured.

    With --online, the command instead prints a line for each check: ok, warn or fail, and the
    remedy. It sends, publishes, consumes and creates nothing. It exits with 1 if a role could not
    work, or if messages would be lost. It can check whether a worker is paused only on the worker's
    own computer.
    """
    settings = read_settings(context, config)
    if render is not None:
        _print_rendering(settings, render, answer or (), as_json=as_json)
        return
    if answer:
        raise ConfigError("--answer: needs --render with the request that is answered")
    missing = _missing(settings, role)
    if quiet:
        _check_any(missing)
    findings = _examine(settings, missing, management_url, online=online)
    shown = [finding for finding in findings if not quiet or finding.result != "ok"]
    configuration = None
    if not (quiet or (online and not as_json)):
        configuration = changed_settings(settings) if changed else settings.masked()
    show = _report_json if as_json else _print_text
    show(configuration, missing, shown)
    if any(finding.result == "fail" for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def try_everything(settings: Settings) -> bool:
    """Run the checks of `check --online` for the configured roles, and print a line for each.

    Return True if none failed. Raises ConfigError if no role is configured.
    """
    missing = _missing(settings, None)
    findings = _examine(settings, missing, None, online=True)
    _print_text(None, missing, findings)
    return all(finding.result != "fail" for finding in findings)


def changed_settings(settings: Settings) -> dict[str, Any]:
    """Return the masked settings that differ from the defaults, and from those of their presets."""
    endpoints = [{"path": one.path, "preset": one.preset} for one in settings.webhook.endpoints]
    chosen = {
        "sms_api": {"preset": settings.sms_api.preset},
        "webhook": {"preset": settings.webhook.preset, "endpoints": endpoints},
    }
    default = Settings.model_validate(chosen).model_dump()
    api, webhook = default["sms_api"], default["webhook"]
    for part in (api, webhook, *webhook["endpoints"]):
        part["preset"] = "generic"
    for part in webhook["endpoints"]:
        part["path"] = None
    changed: dict[str, Any] = _differing(settings.masked(), settings.model_dump(), default)
    return changed


def _differing(masked: Any, value: Any, default: Any) -> Any:  # noqa: ANN401  JSON
    """Return the parts of `masked` whose unmasked values differ from the default."""
    if isinstance(value, dict) and isinstance(default, dict):
        return {
            name: _differing(masked[name], member, default.get(name))
            for name, member in value.items()
            if member != default.get(name)
        }
    if isinstance(value, tuple) and value and isinstance(value[0], dict):
        return list(map(_differing, masked, value, default))
    return masked


def _missing(settings: Settings, role: Role | None) -> dict[Role, str | None]:
    missing = check_roles(settings, roles_of(role))
    if role is not None and (why := missing[role]):
        raise ConfigError(why)
    return missing


def _check_any(missing: dict[Role, str | None]) -> None:
    if all(missing.values()):
        raise ConfigError(*(f"{role}: {why}" for role, why in missing.items()))


def _examine(
    settings: Settings,
    missing: dict[Role, str | None],
    management_url: str | None,
    *,
    online: bool,
) -> list[Finding]:
    roles = [role for role, why in missing.items() if why is None]
    findings = examine_offline(settings, roles)
    if not online:
        return findings
    _check_any(missing)
    return findings + asyncio.run(examine(settings, roles, management=management_url))


def _report_json(
    configuration: dict[str, Any] | None,
    missing: dict[Role, str | None],
    findings: list[Finding],
) -> None:
    document = {
        "configuration": configuration,
        "roles": {role: "ready" if why is None else why for role, why in missing.items()},
        "findings": [asdict(finding) for finding in findings],
    }
    print_json(document)


def _print_text(
    configuration: dict[str, Any] | None,
    missing: dict[Role, str | None],
    findings: list[Finding],
) -> None:
    # After the configuration the lines are comments, so that all of the output is YAML.
    mark = "" if configuration is None else "# "
    if configuration is not None:
        typer.echo(yaml.safe_dump(configuration, sort_keys=False, allow_unicode=True), nl=False)
        for name, why in missing.items():
            typer.echo(f"# {name}: {'not configured, ' + why if why else 'ready to start'}")
    for finding in findings:
        fix = f"; {finding.fix}" if finding.fix and finding.result != "ok" else ""
        typer.echo(f"{mark}{finding.result:<4}  {finding.subject}: {finding.text}{fix}")


def _print_rendering(
    settings: Settings, body: str, answers: Sequence[str], *, as_json: bool
) -> None:
    rendering = render(settings, body, answers)
    if as_json:
        judged = [answer._asdict() for answer in rendering.answers]
        print_json(rendering._asdict() | {"answers": judged})
        return
    typer.echo(f"POST {rendering.url}")
    for name, value in rendering.headers.items():
        typer.echo(f"{name}: {value}")
    typer.echo(f"\n{printable(rendering.body)}\n")
    rows = (
        (str(answer.status or "-"), answer.code or "-", answer.means or "-", answer.becomes)
        for answer in rendering.answers
    )
    for line in format_table(("STATUS", "CODE", "MEANS", "BECOMES"), rows):
        typer.echo(line)
