"""The URLs of the configuration: what is refused, and what is shown of one."""

import pytest

from bridge.errors import ConfigError
from tests.unit.config.conftest import CANARY, Faults, Load, nested, value_at


def test_slash_after_the_base_url_is_dropped(load: Load) -> None:
    loaded = load("sms_api: {base_url: 'https://api.example.com/base/'}")

    assert loaded.sms_api.base_url == "https://api.example.com/base"


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("sms_api.base_url", "; the API key goes in sms_api.key_file"),
        ("webhook.public_url", ""),
        ("tracing.otlp_endpoint", "; a token goes in OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_user_in_a_url_is_refused(faults: Faults, key: str, remedy: str) -> None:
    """A base URL with user info would replace the API key, so it is refused."""
    for user in (f"u:{CANARY}@", f"{CANARY}@", f":{CANARY}@", ":@"):
        told = faults(nested(key, f"https://{user}api.example.com"))

        assert told == (f"{key}: must not hold a user or password{remedy}",)


def test_certificates_of_the_broker_are_always_checked(faults: Faults) -> None:
    """The URL cannot switch the check of the broker's certificate off."""
    (fault,) = faults("rabbitmq: {url: 'amqps://h/?no_verify_ssl=1'}")

    assert "rabbitmq.tls.ca_file" in fault


@pytest.mark.parametrize("url", [5, {"a": 1}])
def test_address_that_is_none(faults: Faults, url: object) -> None:
    """What is neither an address nor a list of them is told what either looks like."""
    assert faults({"rabbitmq": {"url": url}}) == (
        "rabbitmq.url: must be an address like amqp://host:5672/vhost, or a list of them",
    )


@pytest.mark.parametrize("key", ["rabbitmq.url", "sms_api.proxy"])
@pytest.mark.parametrize("end", "#?/")
def test_url_with_a_raw_character_in_its_password(load: Load, key: str, end: str) -> None:
    """A password that ends the URL too early is refused with the remedy, and not shown."""
    scheme = "amqp" if key == "rabbitmq.url" else "http"
    faults = []
    for start in ("12", "pa"):
        with pytest.raises(ConfigError) as caught:
            load(nested(key, f"{scheme}://guest:{start}{end}34{CANARY}@h/"))
        faults.append(str(caught.value))

    assert all("percent-encode the user and the password (/ is %2F)" in text for text in faults)
    assert ("or give them in rabbitmq.password_file" in faults[0]) == (key == "rabbitmq.url")
    assert CANARY not in "".join(faults)


@pytest.mark.parametrize(
    ("key", "url", "shown"),
    [
        (
            "rabbitmq.url",
            f"amqps://{CANARY}:{CANARY}@rabbit.example.com:5671/v%2Fh?heartbeat={CANARY}",
            ["amqps://***:***@rabbit.example.com:5671/v%2Fh?***"],
        ),
        ("rabbitmq.url", f"amqp://{CANARY}@h", ["amqp://***@h"]),
        ("rabbitmq.url", f"amqp://h:5673/v?{CANARY}", ["amqp://h:5673/v?***"]),
        ("rabbitmq.url", "amqp://h/", ["amqp://h/"]),
        (
            "sms_api.proxy",
            f"http://{CANARY}:{CANARY}@proxy.example.com:3128/?{CANARY}=1#{CANARY}",
            "http://***:***@proxy.example.com:3128/?***",
        ),
    ],
)
def test_masked_url_says_where_alone(load: Load, key: str, url: str, shown: object) -> None:
    """What is printed tells host, port and vhost: user, password and query may be secrets."""
    assert value_at(load(nested(key, url)).masked(), key) == shown
