"""The login at the SMS API: an HTTP header built from the secrets in `sms_api`."""

import base64
from typing import Final, assert_never

from pydantic import SecretStr

from bridge.config import SmsApiSettings
from bridge.config.fields import check_whole_characters
from bridge.credentials import Credential, check_header_value
from bridge.errors import ConfigError
from bridge.worker.service.transport import Header

# Shorter strings occur in many codes by chance.
MIN_PART_CHARACTERS: Final = 6
_NOTHING: Final = SecretStr("")


class ApiLogin:
    """Account, key and user name at the SMS API, and the header built from them.

    Raises ConfigError that names the setting if a secret cannot be read, or is invalid in a header.
    """

    def __init__(self, settings: SmsApiSettings) -> None:
        self._scheme = settings.auth.scheme
        self._name = settings.auth.header.encode("ascii")
        self._prefix = settings.auth.prefix.encode("ascii")
        self.account = settings.account or ""
        self.key = _key(settings)
        self.username = _username(settings)
        # Each configured header may be a secret.
        self._constants = [value.get_secret_value() for value in settings.request.headers.values()]
        self._has_username_file = settings.auth.username_file is not None

    @property
    def watched(self) -> tuple[Credential, ...]:
        """The secrets to read again when their files change."""
        return (self.key, self.username) if self._has_username_file else (self.key,)

    def header(self) -> Header | None:
        key = self.key.current.encode()
        match self._scheme:
            case "bearer":
                return self._name, b"Bearer " + key
            case "basic":
                # RFC 7617: both in UTF-8.
                login = b"%s:%s" % (self.username.current.encode(), key)
                return self._name, b"Basic " + base64.b64encode(login)
            case "header":
                return self._name, self._prefix + key
            case "none":
                return None
            case _:
                assert_never(self._scheme)

    def is_repeated(self, code: str) -> bool:
        """Whether an error code from the service contains a secret or a part of one."""
        _, value = self.header() or (b"", b"")
        # Basic credentials are in base64; a code never contains its padding (=).
        sent = value.decode().rpartition(" ")[2].rstrip("=")
        return any(
            (len(secret) >= MIN_PART_CHARACTERS and secret in code)
            or (len(code) >= MIN_PART_CHARACTERS and code in secret)
            for secret in (self.key.current, sent, *self._constants)
        )


def _key(settings: SmsApiSettings) -> Credential:
    if not settings.needs_key:
        return Credential("sms_api.key", value=_NOTHING)
    name = "sms_api.key" if settings.key_file is None else "sms_api.key_file"
    # Encoded keys, for Basic or in the body, may contain any character.
    is_encoded = settings.auth.scheme in {"basic", "none"}
    check = _check_characters if is_encoded else check_header_value
    return Credential(name, value=settings.key, file=settings.key_file, check=check)


def _username(settings: SmsApiSettings) -> Credential:
    auth = settings.auth
    if auth.scheme != "basic":
        return Credential("sms_api.auth.username", value=_NOTHING)
    if auth.username_file is not None:
        name, file = "sms_api.auth.username_file", auth.username_file
        return Credential(name, file=file, check=_check_username)
    username = SecretStr(auth.username or settings.account or "")
    return Credential("sms_api.auth.username", value=username, check=_check_username)


def _check_username(key: str, value: str) -> str:
    if ":" in value:
        # RFC 7617, 2: everything after the first colon is the password.
        raise ConfigError(f"{key}: must not hold a colon")
    return value


def _check_characters(key: str, value: str) -> str:
    try:
        return check_whole_characters(value)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
