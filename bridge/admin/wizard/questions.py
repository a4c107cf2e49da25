"""What is asked, in five groups: where the bridge runs, broker, provider, API key, webhooks.

A question is data: the option that answers it too, what to look for, when it is asked at all.
Which value is right, `checking` says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from bridge.config import EndpointSettings
from bridge.config.presets import (
    PRESETS,
    Preset,
    needed_settings,
    preset_endpoint,
    preset_settings,
    webhook_secret,
)
from bridge.webhook.signatures.schemes import PRESETS as SCHEMES

Name = Literal[
    "where",
    "image",
    "broker",
    "broker-user",
    "broker-password-file",
    "broker-secret-name",
    "preset",
    "base-url",
    "account",
    "username",
    "key-file",
    "key-secret-name",
    "public-url",
    "webhook-secret-file",
    "webhook-secret-name",
]
# By the name of the question; one that is optional and was left empty is "".
Answers = dict[Name, str]

HOST: Final = "host"
KUBERNETES: Final = "kubernetes"
# For no webhook role at all.
NO_WEBHOOKS: Final = "none"


@dataclass(frozen=True, slots=True)
class Question:
    """One thing to ask; `explain`, `default` and `applies` are asked with the answers before it.

    `default` None means that somebody must answer. `is_secret_file` marks the path of a file that
    holds a secret, which may be written on the way.
    """

    name: Name
    prompt: str
    explain: Callable[[Answers], str]
    default: Callable[[Answers], str | None]
    applies: Callable[[Answers], bool]
    is_secret_file: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Questions under one head, which is one of the five."""

    title: str
    questions: tuple[Question, ...]


def preset_of(answers: Answers) -> Preset:
    """Return the preset that was chosen; generic until then."""
    return next((name for name in PRESETS if name == answers.get("preset")), "generic")


def endpoint_path(preset: Preset) -> str:
    """Return the path that the service is to call."""
    return "/webhooks" if preset == "generic" else f"/webhooks/{preset}"


def is_signed(preset: Preset) -> bool:
    """Whether the preset knows how the service signs its webhooks."""
    return "signature" in preset_endpoint(preset)


def signs_address(preset: Preset) -> bool:
    """Whether the service signs the address that it calls, which has to be told then."""
    path = endpoint_path(preset)
    endpoint = EndpointSettings.model_validate({"path": path, "preset": preset})
    return "{url}" in SCHEMES[endpoint.signature.preset].signed_content


def has_webhooks(answers: Answers) -> bool:
    """Whether the webhook role is wanted, as far as it was asked."""
    given = (answers.get("webhook-secret-file"), answers.get("webhook-secret-name"))
    return NO_WEBHOOKS not in given


def _on_host(answers: Answers) -> bool:
    return answers.get("where") == HOST


def _on_kubernetes(answers: Answers) -> bool:
    return answers.get("where") == KUBERNETES


def _needs(key: str) -> Callable[[Answers], bool]:
    return lambda answers: key in needed_settings(preset_of(answers))


def _needs_base_url(answers: Answers) -> bool:
    return preset_settings(preset_of(answers))["base_url"] is None


def _service_calls(key: str, otherwise: str) -> Callable[[Answers], str]:
    """Explain a setting by what the service calls it."""

    def explain(answers: Answers) -> str:
        preset = preset_of(answers)
        words = needed_settings(preset).get(key)
        return otherwise if words is None else f"Of {preset}: {words}."

    return explain


def _key_words(answers: Answers) -> str:
    told = _service_calls("key", "The API key of your SMS service.")(answers)
    place = "A file that holds it alone" if _on_host(answers) else "A Secret that holds it"
    return f"{told}\n{place}: the key itself is written into no configuration."


def _webhook_words(answers: Answers) -> str:
    preset = preset_of(answers)
    place = "file" if _on_host(answers) else "Secret"
    lines = [f"Of {preset}: {webhook_secret(preset)}. A {place} that holds it."]
    if not is_signed(preset):
        lines.append(
            f"The preset {preset} knows of no signature: without a proxy that signs in\n"
            f"X-Service-Signature, answer {NO_WEBHOOKS}; docs/providers/{preset}.md says more."
        )
    lines.append(f"{NO_WEBHOOKS}: receive no webhooks, only send.")
    return "\n".join(lines)


def _webhook_file(answers: Answers) -> str:
    preset = preset_of(answers)
    if not is_signed(preset):
        return NO_WEBHOOKS
    # Several services sign with what logs in, too.
    called = (webhook_secret(preset), needed_settings(preset).get("key", ""))
    is_the_key = len({words.partition(",")[0] for words in called}) == 1
    return answers.get("key-file", "") if is_the_key else str(Path.cwd() / "webhook-secret")


def _webhook_secret_name(answers: Answers) -> str:
    return "sms-webhook/secret" if is_signed(preset_of(answers)) else NO_WEBHOOKS


def _always(_answers: Answers) -> bool:
    return True


def _no_default(_answers: Answers) -> None:
    return None


def _fixed(text: str) -> Callable[[Answers], str]:
    return lambda _answers: text


_WHERE: Final = (
    Question(
        "where",
        "host or kubernetes",
        _fixed(
            f"{HOST}: this computer, a server or a container; writes config.yaml.\n"
            f"{KUBERNETES}: the Helm chart; writes values.yaml."
        ),
        _fixed(HOST),
        _always,
    ),
    Question(
        "image",
        "Image",
        _fixed(
            "The image that you built or pushed, with its tag or digest,\n"
            "such as registry.example.com/sms-bridge:0.1.0."
        ),
        _no_default,
        _on_kubernetes,
    ),
)
_BROKER: Final = (
    Question(
        "broker",
        "Address",
        _fixed(
            "RabbitMQ's address without user and password, amqps:// with TLS. A virtual host\n"
            "stands behind the last slash, such as sms in amqp://rabbitmq.example.com:5672/sms;\n"
            'leave it out for the default one, "/".'
        ),
        lambda answers: "amqp://localhost:5672/" if _on_host(answers) else None,
        _always,
    ),
    Question(
        "broker-user",
        "User",
        _fixed("The user of RabbitMQ; empty is its guest, who may log in from its own host alone."),
        _fixed(""),
        _on_host,
    ),
    Question(
        "broker-password-file",
        "File with the password",
        _fixed("A file that holds the user's password alone."),
        lambda _answers: str(Path.cwd() / "rabbitmq-password"),
        lambda answers: bool(answers.get("broker-user")),
        is_secret_file=True,
    ),
    Question(
        "broker-secret-name",
        "Secret",
        _fixed("The Secret with the keys username and password of the user of RabbitMQ."),
        _fixed("sms-rabbitmq"),
        _on_kubernetes,
    ),
)
_PROVIDER: Final = (
    Question(
        "preset",
        "Service",
        _fixed(
            "generic posts to {base URL}/v1/messages; docs/providers has a page for each service.\n"
            f"One of {', '.join(PRESETS[:6])},\n{', '.join(PRESETS[6:])}."
        ),
        _fixed("generic"),
        _always,
    ),
    Question(
        "base-url",
        "Base URL",
        _service_calls("base_url", "Your SMS service's address, such as https://api.example.com."),
        _no_default,
        _needs_base_url,
    ),
    Question("account", "Account", _service_calls("account", ""), _no_default, _needs("account")),
    Question(
        "username",
        "User name",
        _service_calls("auth.username", ""),
        _no_default,
        _needs("auth.username"),
    ),
)
_KEY: Final = (
    Question(
        "key-file",
        "File with the key",
        _key_words,
        lambda _answers: str(Path.cwd() / "sms-api-key"),
        _on_host,
        is_secret_file=True,
    ),
    Question("key-secret-name", "Secret/key", _key_words, _fixed("sms-api/key"), _on_kubernetes),
)
_WEBHOOKS: Final = (
    Question(
        "webhook-secret-file",
        "File with the secret",
        _webhook_words,
        _webhook_file,
        _on_host,
        is_secret_file=True,
    ),
    Question(
        "webhook-secret-name",
        "Secret/key",
        _webhook_words,
        _webhook_secret_name,
        _on_kubernetes,
    ),
    Question(
        "public-url",
        "Address",
        lambda answers: (
            f"What {preset_of(answers)} calls, to the letter, for it signs that too; such as\n"
            f"https://sms.example.com{endpoint_path(preset_of(answers))}."
        ),
        _no_default,
        lambda answers: has_webhooks(answers) and signs_address(preset_of(answers)),
    ),
)

GROUPS: Final = (
    Group("Where it runs", _WHERE),
    Group("The broker", _BROKER),
    Group("The SMS service", _PROVIDER),
    Group("Its API key", _KEY),
    Group("Its webhooks", _WEBHOOKS),
)
QUESTIONS: Final = tuple(question for group in GROUPS for question in group.questions)
