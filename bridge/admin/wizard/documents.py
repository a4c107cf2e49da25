"""The file that is written: the drafts as YAML, with a comment where one helps whoever reads it."""

from collections.abc import Mapping
from typing import Any, Final

import yaml

from bridge.admin.wizard.drafts import draft_settings, draft_values
from bridge.admin.wizard.questions import KUBERNETES, Answers, preset_of
from bridge.config.presets import needed_settings, webhook_secret

_HEADS: Final = {
    "config.yaml": (
        "What `sms-bridge init` was told. config.example.yaml has every other setting, with its",
        "default; secrets stand in the files that are named here, and are read again when they",
        "change.",
    ),
    "values.yaml": (
        "What `sms-bridge init` was told. The chart's own values.yaml has every other value, with",
        "its default; secrets stand in the Secrets that are named here, and nowhere else.",
    ),
}
_ADDRESS: Final = "The address that the service calls and signs, to the letter."
_PROXY: Final = "How a proxy in front signs what it has checked."
_COMMENTS: Final = {
    "rabbitmq": 'The broker. Without a name behind the last slash the virtual host is "/".',
    "rabbitmq.password_file": "Holds the password alone.",
    "rabbitmq.existingSecret": "Has the keys username and password.",
    "config": "The bridge's own settings, as config.example.yaml explains them.",
    "webhook.enabled": "No webhooks are received; for them a Secret in webhookSecrets, and true.",
}


def write_document(answers: Answers) -> str:
    """Write config.yaml, or for Kubernetes values.yaml, of all the answers."""
    is_chart = answers["where"] == KUBERNETES
    name = "values.yaml" if is_chart else "config.yaml"
    tree = draft_values(answers) if is_chart else draft_settings(answers)
    head = "".join(f"# {line}\n" for line in _HEADS[name])
    return head + "".join(_lines(tree, _comments(answers)))


def _comments(answers: Answers) -> Mapping[str, str]:
    """Say what stands at which path, in the words of the service."""
    preset = preset_of(answers)
    needs = needed_settings(preset)
    secret = f"Holds {webhook_secret(preset)}."
    of_needs = {
        "base_url": ("sms_api.base_url", "smsApi.baseUrl"),
        "account": ("sms_api.account", "smsApi.account"),
        "auth.username": ("sms_api.auth", "config.sms_api.auth"),
    }
    told = {
        path: f"{needs[key][0].upper()}{needs[key][1:]}."
        for key, paths in of_needs.items()
        if key in needs
        for path in paths
    }
    key = f"Holds {needs.get('key', 'the API key')}."
    return {
        **_COMMENTS,
        "sms_api": f"The SMS service: docs/providers/{_page(answers)} says more.",
        "smsApi": f"The SMS service: docs/providers/{_page(answers)} says more.",
        **told,
        "sms_api.key_file": key,
        "smsApi.existingSecret": key,
        "webhook.secret_files": secret,
        "webhookSecrets": secret,
        "webhook.endpoints.public_url": _ADDRESS,
        "webhook.endpoints.config.public_url": _ADDRESS,
        "webhook.endpoints.secret_files": secret,
        "webhook.endpoints.existingSecret": secret,
        "webhook.endpoints.signature": _PROXY,
        "webhook.endpoints.config.signature": _PROXY,
    }


def _page(answers: Answers) -> str:
    preset = preset_of(answers)
    return "your-own-service.md" if preset == "generic" else f"{preset}.md"


def _lines(tree: Mapping[str, Any], comments: Mapping[str, str], path: str = "") -> list[str]:
    lines: list[str] = []
    for key, value in tree.items():
        place = f"{path}.{key}" if path else key
        if not path:
            lines.append("\n")
        if place in comments:
            lines.append(f"# {comments[place]}\n")
        if isinstance(value, dict):
            lines += [f"{key}:\n", *_indented(_lines(value, comments, place))]
        elif isinstance(value, list) and isinstance(value[0], dict):
            lines.append(f"{key}:\n")
            for member in value:
                first, *rest = _lines(member, comments, place)
                lines += [f"  - {first}", *_indented(_indented(rest))]
        else:
            lines.append(f"{key}: {_scalar(value)}\n")
    return lines


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _scalar(value: object) -> str:
    written = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return written.removesuffix("...\n").strip()
