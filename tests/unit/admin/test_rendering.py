"""`check --render`: the request that would be sent, and what the answers to it become."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from bridge.admin.rendering import Rendering, render
from bridge.config import Settings
from bridge.config.presets import PRESETS, Preset
from bridge.errors import ConfigError

KEY = "Canary7Secret"
BODY = json.dumps({"to": "+491713920001", "from": "Acme", "text": "Hi"})


def rendered(preset: str, body: str = BODY, worker: Any = None, **api: Any) -> Rendering:
    needed = {"preset": preset, "account": "AC1", "key": KEY, "base_url": "https://api.example.com"}
    return render(Settings.model_validate({"sms_api": needed | api, "worker": worker or {}}), body)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_secret_is_shown(preset: Preset) -> None:
    shown = rendered(preset)
    secrets = [value for value in shown.headers.values() if "***" in value]

    assert len(secrets) == 1
    assert KEY not in repr(shown)
    assert "Q2FuYXJ5" not in repr(shown)
    assert "491713920001" in shown.body


@pytest.mark.parametrize(
    ("api", "shown"),
    [
        ({}, ("Authorization", "Bearer ***")),
        ({"auth": {"scheme": "basic"}}, ("Authorization", "Basic ***")),
        ({"auth": {"scheme": "header", "prefix": "App "}}, ("Authorization", "App ***")),
        ({"auth": {"scheme": "header", "header": "x-api-key"}}, ("x-api-key", "***")),
    ],
    ids=["bearer", "basic", "prefix", "header"],
)
def test_how_the_key_is_sent_is_shown(api: dict[str, Any], shown: tuple[str, str]) -> None:
    assert shown in rendered("generic", **api).headers.items()


def test_constant_header_is_masked() -> None:
    shown = rendered("generic", request={"headers": {"X-Tenant": "acme 1"}})

    assert shown.headers["X-Tenant"] == "***"
    assert "acme" not in repr(shown)


@pytest.mark.parametrize(
    ("body", "shown", "scheme", "in_file"),
    [
        ("json", '"k":"<***>"', "none", False),
        ("form", "k=%3C***%3E", "none", True),
        ("json", '"k":"<***>"', "bearer", True),
        ("form", "k=%3C***%3E", "header", False),
    ],
)
def test_secret_in_the_body_is_masked(
    tmp_path: Path, body: str, shown: str, scheme: str, *, in_file: bool
) -> None:
    (tmp_path / "key").write_text(KEY)
    fields = {"/k": "<{secret}>", "/a": "{account}", "/t": "{to}{text}"}
    key: dict[str, Any] = {"key": None, "key_file": tmp_path / "key"} if in_file else {}
    request = {"body": body, "fields": fields}
    rendering = rendered("generic", request=request, auth={"scheme": scheme}, **key)

    assert KEY not in repr(rendering)
    assert shown in rendering.body
    assert "AC1" in rendering.body


def test_the_address_for_receipts_is_shown() -> None:
    """As it is posted; of the endpoint with the same preset."""
    url = "https://sms.example.com/webhooks"
    others = {"path": "/other", "preset": "plivo", "public_url": f"{url}/plivo", "secrets": ["s"]}
    own = {"path": "/twilio", "preset": "twilio", "public_url": f"{url}/twilio", "secrets": ["s"]}
    api = {"preset": "twilio", "account": "AC1", "key": KEY}
    body = '{"to": "+447700900123", "from": "Acme", "text": "Hi"}'

    def callback(*endpoints: object) -> list[str]:
        settings = Settings.model_validate({"sms_api": api, "webhook": {"endpoints": endpoints}})
        return parse_qs(render(settings, body).body).get("StatusCallback", [])

    assert callback(others, own) == [f"{url}/twilio?sms-bridge-id=the-message-id#rc=5&rp=all"]
    assert callback(others) == callback(own | {"public_url": None}) == []


def test_every_answer_and_code_is_listed() -> None:
    answers = rendered("twilio").answers

    assert ("refused" in answers[1].becomes, answers[1].code, answers[1].status) == (
        True,
        "21211",
        400,
    )
    assert {(a.code, a.becomes) for a in answers if a.status is None} >= {
        ("21408", "dead letter: refused"),
        ("63017", "the worker slows down"),
        ("20005", "the worker pauses: insufficient_funds"),
    }
    assert len({answer.code for answer in answers if answer.code}) == len(
        [answer for answer in answers if answer.code]
    )


@pytest.mark.parametrize(
    ("preset", "worker", "becomes"),
    [
        ("twilio", {}, "dead letter: uncertain"),
        ("twilio", {"on_uncertain": "retry"}, "retried with the same key, then dead letter: "),
        ("telnyx", {}, "retried with the same key, then dead letter: "),
    ],
)
def test_what_is_uncertain(preset: str, worker: dict[str, str], becomes: str) -> None:
    answers = rendered(preset, worker=worker).answers

    assert next(a for a in answers if a.status == 500).becomes.startswith(becomes)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"to": "+49"}', "--render: to: must be"),
        ("{", "--render: body: is not UTF-8 JSON"),
        ("\udc80", "--render: is not UTF-8"),
    ],
)
def test_what_is_no_request_is_told(body: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rendered("generic", body)

    assert str(caught.value).startswith(told)


def test_answers_may_be_given() -> None:
    settings = Settings.model_validate(
        {
            "sms_api": {
                "base_url": "https://a.example",
                "key": KEY,
                "response": {"accepted": {"pointer": "/ok", "values": ["yes"]}},
            }
        }
    )
    given = ['200 {"ok": "yes"}', '200 {"ok": "no", "code": "7"}', "404", "200 \udc80"]
    answers = render(settings, BODY, given).answers

    assert [(answer.status, answer.code, answer.becomes) for answer in answers] == [
        (200, None, "sent"),
        (200, "7", "retried with the same key, then dead letter: uncertain"),
        (404, None, "retried later; the worker pauses if all messages get it: misconfigured"),
        (200, None, "retried with the same key, then dead letter: uncertain"),
    ]
    # Examples of another API would say what is not so.
    assert render(settings, BODY).answers == []


@pytest.mark.parametrize("answer", ["", "600", '{"status": 200}'])
def test_what_is_no_answer_is_told(answer: str) -> None:
    settings = Settings.model_validate({"sms_api": {"base_url": "https://a", "key": "k"}})
    with pytest.raises(ConfigError, match="--answer: must be a status, and"):
        render(settings, BODY, [answer])


def test_a_status_that_stands_for_a_code_is_listed_once() -> None:
    answers = rendered("android-sms-gateway").answers

    assert [(a.status, a.code) for a in answers if a.becomes == "retried later"] == [(503, None)]


def test_a_code_that_means_yes_is_no_error() -> None:
    answers = rendered("vonage-sms", response={"errors": {"0": "refused", "98": "refused"}}).answers

    assert {a.code for a in answers} & {"0", "98"} == {"98"}
