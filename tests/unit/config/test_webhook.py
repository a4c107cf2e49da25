"""Endpoints as settings: which are served, what a preset lays under them, what cannot work."""

import json
from typing import Any

import pytest

from bridge.config import EndpointSettings, WebhookSettings, presets
from bridge.config.presets import PRESETS, Preset, preset_endpoint
from bridge.config.webhook import MAX_ENDPOINTS
from tests.unit.config.conftest import CANARY, Faults, Load

FILES = ["/run/secrets/webhook"]
OTHER = {"path": "/other", "secret_files": FILES}


def webhook(load: Load, **values: Any) -> WebhookSettings:
    return load({"webhook": values}).webhook


def test_generic_is_what_the_schema_says() -> None:
    """The preset `generic` has the values that the JSON Schema gives as defaults."""
    made = WebhookSettings()
    fields = WebhookSettings.model_fields

    assert {name: fields[name].get_default() for name in preset_endpoint("generic")} == {
        name: getattr(made, name) for name in preset_endpoint("generic")
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_can_be_loaded(load: Load, preset: Preset) -> None:
    """Every preset holds nothing but known keys, with values that may stand there."""
    (endpoint,) = webhook(load, endpoints=[OTHER | {"preset": preset}]).all_endpoints

    assert endpoint.preset == preset
    assert preset_endpoint(preset).keys() <= EndpointSettings.model_fields.keys() - {
        *("path", "preset", "secrets", "secret_files", "public_url")
    }


# --- Which are served -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "served"),
    [
        ({}, {"webhook": "/webhooks"}),
        ({"endpoints": [OTHER]}, {"webhook.endpoints.0": "/other"}),
        (
            {"secrets": ["s"], "endpoints": [OTHER]},
            {"webhook": "/webhooks", "webhook.endpoints.0": "/other"},
        ),
        (
            {"secret_files": FILES, "endpoints": [OTHER, {"path": "/third"}]},
            {
                "webhook": "/webhooks",
                "webhook.endpoints.0": "/other",
                "webhook.endpoints.1": "/third",
            },
        ),
    ],
    ids=["none", "others", "secrets", "secret-files"],
)
def test_the_default_endpoint_is_served_with_secrets_or_alone(
    load: Load, values: dict[str, Any], served: dict[str, str]
) -> None:
    """Whoever lists endpoints has no other, unless the default one has secrets too."""
    loaded = webhook(load, **values)

    assert {key: one.path for key, one in loaded.endpoints_by_key.items()} == served
    assert loaded.all_endpoints == tuple(loaded.endpoints_by_key.values())


def test_types_that_may_be_named_are_those_of_all_endpoints(load: Load) -> None:
    """Each endpoint's types and its constant are known, each once."""
    loaded = webhook(
        load,
        event_types=["a", "b"],
        secrets=["s"],
        endpoints=[OTHER | {"event_types": ["b", "c"], "event_type": "d"}],
    )

    assert loaded.known_types == ("a", "b")
    assert loaded.known_types_of_all == ("a", "b", "c", "d")


@pytest.mark.parametrize(("preset", "named"), [("generic", "a:b"), ("sinch", "a.b")])
def test_types_of_normalized_events_are_named_as_they_are_published(
    load: Load, preset: str, named: str
) -> None:
    loaded = webhook(
        load,
        secrets=["s"],
        endpoints=[OTHER | {"preset": preset, "body": "normalized", "event_types": ["a:b"]}],
    )

    assert named in loaded.types_of(loaded.endpoints[0])


def test_endpoints_of_the_environment(load: Load) -> None:
    """A list of endpoints is JSON in the environment, and takes the place of the file's."""
    given = [{"path": "/a", "secrets": [CANARY], "signature": {"preset": "github"}}]
    loaded = load(
        {"webhook": {"endpoints": [OTHER]}}, SMS_BRIDGE_WEBHOOK__ENDPOINTS=json.dumps(given)
    )
    (endpoint,) = loaded.webhook.all_endpoints

    assert (endpoint.path, endpoint.signature.preset) == ("/a", "github")
    assert CANARY not in str(loaded.masked())


# --- What a preset lays under ---------------------------------------------------------------------

SERVICE = {
    "webhook": {
        "signature": {"preset": "stripe", "header": "X-Service"},
        "event_type_pointers": ["/data/event_type"],
        "event_id_pointers": ["/data/id"],
        "event_types": ["message.finalized"],
    }
}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    read = presets._read
    monkeypatch.setattr(presets, "_read", lambda name: SERVICE if name == "telnyx" else read(name))


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("where", ["default", "list"])
def test_a_preset_lies_under_an_endpoint(load: Load, where: str) -> None:
    """What the user leaves out or null is the preset's; what is given counts, a list as a whole."""
    given = {"preset": "telnyx", "event_id_pointers": ["/mine"], "event_types": None}
    values = given if where == "default" else {"endpoints": [given | {"path": "/a"}]}
    (endpoint,) = webhook(load, **values).all_endpoints

    assert (endpoint.signature.preset, endpoint.signature.header) == ("stripe", "X-Service")
    assert endpoint.event_type_pointers == ("/data/event_type",)
    assert endpoint.event_id_pointers == ("/mine",)
    assert endpoint.event_types == ("message.finalized",)


@pytest.mark.usefixtures("service")
def test_another_scheme_takes_nothing_of_the_presets(load: Load) -> None:
    """A knob of the preset's scheme makes no sense in another; beside the same one it stays."""
    same = webhook(load, preset="telnyx", signature={"tolerance_seconds": "1m"}).signature
    other = webhook(load, preset="telnyx", signature={"preset": "github"}).signature

    assert (same.preset, same.header, same.tolerance_seconds) == ("stripe", "X-Service", 60)
    assert (other.preset, other.header) == ("github", None)


@pytest.mark.parametrize(
    ("signature", "is_known"),
    [
        ({}, False),
        ({"signature": {"preset": "plain"}}, True),
        ({"signature": '{"preset": "plain"}'}, True),
        ({"signature": {"header": "X-Proxy"}}, True),
    ],
    ids=["nothing", "preset", "json", "knob"],
)
def test_a_signature_is_known_when_somebody_says_it(
    load: Load, signature: dict[str, Any], *, is_known: bool
) -> None:
    """A preset without one leaves it to the user; that of others is never taken for it."""
    assert webhook(load, preset="httpsms", **signature).knows_signature == is_known
    assert webhook(load, preset="telnyx", **signature).knows_signature
    assert webhook(load, **signature).knows_signature


# --- What cannot work -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"endpoints": [{}]}, "webhook.endpoints.0.path: is missing; write it"),
        ({"endpoints": [OTHER, {"path": "other"}]}, "webhook.endpoints.1.path: must begin with /"),
        (
            {"endpoints": [OTHER, {"path": "/b"}, OTHER]},
            "webhook.endpoints.2.path: must differ from webhook.endpoints.0.path; give each endp",
        ),
        (
            {"path": "/hooks", "endpoints": [OTHER]},
            "webhook.path: belongs to the default endpoint, which is not served",
        ),
        (
            {"signature": {"preset": "github"}, "endpoints": [OTHER]},
            "webhook.signature: belongs to the default endpoint, which is not served",
        ),
        (
            {"endpoints": [{"path": f"/{number}"} for number in range(MAX_ENDPOINTS + 1)]},
            f"webhook.endpoints: must have at most {MAX_ENDPOINTS} in its list",
        ),
        (
            {"endpoints": [OTHER | {"event_type_pointers": []}]},
            "webhook.endpoints.0: event_type_pointers: is empty, and there is no event_type; set",
        ),
        (
            {"event_type_pointers": ["type"]},
            "webhook.event_type_pointers.0: must be a JSON pointer",
        ),
        (
            {"event_id_pointers": ["/id", "/results/*/id"]},
            "webhook.event_id_pointers.1: cannot lead to each member of a list; write the first",
        ),
        (
            {"health_path": "/webhooks", "secrets": ["a"]},
            "webhook.health_path: must differ from webhook.path; give it a path of its own",
        ),
        ({"event_type": "sms in"}, "webhook.event_type: must be a routing key like message.receiv"),
        ({"event_type": ""}, "webhook.event_type: must be a routing key like message.received"),
    ],
)
def test_what_cannot_work_is_told_by_its_key(
    faults: Faults, values: dict[str, Any], fault: str
) -> None:
    """A fault names the key, with the number of its endpoint, and what to do."""
    (said,) = faults({"webhook": values})

    assert said.startswith(fault)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (
            "https://sms.example.com/webhooks#rc=5&rp=all",
            "webhook.public_url: must not contain a fragment; remove the # and the text after it;",
        ),
        ("https://sms.example.com/a?b=1", "webhook.public_url: must not contain a query; "),
        ("https://exämple.com/webhooks", "webhook.public_url: must be ASCII, percent-encoded as "),
    ],
)
def test_what_a_public_url_may_not_hold(faults: Faults, url: str, told: str) -> None:
    """A fragment is for the service, a query is read from each request, and HTTP carries ASCII."""
    (said,) = faults({"webhook": {"public_url": url}})

    assert said.startswith(told)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("twilio", (200, "text/xml", "<Response/>", 401, 10)),
        ("vonage", (200, None, "", 503, None)),
        ("telnyx", (200, None, "", 401, 1.8)),
        ("generic", (200, None, "", 401, None)),
    ],
)
def test_what_each_service_wants_as_answer(preset: str, expected: object) -> None:
    """A preset says what its service reads, how long it waits, and whether a 401 is final."""
    one = EndpointSettings.model_validate({"path": "/a", "preset": preset})
    answer = one.answer

    assert expected == (
        answer.status,
        answer.content_type,
        answer.body,
        one.unsigned,
        one.response_timeout_seconds,
    )


@pytest.mark.parametrize(
    ("default", "of_default", "of_others"),
    [
        ({"preset": "telnyx"}, 1.8, 2.5),
        ({"preset": "twilio", "response_timeout_seconds": 4}, 4, 4),
        ({"response_timeout_seconds": 4}, 4, 4),
    ],
)
def test_a_presets_time_to_answer_is_its_endpoints_alone(
    load: Load, default: dict[str, Any], of_default: float, of_others: float
) -> None:
    """What one service waits for is nothing to the others; what somebody has set holds for all."""
    address = {"public_url": "https://sms.example.com/webhooks"}
    found = webhook(load, secret_files=FILES, **address, **default, endpoints=[OTHER])
    times = [found.response_seconds(endpoint) for endpoint in found.all_endpoints]

    assert times == [of_default, of_others]


def test_unknown_key_of_an_endpoint(faults: Faults) -> None:
    """An unknown key is told with its number and the nearest one, or by its line."""
    meant = "webhook.endpoints.0.secret_file: unknown key; did you mean webhook.endpoints.0.secret"
    hidden = "webhook:\n  endpoints:\n  - path: /a\n    sk_live_4eC39HqLyjWDarjt: x\n"
    (near,) = faults({"webhook": {"endpoints": [{"path": "/a", "secret_file": FILES}]}})

    assert near.startswith(meant)
    assert faults(hidden) == ("webhook.endpoints.0, line 4: unknown key",)


@pytest.mark.parametrize("below", ["PATH", "0__PATH", "0"])
def test_an_endpoint_has_no_variables_of_its_own(faults: Faults, below: str) -> None:
    """A variable of a single endpoint is refused with the one that gives them all."""
    name = f"SMS_BRIDGE_WEBHOOK__ENDPOINTS__{below}"

    assert faults("", **{name: "/a"}) == (
        f"{name}: is not read; give the whole list as JSON in SMS_BRIDGE_WEBHOOK__ENDPOINTS",
    )
