"""Ed25519 signatures (RFC 8032), which a public key verifies."""

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


def is_usable(public_key: bytes) -> bool:
    """Say whether it has the length of a public key."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key)
    except ValueError:
        return False
    return True


def is_signed(public_key: bytes, content: bytes, signature: bytes) -> bool:
    """Say whether the holder of the private key signed this; both keys have 32 bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, content)
    except InvalidSignature:
        return False
    return True


def signature_of(private_key: bytes, content: bytes) -> bytes:
    """Sign as the service does, which alone has the private key."""
    return Ed25519PrivateKey.from_private_bytes(private_key).sign(content)


def make_pair() -> tuple[bytes, bytes]:
    """Make a private key and its public one, for who plays the service."""
    private = Ed25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()
