"""The questions of `sms-bridge init`, the checks of the answers, and the file from a template."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError
from yarl import URL

from bridge.config import EndpointSettings, Settings, SmsApiSettings
from bridge.config.faults import describe
from bridge.config.presets import (
    PRESETS,
    Preset,
    needed_settings,
    preset_endpoint,
    preset_settings,
    webhook_secret,
)
from bridge.credentials import read_secret
from bridge.errors import BridgeError, ConfigError
from bridge.webhook.endpoint import Endpoint
from bridge.webhook.signatures.schemes import SCHEMES, scheme_from
from bridge.worker.service.shape import shape_from

HOST: Final = "host"
KUBERNETES: Final = "kubernetes"
# The answer that turns webhooks off.
NO_WEBHOOKS: Final = "none"

# By the name of the option for the same answer; "" if an optional one was left empty.
Answers = dict[str, str]

STEPS: Final = ("Where it runs", "The broker", "The SMS service", "Its API key", "Its webhooks")
_PLACEHOLDER: Final = re.compile(r"\{([^}]+)\}")


@dataclass(frozen=True, slots=True)
class WizardQuestion:
    """One question, in one of the five steps; without a `default` it must be answered.

    `is_file`: the answer is the path of a file that holds a secret.
    """

    name: str
    step: int
    prompt: str
    explanation: str
    default: str | None = None
    is_file: bool = False


def questions(answers: Answers) -> Iterator[WizardQuestion]:
    """Yield the questions that apply; the caller adds each answer before the next question."""
    yield WizardQuestion(
        *("where", 1, "host or kubernetes"),
        f"{HOST}: a computer or container; writes config.yaml.\n"
        f"{KUBERNETES}: the Helm chart; writes values.yaml.",
        HOST,
    )
    on_host = answers["where"] == HOST
    if not on_host:
        told = "The image that you have pushed, such as registry.example.com/sms-bridge:0.1.0."
        yield WizardQuestion("image", 1, "Image", told)
    yield WizardQuestion(
        *("broker", 2, "Address"),
        "RabbitMQ's address without user and password, amqps:// for TLS. The virtual host\n"
        'follows the last slash, as in amqp://rabbitmq.example.com:5672/sms; the default is "/".',
        "amqp://localhost:5672/" if on_host else None,
    )
    if not on_host:
        told = "The Secret with RabbitMQ's user, under the keys username and password."
        yield WizardQuestion("broker-secret-name", 2, "Secret", told, "sms-rabbitmq")
    else:
        told = "RabbitMQ's user; empty means guest, which may log in only from the broker's host."
        yield WizardQuestion("broker-user", 2, "User", told, "")
    if answers.get("broker-user"):
        yield _file("broker-password-file", 2, "password", "Holds only the user's password.")
    yield WizardQuestion(
        *("preset", 3, "Service"),
        "generic posts to {base URL}/v1/messages; docs/providers has a page for each service.\n"
        f"One of {', '.join(PRESETS[:6])},\n{', '.join(PRESETS[6:])}.",
        "generic",
    )
    yield from _questions_of_service(answers, _preset(answers), on_host=on_host)


def _questions_of_service(
    answers: Answers, preset: Preset, *, on_host: bool
) -> Iterator[WizardQuestion]:
    needs = {key: f"For {preset}: {words}." for key, words in needed_settings(preset).items()}
    if preset_settings(preset)["base_url"] is None:
        told = needs.get("base_url", "Your SMS service's address, such as https://api.example.com.")
        yield WizardQuestion("base-url", 3, "Base URL", told)
    if "account" in needs:
        yield WizardQuestion("account", 3, "Account", needs["account"])
    if "auth.username" in needs:
        yield WizardQuestion("username", 3, "User name", needs["auth.username"])
    told = needs.get("key", "The API key of your SMS service.")
    told += "\nThe configuration holds no secret, only the name of the {} that holds it."
    if on_host:
        yield _file("key-file", 4, "key", told.format("file"), "sms-api-key")
    else:
        yield WizardQuestion(
            "key-secret-name", 4, "Secret/key", told.format("Secret"), "sms-api/key"
        )
    told = f"For {preset}: {webhook_secret(preset)}.\n"
    if not _is_signed(preset):
        told += f"{preset} does not sign: unless a proxy of yours does, answer {NO_WEBHOOKS}; see\n"
        told += f"docs/providers/{preset}.md. "
    told += f"{NO_WEBHOOKS}: receive no webhooks, only send."
    default = "sms-webhook/secret" if _is_signed(preset) else NO_WEBHOOKS
    if not on_host:
        yield WizardQuestion("webhook-secret-name", 5, "Secret/key", told, default)
    else:
        file = _file("webhook-secret-file", 5, "secret", told, "webhook-secret")
        if not _is_signed(preset):
            file = replace(file, default=NO_WEBHOOKS)
        elif _signs_with_the_key(preset):
            file = replace(file, default=answers.get("key-file", ""))
        yield file
    if _has_webhooks(answers) and _needs_address(preset):
        told = f"The address that {preset} calls, exactly as it is set there;\n"
        told += f"such as https://sms.example.com{_path(preset)}."
        yield WizardQuestion("public-url", 5, "Address", told)


def _file(
    name: str, step: int, what: str, told: str, default: str = "rabbitmq-password"
) -> WizardQuestion:
    path = str(Path.cwd() / default)
    return WizardQuestion(name, step, f"File with the {what}", told, path, is_file=True)


def _preset(answers: Answers) -> Preset:
    return next((name for name in PRESETS if name == answers.get("preset")), "generic")


def _path(preset: Preset) -> str:
    return "/webhooks" if preset == "generic" else f"/webhooks/{preset}"


def _is_signed(preset: Preset) -> bool:
    return "signature" in preset_endpoint(preset)


def _signs_address(preset: Preset) -> bool:
    settings = EndpointSettings.model_validate({"path": _path(preset), "preset": preset})
    return "{url}" in SCHEMES[settings.signature.preset].signed_content


def _needs_address(preset: Preset) -> bool:
    request = SmsApiSettings.model_validate({"preset": preset}).request
    return "callback" in request.placeholders or _signs_address(preset)


def _signs_with_the_key(preset: Preset) -> bool:
    """Whether the secret of the webhooks is also the one that logs in."""
    called = (webhook_secret(preset), needed_settings(preset).get("key", ""))
    return len({words.partition(",")[0] for words in called}) == 1


def _has_webhooks(answers: Answers) -> bool:
    given = (answers.get("webhook-secret-file"), answers.get("webhook-secret-name"))
    return NO_WEBHOOKS not in given


# The names of Secrets (DNS subdomains), of their keys, and of images.
_NAME: Final = r"(?=[^/]{1,253}(/|$))[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
_SECRET_AND_KEY: Final = (
    _NAME + r"(/[-._a-zA-Z0-9]{0,253})?",
    "must name a Secret and its key, such as sms-api/key; never give the secret itself here",
)
# The pattern of an answer, and the error.
_FORMS: Final = {
    "where": (f"{HOST}|{KUBERNETES}", f"must be {HOST} or {KUBERNETES}"),
    "image": (
        r"([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9._/-]+(:[A-Za-z0-9._-]{1,128})?(@sha256:[a-f0-9]{64})?",
        "must look like registry.example.com/sms-bridge:0.1.0, or end with @sha256: and a digest",
    ),
    "broker-secret-name": (_NAME, "must be the name of a Secret, such as sms-rabbitmq"),
    "key-secret-name": _SECRET_AND_KEY,
    "webhook-secret-name": _SECRET_AND_KEY,
}


def check_answer(name: str, answers: Answers, secrets: Mapping[Path, str]) -> None:
    """Check the answer `name`, which `answers` already has, together with those before it.

    `secrets` has the contents of files that are not written yet. Raises ConfigError with a line for
    each fault, which names the remedy and holds no secret.
    """
    value = answers[name]
    if not value.isprintable():
        raise ConfigError(f"--{name}: contains a control character; type it again")
    form, remedy = _FORMS.get(name, (".*", ""))
    if not re.fullmatch(form, value):
        raise ConfigError(f"--{name}: {remedy}")
    settings = _validate(answers, secrets)
    if name == "broker":
        _check_broker(URL(value), is_pod=answers["where"] == KUBERNETES)
    elif name == "broker-password-file" and Path(value) not in secrets:
        read_secret("rabbitmq.password_file", Path(value))
    elif name == "key-file" and settings.sms_api.missing:
        read_secret("sms_api.key_file", Path(value))
    elif name == "key-file":
        shape_from(settings.sms_api)
    elif name.startswith(("webhook", "public")) and _has_webhooks(answers):
        # The address, which is asked for next, is needed to check the secret.
        is_open = _needs_address(_preset(answers)) and "public-url" not in answers
        example = {"public-url": "https://sms.example.com/"} if is_open else {}
        ((key, endpoint),) = _validate(answers | example, secrets).webhook.endpoints_by_key.items()
        if endpoint.has_secrets:
            Endpoint(endpoint, key=key)
        else:
            scheme_from(endpoint.signature, endpoint.public_url, endpoint=key)


def _check_broker(url: URL, *, is_pod: bool) -> None:
    if url.user is not None or url.password is not None:
        raise ConfigError(
            "--broker: must not contain a user or a password, which do not belong in a "
            "configuration; the next questions ask for them"
        )
    if is_pod and url.host in {"localhost", "127.0.0.1", "::1"}:
        raise ConfigError(
            "--broker: in a pod this is the pod itself; give the broker's Service, such as "
            "amqp://rabbitmq.messaging.svc:5672/"
        )
    if is_pod and url.query_string:
        raise ConfigError(
            "--broker: the chart supports no query in the address; remove ? and everything after it"
        )


def _validate(answers: Answers, secrets: Mapping[Path, str]) -> Settings:
    """Validate the settings of the answers so far, with the secrets that are not written yet."""
    document: dict[str, Any] = yaml.safe_load(_fill("config", _values(answers))) or {}
    api = document.get("sms_api", {})
    if (key := secrets.get(Path(answers.get("key-file", "")))) is not None:
        del api["key_file"]
        api["key"] = key
    if (secret := secrets.get(Path(answers.get("webhook-secret-file", "")))) is not None:
        (endpoint,) = document["webhook"]["endpoints"]
        del endpoint["secret_files"]
        endpoint["secrets"] = [secret]
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        raise ConfigError(*describe(error, {})) from None


def write_document(answers: Answers) -> str:
    if answers["where"] == HOST:
        return _fill("config", _values(answers))
    return _fill("values", _values(answers) | _chart_values(answers))


def secrets_to_make(answers: Answers) -> dict[str, list[str]]:
    """Return the Secrets that the values refer to, with the keys that each needs."""
    secrets = {answers["broker-secret-name"]: ["username", "password"]}
    for answer in (answers["key-secret-name"], answers["webhook-secret-name"]):
        if answer != NO_WEBHOOKS:
            name, key = _name_and_key(answer)
            keys = secrets.setdefault(name, [])
            keys += [key] if key not in keys else []
    return secrets


def _values(answers: Answers) -> dict[str, Any]:
    """Return the values of the template's placeholders, as far as there are answers."""
    preset = _preset(answers)
    values: dict[str, Any] = {key: value for key, value in answers.items() if value}
    needs = needed_settings(preset)
    values |= {f"of {key}": f"{words[0].upper()}{words[1:]}" for key, words in needs.items()}
    values["of key"] = needs.get("key", "the API key")
    values["of webhook"] = webhook_secret(preset)
    values["page"] = "your-own-service.md" if preset == "generic" else f"{preset}.md"
    if _has_webhooks(answers):
        values |= {"path": _path(preset), "endpoint": preset}
        if not _is_signed(preset):
            values["signature"] = "plain"
    else:
        values.pop("webhook-secret-file", None)
    return values


def _chart_values(answers: Answers) -> dict[str, Any]:
    url = URL(answers["broker"])
    values: dict[str, Any] = {
        "host": url.host,
        "port": url.explicit_port,
        "vhost": url.path.strip("/") and url.path.removeprefix("/"),
        "tls": url.scheme == "amqps",
        **split_image(answers["image"]),
    }
    # The chart has defaults for empty values, except for the registry.
    values = {name: value for name, value in values.items() if value or name == "registry"}
    values["key secret"], values["key key"] = _name_and_key(answers["key-secret-name"])
    if not _has_webhooks(answers):
        return values | {"webhooks": False}
    secret, key = _name_and_key(answers["webhook-secret-name"])
    return values | {"webhook secret": secret, "webhook key": key}


def split_image(image: str) -> dict[str, str]:
    """Split an image's name as Docker does; the cluster chooses a missing registry."""
    name, _, digest = image.partition("@")
    first, _, rest = name.partition("/")
    has_registry = rest and re.search("[.:]|^localhost$", first)
    registry, repository = (first, rest) if has_registry else ("", name)
    repository, _, tag = repository.partition(":")
    return {"registry": registry, "repository": repository, "tag": tag, "digest": digest}


def _name_and_key(answer: str) -> tuple[str, str]:
    name, _, key = answer.partition("/")
    return name, key or "key"


def _fill(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template; omit lines without a value, with their comments and empty sections."""
    text = (files("bridge.admin") / "templates" / f"{template}.yaml").read_text(encoding="utf-8")
    kept: list[str] = []
    # Backwards, because a comment or a section's head is kept only if the next line is.
    is_next_kept, next_indent = False, 0
    for line in reversed(text.splitlines()):
        names = _PLACEHOLDER.findall(line)
        has_values = all(name in values for name in names)
        is_comment = line.lstrip().startswith("#")
        if is_comment or not line:
            is_kept = is_next_kept and has_values
        else:
            indent = len(line) - len(line.lstrip())
            is_kept = is_next_kept = has_values if names else next_indent > indent
            next_indent = indent if is_kept else next_indent
        for name in names if is_kept else ():
            value = values[name] if is_comment else _scalar(values[name])
            line = line.replace(f"{{{name}}}", value)  # noqa: PLW2901  filled in
        kept += [line] if is_kept else []
    return "".join(f"{line}\n" for line in reversed(kept))


def _scalar(value: object) -> str:
    written = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return written.removesuffix("...\n").strip()


def write_files(secrets: Mapping[Path, str], path: Path, text: str, *, replaces: bool) -> None:
    """Write the secrets, readable by their owner only, and the configuration: all or none.

    Only the configuration may replace a file. Raises ConfigError if a file exists, BridgeError if
    one cannot be written.
    """
    written: list[Path] = []
    mode = path.stat().st_mode & 0o777 if replaces and path.exists() else 0o644
    # An existing file is replaced in one step, when the new one is complete.
    target = path.with_name(f".{path.name}.new") if replaces else path
    try:
        if replaces:
            # Left by an `init` that was killed.
            target.unlink(missing_ok=True)
        for file, secret in secrets.items():
            _write(file, f"{secret}\n", 0o600, written)
        _write(target, text, mode, written)
        target.replace(path)
    except BaseException as error:
        for file in written:
            file.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise already_there(Path(error.filename)) from None
        if isinstance(error, OSError):
            raise BridgeError(f"{error.filename}: cannot be written: {error.strerror}") from None
        raise


def _write(path: Path, text: str, mode: int, written: list[Path]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    written.append(path)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fchmod(handle, mode)
        os.fsync(handle)


def already_there(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: exists and is left as it is; --force replaces config.yaml or values.yaml, "
        "--output names another file"
    )
