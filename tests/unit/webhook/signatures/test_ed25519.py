"""Ed25519: published vectors, and signatures that only look right."""

import pytest

from bridge.webhook.signatures.ed25519 import is_signed, is_usable, signature_of

# RFC 8032, 7.1: the private key, the public key, the message and the signature of tests 1 to 3.
RFC_8032 = (
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        (
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
        ),
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        (
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
        ),
    ),
)
ORDER = 2**252 + 27742317777372353535851937790883648493
PRIVATE, PUBLIC, MESSAGE, SIGNATURE = (bytes.fromhex(text) for text in RFC_8032[1])


@pytest.mark.parametrize("vector", RFC_8032)
def test_rfc_8032(vector: tuple[str, str, str, str]) -> None:
    """The published signatures are made, and verify."""
    private, public, message, signature = (bytes.fromhex(text) for text in vector)

    assert signature_of(private, message) == signature
    assert is_signed(public, message, signature)


def test_the_scalar_has_one_writing() -> None:
    """With the group's order added the scalar would mean the same (RFC 8032, 8.4)."""
    scalar = int.from_bytes(SIGNATURE[32:], "little") + ORDER
    other = SIGNATURE[:32] + scalar.to_bytes(32, "little")

    assert not is_signed(PUBLIC, MESSAGE, other)


@pytest.mark.parametrize("length", [0, 1, 32, 63, 65, 128])
def test_a_signature_of_another_length_is_none(length: int) -> None:
    """What is too short or too long is refused, and raises nothing."""
    assert not is_signed(PUBLIC, MESSAGE, (SIGNATURE * 2)[:length])


def test_a_key_that_is_no_point_verifies_nothing() -> None:
    """32 bytes that are no public key refuse everything."""
    assert not is_signed(b"\xff" * 32, MESSAGE, SIGNATURE)
    assert not is_signed(PRIVATE, MESSAGE, SIGNATURE)


# The eight points of small order, and the two whose y is written as itself plus the prime.
PRIME = 2**255 - 19
EIGHTH = int.from_bytes(
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
)
SMALL = [
    (y | sign << 255).to_bytes(32, "little")
    for y in (0, 1, PRIME - 1, PRIME, PRIME + 1, EIGHTH, PRIME - EIGHTH)
    for sign in (0, 1)
]


@pytest.mark.parametrize("key", SMALL, ids=lambda key: key.hex()[:4] + key.hex()[-2:])
def test_a_key_for_which_anybody_can_sign_is_not_usable(key: bytes) -> None:
    """Keys of small order, such as all zeros in a file that nobody has filled in, are refused."""
    assert not is_usable(key)


def test_anybody_can_sign_for_a_key_of_small_order() -> None:
    """A signature that no private key has made is right for some message, or every one."""
    nobodys = SMALL[2] + bytes(32)

    assert is_signed(SMALL[2], MESSAGE, nobodys)
    assert any(is_signed(bytes(32), bytes([n]), nobodys) for n in range(64))
    assert is_usable(PUBLIC)
    assert not is_usable(PUBLIC[:31])
