"""Asking: each answer is checked at once, and asked again with the remedy."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.admin.wizard.interview import Interview
from bridge.admin.wizard.questions import Answers, Name
from bridge.errors import ConfigError


class Person:
    """Answers from a list, and keeps what was said."""

    def __init__(self, *answers: str) -> None:
        self._answers: Iterator[str] = iter(answers)
        self.said: list[str] = []
        self.asked: list[str] = []

    def say(self, text: str) -> None:
        """Keep what is shown."""
        self.said.append(text)

    def ask(self, prompt: str) -> str:
        """Answer with the next of the list."""
        self.asked.append(prompt)
        return next(self._answers)

    def ask_secret(self, prompt: str) -> str:
        """Answer as to any other question."""
        return self.ask(prompt)


def allow(_answers: Answers) -> None:
    """Take any place of the output."""


def unasked(given: dict[Name, str]) -> Interview:
    """Answer by options alone."""
    interview = Interview(given, None, allow)
    interview.answer_all()
    return interview


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """Make a file with a secret."""
    path = tmp_path / "secret"
    path.write_text("s3cret\n")
    return str(path)


def test_a_wrong_answer_is_asked_again(secret: str) -> None:
    """Each fault is told with its remedy, and the question comes again until it is right."""
    person = Person(
        *("hosst", "host"),
        *("rabbit", "amqp://me:pw@localhost/", "amqp://localhost/", ""),
        *("twillio", "twilio", "", "AC1"),
        *("/no/such/folder/key", secret),
        secret,
        *("not a url", "https://sms.example.com/webhooks/twilio"),
    )
    interview = Interview({}, person, allow)
    interview.answer_all()

    assert [line.strip(" !") for line in person.said if "!" in line] == [
        "--where: must be host or kubernetes; did you mean host?",
        "rabbitmq.url.0: must look like amqp://host:5672/vhost or amqps://...",
        (
            "--broker: must not hold a user or a password, which no configuration is the place "
            "for; they are asked for next"
        ),
        "sms_api.preset: is unknown; did you mean twilio?",
        "an answer is needed",
        "/no/such/folder: is no folder; make it first, or name another file",
        "webhook.endpoints.0.public_url: must look like https://api.example.com",
    ]
    assert interview.answers == {
        "where": "host",
        "broker": "amqp://localhost/",
        "broker-user": "",
        "preset": "twilio",
        "account": "AC1",
        "key-file": secret,
        "webhook-secret-file": secret,
        "public-url": "https://sms.example.com/webhooks/twilio",
    }


def test_an_option_is_not_asked_again(secret: str) -> None:
    """What the options say is taken; the rest is asked, and Enter takes what is in brackets."""
    person = Person("", "", "https://api.example.com")
    given: dict[Name, str] = {
        "where": "host",
        "broker": "amqp://localhost/",
        "key-file": secret,
        "webhook-secret-file": "none",
    }
    Interview(given, person, allow).answer_all()

    assert [prompt.strip() for prompt in person.asked] == [
        "User:",
        "Service [generic]:",
        "Base URL:",
    ]


def test_a_secret_is_checked_before_its_file_is_written(tmp_path: Path) -> None:
    """What a new file shall hold is judged as the role would, and the path is asked again."""
    file = tmp_path / "key"
    person = Person(str(file), "two words", str(file), " good-key ")
    given: dict[Name, str] = {
        "where": "host",
        "broker": "amqp://localhost/",
        "broker-user": "",
        "preset": "telnyx",
        "webhook-secret-file": "none",
    }
    interview = Interview(given, person, allow)
    interview.answer_all()

    assert "must be visible ASCII" in "".join(person.said)
    assert "two words" not in "".join(person.said)
    assert interview.secrets == {file: "good-key"}
    assert not file.exists()


def test_a_secret_of_webhooks_must_fit_its_scheme(tmp_path: Path) -> None:
    """What is no public key is told where a public key is needed."""
    file = tmp_path / "public-key"
    person = Person(str(file), "short", str(file), "11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=")
    (tmp_path / "key").write_text("k")
    given: dict[Name, str] = {
        "where": "host",
        "broker": "amqp://localhost/",
        "broker-user": "",
        "preset": "telnyx",
        "key-file": str(tmp_path / "key"),
    }
    interview = Interview(given, person, allow)
    interview.answer_all()

    assert "webhook.endpoints.0.secrets.0: " in "".join(person.said)
    assert list(interview.secrets) == [file]


def test_all_that_is_missing_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal every option that must be given is named, with what to look for."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        unasked({"where": "kubernetes", "preset": "infobip"})
    with pytest.raises(ConfigError) as on_host:
        unasked({"preset": "twilio", "broker-user": "sms"})

    assert [fault.partition(": is missing")[0] for fault in caught.value.faults] == [
        "--image",
        "--broker",
        "--base-url",
    ]
    assert "Of infobip: the account's own address" in caught.value.faults[2]
    assert [fault.partition(": ")[0] for fault in on_host.value.faults] == [
        "rabbitmq.password_file",
        "--account",
        "sms_api.key_file",
        "webhook.endpoints.0.secret_files.0",
        "--public-url",
    ]


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"where": "moon"}, "--where: must be host or kubernetes"),
        ({"broker": "amqp://u:p@h/"}, "--broker: must not hold a user or a password"),
        ({"broker": "amqp://h/\x07"}, "--broker: holds a control character"),
        ({"image": "x"}, "--image: does not belong to the other answers; leave it out"),
        ({"account": "a"}, "--account: does not belong to the other answers; leave it out"),
        ({"key-file": "/no/key"}, "sms_api.key_file: /no/key cannot be read"),
        (
            {"public-url": "https://a.example"},
            "--public-url: does not belong to the other answers; leave it out",
        ),
    ],
)
def test_a_wrong_option_is_told(secret: str, given: dict[Name, str], fault: str) -> None:
    """An option that is wrong, or that nobody asked for, ends it with what to do."""
    right: dict[Name, str] = {
        "preset": "telnyx",
        "key-file": secret,
        "webhook-secret-file": "none",
    }
    with pytest.raises(ConfigError) as caught:
        unasked(right | given)

    assert len(caught.value.faults) == 1
    assert caught.value.faults[0].startswith(fault)


def test_a_place_that_is_taken_ends_it_before_the_other_questions() -> None:
    """Nobody answers four more questions for a file that may not be written."""
    person = Person("host")

    def refuse(_answers: Answers) -> None:
        raise ConfigError("config.yaml: exists")

    with pytest.raises(ConfigError, match="exists"):
        Interview({}, person, refuse).answer_all()

    assert len(person.asked) == 1
