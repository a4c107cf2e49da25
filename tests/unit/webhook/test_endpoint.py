"""An endpoint: whose signatures it takes, and when it takes those of a new secret."""

from pathlib import Path
from typing import Any

import pytest

from bridge.config import EndpointSettings
from bridge.errors import ConfigError, InvalidSignatureError, SignatureFault
from bridge.http.messages import Request
from bridge.webhook.endpoint import QUIET_SECONDS, Endpoint
from bridge.webhook.signatures.schemes import SCHEMES
from bridge.webhook.signatures.verify import Verified, sign, verify
from tests.clock import Clock
from tests.ears import Ears

BODY = b'{"type": "message.received"}'
NOW = 1_700_000_000.0


def make_endpoint(**settings: Any) -> Endpoint:
    values = {"path": "/hooks", "secrets": ("s",)} | settings
    return Endpoint(EndpointSettings.model_validate(values), key="webhook.endpoints.1")


def signed(endpoint: Endpoint, secret: str) -> Request:
    made = sign(endpoint.scheme, secret.encode(), BODY, now=NOW, event_id="e", query=b"a=b")
    headers = [(name.lower().encode(), value.encode()) for name, value in made.headers]
    return Request("POST", "/hooks", made.query, headers, BODY)


def check(endpoint: Endpoint, request: Request) -> Verified:
    return verify(
        endpoint.scheme, endpoint.keys, request.headers, BODY, now=NOW, query=request.query
    )


@pytest.mark.parametrize("preset", sorted(SCHEMES.keys() & {"plain", "stripe", "twilio"}))
def test_each_secret_is_known_by_its_place(preset: str) -> None:
    """The first secret is the current one, any other a previous one, a third nobody's."""
    endpoint = make_endpoint(
        secrets=("new", "old"), signature={"preset": preset}, public_url="https://a.example/hooks"
    )

    assert check(endpoint, signed(endpoint, "new")).key_index == 0
    assert check(endpoint, signed(endpoint, "old")).key_index == 1
    with pytest.raises(InvalidSignatureError):
        check(endpoint, signed(endpoint, "other"))


def test_a_changed_file_counts_from_the_next_use(tmp_path: Path) -> None:
    """A new secret in the file is used once it is said that the files have changed."""
    file = tmp_path / "secret"
    file.write_text("before", encoding="utf-8")
    endpoint = make_endpoint(secrets=None, secret_files=[str(file)])
    file.write_text("after", encoding="utf-8")
    changed = [secret.reread() for secret in endpoint.secrets]
    endpoint.use_secrets()

    assert changed == [True]
    assert check(endpoint, signed(endpoint, "after")).key_index == 0
    with pytest.raises(InvalidSignatureError):
        check(endpoint, signed(endpoint, "before"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"secrets": None}, "secrets: is missing; set webhook.endpoints.1.secrets or webhook."),
        ({"secret_files": ["/nowhere/a"]}, "secret_files.0: /nowhere/a cannot be read"),
        ({"signature": {"preset": "twilio"}}, "public_url: is missing, but the service signs"),
        ({"preset": "httpsms"}, "signature: is missing; the service of preset httpsms signs no"),
        ({"signature": {"id_header": "X-Service-Signature"}}, "signature.header: signature, id,"),
        ({"signature": {"tolerance_seconds": 5}}, "signature.tolerance_seconds: does nothing"),
    ],
    ids=["secrets", "file", "url", "no-scheme", "header", "knob"],
)
def test_what_it_lacks_is_told_by_its_key(settings: dict[str, Any], told: str) -> None:
    """Whatever an endpoint cannot be served without is told with its number in the list."""
    with pytest.raises(ConfigError) as caught:
        make_endpoint(**settings)

    assert str(caught.value).startswith(f"webhook.endpoints.1.{told}")


@pytest.mark.parametrize("nobodys", ["A" * 43 + "=", "AQ" + "A" * 41 + "="])
def test_a_public_key_for_which_anybody_can_sign_is_refused(nobodys: str) -> None:
    """A key that is only a placeholder is told at the start, or strangers' webhooks were taken."""
    with pytest.raises(ConfigError) as caught:
        make_endpoint(secrets=(nobodys,), preset="telnyx")
    (told,) = caught.value.faults
    assert told.startswith("webhook.endpoints.1.secrets.0: is not a valid secret for this scheme")


def test_a_public_key_is_no_secret_of_tokens() -> None:
    """What looks like a public key stops the start where a shared secret is wanted."""
    pem = "-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----\n"

    with pytest.raises(ConfigError, match=r"^webhook\.endpoints\.1\.secrets\.0: is not a valid"):
        make_endpoint(secrets=(pem,), signature={"preset": "vonage"})


# --- When no webhook is genuine any more ----------------------------------------------------------


def watched_endpoint(clock: Clock, preset: str = "plain", key: str = "webhook") -> Endpoint:
    settings = EndpointSettings.model_validate(
        {
            "path": "/a",
            "secrets": ("a-secret",),
            "signature": {"preset": preset},
            "public_url": "https://sms.example.com/a",
        }
    )
    return Endpoint(settings, key=key, clock=clock)


def test_refusals_are_told_once_an_hour(ears: Ears) -> None:
    """The first refusal is logged with its endpoint and remedy, the next one an hour later."""
    clock = Clock()
    endpoint = watched_endpoint(clock, key="webhook.endpoints.0")
    for _ in range(5):
        endpoint.note_refused("mismatch")
        clock.now += 60
    clock.now += QUIET_SECONDS
    endpoint.note_refused("stale")
    first, second = ears.heard("webhooks_refused")

    assert (first["endpoint"], first["why"], first["refused"]) == (
        "webhook.endpoints.0",
        "mismatch",
        1,
    )
    assert "secret" in first["remedy"]
    assert (second["why"], second["refused"]) == ("stale", 6)
    assert "clock" in second["remedy"]


def test_strangers_beside_genuine_webhooks_are_not_told(ears: Ears) -> None:
    """Where something was verified within the hour the secret is right."""
    clock = Clock()
    endpoint = watched_endpoint(clock)
    endpoint.note_verified()
    clock.now += QUIET_SECONDS - 1
    endpoint.note_refused("mismatch")

    assert ears.heard("webhooks_refused") == []
    assert endpoint.refused_facts() is None


@pytest.mark.parametrize("fault", ["missing", "ambiguous"])
def test_other_faults_speak_of_no_secret(ears: Ears, fault: SignatureFault) -> None:
    """A missing signature is a stranger's, and an ambiguous form was signed with the secret."""
    endpoint = watched_endpoint(Clock())
    endpoint.note_refused(fault)

    assert (ears.heard("webhooks_refused"), endpoint.refused_facts()) == ([], None)


def test_facts_are_of_the_last_hour() -> None:
    """An endpoint is suspect until a webhook is genuine or an hour has passed."""
    clock = Clock()
    one, other = watched_endpoint(clock), watched_endpoint(clock, "twilio")
    one.note_refused("malformed")
    other.note_refused("mismatch")
    facts = [one.refused_facts(), other.refused_facts()]
    other.note_verified()
    after = [one.refused_facts() is None, other.refused_facts() is None]
    clock.now += QUIET_SECONDS

    assert [(fact["why"], fact["refused"]) for fact in facts if fact] == [
        ("malformed", 1),
        ("mismatch", 1),
    ]
    assert after == [False, True]
    assert one.refused_facts() is None
