"""One path that a service calls, with its signature scheme and current secrets."""

from collections.abc import Iterator

from bridge.config import EndpointSettings
from bridge.config.webhook import DEFAULT_ENDPOINT
from bridge.credentials import Credential
from bridge.errors import ConfigError
from bridge.http.messages import Response
from bridge.webhook.signatures.schemes import decode_secret, scheme_from
from bridge.webhook.signatures.verify import is_usable


class Endpoint:
    """Everything needed to verify and answer the webhooks of one path.

    `key` is the path of its settings. The first of `keys` is the current secret. Raises ConfigError
    that names the setting if secrets are missing or unusable, or the scheme contradicts itself.
    """

    def __init__(self, settings: EndpointSettings, *, key: str = DEFAULT_ENDPOINT) -> None:
        self.settings = settings
        self.setting = key
        self.path = settings.path
        self.accepted = _accepted(settings)
        # Receipt types that may be logged: words from the settings, never from a stranger.
        receipts = settings.receipts
        self.receipt_types = frozenset(
            (*receipts.type_values, *receipts.delivered, *receipts.failed, *receipts.pending)
        )
        if not settings.knows_signature:
            raise ConfigError(
                f"{key}.signature: is missing; preset {settings.preset} knows of nothing by which "
                "a body can be verified, so say how a proxy in front signs what it has checked"
            )
        self.scheme = scheme_from(settings.signature, settings.public_url, endpoint=key)
        self.secrets = tuple(self._read_secrets(key))
        self.keys: list[bytes] = []
        self.use_secrets()

    def _read_secrets(self, key: str) -> Iterator[Credential]:
        def check(setting: str, value: str) -> str:
            if not is_usable(self.scheme, decode_secret(self.scheme, value, setting=setting)):
                raise ConfigError(
                    f"{setting}: is no secret that this scheme can use; a token is signed with a "
                    "shared secret, Ed25519 with a key whose public half belongs here"
                )
            return value

        if self.settings.secret_files is not None:
            for number, file in enumerate(self.settings.secret_files):
                yield Credential(f"{key}.secret_files.{number}", file=file, check=check)
        elif self.settings.secrets is not None:
            for number, value in enumerate(self.settings.secrets):
                yield Credential(f"{key}.secrets.{number}", value=value, check=check)
        else:
            raise ConfigError(lacks_secrets(key))

    def use_secrets(self) -> None:
        """Decode the secrets again, after a file has changed."""
        self.keys = [decode_secret(self.scheme, secret.current) for secret in self.secrets]


def _accepted(settings: EndpointSettings) -> Response:
    """Build the response to an accepted webhook."""
    answer = settings.answer
    headers = {} if answer.content_type is None else {"content-type": answer.content_type}
    return Response(answer.status, answer.body.encode(), headers)


def lacks_secrets(key: str) -> str:
    """Return the error text for an endpoint without secrets."""
    return f"{key}.secrets: is missing; set {key}.secrets or {key}.secret_files"
