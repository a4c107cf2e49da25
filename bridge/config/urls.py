"""Validates the URLs in the configuration, and masks the secrets in them.

No fault quotes a URL, or chains an exception that does, because it may contain a password.
"""

import re
from functools import partial
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, WithJsonSchema
from yarl import URL

from bridge.config.fields import read_list

_MASK: Final = "***"
_BROKER: Final = "amqp://host:5672/vhost"
_PROXY: Final = "http://proxy.example.com:3128"
_HTTP: Final = "https://api.example.com"


def mask_url(url: SecretStr) -> str:
    """Return a URL with user, password and query masked, and without its fragment."""
    parsed = URL(url.get_secret_value())
    shown = parsed.with_user(None)
    if parsed.user is not None:
        shown = shown.with_user(_MASK)
    if parsed.password is not None:
        shown = shown.with_password(_MASK)
    rest = f"?{_MASK}" if parsed.raw_query_string else ""
    return f"{shown.with_query(None).with_fragment(None)}{rest}"


def _one_or_many(value: object) -> object:
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return [value]
    many = read_list(value)
    if not isinstance(many, list | tuple):
        raise ValueError(f"must be an address like {_BROKER}, or a list of them")  # noqa: TRY004
    return many


def _check_broker(value: SecretStr) -> SecretStr:
    url = _parse_with_login(value, _BROKER, remedy=", or give them in rabbitmq.password_file")
    if url.scheme not in {"amqp", "amqps"} or not url.host:
        raise ValueError(f"must look like {_BROKER} or amqps://...")
    if url.raw_fragment:
        raise ValueError("must not hold a #")
    if "no_verify_ssl" in url.query:
        raise ValueError("no_verify_ssl is refused; name your CA in rabbitmq.tls.ca_file")
    return value


def _check_proxy(value: SecretStr) -> SecretStr:
    _require_http(_parse_with_login(value, _PROXY), _PROXY)
    return value


def _check_http(value: str, *, remedy: str = "") -> str:
    url = _parse(value, _HTTP)
    _require_http(url, _HTTP)
    if url.user is not None or url.password is not None:
        # An HTTP client would send it as Basic authentication, in place of the API key.
        raise ValueError(f"must not hold a user or password{remedy}")
    if url.query_string or url.fragment:
        raise ValueError("must not hold a query or a fragment")
    return value


def _require_http(url: URL, example: str) -> None:
    # yarl accepts a host with white space.
    if url.scheme not in {"http", "https"} or not url.host or re.search(r"\s", url.host):
        raise ValueError(f"must look like {example}")


def _check_public(value: str) -> str:
    if "#" in value:
        # Services read settings of their own from the fragment, which they neither call nor sign.
        raise ValueError(
            "must not contain a fragment; remove the # and the text after it; set such options "
            "(like rc=5) only in the address given to the service"
        )
    if "?" in value:
        raise ValueError("must not contain a query; it is taken from each request")
    if not re.fullmatch("[!-~]*", value):
        # The service calls, signs and is given exactly this text.
        raise ValueError("must be ASCII, percent-encoded as the service calls it")
    return _check_http(value)


def _parse_with_login(value: SecretStr, example: str, *, remedy: str = "") -> URL:
    """Parse a URL that may contain a user and a password.

    Raises ValueError with the remedy if they contain a character that would end them.
    """
    text = value.get_secret_value()
    _, _, authority_and_rest = text.partition("://")
    # User and password end at the first of these characters, even if the @ comes later.
    _, _, behind = re.sub("[?#]", "/", authority_and_rest).partition("/")
    if "@" in behind:
        raise ValueError(
            "holds a /, ? or # before an @; percent-encode the user and the password "
            f"(/ is %2F){remedy}"
        )
    return _parse(text, example)


def _parse(value: str, example: str) -> URL:
    # The text of yarl's own error quotes the URL, which may hold a password.
    try:
        return URL(value)
    except ValueError:
        raise ValueError(f"is not a URL like {example}") from None


# One address, or a list of them that is tried in turn.
BrokerUrls = Annotated[
    tuple[Annotated[SecretStr, AfterValidator(_check_broker)], ...],
    BeforeValidator(_one_or_many),
    Field(min_length=1),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ]
        }
    ),
]
ProxyUrl = Annotated[SecretStr, AfterValidator(_check_proxy)]
HttpUrl = Annotated[str, AfterValidator(_check_http)]
# The address that a service calls.
PublicUrl = Annotated[str, AfterValidator(_check_public)]
OtlpUrl = Annotated[
    str, AfterValidator(partial(_check_http, remedy="; a token goes in OTEL_EXPORTER_OTLP_HEADERS"))
]
# A path is appended to it, so a slash at the end is removed.
BaseUrl = Annotated[
    str,
    AfterValidator(partial(_check_http, remedy="; the API key goes in sms_api.key_file")),
    AfterValidator(lambda value: value.rstrip("/")),
]
