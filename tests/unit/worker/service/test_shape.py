"""How a request is written for each service, and what its answers mean."""

import base64
import encodings
import gzip
import json
import re
import time
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.config import SmsApiSettings, WorkerSettings
from bridge.config.presets import PRESETS, Preset, documented_answers
from bridge.errors import ConfigError, InvalidMessageError
from bridge.worker.envelope import Envelope
from bridge.worker.fates import Answer, Fate
from bridge.worker.request import OpenSendRequest, SendRequest, parse_request
from bridge.worker.service.lenient_reader import _CHARSETS, MAX_ANSWER_BYTES
from bridge.worker.service.shape import ApiRequest, Shape, _legible_body, shape_from
from bridge.worker.service.transport import Header, Reply

KEY = "an-api-key"
REQUEST = {"to": "+491713920001", "from": "Acme", "text": 'Hi "Ü" & more'}
TRACE = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)


def envelope(key: str = "m-1", trace: tuple[tuple[str, str], ...] = ()) -> Envelope:
    return Envelope(key=key, message_id=key, published_at=None, first_delivered_at=0.0, trace=trace)


def request(**members: Any) -> SendRequest:
    """Read a send request, with members of its own if there are any."""
    settings = WorkerSettings(extra_fields="forward")
    return parse_request(json.dumps(REQUEST | members).encode(), settings)


def settings(preset: str = "generic", **api: Any) -> SmsApiSettings:
    needed: dict[str, Any] = {"preset": preset, "account": "AC1", "key": KEY}
    if preset in {"generic", "infobip"}:
        needed["base_url"] = "https://api.example.com"
    return SmsApiSettings.model_validate(needed | api)


def shape(preset: str = "generic", **api: Any) -> Shape:
    return shape_from(settings(preset, **api))


SHAPES = {preset: shape(preset) for preset in PRESETS}


def whole(asked: ApiRequest) -> tuple[str, list[Header], bytes]:
    """Return a request's address, all of its headers, and its body."""
    return asked.url, [*asked.common, *asked.headers], asked.body


def fields(body: str = "json", **places: Any) -> dict[str, Any]:
    """Make the setting `request` with fields by the names of their members."""
    return {"body": body, "fields": {f"/{name}": value for name, value in places.items()}}


def answered(status: int, body: object = None, **headers: str) -> Reply:
    content = b"" if body is None else json.dumps(body).encode()
    return Reply(status, [(k.encode(), v.encode()) for k, v in headers.items()], content)


def fate_of(answer: Answer) -> str:
    """Write a fate as `response.errors` does."""
    more = answer.pause if answer.fate is Fate.SETUP else answer.about
    return answer.fate.value if more is None else f"{answer.fate.value}:{more}"


# --- The shape that the bridge was made for -------------------------------------------------------


@given(
    st.fixed_dictionaries(
        {
            "to": st.from_regex(r"\+[1-9][0-9]{3,14}", fullmatch=True),
            "from": st.text("Acme é😀", min_size=1, max_size=32),
            "text": st.text(
                st.characters(exclude_categories=["Cs", "Cc"], include_characters="\t\n\r"),
                min_size=1,
                max_size=200,
            ),
        },
        optional={"tag": st.recursive(st.none() | st.integers() | st.text('a"\\'), st.lists)},
    )
)
def test_generic_body_is_the_request_as_pydantic_writes_it(members: dict[str, Any]) -> None:
    """The default shape's body is byte for byte what a request is as JSON, in ASCII."""
    made = OpenSendRequest.model_validate(members)

    assert shape().encode(made, envelope()).body == made.model_dump_json(ensure_ascii=True).encode()


def test_generic_request() -> None:
    """The default shape's address and headers are those that it always had, in their order."""
    url, headers, _ = whole(shape().encode(request(), envelope(trace=TRACE)))

    assert url == "https://api.example.com/v1/messages"
    assert headers == [
        (b"Content-Type", b"application/json"),
        (b"Accept-Encoding", b"identity"),
        (b"User-Agent", b"sms-bridge"),
        (b"Authorization", b"Bearer an-api-key"),
        (b"Idempotency-Key", b"m-1"),
        (b"traceparent", TRACE[0][1].encode()),
    ]


def test_constant_headers() -> None:
    """They are sent with each request, and what is sent else stays as it was."""
    with_them = shape("twilio", request={"headers": {"Accept": "a/b", "X-Tenant": "acme-1"}})
    _, plain, body = whole(SHAPES["twilio"].encode(request(), envelope()))
    _, headers, same_body = whole(with_them.encode(request(), envelope()))

    assert [header for header in headers if header not in plain] == [
        (b"Accept", b"a/b"),
        (b"X-Tenant", b"acme-1"),
    ]
    assert (len(headers), same_body) == (len(plain) + 2, body)
    assert with_them.login.is_repeated("acme-1")


def test_generic_takes_any_2xx() -> None:
    """Whatever a body behind a 2xx says, or if it says nothing that can be read, it was sent."""
    replies = [answered(status, {"error": {"code": 1}}) for status in range(200, 300)]
    replies += [Reply(200, (), b"{"), Reply(202, (), b"")]

    assert {shape().judge(reply).fate for reply in replies} == {Fate.SENT}


# --- Where it goes, and who we are ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("auth", "expected"),
    [
        ({}, (b"Authorization", b"Bearer an-api-key")),
        ({"scheme": "basic"}, (b"Authorization", b"Basic " + base64.b64encode(b"AC1:an-api-key"))),
        (
            {"scheme": "basic", "username": "ü"},
            (b"Authorization", b"Basic " + base64.b64encode("ü:an-api-key".encode())),
        ),
        ({"scheme": "header", "prefix": "App "}, (b"Authorization", b"App an-api-key")),
        ({"scheme": "header", "header": "x-api-key"}, (b"x-api-key", b"an-api-key")),
    ],
    ids=["bearer", "basic", "basic with a user", "prefix", "header"],
)
def test_login(auth: dict[str, str], expected: tuple[bytes, bytes]) -> None:
    """Each scheme makes its one header of the key."""
    _, headers, _ = whole(shape(auth=auth).encode(request(), envelope()))

    assert headers[3] == expected


@pytest.mark.parametrize("body", ["json", "form"])
def test_login_in_the_body(tmp_path: Path, body: str) -> None:
    """Account and key go into the body where they are wanted; the key follows its file."""
    (tmp_path / "key").write_text('o"l&d é')
    api = fields(body, u="{account}", p="<{secret}>", to="{to}", text="{text}")
    login: dict[str, Any] = {"auth": {"scheme": "none"}, "key": None, "key_file": tmp_path / "key"}
    prepared = shape(request=api, account='A"C&1', **login)
    sent = [whole(prepared.encode(request(), envelope()))]
    (tmp_path / "key").write_text("new")
    for credential in prepared.login.watched:
        credential.reread()
    sent.append(whole(prepared.encode(request(), envelope())))
    read = [json.loads(b) if body == "json" else dict(parse_qsl(b.decode())) for *_, b in sent]

    assert [(one["u"], one["p"]) for one in read] == [('A"C&1', '<o"l&d é>'), ('A"C&1', "<new>")]
    assert {name for name, _ in sent[0][1]}.isdisjoint({b"Authorization"})


@pytest.mark.parametrize("secret", ["key_file", "username_file"])
def test_login_follows_its_files(tmp_path: Path, secret: str) -> None:
    """A key or user name that changes in its file counts from the next request on."""
    (tmp_path / "secret").write_text("old")
    file: dict[str, Any] = (
        {"username_file": tmp_path / "secret"} if secret == "username_file" else {}
    )
    api: dict[str, Any] = {"key_file": tmp_path / "secret"} if secret == "key_file" else {}
    prepared = shape(auth={"scheme": "basic"} | file, **api)
    before = dict(whole(prepared.encode(request(), envelope()))[1])[b"Authorization"]
    (tmp_path / "secret").write_text("new")
    for credential in prepared.login.watched:
        credential.reread()
    after = dict(whole(prepared.encode(request(), envelope()))[1])[b"Authorization"]

    assert base64.b64decode(before[6:]).replace(b"old", b"new") == base64.b64decode(after[6:])
    assert before != after


@pytest.mark.parametrize(
    ("api", "told"),
    [
        ({"key": None}, "sms_api.key: is missing"),
        ({"account": None, "path": "/{account}"}, "sms_api.account: is missing"),
        ({"account": None, "auth": {"scheme": "basic"}}, "sms_api.auth.username: is missing"),
        ({"auth": {"scheme": "basic", "username": "a:b"}}, "sms_api.auth.username: must not hold"),
        ({"key": "a b"}, "sms_api.key: must be visible ASCII"),
        (
            {
                "key": None,
                "auth": {"scheme": "none"},
                "request": fields(to="{to}", text="{text}{secret}"),
            },
            "sms_api.key: is missing; set sms_api.key or sms_api.key_file",
        ),
        (
            {"account": None, "request": fields(to="{to}", text="{text}{account}")},
            "sms_api.account: is missing; it is what",
        ),
        (
            {"key": "a\ud800", "auth": {"scheme": "basic", "username": "u"}},
            "sms_api.key: holds half of a surrogate pair",
        ),
    ],
    ids=[
        *("key", "account", "user", "colon", "space"),
        *("key of the body", "account of the body", "surrogate"),
    ],
)
def test_what_is_missing_is_told(api: dict[str, Any], told: str) -> None:
    """A shape that lacks something does not start, and names the key."""
    with pytest.raises(ConfigError, match=told):
        shape(**api)


def test_account_in_the_path_is_encoded() -> None:
    """An account can be no other path than the one that is configured."""
    url, _, _ = whole(shape(path="/a/{account}/b", account="x/../y").encode(request(), envelope()))

    assert url == "https://api.example.com/a/x%2F..%2Fy/b"


# --- The body -------------------------------------------------------------------------------------


def test_form_repeats_lists_and_writes_constants() -> None:
    """A list in a form is a member for each of its values."""
    api = fields("form", to="{to}", text="{text}", tag=["a b", 1], flag=True)
    _, headers, body = whole(shape(request=api).encode(request(), envelope()))

    assert headers[0] == (b"Content-Type", b"application/x-www-form-urlencoded")
    assert body == b"to=%2B491713920001&text=Hi+%22%C3%9C%22+%26+more&tag=a+b&tag=1&flag=true"


@pytest.mark.parametrize(
    ("sender", "sent"), [("Acme", "Acme"), ("+49170", "49170"), ("+1 Shop", "+1 Shop")]
)
def test_digits(sender: str, sent: str) -> None:
    """Numbers go without their + where that is wanted, a sender's too, and names as they are."""
    api = {"to_format": "digits", "fields": {"/to": "{to}{text}", "/from": "{from}"}}
    made = request(**{"from": sender, "text": "x"})
    _, _, body = whole(shape(request=api).encode(made, envelope()))

    assert json.loads(body) == {"to": "491713920001x", "from": sent}


def test_long_key_is_shortened_to_another_one() -> None:
    """A key that is longer than the service takes is always the same other one, of that length."""
    api = fields(to="{to}", text="{text}", id="{key:36}")
    ids = [
        json.loads(shape(request=api).encode(request(), envelope(key)).body)["id"]
        for key in ("a" * 36, "a" * 37, "a" * 37, "a" * 38)
    ]

    assert ids[0] == "a" * 36
    assert ids[1] == ids[2]
    assert len({*ids}) == 3
    assert {len(one) for one in ids} == {36}


@pytest.mark.parametrize(
    ("idempotency", "header", "members"),
    [
        ("header:X-Key", b"m-1", {}),
        ("field:/meta/id", None, {"meta": {"id": "m-1"}}),
        ("none", None, {}),
    ],
)
def test_idempotency(idempotency: str, header: bytes | None, members: dict[str, Any]) -> None:
    """The key goes into a header, a field, or nowhere."""
    _, headers, body = whole(shape(idempotency=idempotency).encode(request(), envelope()))

    assert dict(headers).get(b"X-Key") == header
    assert json.loads(body) == REQUEST | members


@pytest.mark.parametrize("body", ["json", "form"])
def test_the_address_for_receipts_has_the_key(body: str) -> None:
    """Without a known address there is no such field, at any depth."""
    deep = {"Deep": [{"u": "{callback}"}]} if body == "json" else {}
    places = fields(body, To="{to}", Body="{text}", Callback="{callback}#rc=5", **deep)
    known = shape_from(settings(request=places), "https://sms.example.com/w")

    def read(prepared: Shape, key: str) -> dict[str, Any]:
        written = whole(prepared.encode(request(), envelope(key)))[2]
        return json.loads(written) if body == "json" else dict(parse_qsl(written.decode()))

    assert read(known, "order-17")["Callback"] == (
        "https://sms.example.com/w?sms-bridge-id=order-17#rc=5"
    )
    number = REQUEST["to"][1:]
    assert read(known, f"to-{number}")["Callback"] == "https://sms.example.com/w#rc=5"
    assert read(shape(request=places), "order-17") == {
        "To": REQUEST["to"],
        "Body": REQUEST["text"],
    }


@pytest.mark.parametrize("body", ["json", "form"])
def test_members_of_the_publishers_own_are_sent_beside(body: str) -> None:
    """With `worker.extra_fields: forward`, other members go to the top of any body."""
    prepared = shape(request=fields(body, To="{to}", Body="{text}"))
    _, _, written = whole(prepared.encode(request(StatusCallback="https://x"), envelope()))
    read = json.loads(written) if body == "json" else dict(parse_qsl(written.decode()))

    assert read == {"To": REQUEST["to"], "Body": REQUEST["text"], "StatusCallback": "https://x"}


@pytest.mark.parametrize(
    ("body", "extra"), [("json", {"To": "x"}), ("form", {"To": "x"}), ("form", {"tags": [1]})]
)
def test_member_without_a_place_is_refused(body: str, extra: dict[str, Any]) -> None:
    """A member that would take the place of one of the service's makes the message invalid."""
    prepared = shape(request=fields(body, To="{to}", Body="{text}"))

    with pytest.raises(InvalidMessageError, match=f"^{next(iter(extra))}: "):
        prepared.encode(request(**extra), envelope())


# --- What answers mean ----------------------------------------------------------------------------

BY_BODY: dict[str, Any] = {
    "response": {
        "accepted": {"statuses": [200], "pointer": "/parts/*/status", "values": ["0"]},
        "errors": {"1": "slow_down", "7": "refused", "503": "retry"},
        "duplicate": {"status": 409, "code": "again"},
    },
    "error_code_pointers": ["/parts/*/status", "/code", "/type#"],
}


@pytest.mark.parametrize(
    ("reply", "fate", "code"),
    [
        (answered(200, {"parts": [{"status": "0"}, {"status": 0}]}), "sent", None),
        (answered(200, {"parts": [{"status": "0"}, {"status": "7"}]}), "uncertain", "7"),
        (answered(200, {"parts": [{"status": 7}, {"status": "7"}]}), "refused", "7"),
        (answered(200, {"parts": [{"status": "1"}, {"status": "7"}]}), "slow_down", "1"),
        (answered(200, {"parts": [{"status": "1"}, {"status": "5"}]}), "uncertain", "5"),
        (answered(200, {"parts": [{"status": "1"}, {}]}), "uncertain", None),
        (answered(503, {"parts": [{"status": "0"}, {"status": "1"}]}), "uncertain", "1"),
        (answered(400, {"parts": [{}, {}], "code": "7"}), "refused", "7"),
        (answered(200, {"parts": [{"status": "new"}]}), "uncertain", "new"),
        (answered(200, {"parts": [{"status": "0"}, {}]}), "uncertain", None),
        (answered(200, {"parts": [{"status": "0"}, None]}), "uncertain", None),
        (answered(200, {"parts": []}), "uncertain", None),
        (answered(200), "uncertain", None),
        (Reply(200, (), b'{"parts": [{"status": "0"'), "uncertain", None),
        (answered(202, {"parts": [{"status": "0"}]}), "uncertain", None),
        (answered(409, {"code": "again"}), "sent", None),
        (answered(409, {"code": "other"}), "retry", "other"),
        (answered(400, {"code": "again"}), "refused", "again"),
        (answered(400, {"type": "https://x.example/errors#a-7"}), "refused", "a-7"),
        (answered(503), "retry", None),
        (answered(503, {"code": "x"}), "uncertain", "x"),
        (answered(401, {"code": "x"}), "setup:credentials_rejected", "x"),
        (answered(500, {"code": "7"}), "refused", "7"),
    ],
)
def test_where_the_body_decides(reply: Reply, fate: str, code: str | None) -> None:
    """The body says yes, the code says what, the status says it where neither does."""
    answer = shape(**BY_BODY).judge(reply)

    assert (fate_of(answer), answer.code) == (fate, code)


@pytest.mark.parametrize(
    ("codes", "fate", "code"),
    [
        (["again"], "sent", None),
        (["again", "again"], "sent", None),
        (["again", "no"], "uncertain", "again"),
        (["no", "again"], "uncertain", "no"),
        (["again", None], "uncertain", "again"),
        (["taken", "again"], "uncertain", "again"),
        (["taken", "no"], "uncertain", "no"),
        (["no", "taken"], "uncertain", "no"),
        (["taken", None], "uncertain", None),
        (["no", "later"], "refused", "no"),
        (["later", "no"], "retry", "later"),
        (["taken", "taken"], "sent", None),
    ],
    ids=str,
)
def test_each_part_counts(codes: list[str | None], fate: str, code: str | None) -> None:
    """A part that was taken leaves doubt about the others; the code is that of one that was not."""
    by_part = shape(
        response={
            "accepted": {"pointer": "/parts/*/ok", "values": ["true"]},
            "errors": {"no": "refused", "later": "retry"},
            "duplicate": {"code": "again"},
        },
        error_code_pointers=["/parts/*/code"],
    )
    parts = [{"ok": one == "taken", "code": one} for one in codes]
    answer = by_part.judge(answered(200, {"parts": parts}))

    assert (fate_of(answer), answer.code) == (fate, code)
    # The service has taken a part, so it is there.
    assert answer.in_part == (fate == "uncertain")
    assert not answer.in_part or (answer.ends_pause and not answer.counts_as_outage)


def test_a_list_of_errors_is_no_list_of_parts() -> None:
    """Where an answer lists several errors of one message, the first known one counts."""
    by_list = shape(
        response={"accepted": {"pointer": "/id"}, "errors": {"no": "refused"}},
        error_code_pointers=["/errors/*/code"],
    )
    answer = by_list.judge(answered(200, {"errors": [{"code": "no"}, {"code": "also"}]}))

    assert (answer.fate, answer.code) == (Fate.REFUSED, "no")


@pytest.mark.parametrize(
    ("body", "fate", "code", "provider_id"),
    [
        (b"OK: 12345", "sent", None, "12345"),
        (b"100\r\n12345\r\n", "sent", None, "12345"),
        (b"100", "sent", None, None),
        (b"ERR: 17, no such number", "refused", "17", None),
        (b"ERR: 21", "slow_down", "21", None),
        (b"AGAIN: 50", "sent", None, "50"),
        (b"ERR: 99", "uncertain", "99", None),
        (b"ERR: E-98", "uncertain", "E-98", None),
        (b"ERR: not for Smith", "uncertain", None, None),
        (b"ERR: blocked", "refused", "blocked", None),
        (b"ERR: to 447700900123", "uncertain", None, None),
        (b"ERR", "uncertain", None, None),
        (b'{"result": "OK"}', "uncertain", None, None),
        (b"<html>OK</html>", "uncertain", None, None),
        (b"", "uncertain", None, None),
    ],
)
def test_plain_text(body: bytes, fate: str, code: str | None, provider_id: str | None) -> None:
    """A service that answers 200 to everything in plain text says by its words what it means."""
    prepared = shape(
        response={
            "body": "text",
            "accepted": {"pointer": "/0", "values": ["OK", "100"]},
            "errors": {"17": "refused", "blocked": "refused", "21": "slow_down"},
            "duplicate": {"code": "50"},
        },
        message_id_pointers=["/1"],
        error_code_pointers=["/1"],
    )
    answer = prepared.judge(Reply(200, (), body))

    assert (fate_of(answer), answer.code, answer.provider_id) == (fate, code, provider_id)


@pytest.mark.parametrize(
    ("ids", "fate"),
    [
        (["a-1"], "sent"),
        ([1, 2], "sent"),
        (["a-1", None], "uncertain"),
        (["a-1", ""], "uncertain"),
        ([["a-1"]], "uncertain"),
        ([False, 0], "uncertain"),
        ([True], "sent"),
        ([], "uncertain"),
    ],
    ids=str,
)
def test_pointer_without_values_wants_something_there(ids: list[object], fate: str) -> None:
    """Where a service says yes by giving an id, an answer without one is no yes."""
    prepared = shape(response={"accepted": {"pointer": "/parts/*/id"}})
    answer = prepared.judge(answered(202, {"parts": [{"id": one} for one in ids]}))

    assert fate_of(answer) == fate
    assert fate_of(prepared.judge(Reply(202, (), b"<html>"))) == "uncertain"


@pytest.mark.parametrize(
    ("fate", "result"),
    [
        ("refused", "rejected"),
        ("retry", "rejected"),
        ("slow_down", "rate_limited"),
        ("slow_down:sender", "rate_limited"),
        ("setup:credentials_rejected", "unauthorized"),
        ("setup:insufficient_funds", "rejected"),
        ("setup:misconfigured", "rejected"),
    ],
)
def test_fate_of_a_code(fate: str, result: str) -> None:
    """A code's fate is what is configured, with the result that metrics show, and the wait."""
    reply = Reply(400, [(b"Retry-After", b"7")], b'{"code": "a"}')
    answer = shape(response={"errors": {"a": fate}}).judge(reply)

    assert (fate_of(answer), answer.result, answer.code) == (fate, result, "a")
    assert (answer.status, answer.retry_after_seconds) == (400, 7)


def test_trouble_of_the_service_is_told_from_that_of_a_message() -> None:
    """A code to try again with counts towards an outage only behind a 5xx."""
    prepared = shape(response={"errors": {"a": "retry"}})
    outage = {s: prepared.judge(answered(s, {"code": "a"})).counts_as_outage for s in (400, 500)}

    assert outage == {400: False, 500: True}


@pytest.mark.parametrize(
    "code",
    ["", "a text", "x" * 65, "+491713920001", "id-491713920001", "ü", None, 1.5, ["a"], 10**50],
    ids=str,
)
def test_what_is_no_code_is_passed_over(code: object) -> None:
    """A text, a phone number or anything long is no code, wherever it stands."""
    assert shape().judge(answered(400, {"code": code})).code is None


@pytest.mark.parametrize(
    ("code", "read"),
    [
        *((21211, "21211"), ("E.400-x_y", "E.400-x_y"), ("x" * 64, "x" * 64)),
        *((21211.0, "21211"), ("21610.0", "21610"), ("21211.00", "21211")),
        *(("1.5", "1.5"), ("E.0", "E.0"), (-3.0, "-3")),
    ],
)
def test_code(code: object, read: str) -> None:
    """A code is a short number or a word of up to 64 characters."""
    assert shape().judge(answered(400, {"errors": [{"code": code}]})).code == read


def test_code_with_a_point_has_the_meaning_of_its_number() -> None:
    """A code is known however its number is written; one that a setting writes so stays so."""
    prepared = shape(response={"errors": {"21211": "refused", "7.0": "slow_down"}})
    codes: list[object] = [21211, 21211.0, "21211.0", "7.0"]
    judged = [prepared.judge(answered(500, {"code": code})) for code in codes]

    assert [(fate_of(one), one.code) for one in judged] == [
        *[("refused", "21211")] * 3,
        ("slow_down", "7.0"),
    ]


def test_same_word_means_yes_here_and_an_error_there() -> None:
    """A value that means yes at its own pointer is a code like any other one elsewhere."""
    prepared = shape(
        response={
            "accepted": {"pointer": "/result", "values": ["1"]},
            "errors": {"1": "refused", "errors/2": "slow_down"},
        },
        error_code_pointers=["/result", "/code"],
    )
    answers = [{"result": 1, "code": 1}, {"result": 0, "code": 1}, {"code": "errors/2"}]
    judged = [prepared.judge(answered(200, answer)) for answer in answers]

    assert [fate_of(answer) for answer in judged] == ["sent", "uncertain", "slow_down"]
    assert [answer.code for answer in judged] == [None, "0", "errors/2"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"parts": [{"status": "0"}], "x": "\\ud800"}',
        b'{"parts": [{"status": "0"}], "x": 1%s}' % (b"0" * 5000),
    ],
    ids=["surrogate", "number"],
)
def test_oddity_beside_a_yes_is_passed_over(body: bytes) -> None:
    """An answer that says yes is one, though another member of it is odd JSON."""
    assert shape(**BY_BODY).judge(Reply(200, (), body)).fate is Fate.SENT


DOCUMENTED = [
    json.dumps(a["body"]).encode() for p in PRESETS for a in documented_answers(p) if "body" in a
]
# Documented answers, cut and mended at any place, and bytes of all kinds.
BODIES = st.binary(max_size=60) | st.builds(
    lambda body, begin, middle, end: body[:begin] + middle + body[end:],
    st.sampled_from(DOCUMENTED),
    st.integers(0, 200),
    st.binary(max_size=8)
    | st.sampled_from([b"NaN", b"1e999", b'"\\ud800"', b"[" * 5000, b"9" * 5000]),
    st.integers(0, 200),
)


@pytest.mark.parametrize("preset", PRESETS)
@given(status=st.integers(200, 599), body=BODIES, wait=st.binary(max_size=30))
def test_no_bytes_are_too_odd(preset: Preset, status: int, body: bytes, wait: bytes) -> None:
    """Whatever a service answers, there is a fate; a code is short, and an id can be a header."""
    headers = [(b"Retry-After", wait), (b"Date", wait)]
    answer = SHAPES[preset].judge(Reply(status, headers, body))

    assert re.fullmatch(r"[!-~]{1,64}", answer.code or "-")
    assert re.fullmatch(r"[!-~]{1,255}", answer.provider_id or "-")
    assert answer.fate is not Fate.SENT or status < 300 or answer.detail == "accepted before"


# --- What it is packed and written in -------------------------------------------------------------

SAYS = '{"parts": [{"status": "0", "id": "m1"}], "note": "Grüße"}'
GZIP, DEFLATE = ({"Content-Encoding": coding} for coding in ("gzip", "deflate"))
LATIN, WIDE = (
    {"Content-Type": f"application/json; charset={charset}"} for charset in ("ISO-8859-1", "utf-16")
)
RAW = zlib.compress(SAYS.encode(), wbits=-15)
MEMBERS = (b"", SAYS.encode()[:9], SAYS.encode()[9:])
LEGIBLE: dict[str, tuple[bytes, dict[str, str]]] = {
    "as it should be": (SAYS.encode(), {}),
    "a byte-order mark": (SAYS.encode("utf-8-sig"), {}),
    "ISO-8859-1": (SAYS.encode("latin-1"), LATIN),
    "declared ISO-8859-1, and UTF-8": (SAYS.encode(), LATIN),
    "UTF-16": (SAYS.encode("utf-16"), WIDE),
    "UTF-16 without a mark": (SAYS.encode("utf-16-be"), WIDE),
    "UTF-16, undeclared": (SAYS.encode("utf-16"), {}),
    "an unknown charset": (SAYS.encode("utf-8-sig"), {"Content-Type": "text/x; charset=x-none"}),
    "what is no charset": (SAYS.encode("utf-8-sig"), {"Content-Type": 'a; charset="zlib"'}),
    "gzip": (gzip.compress(SAYS.encode()), GZIP),
    "x-gzip": (gzip.compress(SAYS.encode()), {"Content-Encoding": "X-GZIP"}),
    "deflate": (zlib.compress(SAYS.encode()), DEFLATE),
    "deflate without its header": (RAW, DEFLATE),
    "gzip twice": (gzip.compress(gzip.compress(SAYS.encode())), {"Content-Encoding": "gzip, gzip"}),
    "gzip of UTF-16": (gzip.compress(SAYS.encode("utf-16")), GZIP | WIDE),
    "gzip in several members": (b"".join(map(gzip.compress, MEMBERS)), GZIP),
    "declared gzip, and none": (SAYS.encode("utf-8-sig"), GZIP),
}


def reply_of(body: bytes, headers: dict[str, str]) -> Reply:
    return Reply(200, [(name.encode(), value.encode()) for name, value in headers.items()], body)


@pytest.mark.parametrize("name", LEGIBLE)
def test_answer_is_read_however_it_is_packed_and_written(name: str) -> None:
    """A yes is one with a mark before it, in another charset, and compressed."""
    prepared = shape(**BY_BODY, message_id_pointers=["/parts/0/id"])
    answer = prepared.judge(reply_of(*LEGIBLE[name]))

    assert (answer.fate, answer.provider_id) == (Fate.SENT, "m1")


@pytest.mark.parametrize(
    "body", ["OK: 12345".encode("utf-16"), gzip.compress(b"OK: 12345")], ids=["UTF-16", "gzip"]
)
def test_words_are_read_so_too(body: bytes) -> None:
    """Plain text is no less packed and written in another charset than JSON."""
    settings = {"body": "text", "accepted": {"pointer": "/0", "values": ["OK"]}}
    prepared = shape(response=settings, message_id_pointers=["/1"])
    answer = prepared.judge(reply_of(body, GZIP))

    assert (answer.fate, answer.provider_id) == (Fate.SENT, "12345")


def test_bomb_is_not_unpacked() -> None:
    """No more is unpacked than is read of any answer, and what is cut there says nothing."""
    bomb = reply_of(gzip.compress(b"[" + b" " * 100_000_000), GZIP)

    assert len(_legible_body(bomb)) == MAX_ANSWER_BYTES
    assert shape(**BY_BODY).judge(bomb).fate is Fate.UNCERTAIN


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("text", [b"sent", b"code=2", b"queued"])
def test_text_that_is_declared_packed_and_is_not(text: bytes, coding: str) -> None:
    """What begins like a packed stream and never ends as one is the text that it was."""
    assert _legible_body(reply_of(text, {"Content-Encoding": coding})) == text


NO_CHARSETS = ("idna", "punycode", "-punycode", "_punycode", "unicode_escape", "undefined", "utf-7")


def test_every_charset_that_is_listed_reads_any_bytes() -> None:
    """Python knows each of them."""
    for charset in _CHARSETS:
        declared = {"Content-Type": f"text/plain; charset={charset}"}

        assert _legible_body(reply_of(b"<\xff\xfe" + bytes(range(1, 256)) * 9, declared)), charset


@pytest.mark.parametrize("charset", NO_CHARSETS)
def test_no_charset_costs_time_or_raises(charset: str) -> None:
    """Whatever a service declares, a body of the longest size is read at once, as UTF-8."""
    declared = {"Content-Type": f"text/plain; charset={charset}"}
    started = time.process_time()
    read = _legible_body(reply_of(b"a" * (MAX_ANSWER_BYTES - 12) + rb"-\u0041+AEE-", declared))

    assert time.process_time() - started < 1
    assert read.endswith(rb"-\u0041+AEE-")


def test_unknown_charsets_are_not_remembered() -> None:
    """Python keeps each name that it looks for; a service must not fill the memory with them."""
    known = len(encodings._cache)
    for number in range(100):
        declared = {"Content-Type": f"text/plain; charset=x-{number}"}
        _legible_body(reply_of(b"OK", declared))

    assert len(encodings._cache) <= known + 1


@pytest.mark.parametrize(("times", "fate"), [(4, Fate.SENT), (5, Fate.UNCERTAIN)])
def test_codings_without_end_are_not_followed(times: int, fate: Fate) -> None:
    """Each coding costs as much as the first: a few are followed, more are nobody's."""
    packed = SAYS.encode()
    for _ in range(times):
        packed = gzip.compress(packed)
    answer = reply_of(packed, {"Content-Encoding": ", ".join(["gzip"] * times)})

    assert shape(**BY_BODY).judge(answer).fate is fate


PAGES: dict[str, tuple[bytes, dict[str, str], bool]] = {
    "HTML": (b"<!DOCTYPE html><html>", {}, True),
    "HTML behind blanks": (b"\xef\xbb\xbf\r\n <HTML lang=en>", {}, True),
    "declared": (b"<!-- x --><h1>", {"Content-Type": "text/html"}, True),
    "packed": (gzip.compress(b"<html>"), GZIP, True),
    "text by a default type": (b"OK 1", {"Content-Type": "text/html"}, False),
    "XML": (b"<?xml version='1.0'?><ok/>", {"Content-Type": "text/xml"}, False),
    "nothing": (b"", {"Content-Type": "text/html"}, False),
    "JSON": (b'{"id": "<html>"}', {"Content-Type": "text/html"}, False),
}


@pytest.mark.parametrize(("body", "headers", "is_page"), PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("read", ["json", "text"])
def test_page_behind_a_yes(
    body: bytes, headers: dict[str, str], *, is_page: bool, read: str
) -> None:
    """A web page counts as sent where any 2xx does, and is told apart."""
    answer = shape(response={"body": read}).judge(reply_of(body, headers))

    assert (answer.fate, answer.is_page) == (Fate.SENT, is_page)


# --- The presets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_documented_answers(preset: Preset) -> None:
    """Each answer that a preset documents becomes what it says, those that matter among them."""
    prepared, documented = shape(preset), documented_answers(preset)
    judged = [
        fate_of(prepared.judge(answered(one["status"], one.get("body")))) for one in documented
    ]

    assert judged == [one["fate"] for one in documented]
    assert {*judged} >= {"sent", "refused", "setup:credentials_rejected", "uncertain"}


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "generic"])
def test_every_preset_reads_the_id(preset: Preset) -> None:
    """The service's message id is found in the answer that accepts."""
    accepted = next(one for one in documented_answers(preset) if one["fate"] == "sent")
    judged = shape(preset).judge(answered(accepted["status"], accepted["body"]))

    assert judged.provider_id
