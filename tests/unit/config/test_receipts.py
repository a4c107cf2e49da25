"""Settings of delivery receipts: what can be read, and what is told at the start."""

from typing import Any

import pytest
from pydantic import ValidationError

from bridge.config.webhook import ReceiptSettings

READABLE: dict[str, Any] = {
    "status_pointers": ["/status"],
    "delivered": ["delivered"],
    "failed": ["failed"],
}


def test_values_that_are_numbers_are_written_as_texts() -> None:
    """YAML reads a status of digits as a number."""
    settings = ReceiptSettings.model_validate(READABLE | {"delivered": [0]})

    assert settings.delivered == ("0",)


def test_lists_are_json_in_the_environment() -> None:
    settings = ReceiptSettings.model_validate(READABLE | {"failed": '["failed", "expired"]'})

    assert settings.failed == ("failed", "expired")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"status_pointers": []}, "status_pointers: is empty"),
        ({"delivered": [], "failed": []}, "delivered: is empty"),
        ({"pending": ["failed"]}, "a status appears twice"),
        ({"delivered": ["delivered", "delivered"]}, "a status appears twice"),
    ],
    ids=["no pointer", "no words", "two meanings", "twice"],
)
def test_what_cannot_be_read_is_told(changed: dict[str, Any], told: str) -> None:
    """Settings by which no receipt could be understood are a fault that names the key."""
    with pytest.raises(ValidationError, match=told):
        ReceiptSettings.model_validate(READABLE | changed)
