"""A request as it is shown."""

import pytest

from bridge.sandbox.exchanges import MAX_SHOWN_BYTES, mask, shorten


@pytest.mark.parametrize(
    ("header", "shown"),
    [
        (("Authorization", "Bearer a-key"), "Bearer ***"),
        (("authorization", "a-key"), "***"),
        (("Proxy-Authorization", "Basic YTpi"), "Basic ***"),
        (("X-Api-Token", "App a-key"), "App ***"),
        (("Cookie", "session=a-key"), "***"),
        (("Idempotency-Key", "a-key"), "a-key"),
    ],
)
def test_logins_are_masked(header: tuple[str, str], shown: str) -> None:
    """Only the scheme of a login is shown, of the preset's own header too."""
    assert mask([header], logins={"x-api-token"}) == ((header[0], shown),)


def test_long_bodies_are_cut() -> None:
    """So much is shown, and how much more there was; what is no text does no harm."""
    assert shorten(b"short \xff") == "short \ufffd"
    assert shorten(b"x" * (MAX_SHOWN_BYTES + 7)) == "x" * MAX_SHOWN_BYTES + "\n... and 7 bytes"
