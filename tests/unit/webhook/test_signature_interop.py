"""Signatures against the services' own libraries: what they sign we verify, and the reverse."""

import base64
import hashlib
import hmac
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import stripe
from gidgethub import ValidationFailure
from gidgethub.sansio import validate_event
from hypothesis import given
from hypothesis import strategies as st
from slack_sdk.signature import Clock, SignatureVerifier
from standardwebhooks import Webhook, WebhookVerificationError
from twilio.request_validator import HMAC_SHA1, HMAC_SHA256, RequestValidator

from bridge.errors import InvalidSignatureError
from bridge.webhook.signatures.schemes import SCHEMES, Scheme, at_address, decode_secret
from bridge.webhook.signatures.verify import Verified, sign, verify

SECRET = "whsec_dGVzdF9zZWNyZXRfa2V5X29mXzI0IQ=="
URL = "https://bridge.example/webhooks"
BODY = '{"type": "message.received", "data": {"text": "héllo ✓"}}'
STANDARD = SCHEMES["standard-webhooks"]
STRIPE = SCHEMES["stripe"]
SLACK = SCHEMES["slack"]
GITHUB = SCHEMES["github"]
SHOPIFY = SCHEMES["shopify"]
TWILIO = at_address(SCHEMES["twilio"], URL)

# The libraries sign text.
texts = st.text(st.characters(exclude_categories=["Cs"]))


def check(
    scheme: Scheme, headers: dict[str, str], body: str = BODY, *, now: float, query: str = ""
) -> Verified:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    key = decode_secret(scheme, SECRET)
    return verify(scheme, [key], raw, body.encode(), now=now, query=query.encode())


def send(
    scheme: Scheme, body: str = BODY, *, now: float, event_id: str = "msg_1"
) -> dict[str, str]:
    key = decode_secret(scheme, SECRET)
    return dict(sign(scheme, key, body.encode(), now=now, event_id=event_id).headers)


# --- Standard Webhooks: standardwebhooks ---------------------------------------------------------


@given(body=texts)
def test_standard_webhooks_signs_and_we_verify(body: str) -> None:
    now = int(time.time())
    signature = Webhook(SECRET).sign("msg_1", datetime.fromtimestamp(now, UTC), body)
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(now),
        "webhook-signature": signature,
    }

    assert check(STANDARD, headers, body, now=now) == Verified(0, "msg_1", now)


@given(body=texts)
def test_we_sign_and_standard_webhooks_verifies(body: str) -> None:
    headers = send(STANDARD, body, now=time.time())

    Webhook(SECRET).verify(body, headers, json_parse=False)


def test_standard_webhooks_refuses_what_we_sign_with_another_key() -> None:
    """The library would have told, had our signature been wrong."""
    headers = send(STANDARD, now=time.time())

    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_b3RoZXI=").verify(BODY, headers)


@pytest.mark.parametrize(
    "secret",
    [SECRET, SECRET.removeprefix("whsec_"), SECRET.rstrip("=")],
    ids=["whole", "without prefix", "without padding"],
)
def test_standard_webhooks_reads_a_secret_as_we_do(secret: str) -> None:
    """Each way to write a secret means the same key to the library and to us."""
    now = int(time.time())
    signature = Webhook(secret).sign("msg_1", datetime.fromtimestamp(now, UTC), BODY)
    expected = send(STANDARD, now=now)["webhook-signature"]

    assert decode_secret(STANDARD, secret) == decode_secret(STANDARD, SECRET)
    assert signature == expected


def test_standard_webhooks_rotates_with_two_signatures() -> None:
    """A header with the signatures of the old and the new key is accepted under either."""
    now = int(time.time())
    at = datetime.fromtimestamp(now, UTC)
    signatures = [Webhook(s).sign("msg_1", at, BODY) for s in (SECRET, "whsec_b3RoZXI=")]
    headers = {"webhook-id": "msg_1", "webhook-timestamp": str(now)}
    for order in (signatures, signatures[::-1]):
        header = {"webhook-signature": " ".join(order)}
        assert check(STANDARD, headers | header, now=now).key_index == 0


# --- Stripe: stripe ------------------------------------------------------------------------------


@given(body=texts)
def test_stripe_signs_and_we_verify(body: str) -> None:
    """What Stripe's library signs is accepted."""
    now = int(time.time())
    generate: Any = stripe.WebhookSignature.generate_signature_header
    header = generate(body, SECRET, now)

    assert check(STRIPE, {"Stripe-Signature": header}, body, now=now).timestamp == now


@given(body=texts)
def test_we_sign_and_stripe_verifies(body: str) -> None:
    """Stripe's library accepts what we sign."""
    header = send(STRIPE, body, now=time.time())["Stripe-Signature"]

    assert stripe.WebhookSignature.verify_header(body, header, SECRET, tolerance=300)


def test_stripe_refuses_what_we_sign_with_another_key() -> None:
    """The library would have told, had our signature been wrong."""
    header = send(STRIPE, now=time.time())["Stripe-Signature"]

    with pytest.raises(stripe.SignatureVerificationError):
        stripe.WebhookSignature.verify_header(BODY, header, "whsec_other", tolerance=300)


# --- Slack: slack_sdk ----------------------------------------------------------------------------


class FixedClock(Clock):
    """Tells a moment that was."""

    def now(self) -> float:
        return 1531420700


@given(body=texts)
def test_slack_signs_and_we_verify(body: str) -> None:
    """What Slack's library signs is accepted."""
    signature = SignatureVerifier(SECRET).generate_signature(timestamp="1531420618", body=body)
    headers = {"X-Slack-Signature": signature or "", "X-Slack-Request-Timestamp": "1531420618"}

    assert check(SLACK, headers, body, now=1531420700).timestamp == 1531420618


@given(body=texts)
def test_we_sign_and_slack_verifies(body: str) -> None:
    """Slack's library accepts what we sign."""
    headers = send(SLACK, body, now=1531420618)

    assert SignatureVerifier(SECRET, FixedClock()).is_valid_request(body, headers)
    assert not SignatureVerifier("other", FixedClock()).is_valid_request(body, headers)


@pytest.mark.parametrize(
    ("late", "fresh"), [(300, True), (301, False), (-300, True), (-301, False)]
)
def test_slack_agrees_about_time(late: int, fresh: object) -> None:
    """Slack's library and we call the same requests stale."""
    headers = send(SLACK, now=1531420700 - late)
    try:
        check(SLACK, headers, now=1531420700)
        ours = True
    except InvalidSignatureError:
        ours = False
    theirs = SignatureVerifier(SECRET, FixedClock()).is_valid_request(BODY, headers)

    assert (ours, theirs) == (fresh, fresh)


# --- GitHub: gidgethub ---------------------------------------------------------------------------


@given(body=texts)
def test_we_sign_and_gidgethub_verifies(body: str) -> None:
    """GitHub's community library, which only verifies, accepts what we sign."""
    header = send(GITHUB, body, now=0)["X-Hub-Signature-256"]

    validate_event(body.encode(), signature=header, secret=SECRET)
    with pytest.raises(ValidationFailure):
        validate_event(body.encode(), signature=header, secret="other")


# --- Twilio: twilio ------------------------------------------------------------------------------

VALIDATOR = RequestValidator(SECRET)
ALGORITHMS = {"sha1": HMAC_SHA1, "sha256": HMAC_SHA256}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(body=texts)
def test_twilio_signs_and_we_verify(algorithm: Any, body: str) -> None:
    """What Twilio's library signs is accepted, with either of its algorithms."""
    query = f"a=1&bodySHA256={VALIDATOR.compute_hash(body)}"
    signature = VALIDATOR.compute_signature(f"{URL}?{query}", {}, ALGORITHMS[algorithm])
    scheme = replace(TWILIO, algorithm=algorithm)

    headers = {"X-Twilio-Signature": signature}
    assert check(scheme, headers, body, now=0, query=query) == Verified(0, None, None)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(body=texts)
def test_we_sign_and_twilio_verifies(algorithm: Any, body: str) -> None:
    """Twilio's library accepts what we sign."""
    scheme, key = replace(TWILIO, algorithm=algorithm), SECRET.encode()
    signed = sign(scheme, key, body.encode(), now=0, event_id="", query=b"a=1")
    header = dict(signed.headers)["X-Twilio-Signature"]
    url = f"{URL}?{signed.query.decode()}"

    assert VALIDATOR.validate(url, body, header, ALGORITHMS[algorithm])
    assert not VALIDATOR.validate(url, body + "!", header, ALGORITHMS[algorithm])


PIECES = (
    *("Body", "From", "FromCity", "To", "ToCity", "NumMedia", "MessageSid", "AccountSid"),
    *("MediaUrl0", "SmsStatus", "+447700900123", "12345", "US", "https://a.example/", "AC", "SM"),
    *("0123456789abcdef0123456789abcdef", "received", "1", " ", "✓", "YES", "&", "=", "#", "?"),
)
WORDS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
SID = "0123456789abcdef0123456789abcdef"
FORM = {
    "AccountSid": f"AC{SID}",
    "ApiVersion": "2010-04-01",
    "Body": "",
    "From": "+12025550101",
    "FromCity": "SAN FRANCISCO",
    "FromCountry": "US",
    "FromState": "CA",
    "FromZip": "94105",
    "MessageSid": f"SM{SID}",
    "NumMedia": "0",
    "NumSegments": "1",
    "SmsMessageSid": f"SM{SID}",
    "SmsSid": f"SM{SID}",
    "SmsStatus": "received",
    "To": "+12025550102",
    "ToCity": "",
    "ToCountry": "US",
    "ToState": "",
    "ToZip": "",
}
REPORT = {
    "AccountSid": f"AC{SID}",
    "From": "Acme",
    "MessageSid": f"SM{SID}",
    "MessageStatus": "undelivered",
    "ErrorCode": "30003",
    "To": "+12025550101",
}
PORTS = (
    ("https://bridge.example/webhooks", "https://bridge.example:443/webhooks"),
    ("http://bridge.example/webhooks", "http://bridge.example:80/webhooks"),
    ("https://bridge.example:8443/webhooks", "https://bridge.example/webhooks"),
)


def outcome_of(
    scheme: Scheme, signature: str, form: dict[str, str], query: str, key: str = SECRET
) -> str:
    headers = [
        (b"x-twilio-signature", signature.encode()),
        (b"content-type", b"application/x-www-form-urlencoded"),
    ]
    body = urlencode(form).encode()
    try:
        verify(scheme, [key.encode()], headers, body, now=0, query=query.encode())
    except InvalidSignatureError as error:
        return error.fault
    return "valid"


@given(
    text=WORDS | texts,
    query=st.lists(st.sampled_from((*PIECES[:-4], "a=", "&template=")), max_size=6).map("".join),
    is_report=st.booleans(),
    ports=st.sampled_from(PORTS),
    is_swapped=st.booleans(),
)
def test_what_twilios_validator_takes_we_take(
    text: str, query: str, is_report: object, ports: tuple[str, str], is_swapped: object
) -> None:
    """Whatever text, query and port Twilio signs is taken, as its own library does."""
    ours, called = reversed(ports) if is_swapped else ports
    query = quote(query, safe="=&/:+")
    form = REPORT if is_report else {**FORM, "Body": text}
    for address in (ours, called):
        url = f"{address}?{query}" if query else address
        signature = VALIDATOR.compute_signature(url, form)
        full = f"{ours}?{query}" if query else ours
        scheme = at_address(SCHEMES["twilio"], ours)

        is_genuine = VALIDATOR.validate(full, form, signature)
        outcome = outcome_of(scheme, signature, form, query)
        # Of a public address with an odd port its library tries none with the usual one.
        assert outcome == ("valid" if is_genuine else "mismatch")
        assert outcome_of(scheme, signature, form, query, key="other") == "mismatch"


@pytest.mark.parametrize(("ours", "called"), PORTS)
def test_twilio_signs_with_or_without_the_port(ours: str, called: str) -> None:
    """Either address is taken, as Twilio's library takes it; another port is taken by neither."""
    scheme = at_address(SCHEMES["twilio"], ours)
    other = "https://bridge.example:444/webhooks"
    for url, expected in ((ours, "valid"), (called, "valid"), (other, "mismatch")):
        signature = VALIDATOR.compute_signature(url, FORM)

        assert VALIDATOR.validate(ours, FORM, signature) == (expected == "valid")
        assert outcome_of(scheme, signature, FORM, "") == expected


# --- Shopify: no library verifies its webhooks, so after its documentation ------------------------


@given(body=st.binary())
def test_shopify_as_documented(body: bytes) -> None:
    """The header is the base64 of the HMAC-SHA256 of the raw body, no more and no less."""
    expected = base64.b64encode(hmac.new(SECRET.encode(), body, hashlib.sha256).digest()).decode()
    signed = sign(SHOPIFY, SECRET.encode(), body, now=0, event_id="b1")
    raw = [(name.lower().encode(), value.encode()) for name, value in signed.headers]

    assert dict(signed.headers)["X-Shopify-Hmac-SHA256"] == expected
    assert verify(SHOPIFY, [SECRET.encode()], raw, body, now=0).event_id == "b1"
