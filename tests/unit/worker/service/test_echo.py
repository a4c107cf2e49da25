"""What of an answer repeats the message, and is no code of the service's."""

from typing import Any

import pytest

from bridge.worker.request import OpenSendRequest, SendRequest
from bridge.worker.service.sender import is_echo, is_number


def request(**members: Any) -> OpenSendRequest:
    """Make a request, with a text that has a one-time code."""
    text = "Ann, your code is 402 117 (or 8812-33). Call 21211 for help with an invalid_number."
    given = {"to": "+491713920001", "from": "Acme", "text": text} | members
    return OpenSendRequest.model_validate(given)


@pytest.mark.parametrize(
    "code",
    [
        *("402117", "402-117", "code-402117", "881233", "8812-33", "21211", "invalid_number"),
        *("Acme", "acme", "ANN", "17139200", "920001", "2000", "X-20.00", "017139", "invalid"),
        *("Ann_your.code", "call-21", "forHelp"),
    ],
)
def test_what_is_of_the_message_is_an_echo(code: str) -> None:
    """A word, a sender, digits of the number or of a one-time code are known again."""
    assert is_echo(code, request())


@pytest.mark.parametrize(
    "code", ["21610", "E402", "402", "REJECTED_DND", "1", "40", "an", "unauthorized", "E-17"]
)
def test_what_the_message_does_not_say_is_none(code: str) -> None:
    """A code that only shares a few characters with the message by chance stays one."""
    assert not is_echo(code, request())


@pytest.mark.parametrize(("number", "is_private"), [("+9991234", True), ("999123", False)])
def test_id_with_the_number_is_recognised(number: str, *, is_private: bool) -> None:
    """An id with a whole number of at least seven digits is one; six digits occur by chance."""
    sent = SendRequest.model_construct(to=number, sender="A", text="x")

    assert is_number(f"msg-{number.lstrip('+')}-1", sent) == is_private


def test_members_of_the_publishers_own_count() -> None:
    """What a publisher has put beside text and number is as private as they are."""
    assert is_echo("A-7731", request(customer={"ids": ["a-7731"]}))
    assert not is_echo("A-7731", request())
