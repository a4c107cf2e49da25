"""The words of a refusal: the key, what is right, the nearest name, and never a value."""

import json
import os
import re
from typing import Any

import pytest

from bridge.config import Settings
from bridge.config.fields import PATTERNS
from tests.unit.config.conftest import CANARY, Faults, Load, env_name, nested

FILES = ("sms_api.key_file", "sms_api.auth.username_file", "sms_api.ca_file")
PATTERN = re.compile(r'"pattern": "((?:[^"\\]|\\.)*)"')


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("worker", [1], "must hold keys, indented below it"),
        ("worker", "a", "must hold keys; in the environment it is JSON"),
        ("worker.queue", 5, "must be text; a number needs quotes"),
        ("worker.queue", "", "must not be empty"),
        ("worker.default_from", "a\tb", "must not hold line breaks or control characters"),
        ("worker.retry_delays", [], "must have at least 1 in its list"),
        ("worker.retry_delays", {"a": 1}, "must be a list"),
        ("worker.retry_delays", [[5]], "must be a number"),
        ("worker.outage_after", 0, "must be more than 0"),
        ("worker.max_text_length", 100_000, "must be at most 65536"),
        ("webhook.secrets", ["a"] * 6, "must have at most 5 in its list"),
        ("webhook.path", "a", "must begin with / and hold no space, ?, #, %, { or }"),
        ("webhook.path", "/a%20b", "must begin with / and hold no space, ?, #, %, { or }"),
        ("webhook.signature.signed_content", "x", "must hold {body} or {url}"),
        (
            "webhook.signature.format",
            "x",
            "must be plain, kv, list, csv, jwt, or prefix: followed by",
        ),
        ("webhook.port", "a", "must be a whole number"),
        ("webhook.port", None, "must be a whole number"),
        ("webhook.port", 1.5, "must be a whole number"),
        ("webhook.port", -1, "must be at least 0"),
        ("log.level", "loud", "must be 'debug', 'info', 'warning' or 'error'"),
        ("sms_api.key_file", 5, "must be the path of a file"),
        ("sms_api.key_file", "\0", "must be the path of a file, without the character NUL"),
        *((key, "/run/\0", "must be the path of a file, without") for key in FILES),
    ],
)
def test_refusal_says_what_to_write(faults: Faults, key: str, value: object, text: str) -> None:
    """A refusal says in plain words what is right, without patterns or Python's types."""
    (fault,) = faults(nested(key, value))
    path, _, told = fault.partition(": ")

    assert path.startswith(key)
    assert told.startswith(text)


@pytest.mark.parametrize("key", [*FILES, "sms_api.account", "sms_api.auth.username"])
def test_half_a_character_is_refused(faults: Faults, key: str) -> None:
    """A path or a name that could not be used is a fault of its key, not of whoever uses it."""
    section, _, rest = key.partition(".")
    values = json.dumps(nested(rest, "a\ud800"))

    (fault,) = faults(**{f"SMS_BRIDGE_{section.upper()}": values})

    assert fault == f"{key}: holds half of a surrogate pair; write the whole character"


def test_path_of_other_bytes_is_a_path(load: Load) -> None:
    """A path whose bytes are no UTF-8, as the environment gives it, is taken."""
    path = os.fsdecode(b"/run/\xff")
    loaded = load(SMS_BRIDGE_SMS_API__KEY_FILE=path)

    assert str(loaded.sms_api.key_file) == path


def test_every_pattern_has_its_words() -> None:
    """No pattern of a setting is without the words that a fault tells in its place."""
    schema = json.dumps(Settings.model_json_schema())

    assert {json.loads(f'"{found}"') for found in PATTERN.findall(schema)} == PATTERNS.keys()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("rabbitmq.url", "must be an address like amqp://host:5672/vhost, or a list of them"),
        ("worker.queue", "must be text; a number needs quotes"),
        ("worker.concurrency", "must be a whole number from 1 to 5000, or auto"),
        ("worker.retry_delays", "must be a list"),
        ("worker.outage_after", "must be a number"),
        ("webhook.port", "must be a whole number"),
        ("log.level", "must be 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_key_that_is_left_empty(faults: Faults, key: str, told: str) -> None:
    """A key with nothing behind it is told so, with what may stand there, and the remedy."""
    section, _, name = key.partition(".")
    fault = f"{key}: {told}; it has no value: write one, or leave the key out for its default"

    assert faults(f"{section}:\n  {name}:\n") == (fault,)
    assert faults("", **{env_name(key): "null"}) == (fault,)


def test_nothing_in_a_list(faults: Faults) -> None:
    """An empty place in a list is told by its number; no single place has a default."""
    (fault,) = faults("rabbitmq:\n  url:\n  - amqp://one/\n  -\n")

    assert fault == (
        "rabbitmq.url.1: must be text; a number needs quotes; "
        "it has no value: write one, or remove it from the list"
    )


# --- Unknown keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("worker: {queu: q}", "worker.queu: unknown key; did you mean worker.queue?"),
        (
            "worker: {rate_limit: {per_secnd: 1}}",
            "worker.rate_limit.per_secnd: unknown key; did you mean worker.rate_limit.per_second?",
        ),
        (
            "rabbitmq: {tls: {cafile: x}}",
            "rabbitmq.tls.cafile: unknown key; did you mean rabbitmq.tls.ca_file?",
        ),
        ("rabitmq: {url: x}", "rabitmq: unknown key; did you mean rabbitmq?"),
        ("zzzzzz: 1", "zzzzzz: unknown key"),
    ],
    ids=["key", "deeper", "deeper-again", "section", "like-nothing"],
)
def test_unknown_key_of_the_file(faults: Faults, text: str, fault: str) -> None:
    """An unknown key is refused by its path, with the nearest known one."""
    assert faults(text) == (fault,)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("worker:\n  +491713920012: x\n", "worker, line 2: unknown key"),
        ("worker: {491713920012: x}", "worker, line 1: unknown key"),
        ("rabbitmq:\n  {password:canary-4f1d}\n", "rabbitmq, line 2: unknown key"),
        ("sms_api:\n  sk_live_4eC39HqLyjWDarjt: x", "sms_api, line 2: unknown key"),
        ("\nCanary4f1d: {}", "the top, line 2: unknown key"),
        ("QuxQuuxCorge: {}", "the top, line 1: unknown key"),
        ("a" * 33 + ": {}", "the top, line 1: unknown key"),
        ("worker: {Max_Attempts: 1}", "worker.Max_Attempts: unknown key; did you mean worker.max_"),
    ],
)
def test_unknown_key_that_may_be_a_secret(faults: Faults, text: str, fault: str) -> None:
    """A key that does not look like a setting's name is told by its line, and not quoted."""
    (said,) = faults(text)

    assert said.startswith(fault)
    assert "canary" not in said


def test_keys_of_a_map_in_the_environment(faults: Faults) -> None:
    """The same holds for a map in the environment, which has no lines."""
    assert faults("", SMS_BRIDGE_WORKER__RATE_LIMIT='{"491713920012": 1}') == (
        "worker.rate_limit: unknown key",
    )


# --- Values are not quoted ------------------------------------------------------------------------

REFUSED: dict[str, str | dict[str, Any]] = {
    "broken broker url": {"rabbitmq": {"url": f"amqp://u:{CANARY}@h:port/"}},
    "scheme of the broker": {"rabbitmq": {"url": f"http://u:{CANARY}@h/"}},
    "one of several": {"rabbitmq": {"url": ["amqp://a/", f"x://u:{CANARY}@h/"]}},
    "password as list": {"rabbitmq": {"password": [CANARY]}},
    "password as map": {"rabbitmq": {"password": {"value": CANARY}}},
    "unknown key": {"rabbitmq": {"pasword": CANARY}},
    "unknown section": {"rabitmq": {"password": CANARY}},
    "section as text": {"sms_api": CANARY},
    "section as list": {"sms_api": [CANARY]},
    "key as list": {"sms_api": {"key": [CANARY]}},
    "key in the url": {"sms_api": {"base_url": f"https://u:{CANARY}@h"}},
    "key as port": {"sms_api": {"base_url": f"https://h:{CANARY}"}},
    "key as query": {"sms_api": {"base_url": f"https://h?key={CANARY}"}},
    "proxy": {"sms_api": {"proxy": f"socks5://u:{CANARY}@h"}},
    "secrets as text": {"webhook": {"secrets": CANARY}},
    "secrets as broken JSON": {"webhook": {"secrets": f'["{CANARY}'}},
    "too many secrets": {"webhook": {"secrets": [CANARY] * 6}},
    "number for a secret's list": {"webhook": {"secrets": {"a": CANARY}}},
    "choice": {"log": {"level": CANARY}},
    "number": {"worker": {"concurrency": CANARY}},
    "duration": {"worker": {"max_age": CANARY}},
    "header": {"sms_api": {"idempotency_header": f"Bearer {CANARY}"}},
    "pointer": {"webhook": {"event_id_pointers": [CANARY]}},
    "field": {"sms_api": {"request": {"fields": {f"/to:{CANARY}": f"{{{CANARY}}}"}}}},
    "broken YAML": f"sms_api: {{key: '{CANARY}",
    "YAML tag": f"sms_api: !!python/name:{CANARY} x",
    "YAML alias": f"sms_api: {{key: *{CANARY}}}",
    "YAML anchor": f"sms_api: {{key: &{CANARY} a, proxy: &{CANARY} b}}",
    "YAML number": f"sms_api: {{key: !!int {CANARY}}}",
    "list at the top": f"- {CANARY}",
    "text at the top": CANARY,
}


@pytest.mark.parametrize("case", REFUSED)
def test_fault_does_not_quote_a_value(faults: Faults, case: str) -> None:
    """No fault holds what was configured, because it may be a secret in the wrong place."""
    text = "\n".join(faults(REFUSED[case]))

    assert CANARY not in text
