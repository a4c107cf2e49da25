"""What the answers come to: the settings of config.yaml, or the chart's values.

Half of the answers make half a draft, which the settings' models can check already.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yarl import URL

from bridge.admin.wizard.questions import (
    KUBERNETES,
    NO_WEBHOOKS,
    Answers,
    endpoint_path,
    is_signed,
    preset_of,
)


def draft_settings(answers: Answers, secrets: Mapping[Path, str] | None = None) -> dict[str, Any]:
    """Make the settings that the answers give so far.

    `secrets` are those of files that are still to be written; to be checked, they stand in the
    settings themselves.
    """
    sections = {
        "rabbitmq": _broker(answers),
        "sms_api": _sms_api(answers, secrets or {}),
        "webhook": _webhook(answers, secrets or {}),
    }
    return {name: section for name, section in sections.items() if section}


def draft_values(answers: Answers) -> dict[str, Any]:
    """Make the chart's values; every answer for Kubernetes must be there."""
    username = answers.get("username")
    config = {"config": {"sms_api": {"auth": {"username": username}}}} if username else {}
    values = {
        "image": split_image(answers["image"]),
        "rabbitmq": _chart_broker(answers),
        "smsApi": _chart_api(answers),
    }
    return values | config | _chart_webhooks(answers)


def secrets_to_make(answers: Answers) -> dict[str, list[str]]:
    """Return the Secrets that the values name, with the keys that each must hold."""
    secrets = {answers["broker-secret-name"]: ["username", "password"]}
    for answer in (answers["key-secret-name"], answers["webhook-secret-name"]):
        if answer != NO_WEBHOOKS:
            name, key = split_secret(answer)
            keys = secrets.setdefault(name, [])
            keys += [key] if key not in keys else []
    return secrets


def split_image(image: str) -> dict[str, str]:
    """Take an image's name apart as Docker does; without a registry the cluster chooses it."""
    name, _, digest = image.partition("@")
    first, _, rest = name.partition("/")
    has_registry = rest and re.search("[.:]|^localhost$", first)
    registry, repository = (first, rest) if has_registry else ("", name)
    repository, _, tag = repository.partition(":")
    parts = {"registry": registry, "repository": repository, "tag": tag, "digest": digest}
    return {key: value for key, value in parts.items() if value or key == "registry"}


def split_secret(answer: str) -> tuple[str, str]:
    """Take NAME/KEY apart; without a key it is `key`."""
    name, _, key = answer.partition("/")
    return name, key or "key"


def _broker(answers: Answers) -> dict[str, Any]:
    broker: dict[str, Any] = {}
    if "broker" in answers:
        broker["url"] = answers["broker"]
    if answers.get("broker-user"):
        broker["username"] = answers["broker-user"]
    if "broker-password-file" in answers:
        broker["password_file"] = answers["broker-password-file"]
    return broker


def _sms_api(answers: Answers, secrets: Mapping[Path, str]) -> dict[str, Any]:
    api: dict[str, Any] = {}
    if "preset" in answers:
        api["preset"] = answers["preset"]
    if "base-url" in answers:
        api["base_url"] = answers["base-url"]
    if "account" in answers:
        api["account"] = answers["account"]
    if "username" in answers:
        api["auth"] = {"username": answers["username"]}
    file = answers.get("key-file")
    if file is not None and Path(file) in secrets:
        api["key"] = secrets[Path(file)]
    elif file is not None:
        api["key_file"] = file
    return api


def _webhook(answers: Answers, secrets: Mapping[Path, str]) -> dict[str, Any]:
    file = answers.get("webhook-secret-file")
    if "public-url" not in answers and file in {None, NO_WEBHOOKS}:
        return {}
    preset = preset_of(answers)
    endpoint: dict[str, Any] = {}
    if preset != "generic":
        endpoint = {"path": endpoint_path(preset), "preset": preset}
    if not is_signed(preset):
        endpoint["signature"] = {"preset": "plain"}
    if "public-url" in answers:
        endpoint["public_url"] = answers["public-url"]
    if file is not None and Path(file) in secrets:
        endpoint["secrets"] = [secrets[Path(file)]]
    elif file is not None:
        endpoint["secret_files"] = [file]
    return endpoint if preset == "generic" else {"endpoints": [endpoint]}


def _chart_broker(answers: Answers) -> dict[str, Any]:
    url = URL(answers["broker"])
    broker: dict[str, Any] = {"host": url.host}
    if url.explicit_port is not None:
        broker["port"] = url.explicit_port
    if url.path.strip("/"):
        broker["vhost"] = url.path.removeprefix("/")
    if url.scheme == "amqps":
        broker["tls"] = {"enabled": True}
    return broker | {"existingSecret": answers["broker-secret-name"]}


def _chart_api(answers: Answers) -> dict[str, Any]:
    preset = preset_of(answers)
    api: dict[str, Any] = {} if preset == "generic" else {"preset": preset}
    if "base-url" in answers:
        api["baseUrl"] = answers["base-url"]
    if "account" in answers:
        api["account"] = answers["account"]
    name, key = split_secret(answers["key-secret-name"])
    return api | {"existingSecret": name, "secretKeys": {"key": key}}


def _chart_webhooks(answers: Answers) -> dict[str, Any]:
    if answers["webhook-secret-name"] == NO_WEBHOOKS:
        return {"webhook": {"enabled": False}}
    preset = preset_of(answers)
    name, key = split_secret(answers["webhook-secret-name"])
    if preset == "generic":
        return {"webhookSecrets": {"existingSecret": name, "secretKeys": [key]}}
    endpoint: dict[str, Any] = {"path": endpoint_path(preset), "preset": preset}
    endpoint |= {"existingSecret": name, "secretKeys": [key]}
    config: dict[str, Any] = {} if is_signed(preset) else {"signature": {"preset": "plain"}}
    if "public-url" in answers:
        config["public_url"] = answers["public-url"]
    return {"webhook": {"endpoints": [endpoint | ({"config": config} if config else {})]}}


def default_output(answers: Answers) -> Path:
    """Return the name of the file that is written unless the user names another."""
    return Path("values.yaml" if answers["where"] == KUBERNETES else "config.yaml")
