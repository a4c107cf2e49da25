"""The reference in a callback address: what is written into it is read from it again."""

import base64
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.callback import MAX_ADDRESS_CHARACTERS, callback_address, read_reference, reference_in

URL = "https://sms.example.com/webhooks/twilio"
TO = "+447700900123"
KEY = "7f9c24e8-0b5c-4a5e-9d3b-1f0e6a2b8c4d"


def test_the_address_holds_the_key() -> None:
    address = callback_address(URL, KEY, TO)

    assert address == f"{URL}?sms-bridge-id={KEY}"
    assert reference_in(address) == KEY


@pytest.mark.parametrize("key", ["order:17", "a.b", "100%", "a b&c=d#e", "_a", "~a"])
def test_other_characters_travel_in_base64(key: str) -> None:
    """The query has no character that a service, a proxy or a signature could read otherwise."""
    address = callback_address(URL, key, TO)

    assert re.fullmatch(r"sms-bridge-id=_[A-Za-z0-9_-]+", address.partition("?")[2])


@given(key=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=255))
def test_a_key_comes_back_whole_or_not_at_all(key: str) -> None:
    address = callback_address(URL, key, TO)

    assert reference_in(address) == (None if address == URL else key)
    assert len(address) <= MAX_ADDRESS_CHARACTERS


@pytest.mark.parametrize(
    "key",
    ["447700900123", "+447700900123", "07700 900123", "sms-to-447700900123", "x-07700-900-123"],
)
def test_a_key_with_a_phone_number_stays_out(key: str) -> None:
    """An address is in the access log of every proxy."""
    assert callback_address(URL, key, TO) == URL


@pytest.mark.parametrize(
    "key",
    [
        "447700%20900123%20x",
        "tel:%2B44%207700%20900123",
        "tel:%252B44%25207700%2520900123",  # the key of the message_id above
        "%D9%A4%D9%A4%D9%A7%D9%A7%D9%A0%D9%A0%D9%A9%D9%A0%D9%A0%D9%A1%D9%A2%D9%A3",  # Arabic digits
    ],
)
def test_a_key_with_an_encoded_phone_number_stays_out(key: str) -> None:
    assert callback_address(URL, key, TO) == URL
    encoded = base64.urlsafe_b64encode(key.encode()).rstrip(b"=")
    assert key.startswith("447700") or read_reference(b"sms-bridge-id=_" + encoded) is None


@pytest.mark.parametrize(("key", "to"), [("order-12345", "+12345"), ("x12-34", "+1234")])
def test_a_key_with_a_short_phone_number_stays_out(key: str, to: str) -> None:
    assert callback_address(URL, key, to) == URL


def test_a_short_code_is_no_phone_number() -> None:
    assert reference_in(callback_address(URL, "order-55555", "55555")) == "order-55555"


def test_the_address_has_no_character_that_a_client_encodes() -> None:
    """Some HTTP clients write ~ as %7E, which a receiver would not read."""
    assert "~" not in callback_address(URL, "order:17", TO)


def test_a_key_for_which_the_address_is_too_long_stays_out() -> None:
    url = f"{URL}/{'x' * (MAX_ADDRESS_CHARACTERS - len(URL) - 60)}"

    assert reference_in(callback_address(url, KEY, TO)) == KEY
    assert callback_address(url, KEY + KEY, TO) == url


@pytest.mark.parametrize(
    "query",
    [
        b"",
        b"key=a",
        b"sms-bridge-id=",
        b"sms-bridge-id=a.b",
        b"sms-bridge-id=%61",
        b"sms-bridge-id=a&sms-bridge-id=a",
        b"sms-bridge-id=_a",
        b"sms-bridge-id=_IA",  # a space
        b"sms-bridge-id=__w",  # no ASCII
        b"sms-bridge-id=447700900123",
        b"sms-bridge-id=_KzQ0NzcwMDkwMDEyMw",  # the same number with its +
        b"sms-bridge-id=" + b"a" * 256,
    ],
)
def test_what_the_bridge_has_not_written_is_no_reference(query: bytes) -> None:
    assert read_reference(query) is None


def test_other_parameters_may_stand_beside_it() -> None:
    assert read_reference(b"a=1&sms-bridge-id=order-17&b=2") == "order-17"
    assert reference_in(f"{URL}?a=1&sms-bridge-id=order-17#rc=5") == "order-17"
    assert reference_in(URL) is None
