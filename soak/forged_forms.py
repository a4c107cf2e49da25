"""Forges forms: other forms whose signed content is the same, so that the signature still fits."""

import base64
import hmac
from dataclasses import replace
from random import Random
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

from bridge.webhook.signatures.forms import PLIVO
from soak.genuine_requests import FORM, NEW_NAME, Genuine, Request, make_form, make_id

_PLANTED: Final = (
    ("From", "+447700900123"),
    ("To", "+447700900123"),
    ("FromCity", "x"),
    ("ErrorCode", "30003"),
    ("ErrorCode", "0"),
    ("NumMedia", "1"),
    ("SmsStatus", "delivered"),
    ("Type", "sms"),
    ("Units", "9"),
)


def means_the_same(one: bytes, other: bytes) -> bool:
    """Return whether a lenient reader sees the same form in two bodies."""
    return _read(one) == _read(other)


def _read(body: bytes) -> list[tuple[str, str]]:
    return sorted(parse_qsl(body.decode("latin-1"), keep_blank_values=True))


def forge_cut(rng: Random, genuine: Genuine) -> Request | None:
    """Move the borders of names and values without changing the signed content.

    The borders of an unknown parameter cannot be determined.
    """
    if NEW_NAME in genuine.request.body.decode():
        return None
    pairs = sorted(parse_qsl(genuine.request.body.decode(), keep_blank_values=True))
    if rng.random() < 0.5:
        return _forge_planted(rng, genuine)
    place = rng.randrange(len(pairs))
    name, value = pairs[place]
    cut = rng.randrange(len(name + value) + 1)
    row = name + value
    before, behind = pairs[:place], pairs[place + 1 :]
    forged = rng.choice(
        (
            # A longer or shorter name.
            [*before, (row[:cut], row[cut:]), *behind],
            # Merged into the parameter before it, alone or with others.
            [*before[:-1], (before[-1][0], before[-1][1] + row), *behind] if before else None,
            [*before, (name, value + "".join(map("".join, behind)))],
            # Split in two or three.
            [*before, (name, value[:cut]), (value[cut:], ""), *behind],
            [*before, (name, value[:cut]), (value[cut : cut + 3], value[cut + 3 :]), *behind],
            # Duplicated: readers take the first or the last one.
            [*pairs, (name, value)],
            [*pairs, (name, "")],
            # An empty form.
            [],
            [("", "".join(map("".join, pairs)))],
        )
    )
    if forged is None or sorted(forged) == pairs:
        return None
    body = urlencode(forged).encode()
    if means_the_same(body, genuine.request.body):
        return None
    return _moved_to_query(rng, genuine, pairs) if rng.random() < 0.1 else _with(genuine, body)


def _with(genuine: Genuine, body: bytes) -> Request:
    return replace(genuine.request, body=body)


def _moved_to_query(rng: Random, genuine: Genuine, pairs: list[tuple[str, str]]) -> Request:
    """Move the first parameters to the end of the query."""
    count = rng.randrange(1, len(pairs) + 1)
    moved = "".join(map("".join, pairs[:count]))
    query = genuine.request.query + quote(moved, safe="+:").encode()
    return replace(genuine.request, query=query, body=urlencode(pairs[count:]).encode())


def _forge_planted(rng: Random, genuine: Genuine) -> Request:
    """Split a parameter off a text that a stranger wrote.

    The parameters after the text become part of the new parameter, so that the signature fits.
    """
    scheme = genuine.scheme
    text_name = "Text" if scheme.parameters is PLIVO else "Body"
    name, value = rng.choice([each for each in _PLANTED if each[0] > text_name])
    form = make_form(rng, scheme, f"YES{name}{value}")
    values = dict(parse_qsl(form.decode(), keep_blank_values=True))
    row = "".join(key + values[key] for key in sorted(values))
    swallowed = "".join(key + values[key] for key in sorted(values) if text_name < key <= name)
    cut = {key: values[key] for key in values if key < text_name or key > name}
    cut |= {text_name: "YES", name: value + swallowed}
    nonce = make_id(rng)
    url = scheme.url or ""
    content = f"{url}?{row}.{nonce}" if scheme.nonce_header else url + row
    digest = hmac.digest(genuine.key, content.encode(), scheme.algorithm)
    headers = [(scheme.header.lower().encode(), base64.b64encode(digest))]
    if scheme.nonce_header:
        headers.append((scheme.nonce_header.lower().encode(), nonce.encode()))
    headers.append((b"content-type", FORM.encode()))
    return Request(tuple(headers), urlencode(cut).encode(), b"", genuine.request.now)


def forge_type(rng: Random, genuine: Genuine) -> Request | None:
    """Change the content type or the character set of the form."""
    types = (
        (),
        (b"",),
        (b"application/json",),
        (b"text/plain",),
        (b"multipart/form-data; boundary=a",),
        (FORM.encode() + b"; charset=utf-16",),
        (FORM.encode() + b"; charset=latin-1",),
        (FORM.encode() + b"; charset=utf-8; charset=utf-7",),
        (FORM.encode() + b", application/json",),
        (FORM.encode(), FORM.encode()),
        (FORM.encode(), b"application/json"),
    )
    return genuine.request.having("content-type", *rng.choice(types))
