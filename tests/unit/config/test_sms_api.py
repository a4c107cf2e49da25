"""The shape of a service's API as settings: presets, what overrides them, what cannot work."""

import json
from typing import Any

import pytest

from bridge.config import Settings, SmsApiSettings
from bridge.config.presets import PRESETS, Preset, preset_settings
from tests.unit.config.conftest import CANARY, Faults, Load


def api(load: Load, **values: Any) -> SmsApiSettings:
    return load({"sms_api": values}).sms_api


def test_generic_is_what_the_schema_says() -> None:
    """The preset `generic` has the values that the JSON Schema gives as defaults."""
    described = {
        name: SmsApiSettings.model_fields[name].get_default() for name in preset_settings("generic")
    }
    made = SmsApiSettings()

    assert described == {name: getattr(made, name) for name in described}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_can_be_loaded(load: Load, preset: Preset) -> None:
    """Every preset holds nothing but known keys with values that may stand there."""
    loaded = load({"sms_api": {"preset": preset}})

    assert loaded.sms_api.preset == preset
    assert set(preset_settings(preset)) == set(preset_settings("generic"))


@pytest.mark.parametrize("preset", PRESETS)
def test_effective_settings_are_settings(load: Load, preset: Preset) -> None:
    """What `check` prints of a preset can be written down, and is the same then."""
    shown = load({"sms_api": {"preset": preset}}).masked()["sms_api"]

    assert api(load, **shown) == api(load, preset=preset)


def test_null_leaves_it_to_the_preset(load: Load) -> None:
    """A key that is given as null is the preset's, at any depth."""
    written = {
        "path": None,
        "auth": None,
        "request": {"fields": None, "body": None},
        "response": {"accepted": {"statuses": None}, "errors": None},
        "message_id_pointers": None,
    }

    assert api(load, preset="twilio", **written) == api(load, preset="twilio")


def test_single_key_overrides_the_preset(load: Load) -> None:
    """A key that is given holds, and its neighbours stay the preset's; codes are added to."""
    mine = api(
        load,
        preset="twilio",
        auth={"scheme": "bearer"},
        request={"body": "json", "fields": {"/a": "{to}", "/b": "{text}"}},
        response={"errors": {"20003": "retry", "1": "refused"}},
    )
    its = api(load, preset="twilio")

    assert (mine.auth.scheme, mine.path, mine.base_url) == ("bearer", its.path, its.base_url)
    assert mine.request.fields == {"/a": "{to}", "/b": "{text}"}
    assert mine.response.errors == its.response.errors | {"20003": "retry", "1": "refused"}


def test_own_fields_keep_the_bound_of_the_key(load: Load) -> None:
    """The preset's field of the idempotency key stays, bound and all, unless it is given too."""
    mine = {"/phoneNumbers/0": "{to}", "/textMessage/text": "{text}"}

    def fields(given: dict[str, str], **values: Any) -> dict[str, Any]:
        loaded = api(load, preset="android-sms-gateway", request={"fields": given}, **values)
        return loaded.request.fields

    assert fields(mine) == mine | {"/id": "{key:36}"}
    assert fields(mine | {"/id": "a-{key:30}"}) == mine | {"/id": "a-{key:30}"}
    assert fields(mine, idempotency="none") == mine
    assert fields(mine, idempotency="field:/other") == mine


def test_environment_overrides_the_preset(load: Load) -> None:
    """Maps and sections of the environment are JSON."""
    loaded = load(
        "sms_api: {preset: vonage-sms}",
        SMS_BRIDGE_SMS_API__RESPONSE__ERRORS='{"5": "retry"}',
        SMS_BRIDGE_SMS_API__REQUEST='{"to_format": "e164"}',
        SMS_BRIDGE_SMS_API__RESPONSE__ACCEPTED__STATUSES='["200"]',
    ).sms_api

    assert (loaded.response.errors["5"], loaded.response.errors["1"]) == ("retry", "slow_down")
    assert (loaded.request.to_format, loaded.request.body) == ("e164", "form")
    assert loaded.response.accepted.statuses == ("200",)


def test_constants_of_fields_are_json(load: Load) -> None:
    """Below `fields` a bare true is a truth value; quoted it is text, and elsewhere a word."""
    text = """
    sms_api:
      account: true
      request:
        fields: {/to: "{to}", /text: "{text}", /a: true, /b: "true", /c: [false, 1, null], /d: off}
    """
    loaded = load(text).sms_api

    assert loaded.account == "true"
    assert {name: loaded.request.fields[f"/{name}"] for name in "abcd"} == {
        "a": True,
        "b": "true",
        "c": [False, 1, None],
        "d": "off",
    }


def test_constant_headers(load: Load) -> None:
    """They come from the file or the environment, numbers as they are written, and stay hidden."""
    given = f'{{"X-Tenant": "{CANARY} 1", "X-Version": 2}}'
    loaded = load(SMS_BRIDGE_SMS_API__REQUEST__HEADERS=given)
    headers = loaded.sms_api.request.headers

    assert {name: value.get_secret_value() for name, value in headers.items()} == {
        "X-Tenant": f"{CANARY} 1",
        "X-Version": "2",
    }
    assert CANARY not in repr(loaded)
    assert CANARY not in json.dumps(loaded.masked())
    assert list(loaded.masked()["sms_api"]["request"]["headers"]) == ["X-Tenant", "X-Version"]


@pytest.mark.parametrize("value", ["{}\r\nX: b", "{}\nb", "{}\0b", "{}ü", " {}", "{} ", " ", ""])
def test_constant_header_that_would_break_the_request(faults: Faults, value: str) -> None:
    """A line break above all would begin another header; the value itself is not told."""
    headers = {"X-Tenant": value.format(CANARY)}
    (fault,) = faults({"sms_api": {"request": {"headers": headers}}})

    assert fault.startswith("sms_api.request.headers.X-Tenant: must be 1 to 1,000 visible ASCII")
    assert CANARY not in fault


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"request": {"headers": {"authorization": "x"}}},
            "headers has the header of sms_api.auth",
        ),
        ({"request": {"headers": {"idempotency-key": "x"}}}, "names a header of sms_api.request"),
        ({"request": {"headers": {"X-A": "1", "x-a": "2"}}}, "has a header twice"),
        ({"request": {"headers": {"a b": "1"}}}, "is not an HTTP header name"),
    ],
)
def test_constant_header_that_is_there_already(
    faults: Faults, values: dict[str, Any], told: str
) -> None:
    """No header is written twice, in whatever case it is given."""
    (fault,) = faults({"sms_api": values})

    assert told in fault


def test_constant_header_in_place_of_a_login(load: Load) -> None:
    """Where the bridge writes no login, the header of one is free."""
    loaded = api(load, auth={"scheme": "none"}, request={"headers": {"Authorization": "Digest x"}})

    assert loaded.request.has_header("authorization")


# --- Repeats --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "idempotency", "header"),
    [
        ({}, "header:Idempotency-Key", "Idempotency-Key"),
        ({"idempotency_header": "X-Key"}, "header:X-Key", "X-Key"),
        ({"idempotency_header": None}, "none", None),
        ({"idempotency": "field:/id"}, "field:/id", None),
        ({"preset": "twilio"}, "none", None),
        ({"preset": "android-sms-gateway"}, "field:/id", None),
        ({"preset": "android-sms-gateway", "idempotency_header": None}, "field:/id", None),
    ],
)
def test_idempotency(
    load: Load, values: dict[str, Any], idempotency: str, header: str | None
) -> None:
    """Either key says where the message's id goes, and both show the same."""
    loaded = api(load, **values)

    assert (loaded.idempotency, loaded.idempotency_header) == (idempotency, header)


@pytest.mark.parametrize(
    ("values", "given", "on_uncertain"),
    [
        ({}, None, "retry"),
        ({}, "park", "park"),
        ({"preset": "twilio"}, None, "park"),
        ({"preset": "telnyx"}, None, "retry"),
        ({"preset": "twilio", "idempotency": "field:/Key"}, None, "retry"),
    ],
)
def test_what_is_uncertain_is_parked_where_no_repeat_is_known(
    load: Load, values: dict[str, Any], given: str | None, on_uncertain: str
) -> None:
    """A service that cannot tell a repeat is not sent one, unless the user says so."""
    loaded = load({"sms_api": values, "worker": {"on_uncertain": given}})

    assert loaded.worker.on_uncertain == on_uncertain


@pytest.mark.parametrize(
    ("preset", "default"), [("android-sms-gateway", "unused"), ("twilio", None), ("generic", None)]
)
def test_service_that_is_told_no_sender_asks_for_none(
    load: Load, preset: str, default: str | None
) -> None:
    """Where no field holds the sender, requests do without one."""
    assert load({"sms_api": {"preset": preset}}).worker.default_from == default
    assert (
        load(
            {"sms_api": {"preset": preset}, "worker": {"default_from": "Acme"}}
        ).worker.default_from
        == "Acme"
    )


# --- What cannot work -----------------------------------------------------------------------------

FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"/to/x": "{to}", "/text": "{text}"}, "/to/x: is nested, but form fields are flat"),
    ({"/to": {"x": "{to}"}, "/text": "{text}"}, "/to: must be text or a number, or a list"),
    ({"/to": None, "/text": "{text}"}, "/to: must be text or a number, or a list of them"),
    ({"/to": "{to}", "/text": "{txt}"}, "/text: holds an unknown placeholder; did you mean text?"),
    ({"/to": "{to}", "/text": "{text"}, "/text: holds a { or } that belongs to no placeholder"),
    ({"/to": "{to:5}", "/text": "{text}"}, "/to: holds {to:...}; it takes no argument"),
    ({"/to": "{to}", "/text": "{text}{key:9}"}, "/text: {key:N} needs a length N from 20 to"),
    ({"/to": "{to}", "/text": "{text}{encoding:a}"}, "/text: holds {encoding:...} without two"),
    ({"/text": "{text}"}, "no field holds {to}; say where the service wants it"),
]


@pytest.mark.parametrize(("given", "told"), FIELDS, ids=[told for _, told in FIELDS])
def test_fields_that_cannot_work(faults: Faults, given: dict[str, Any], told: str) -> None:
    """A field that no request could be made of is told with its pointer and the remedy."""
    (fault,) = faults({"sms_api": {"request": {"body": "form", "fields": given}}})

    assert fault.startswith(f"sms_api.request.fields: {told}")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"/a": "{to}", "/a/b": "{text}"}, "/a/b: conflicts with the place of another field"),
        ({"/a/0": "{to}", "/a/b": "{text}"}, "the members of a list must be numbered 0, 1, ..."),
    ],
)
def test_fields_in_each_others_way(faults: Faults, given: dict[str, Any], told: str) -> None:
    """Two fields at one place, or a level that is neither list nor object, are told."""
    (fault,) = faults({"sms_api": {"request": {"fields": given}}})

    assert fault.startswith(f"sms_api.request.fields: {told}")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"preset": "twillio"}, "sms_api.preset: is unknown; did you mean twilio?"),
        ({"preset": "x"}, "sms_api.preset: is unknown; there are generic, twilio, "),
        ({"preset": ["twilio"]}, "sms_api.preset: is unknown; there are generic, "),
        ({"path": "v1"}, "sms_api.path: must start with / and contain no space"),
        ({"path": "/{accounts}"}, "sms_api.path: must start with / and contain no space"),
        ({"auth": {"header": "a b"}}, "sms_api.auth.header: is not an HTTP header name"),
        ({"auth": {"scheme": "digest"}}, "sms_api.auth.scheme: must be 'bearer', 'basic'"),
        ({"auth": {"prefix": "ü"}}, "sms_api.auth.prefix: must be at most 64 visible ASCII"),
        ({"idempotency": "X-Key"}, "sms_api.idempotency: must be none, header: and its name"),
        ({"idempotency": "field:id"}, "sms_api.idempotency: must be none, header: and its"),
        ({"idempotency": "field:/to"}, "sms_api.idempotency: request.fields has /to without {key}"),
        ({"idempotency": "field:/to/x"}, "sms_api.idempotency: /to/x: conflicts with the place"),
        (
            {
                "preset": "android-sms-gateway",
                "request": {"fields": {"/id": "{key}", "/to": "{to}", "/x": "{text}"}},
            },
            "sms_api.idempotency: request.fields has /id with a longer key than the service takes",
        ),
        (
            {
                "preset": "android-sms-gateway",
                "request": {"fields": {"/id": "{key:37}", "/to": "{to}", "/x": "{text}"}},
            },
            "sms_api.idempotency: request.fields has /id with a longer key than the service takes",
        ),
        (
            {"idempotency": "none", "idempotency_header": "X-Key"},
            "sms_api: idempotency_header conflicts with idempotency; remove idem",
        ),
        ({"idempotency_header": "a b"}, "sms_api.idempotency_header: is not an HTTP header name"),
        (
            {"response": {"errors": {"+49-170-1234567": "refused"}}},
            "sms_api.response.errors, line 4: is like a phone number",
        ),
        (
            {"response": {"duplicate": {"code": "100200300"}}},
            "sms_api.response.duplicate.code: is like a phone number",
        ),
        ({"response": {"errors": ["1"]}}, "sms_api.response.errors: must be a map, like {a: b}"),
        ({"response": {"errors": {"1": "sent"}}}, "sms_api.response.errors.1: must be 'refused'"),
        *(
            (
                {"response": {"accepted": {"statuses": [status]}}},
                "sms_api.response.accepted.statuses.0: must be a status like 202, or 2xx for all",
            )
            for status in ("20x", "4xx", 302, 2000)
        ),
        *(
            (
                {"response": {"duplicate": {"status": status}}},
                f"sms_api.response.duplicate: status {status} alone is ambiguous, and messages",
            )
            for status in (200, 404, 429, 500)
        ),
        (
            {"response": {"duplicate": {"code": "1"}, "errors": {"1": "refused"}}},
            "sms_api.response: duplicate.code is in errors too; leave it out of one of them",
        ),
        (
            {"response": {"accepted": {"values": ["ok"]}}},
            "sms_api.response.accepted: values need a pointer to their place in the body",
        ),
        (
            {"response": {"body": "xml"}},
            "sms_api.response.body: must be 'json' or 'text'",
        ),
        (
            {"response": {"body": "text", "accepted": {"pointer": "/status"}}},
            "sms_api.response: accepted.pointer: cannot lead into plain text; write /0",
        ),
        *(
            (
                {"response": {"body": "text"}, key: ["/0", pointer]},
                f"sms_api.{key}: 1: cannot lead into plain text; write /0 for its first word",
            )
            for key in ("message_id_pointers", "error_code_pointers")
            for pointer in ("/id", "/100", "/01", "/1#")
        ),
        ({"error_code_pointers": ["/a~b"]}, "sms_api.error_code_pointers.0: must be a JSON poi"),
        *(
            (values, f"sms_api.{key}: contains * more than once, but only one is allowed")
            for key, values in (
                ("error_code_pointers.0", {"error_code_pointers": ["/*/a/*"]}),
                ("message_id_pointers.1", {"message_id_pointers": ["/*", "/*/*"]}),
                (
                    "response.accepted.pointer",
                    {"response": {"accepted": {"pointer": "/*/*", "values": ["0"]}}},
                ),
            )
        ),
        *(
            ({"idempotency": f"field:{pointer}"}, "sms_api.idempotency: contains * or ends in #")
            for pointer in ("/*", "/a#")
        ),
        *(
            (
                {"request": {"fields": {pointer: "{to}{text}"}}},
                "sms_api.request.fields, line 4: contains * or ends in #, which are valid only",
            )
            for pointer in ("/*", "/a/*/b", "/a#")
        ),
    ],
)
def test_key_that_cannot_work(faults: Faults, values: dict[str, Any], told: str) -> None:
    (fault,) = faults({"sms_api": values})

    assert fault.startswith(told)


@pytest.mark.parametrize(
    ("key", "values", "header"),
    [
        ("auth.header", {"auth": {"scheme": "header", "header": "{}"}}, "Host"),
        ("auth.header", {"auth": {"scheme": "header", "header": "{}"}}, "content-length"),
        ("idempotency", {"idempotency": "header:{}"}, "Transfer-Encoding"),
        ("idempotency", {"idempotency": "header:{}"}, "CONNECTION"),
        ("idempotency_header", {"idempotency_header": "{}"}, "Content-Type"),
        ("request.headers.{}", {"request": {"headers": {"{}": "x"}}}, "traceparent"),
    ],
)
def test_header_that_is_not_free(
    faults: Faults, key: str, values: dict[str, Any], header: str
) -> None:
    """A header that would break the request, or go to a proxy, is refused by its key alone."""
    text = json.dumps(values).replace("{}", header)

    (fault,) = faults({"sms_api": json.loads(text)})

    told = f"sms_api.{key.format(header)}: {header} is not free to use"
    assert fault == f"{told}; name a header that the service reads"


@pytest.mark.parametrize(
    "values",
    [
        {"idempotency": "header:AUTHORIZATION"},
        {"idempotency": "header:X-Key", "auth": {"scheme": "header", "header": "x-key"}},
        {"preset": "telnyx", "auth": {"scheme": "header", "header": "Idempotency-Key"}},
    ],
)
def test_one_header_for_two_things(faults: Faults, values: dict[str, Any]) -> None:
    """The login and the idempotency key cannot be in one header."""
    (fault,) = faults({"sms_api": values})

    assert (
        fault == "sms_api.idempotency: names the header of sms_api.auth; name another one, or none"
    )


@pytest.mark.parametrize(
    "values",
    [
        {"request": {"fields": {CANARY: "{to}{text}"}}},
        {"request": {"fields": {"/to": {CANARY: [float("inf")]}, "/text": "{text}"}}},
        {"response": {"errors": {CANARY: "sent"}}},
        {"response": {"errors": {"491713920001": "sent"}}},
    ],
    ids=["pointer", "constant", "code", "number"],
)
def test_fault_quotes_no_key_of_a_map(faults: Faults, values: dict[str, Any]) -> None:
    """A key that the user has made up may be a secret or a number; its map is named instead."""
    told = "".join(faults({"sms_api": values}))

    assert CANARY not in told
    assert "491713920001" not in told
    assert told.startswith("sms_api.re")


def test_fault_of_a_map_names_the_line(faults: Faults) -> None:
    """Where the key itself is not quoted, its line is."""
    text = "sms_api:\n  response:\n    errors:\n      1: retry\n      odd.one: sent\n"

    (fault,) = faults(text)

    assert fault.startswith("sms_api.response.errors, line 5: must be 'refused'")


@pytest.mark.parametrize("body", ["json", "form"])
def test_half_a_character_is_refused(faults: Faults, body: str) -> None:
    """A constant that cannot be written in UTF-8 is a fault of its field, not of each message."""
    values = {"body": body, "fields": {"/a": "{to}{text}", "/b": "\ud800"}}

    (fault,) = faults(SMS_BRIDGE_SMS_API__REQUEST=json.dumps(values))

    assert fault == (
        "sms_api.request.fields: /b: holds half of a surrogate pair; write the whole character"
    )


def test_settings_can_be_made_from_themselves() -> None:
    """A section that is a model already is taken as it is."""
    made = SmsApiSettings(preset="twilio", account="AC1")

    assert Settings.model_validate({"sms_api": made}).sms_api == made
