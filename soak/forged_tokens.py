"""Forges JSON Web Tokens: other claims, other algorithms, several tokens."""

import base64
import hmac
import json
from dataclasses import replace
from random import Random
from typing import Any

from soak.genuine_requests import Genuine, Request


def forge_claims(rng: Random, genuine: Genuine) -> Request:
    """Change the claims of the token, or its algorithm."""
    header, claims = (_read(part) for part in _token(genuine).split(".")[:2])
    return rng.choice((_other_claims, _other_algorithm, _several))(rng, genuine, header, claims)


def forge_lifetime(rng: Random, genuine: Genuine) -> Request:
    """Replay a token before or after its lifetime."""
    claims = _read(_token(genuine).split(".")[1])
    tolerance = genuine.scheme.tolerance_seconds
    far = 10 ** rng.uniform(-2, 9)
    begin = claims[genuine.scheme.timestamp_from] - tolerance - far
    end = claims["exp"] + 1 if genuine.scheme.expires else claims["iat"] + tolerance
    return replace(genuine.request, now=rng.choice((begin, end + far)))


def _other_claims(
    rng: Random, genuine: Genuine, header: dict[str, Any], claims: dict[str, Any]
) -> Request:
    """Remove or change a claim, and keep the signature or sign again."""
    needed = ["payload_hash", genuine.scheme.timestamp_from or ""]
    if genuine.scheme.expires:
        needed += ["url_hash", "iss", "exp"]
    name = rng.choice(needed)
    others: list[Any] = [
        None,
        "",
        [],
        {},
        True,
        "1",
        -1,
        0,
        1.5,
        10**400,
        "0" * 64,
        f"{claims[name]} ",
    ]
    changed: Any = claims | {name: rng.choice(others)}
    if rng.random() < 0.3:
        changed.pop(name)
    if rng.random() < 0.1:
        changed = rng.choice(([], "text", 1, None, [claims]))
    key = genuine.key if rng.random() < 0.7 else b"secret"
    return genuine.headed(_bearer(genuine) + _signed(header, changed, key))


def _other_algorithm(
    rng: Random, genuine: Genuine, header: dict[str, Any], claims: dict[str, Any]
) -> Request:
    """Name another algorithm, with a valid signature for it or none."""
    kinds: tuple[tuple[dict[str, Any], str | None], ...] = (
        ({"alg": "none"}, None),
        ({"alg": "None"}, None),
        ({"alg": ""}, None),
        ({}, None),
        ({"alg": "HS512"}, "sha512"),
        ({"alg": "HS384"}, "sha384"),
        ({"alg": "hs256"}, "sha256"),
        ({"alg": ["HS256"]}, "sha256"),
        ({"alg": "RS256"}, "sha256"),
        ({"alg": "ES256"}, "sha256"),
        ({"alg": "EdDSA"}, "sha256"),
        ({"alg": "HS256", "crit": ["exp"]}, "sha256"),
        ({"alg": "HS256", "b64": False, "crit": ["b64"]}, "sha256"),
        ({"alg": "HS256", "kid": 1}, "sha256"),
    )
    named, name = rng.choice(kinds)
    other = {key: value for key, value in header.items() if key != "alg"} | named
    if rng.random() < 0.2:
        # The unsigned token keeps a signature.
        return genuine.headed(_bearer(genuine) + _signed(other, claims, genuine.key, "sha256"))
    token = _signed(other, claims, genuine.key, name)
    return genuine.headed(_bearer(genuine) + token)


def _several(
    rng: Random, genuine: Genuine, header: dict[str, Any], claims: dict[str, Any]
) -> Request:
    """Send several tokens, part of a token, or none."""
    token, bearer = _token(genuine), _bearer(genuine)
    begin, claimed, digest = token.split(".")
    other = _signed(header, claims | {"payload_hash": "0" * 64}, b"secret")
    values = [
        f"{bearer}{token},{token}",
        f"{bearer}{token} {token}",
        f"{bearer}{other}, {token}",
        f"{bearer}{token}.{digest}",
        f"{bearer}{begin}.{claimed}",
        f"{bearer}{claimed}.{begin}.{digest}",
        f"{bearer}{other.rpartition('.')[0]}.{digest}",
        f"{bearer}.{claimed}.{digest}",
        f"{bearer}{begin}..{digest}",
        f"{bearer}{token}=",
        f"{bearer}{begin}.{claimed}{'A' * 9000}.{digest}",
        f"Basic {token}",
        f"bearer{token}",
        f"Bearer Bearer {token}",
        f"JWT {token}",
        f'"{token}"',
    ]
    values += [token, f"Basic {token}"] if bearer else [f"Bearer {token}", f"bearer {token}"]
    return genuine.headed(rng.choice(values))


def _bearer(genuine: Genuine) -> str:
    return "Bearer " if genuine.front.startswith("Bearer ") else ""


def _token(genuine: Genuine) -> str:
    return (genuine.front + genuine.text).removeprefix("Bearer ")


def _read(part: str) -> Any:
    return json.loads(base64.urlsafe_b64decode(part + "=="))


def _signed(header: object, claims: object, key: bytes, algorithm: str | None = "sha256") -> str:
    parts = [json.dumps(part, separators=(",", ":")).encode() for part in (header, claims)]
    content = b".".join(_spell(part) for part in parts)
    digest = b"" if algorithm is None else hmac.digest(key, content, algorithm)
    return (content + b"." + _spell(digest)).decode()


def _spell(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")
