"""Forges a million webhooks: genuine requests of every preset, changed so that none is valid.

    python soak/forgeries.py --count 1000000 --seed 1

Exit status 0: every genuine request was accepted, and no forgery. 1: otherwise. 2: bad usage.
"""

import argparse
import base64
import hashlib
import hmac
import json
import multiprocessing
import os
import platform
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, quote

from rich.console import Console
from rich.table import Table

from bridge.errors import InvalidSignatureError
from bridge.webhook.signatures.header import MAX_CANDIDATES
from bridge.webhook.signatures.schemes import Scheme
from bridge.webhook.signatures.verify import sign, verify
from soak.forged_forms import forge_cut, forge_type, means_the_same
from soak.forged_tokens import forge_claims, forge_lifetime
from soak.genuine_requests import (
    LISTED,
    OLDER_KEY,
    SCHEMES,
    VISIBLE,
    Genuine,
    Request,
    make_genuine,
    make_id,
)

CHUNK: Final = 2_000
# Number of forgeries per genuine request.
PER_GENUINE: Final = 20
SHOWN: Final = 10
PLAIN_WIDTH: Final = 180
TIMEOUT_SECONDS: Final = 1800

_ED25519_ORDER: Final = 2**252 + 27742317777372353535851937790883648493
_BASE64: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_BASE64URL: Final = _BASE64[:-2] + "-_"

Verifier: TypeAlias = Callable[..., object]


# --- Ways to forge: each returns a request that must be refused, or None if the result means ----
# --- the same as the genuine one.


def forge_digest(rng: Random, genuine: Genuine) -> Request | None:
    """Replace the digest by another one in the right format."""
    digest = genuine.digest
    size = len(digest)
    place, other = rng.randrange(size), bytearray(digest)
    other[place] ^= 1 << rng.randrange(8)
    forged = rng.choice(
        (
            bytes(other),
            bytes(other),
            rng.randbytes(size),
            digest[:place] + rng.randbytes(size - place),
            rng.randbytes(place) + digest[place:],
            digest[:place],
            digest[place + 1 :],
            digest + digest[:place],
            digest[::-1],
            digest[place:] + digest[:place],
            bytes(size),
            hashlib.sha256(genuine.request.body).digest().ljust(size, b"\0")[:size],
            _same_scalar(digest),
        )
    )
    return None if forged == digest else genuine.signed(genuine.spell(forged))


def _same_scalar(digest: bytes) -> bytes:
    """Add the group's order to the scalar, which lenient verifiers accept (RFC 8032)."""
    scalar = int.from_bytes(digest[32:], "little") + _ED25519_ORDER
    return digest[:32] + scalar.to_bytes(33, "little")[: len(digest) - 32]


def forge_text(rng: Random, genuine: Genuine) -> Request | None:
    """Replace, insert, delete or swap characters in the signature header."""
    value = genuine.front + genuine.text
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.randrange(len(value))
        character = rng.choice((*VISIBLE, " ", "\t", "\0", "\x7f", "é", "\uff11"))
        value = rng.choice(
            (
                value[:place] + character + value[place + 1 :],
                value[:place] + character + value[place:],
                value[:place] + value[place + 1 :],
                value[:place] + value[place + 1 : place + 2] + value[place] + value[place + 2 :],
            )
        )
        if not value:
            break
    given = genuine.front + genuine.text
    return None if is_same(genuine.scheme, value, given) else genuine.headed(value)


def is_same(scheme: Scheme, one: str, other: str) -> bool:
    """Return whether two values of the signature header mean the same."""
    return _meaning(scheme, one) == _meaning(scheme, other)


def _meaning(scheme: Scheme, value: str) -> list[str]:
    """Read a header leniently, and independently of the code under test.

    Only `v1` and the time have a meaning. White space around values and entries, the case of hex,
    and entries of unknown versions have none.
    """
    if scheme.header == "Authorization":
        # The scheme of Authorization is case-insensitive (RFC 9110, 11.1).
        value = re.sub(r"^[ \t]*bearer[ \t]+", "Bearer ", value, flags=re.IGNORECASE)
    between, mark = LISTED.get(scheme.format, ("\n", ""))
    entries = [entry.strip(" \t") for entry in value.strip(" \t").split(between)]
    known = [entry for entry in entries if entry.startswith((mark, "t="))]
    unreadable = [entry for entry in entries if mark[-1:] not in entry]
    known = [*known, *unreadable]
    if scheme.encoding == "base64":
        return known
    return [re.sub(r"[0-9A-Fa-f]{40,}$", lambda match: match[0].lower(), e) for e in known]


def forge_spelling(rng: Random, genuine: Genuine) -> Request | None:
    """Encode the right digest in a way that only a lenient decoder accepts."""
    text = genuine.text
    if genuine.scheme.format == "jwt":
        return _respell_token(rng, genuine)
    place = rng.randrange(1, len(text))
    spellings = [
        text[:place] + rng.choice((" ", "\t", "\n", "\r\n", "!", "\0", ":")) + text[place:],
        text + rng.choice("\0!=%;"),
        rng.choice(("0x", "\\x", "=", '"', "'", "<", "\ufeff")) + text,
        quote(text.encode(), safe="") if "=" in text else f"%{ord(text[0]):x}{text[1:]}",
        f'"{text}"',
        text.translate(_FULLWIDTH),
        rng.choice((" ", ":")).join(re.findall("..?", text)),
        text + text,
        base64.b64encode(text.encode()).decode(),
    ]
    if genuine.scheme.encoding == "base64":
        spellings += [*_loose_base64(rng, text), genuine.digest.hex()]
    elif genuine.scheme.encoding == "hex":
        spellings.append(base64.b64encode(genuine.digest).decode())
    else:
        spellings += _loose_base64(rng, base64.b64encode(genuine.digest).decode())
    spelled = rng.choice(spellings)
    return None if spelled.strip(" \t") == text else genuine.signed(spelled)


def _respell_token(rng: Random, genuine: Genuine) -> Request:
    """Encode the last part of a token differently: 32 bytes leave two unused bits at its end."""
    text = genuine.text
    place = rng.randrange(1, len(text))
    last = _BASE64URL.index(text[-1])
    return genuine.signed(
        rng.choice(
            (
                text[:place] + rng.choice(" \t\n!\0:.,") + text[place:],
                text[:-1] + _BASE64URL[last ^ rng.randrange(1, 4)],
                text + "=",
                text + "==",
                text + ".",
                text + "A",
                text[:-1],
                genuine.digest.hex(),
                base64.b64encode(genuine.digest).decode(),
                "",
            )
        )
    )


_FULLWIDTH: Final = {ord(c): 0xFEE0 + ord(c) for c in "0123456789ABCDEFabcdef"}


def _loose_base64(rng: Random, text: str) -> Iterator[str]:
    bare = text.rstrip("=")
    last = _BASE64.index(bare[-1])
    # Unused bits of the last character.
    spare = 4 if len(text) - len(bare) == 1 else 16
    yield bare[:-1] + _BASE64[last ^ rng.randrange(1, spare)] + text[len(bare) :]
    yield bare
    yield text + "="
    yield text + "===="
    yield text + "AAAA"
    if "+" in text or "/" in text:
        yield text.replace("+", "-").replace("/", "_")


def forge_header(rng: Random, genuine: Genuine) -> Request | None:
    """Remove, double, rename or overfill the signature header."""
    scheme, request = genuine.scheme, genuine.request
    value = genuine.front + genuine.text
    wrong = genuine.front + genuine.spell(rng.randbytes(len(genuine.digest)))
    name = scheme.header.lower().encode()
    renamed = rng.choice((name + b"-", b"x-" + name, name.replace(b"-", b"_") + b"_", name[:-1]))
    bare = request.having(scheme.header)
    whole, doubled = value.encode(), (value.encode(), value.encode())
    # A bare signature may have a prefix with its own algorithm, but no other.
    prefixes = {"sha1=", "sha256=", "sha512=", "sha256:", "Bearer "} - {f"{scheme.algorithm}="}
    requests = [
        bare,
        request.having(scheme.header, b""),
        request.having(scheme.header, *doubled),
        request.having(scheme.header, *rng.sample([whole, wrong.encode()], 2)),
        request.having(scheme.header, whole, b""),
        replace(bare, headers=(*bare.headers, (renamed, whole))),
        genuine.headed(f"{value},{value}" if scheme.format == "list" else f"{value} {value}"),
        genuine.headed(genuine.text if genuine.front else f"v1={value}"),
        genuine.headed(rng.choice(sorted(prefixes)) + value),
        genuine.headed(
            genuine.front.upper() + genuine.text if genuine.front else f"SHA256={value}"
        ),
        genuine.headed(genuine.front or f"{scheme.algorithm}="),
    ]
    if scheme.format in LISTED:
        requests += _spoil_list(rng, genuine)
    return rng.choice(requests)


def _spoil_list(rng: Random, genuine: Genuine) -> Iterator[Request]:
    between, mark = LISTED[genuine.scheme.format]
    entry = mark + genuine.text
    stem = genuine.front.removesuffix(mark)
    for name in ("v0", "v2", "v1a", "V1", "v01", "v", "v1 ", ""):
        yield genuine.headed(stem + name + mark[-1] + genuine.text)
    yield genuine.headed(stem + between.join([entry] * (MAX_CANDIDATES + rng.randrange(1, 20))))
    yield genuine.headed(stem + entry + between + between + entry)
    yield genuine.headed(stem + entry + between + "v1")
    bad = [mark + genuine.spell(rng.randbytes(len(genuine.digest))) for _ in range(9)]
    yield genuine.headed(stem + between.join(bad))


def forge_body(rng: Random, genuine: Genuine) -> Request | None:
    """Change the body, but not the signature."""
    body = genuine.request.body
    place = rng.randrange(len(body))
    flipped = bytearray(body)
    flipped[place] ^= 1 << rng.randrange(8)
    forged = rng.choice(
        (
            bytes(flipped),
            bytes(flipped),
            body[:place] + rng.randbytes(1) + body[place:],
            body[:place] + body[place + 1 :],
            body + rng.choice((b"\n", b" ", b"\0", b"{}")),
            rng.choice((b"\xef\xbb\xbf", b" ", b"?", b".")) + body,
            body[:place],
            body[place:],
            b"",
            body + body,
            _reserialize(body),
            rng.randbytes(len(body)),
        )
    )
    is_same = genuine.is_form and means_the_same(forged, body)
    return None if forged == body or is_same else replace(genuine.request, body=forged)


def _reserialize(body: bytes) -> bytes:
    try:
        return json.dumps(json.loads(body), separators=(",", ":")).encode()
    except ValueError:
        return body.upper()


def forge_time(rng: Random, genuine: Genuine) -> Request | None:
    """Change the time or its format, but not the signature."""
    given = _read_time(genuine)
    place = rng.randrange(len(given))
    digit = rng.choice("0123456789")
    forged = rng.choice(
        (
            given[:place] + digit + given[place + 1 :],
            str(int(given) + rng.choice((-1, 1)) * rng.randrange(1, 10**6)),
            str(int(genuine.request.now) + rng.randrange(-300, 301)),
            given[:place] + "_" + given[place:],
            rng.choice(("0", "00", "+", "-", "0x", "\u00a0", "\0")) + given,
            given + rng.choice((".0", ".", "e0", "\0", "\n", "L")),
            given + "000",
            given.translate(_FULLWIDTH),
            rng.choice(("nan", "inf", "-inf", "1e9", "now", "", "0")),
        )
    )
    return None if forged == given else _write_time(genuine, forged)


def _read_time(genuine: Genuine) -> str:
    name = genuine.scheme.timestamp_from or ""
    if genuine.scheme.format == "kv":
        return genuine.front.removeprefix(f"{name}=").partition(",")[0]
    return genuine.request.value(name)


def _write_time(genuine: Genuine, text: str) -> Request:
    name = genuine.scheme.timestamp_from or ""
    if genuine.scheme.format == "kv":
        return genuine.headed(f"{name}={text},v1={genuine.text}")
    return genuine.request.having(name, text.encode())


def forge_moment(rng: Random, genuine: Genuine) -> Request | None:
    """Replay the request before or after its tolerance."""
    if genuine.scheme.format == "jwt":
        return forge_lifetime(rng, genuine)
    tolerance = genuine.scheme.tolerance_seconds
    far = tolerance + 10 ** rng.uniform(-2, 9)
    at = float(_read_time(genuine)) + rng.choice((-far, far))
    return replace(genuine.request, now=at)


def forge_id(rng: Random, genuine: Genuine) -> Request | None:
    """Change the id or nonce, or split the signed content differently."""
    name = genuine.scheme.id_header or genuine.scheme.nonce_header or ""
    given = genuine.request.value(name)
    time_name = genuine.scheme.timestamp_from
    at = genuine.request.value(time_name) if time_name else "-"
    first, dot, rest = genuine.request.body.partition(b".")
    if dot and first.decode("ascii", "replace") == at and rng.random() < 0.5:
        moved = genuine.request.having(name, f"{given}.{at}".encode())
        return replace(moved, body=rest)
    if genuine.scheme.nonce_header and rng.random() < 0.2:
        # Text before the nonce becomes part of the nonce.
        body = genuine.request.body
        moved = genuine.request.having(name, body[-1:] + b"." + given.encode())
        return replace(moved, body=body[:-1])
    place = rng.randrange(len(given))
    forged = rng.choice(
        (
            given[:place] + rng.choice(VISIBLE) + given[place + 1 :],
            given[:place] + given[place + 1 :],
            given + rng.choice((".", "a", "\0", "\n", "é")),
            given.upper(),
            make_id(rng),
            "",
            "m" * 256,
        )
    )
    if rng.random() < 0.1:
        return genuine.request.having(name, *rng.choice(((), (given.encode(),) * 2)))
    return None if forged == given else genuine.request.having(name, forged.encode())


def forge_query(rng: Random, genuine: Genuine) -> Request | None:
    """Change the signed query, or its digest of the body."""
    query = genuine.request.query
    place = rng.randrange(len(query) + 1)
    body = genuine.request.body + b"!"
    digest = hashlib.sha256(body).hexdigest().encode()
    other = re.sub(rb"bodySHA256=.*", b"bodySHA256=" + digest, query)
    character = rng.choice((*VISIBLE, "\0", "\xff")).encode("latin-1")
    requests = [
        replace(genuine.request, query=query[:place] + character + query[place + 1 :]),
        replace(genuine.request, query=query[:place] + character + query[place:]),
        replace(genuine.request, query=query[:place] + query[place + 1 :]),
        replace(genuine.request, query=query + b"&"),
        replace(genuine.request, query=query + b"&bodySHA256=" + digest),
        replace(genuine.request, query=query.partition(b"bodySHA256")[0]),
        replace(genuine.request, query=query[place:] + query[:place]),
        replace(genuine.request, query=query.swapcase()),
        replace(genuine.request, query=other, body=body),
        replace(genuine.request, query=query + b"&bodySHA256=" + digest, body=body),
        replace(genuine.request, query=b"bodySHA256=" + digest + b"&" + query, body=body),
        replace(genuine.request, query=b""),
    ]
    forged = rng.choice(requests)
    return None if forged == genuine.request else forged


def forge_key(rng: Random, genuine: Genuine) -> Request | None:
    """Sign the right content with another key or algorithm."""
    key, scheme = genuine.key, genuine.scheme
    if scheme.algorithm == "ed25519" or scheme.format == "jwt":
        return _sign_otherwise(rng, genuine)
    flipped = bytearray(key)
    flipped[rng.randrange(len(key))] ^= 1 << rng.randrange(8)
    other = rng.choice((bytes(flipped), b"", b"secret", key.hex().encode(), key[:-1] + b"~~"))
    content = _content(genuine)
    algorithms = [
        name for name in ("sha1", "sha256", "sha384", "sha512") if name != scheme.algorithm
    ]
    digest = rng.choice(
        (
            hmac.digest(other, content, scheme.algorithm),
            hmac.digest(other, content, scheme.algorithm),
            hmac.digest(key, content, rng.choice(algorithms)),
            hashlib.new(scheme.algorithm, content).digest(),
            hashlib.new(scheme.algorithm, key + content).digest(),
            hmac.digest(content, key, scheme.algorithm),
            hmac.digest(key, content + b"\0", scheme.algorithm),
            hmac.digest(key, content.upper(), scheme.algorithm),
            hmac.digest(key, b"", scheme.algorithm),
        )
    )
    return None if digest == genuine.digest else genuine.signed(genuine.spell(digest))


def _sign_otherwise(rng: Random, genuine: Genuine) -> Request:
    """Sign with another key, or by HMAC with the public key."""
    scheme, content = genuine.scheme, _content(genuine)
    other = sign(
        scheme,
        rng.randbytes(32),
        genuine.request.body,
        now=int(genuine.request.now),
        event_id="",
        query=genuine.request.query,
    )
    if rng.random() < 0.5:
        return genuine.request.having(scheme.header, dict(other.headers)[scheme.header].encode())
    key = rng.choice((genuine.verifying, b"", b"secret", OLDER_KEY[:-1] + b"!"))
    if scheme.format == "jwt":
        key = rng.choice((b"", b"secret", key[::-1]))
    name = rng.choice(("sha256", "sha512"))
    digest = hmac.digest(key, content, name).ljust(len(genuine.digest), b"\0")
    return genuine.signed(genuine.spell(digest[: len(genuine.digest)]))


def _content(genuine: Genuine) -> bytes:
    """Build the signed content independently of the code under test."""
    scheme, request = genuine.scheme, genuine.request
    if scheme.format == "jwt":
        return genuine.front.removeprefix("Bearer ").rstrip(".").encode()
    template = re.split(r"\{(\w+)\}", scheme.signed_content)
    timestamp = _read_time(genuine).encode() if scheme.timestamp_from else b""
    event_id = request.value(scheme.id_header).encode() if scheme.id_header else b""
    url = (scheme.url or "").encode() + (b"?" + request.query if request.query else b"")
    values = {"body": request.body, "timestamp": timestamp, "id": event_id, "url": url}
    values["body_sha256"] = hashlib.sha256(request.body).digest()
    pairs = sorted(
        parse_qsl(request.body.decode(), keep_blank_values=True, strict_parsing=True)
        if genuine.is_form
        else []
    )
    values["params"] = "".join(name + value for name, value in pairs).encode()
    values["nonce"] = request.value(scheme.nonce_header).encode() if scheme.nonce_header else b""
    return b"".join(values[p] if i % 2 else p.encode() for i, p in enumerate(template))


Forger: TypeAlias = Callable[[Random, Genuine], Request | None]
FORGERS: Final[Mapping[str, tuple[Forger, Callable[[Genuine], object]]]] = {
    "digest": (forge_digest, lambda _: True),
    "text": (forge_text, lambda _: True),
    "spelling": (forge_spelling, lambda _: True),
    "header": (forge_header, lambda _: True),
    "body": (forge_body, lambda _: True),
    "key": (forge_key, lambda _: True),
    "time": (forge_time, lambda genuine: genuine.has_time_header),
    "replay": (forge_moment, lambda genuine: genuine.scheme.timestamp_from),
    "id": (
        forge_id,
        lambda genuine: (
            "{id}" in genuine.scheme.signed_content or "{nonce}" in genuine.scheme.signed_content
        ),
    ),
    "query": (forge_query, lambda genuine: "{url}" in genuine.scheme.signed_content),
    "claims": (forge_claims, lambda genuine: genuine.scheme.format == "jwt"),
    "cut": (forge_cut, lambda genuine: genuine.is_form),
    "type": (forge_type, lambda genuine: genuine.is_form),
}


# --- Attack -------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Number of forgeries by preset and kind, and the accepted ones."""

    tried: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    same: int = 0
    genuine: int = 0
    refused_genuine: int = 0
    accepted: list[tuple[str, str, Request]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Return the number of all forgeries."""
        return sum(self.tried.values())

    @property
    def is_clean(self) -> bool:
        """Whether enough was tried, and nothing failed."""
        return not self.accepted and not self.refused_genuine and self.genuine > 0

    def add(self, other: "Tally") -> None:
        """Add the numbers of another tally."""
        self.tried += other.tried
        self.faults += other.faults
        self.same += other.same
        self.genuine += other.genuine
        self.refused_genuine += other.refused_genuine
        self.accepted += other.accepted


def attack(count: int, *, seed: str, verifier: Verifier = verify) -> Tally:
    """Try a number of forgeries on a verifier, spread evenly over presets and kinds."""
    rng, tally = Random(seed), Tally()
    names = list(SCHEMES)
    # Shuffled, or the first ones would get more than their share.
    first = rng.randrange(len(names))
    while tally.count < count:
        name = names[(first + tally.genuine) % len(names)]
        genuine = make_genuine(rng, SCHEMES[name])
        tally.genuine += 1
        tally.refused_genuine += _try(verifier, genuine, genuine.request) is not None
        kinds = [kind for kind, (_, fits) in FORGERS.items() if fits(genuine)]
        for number in range(PER_GENUINE):
            kind = kinds[(number + tally.genuine) % len(kinds)]
            forged = FORGERS[kind][0](rng, genuine)
            if forged is None:
                tally.same += 1
            elif tally.count < count:
                tally.tried[name, kind] += 1
                fault = _try(verifier, genuine, forged)
                tally.faults[fault or "accepted"] += 1
                if fault is None:
                    tally.accepted.append((name, kind, forged))
    return tally


def _try(verifier: Verifier, genuine: Genuine, request: Request) -> str | None:
    """Return why a request was refused, or None if it was accepted."""
    try:
        verifier(
            genuine.scheme,
            [OLDER_KEY, genuine.verifying],
            request.headers,
            request.body,
            now=request.now,
            query=request.query,
        )
    except InvalidSignatureError as error:
        return error.fault
    return None


def _attack(job: tuple[int, str]) -> Tally:
    count, seed = job
    return attack(count, seed=seed)


def attack_in_parallel(count: int, *, seed: int, processes: int) -> Tally:
    """Try a number of forgeries in several processes. The result does not depend on how many."""
    sizes = [CHUNK] * (count // CHUNK) + [count % CHUNK] * (count % CHUNK > 0)
    jobs = [(size, f"{seed}/{number}") for number, size in enumerate(sizes)]
    tally = Tally()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for part in pool.map_async(_attack, jobs, chunksize=1).get(TIMEOUT_SECONDS):
            tally.add(part)
    return tally


# --- Report --------------------------------------------------------------------------------------


def draw(console: Console, tally: Tally, *, seed: int, seconds: float) -> None:
    """Print the numbers and the accepted forgeries."""
    accepted = Counter((name, kind) for name, kind, _ in tally.accepted)
    table = Table(title=f"Forgeries tried, seed {seed}", title_justify="left")
    table.add_column("preset")
    for kind in (*FORGERS, "all", "accepted"):
        table.add_column(kind, justify="right")
    for name in SCHEMES:
        cells = [tally.tried[name, kind] for kind in FORGERS]
        wrong = sum(accepted[name, kind] for kind in FORGERS)
        shown = [f"{cell:,}" if cell else "" for cell in cells]
        table.add_row(name, *shown, f"{sum(cells):,}", f"{wrong:,}")
    columns = [sum(tally.tried[name, kind] for name in SCHEMES) for kind in FORGERS]
    table.add_section()
    totals = [*columns, sum(columns), len(tally.accepted)]
    table.add_row("all", *(f"{total:,}" for total in totals))
    console.print(table)
    refused = ", ".join(f"{fault} {number:,}" for fault, number in tally.faults.most_common())
    console.print(f"refused as: {refused}", markup=False)
    console.print(
        f"made of {tally.genuine:,} genuine requests, of which {tally.refused_genuine:,} were "
        f"refused; left out because they meant the same: {tally.same:,}; {seconds:.0f} s; "
        f"Python {platform.python_version()}",
        markup=False,
    )
    for name, kind, request in tally.accepted[:SHOWN]:
        console.print(f"ACCEPTED: {name}, {kind}: {request}", markup=False)
    verdict = "PASSED: nothing forged was accepted." if tally.is_clean else "FAILED"
    console.print(verdict, markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    options: Any = _parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    begun = time.monotonic()
    tally = attack_in_parallel(options.count, seed=options.seed, processes=options.processes)
    draw(console, tally, seed=options.seed, seconds=time.monotonic() - begun)
    return 0 if tally.is_clean else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Forge webhooks of every preset, and check that all are refused."
    )
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if options.count < 1 or options.processes < 1:
        parser.error("--count and --processes must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
