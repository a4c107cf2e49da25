"""Verifies and creates Ed25519 signatures (RFC 8032)."""

from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

# Points of small order, in every encoding of y that OpenSSL accepts (all zeros is one). For such a
# public key, anyone can forge signatures without a private key (RFC 8032, 5.1.7).
_SMALL_ORDER: Final = frozenset(
    bytes.fromhex(y)
    for y in (
        "00" * 32,
        "01" + "00" * 31,
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    )
)


def is_usable(public_key: bytes) -> bool:
    """Whether a public key is valid, and not one for which signatures can be forged."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key)
    except ValueError:
        return False
    # Ignore the highest bit, the sign of x.
    return public_key[:-1] + bytes([public_key[-1] & 0x7F]) not in _SMALL_ORDER


def is_signed(public_key: bytes, content: bytes, signature: bytes) -> bool:
    """Whether the signature is valid. The public key has 32 bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, content)
    except InvalidSignature:
        return False
    return True


def signature_of(private_key: bytes, content: bytes) -> bytes:
    """Sign as the service does, with its private key."""
    return Ed25519PrivateKey.from_private_bytes(private_key).sign(content)


def make_pair() -> tuple[bytes, bytes]:
    """Generate a private and a public key, for the sandbox and for tests."""
    private = Ed25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()
