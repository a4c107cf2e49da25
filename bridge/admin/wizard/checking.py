"""Whether an answer is right, asked of the settings' own models and of what the roles read."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import ValidationError
from yarl import URL

from bridge.admin.wizard.drafts import draft_settings
from bridge.admin.wizard.questions import (
    HOST,
    KUBERNETES,
    Answers,
    Name,
    has_webhooks,
    preset_of,
    signs_address,
)
from bridge.config import Settings
from bridge.config.faults import describe
from bridge.config.spelling import did_you_mean
from bridge.credentials import read_secret
from bridge.errors import ConfigError
from bridge.webhook.endpoint import Endpoint
from bridge.webhook.signatures.schemes import scheme_from
from bridge.worker.service.shape import shape_from

# As Kubernetes names Secrets (a DNS subdomain) and their keys, and as images are named.
_SECRET_NAME: Final = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_SECRET_KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_IMAGE: Final = re.compile(
    r"([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9._/-]+(:[A-Za-z0-9._-]{1,128})?(@sha256:[a-f0-9]{64})?"
)
_AN_ADDRESS: Final = "https://sms.example.com/webhooks"
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def check_answer(name: Name, answers: Answers, secrets: Mapping[Path, str]) -> None:
    """Check one answer beside those before it; it is among `answers` already.

    `secrets` are the contents of files that are still to be written. Raises ConfigError with a
    line for each fault, each with its remedy and none with a secret.
    """
    if not answers[name].isprintable():
        raise ConfigError(f"--{name}: holds a control character; type it anew")
    _check_by_itself(name, answers[name])
    settings = _validate(answers, secrets)
    match name:
        case "broker":
            _check_broker(answers)
        case "broker-password-file" if Path(answers[name]) not in secrets:
            read_secret("rabbitmq.password_file", Path(answers[name]))
        case "key-file" if settings.sms_api.missing:
            # What is missing is told where it is asked for.
            read_secret("sms_api.key_file", Path(answers[name]))
        case "key-file":
            shape_from(settings.sms_api)
        case "public-url" | "webhook-secret-file" | "webhook-secret-name":
            _check_endpoint(answers, secrets)
        case _:
            pass


def _check_by_itself(name: Name, value: str) -> None:
    match name:
        case "where" if value not in {HOST, KUBERNETES}:
            meant = did_you_mean(value, (HOST, KUBERNETES))
            raise ConfigError(f"--where: must be {HOST} or {KUBERNETES}{meant}")
        case "image" if not _IMAGE.fullmatch(value):
            raise ConfigError(
                "--image: must look like registry.example.com/sms-bridge:0.1.0, or end with "
                "@sha256: and a digest"
            )
        case "broker-secret-name" if not _SECRET_NAME.fullmatch(value):
            raise ConfigError(f"--{name}: must be the name of a Secret, such as sms-rabbitmq")
        case "key-secret-name" | "webhook-secret-name":
            secret, _, key = value.partition("/")
            if not (_SECRET_NAME.fullmatch(secret) and _SECRET_KEY.fullmatch(key or "key")):
                raise ConfigError(
                    f"--{name}: must be the name of a Secret and of its key, such as sms-api/key; "
                    "the secret itself is never given here"
                )
        case _:
            pass


def _check_broker(answers: Answers) -> None:
    url = URL(answers["broker"])
    if url.user is not None or url.password is not None:
        raise ConfigError(
            "--broker: must not hold a user or a password, which no configuration is the place "
            "for; they are asked for next"
        )
    if answers["where"] != KUBERNETES:
        return
    if url.host in _LOOPBACK:
        raise ConfigError(
            "--broker: in a pod this is the pod itself; name the broker's Service, such as "
            "amqp://rabbitmq.messaging.svc:5672/"
        )
    if url.query_string:
        raise ConfigError("--broker: the chart has no place for what stands behind ?; take it out")


def _check_endpoint(answers: Answers, secrets: Mapping[Path, str]) -> None:
    if not has_webhooks(answers):
        return
    # Asked for after the secret, which cannot be checked without one.
    is_open = signs_address(preset_of(answers)) and "public-url" not in answers
    settings = _validate(answers | {"public-url": _AN_ADDRESS} if is_open else answers, secrets)
    ((key, endpoint),) = settings.webhook.endpoints_by_key.items()
    if endpoint.has_secrets:
        Endpoint(endpoint, key=key)
    else:
        scheme_from(endpoint.signature, endpoint.public_url, endpoint=key)


def _validate(answers: Answers, secrets: Mapping[Path, str]) -> Settings:
    try:
        return Settings.model_validate(draft_settings(answers, secrets))
    except ValidationError as error:
        raise ConfigError(*describe(error, {})) from None
