"""What is told when no webhook of an endpoint is genuine any more."""

from dataclasses import dataclass

import pytest
from pydantic import SecretStr

from bridge.config import EndpointSettings
from bridge.config.webhook import SignatureSettings
from bridge.webhook.endpoint import Endpoint
from bridge.webhook.refusal_watch import QUIET_SECONDS, Trust
from tests.ears import Ears


@dataclass
class Clock:
    """Shows a time."""

    now: float = 1000.0

    def __call__(self) -> float:
        """Return it."""
        return self.now


def make_endpoint(preset: str = "plain", key: str = "webhook.endpoints.0") -> Endpoint:
    """Make an endpoint with a secret."""
    settings = EndpointSettings(
        path="/a",
        secrets=(SecretStr("a-secret"),),
        signature=SignatureSettings.model_validate({"preset": preset}),
        public_url="https://sms.example.com/a",
    )
    return Endpoint(settings, key=key)


def test_it_is_told_once_an_hour(ears: Ears) -> None:
    """The first refusal is told with its endpoint and remedy, the next one an hour later."""
    clock, endpoint = Clock(), make_endpoint()
    trust = Trust([endpoint], clock)
    for _ in range(5):
        trust.note_refused(endpoint, "mismatch")
        clock.now += 60
    clock.now += QUIET_SECONDS
    trust.note_refused(endpoint, "stale")
    first, second = ears.heard("webhooks_refused")

    assert (first["endpoint"], first["why"], first["refused"]) == (
        "webhook.endpoints.0",
        "mismatch",
        1,
    )
    assert "secret" in first["remedy"]
    assert (second["why"], second["refused"]) == ("stale", 6)
    assert "clock" in second["remedy"]


def test_what_strangers_do_beside_genuine_webhooks_is_not_told(ears: Ears) -> None:
    """Where something was verified within the hour the secret is right."""
    clock, endpoint = Clock(), make_endpoint()
    trust = Trust([endpoint], clock)
    trust.note_verified(endpoint)
    clock.now += QUIET_SECONDS - 1
    trust.note_refused(endpoint, "mismatch")

    assert ears.heard("webhooks_refused") == []
    assert trust.facts() == []


@pytest.mark.parametrize("fault", ["missing", "ambiguous"])
def test_other_faults_speak_of_no_secret(ears: Ears, fault: object) -> None:
    """Who does not sign is a stranger, and what is ambiguous was signed with the right secret."""
    endpoint = make_endpoint()
    trust = Trust([endpoint], Clock())
    trust.note_refused(endpoint, fault)  # type: ignore[arg-type]

    assert (ears.heard("webhooks_refused"), trust.facts()) == ([], [])


def test_facts_are_of_the_last_hour() -> None:
    """Each endpoint is judged by itself, until a webhook is genuine or an hour has passed."""
    clock, one = Clock(), make_endpoint()
    other = make_endpoint("twilio", "webhook")
    trust = Trust([one, other], clock)
    trust.note_refused(one, "malformed")
    trust.note_refused(other, "mismatch")
    facts = trust.facts()
    trust.note_verified(other)
    after = trust.facts()
    clock.now += QUIET_SECONDS

    assert [(fact["endpoint"], fact["why"], fact["refused"]) for fact in facts] == [
        ("webhook.endpoints.0", "malformed", 1),
        ("webhook", "mismatch", 1),
    ]
    assert [fact["endpoint"] for fact in after] == ["webhook.endpoints.0"]
    assert trust.facts() == []
