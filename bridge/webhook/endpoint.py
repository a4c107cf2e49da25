"""A webhook endpoint: one path with its signature scheme and its secrets.

If all webhooks of an endpoint are refused, its secret, address or clock is probably wrong, and it
logs a warning. Anyone can post webhooks that are refused, so the warning is logged at most once an
hour, and only if no webhook was verified for an hour.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from bridge.config import EndpointSettings, WebhookSettings
from bridge.config.webhook import DEFAULT_ENDPOINT
from bridge.credentials import Credential
from bridge.errors import ConfigError, SignatureFault
from bridge.http.messages import Response, problem
from bridge.telemetry.log_format import utc_text
from bridge.telemetry.logs import Log
from bridge.webhook.signatures.schemes import decode_secret, scheme_from
from bridge.webhook.signatures.verify import is_usable

log = Log(__name__)

RETRY_AFTER_SECONDS: Final = 5
# The answer to every webhook that fails the verification, unless the next one replaces it.
REFUSED: Final = problem(401, "the signature is not valid")
# Replaces REFUSED if the endpoint has `unsigned: 503` and the fault is one of `_MAY_BE_GENUINE`:
# the service would not repeat a webhook after a 401.
ASK_AGAIN: Final = problem(503, "the signature is not valid", Retry_After=str(RETRY_AFTER_SECONDS))

QUIET_SECONDS: Final = 3600.0
_CLOCK: Final = "compare this computer's clock with the service's"
_SETTINGS: Final = (
    "compare the secret with the service's{public_url}; make sure that no proxy rewrites bodies"
)
_ADDRESS: Final = ", and public_url exactly with the address configured there"
_SCHEME: Final = "compare preset and signature with what the service sends"
# Without `missing`, which mostly comes from strangers, and `ambiguous`, for which the secret was
# right.
_REMEDIES: Final[Mapping[SignatureFault, str]] = {
    "mismatch": _SETTINGS,
    "malformed": _SCHEME,
    "stale": _CLOCK,
    "future": _CLOCK,
}
# Faults that a genuine webhook has if it was signed by an earlier scheme or delivered late.
_MAY_BE_GENUINE: Final = frozenset(("missing", "malformed", "stale", "future"))


class Endpoint:
    """Everything needed to verify and answer the webhooks of one path; `clock` is monotonic.

    `key` is the path of its settings. The first of `keys` is the current secret. Raises ConfigError
    that names the setting if secrets are missing or unusable, or the scheme contradicts itself.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        *,
        key: str = DEFAULT_ENDPOINT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.setting = key
        self.path = settings.path
        self.accepted = _accepted(settings)
        # Receipt types that may be logged: only words from the settings, never text from a request.
        receipts = settings.receipts
        self.receipt_types = frozenset(
            (*receipts.type_values, *receipts.delivered, *receipts.failed, *receipts.pending)
        )
        if not settings.knows_signature:
            raise ConfigError(
                f"{key}.signature: is missing; the service of preset {settings.preset} signs no "
                "bodies; configure the signature that a proxy in front adds"
            )
        self.scheme = scheme_from(settings.signature, settings.public_url, endpoint=key)
        # Whether the query of a verified webhook is the one that was given to the service.
        self.signs_query = "{url}" in self.scheme.signed_content
        self.signature_header = self.scheme.header.lower().encode()
        self._is_asked_again = settings.unsigned == ASK_AGAIN.status
        self.unsigned = ASK_AGAIN if self._is_asked_again else REFUSED
        self.secrets = tuple(self._read_secrets(key))
        self.keys: list[bytes] = []
        self.use_secrets()
        self._clock = clock
        self._verified_at = self._warned_at = self._refused_at = -QUIET_SECONDS
        # Number of webhooks refused since the last genuine one, and the reason of the last refusal.
        self._refused = 0
        self._why: SignatureFault = "mismatch"

    def _read_secrets(self, key: str) -> Iterator[Credential]:
        def check(setting: str, value: str) -> str:
            if not is_usable(self.scheme, decode_secret(self.scheme, value, setting=setting)):
                raise ConfigError(
                    f"{setting}: is not a valid secret for this scheme: tokens need a "
                    "shared secret, Ed25519 needs the service's public key"
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

    def note_verified(self) -> None:
        self._verified_at = self._clock()
        self._refused = 0

    def note_refused(self, why: SignatureFault) -> Response:
        """Record a refused webhook, and warn if none was genuine for an hour; return the answer."""
        if why in _REMEDIES:
            self._refused += 1
            self._refused_at = now = self._clock()
            self._why = why
            is_quiet = now - self._verified_at >= QUIET_SECONDS
            if is_quiet and now - self._warned_at >= QUIET_SECONDS:
                self._warned_at = now
                log.warning(
                    "webhooks_refused",
                    endpoint=self.setting,
                    why=why,
                    refused=self._refused,
                    remedy=_REMEDIES[why].format(public_url=_ADDRESS if self.scheme.url else ""),
                )
        return ASK_AGAIN if self._is_asked_again and why in _MAY_BE_GENUINE else REFUSED

    def refused_facts(self) -> dict[str, object] | None:
        """Describe the refusals of the last hour if all of its webhooks were refused, else None."""
        now = self._clock()
        is_recent = now - self._refused_at < QUIET_SECONDS <= now - self._verified_at
        if not self._refused or not is_recent:
            return None
        return {
            "endpoint": self.setting,
            "why": self._why,
            "refused": self._refused,
            "last": utc_text(time.time() - (now - self._refused_at)),
        }


def endpoints_from(settings: WebhookSettings) -> list[Endpoint]:
    """Create the endpoints of the webhook receiver and read their secrets.

    Raises ConfigError with the faults of all endpoints.
    """
    endpoints: list[Endpoint] = []
    faults: list[str] = []
    for key, endpoint in settings.endpoints_by_key.items():
        try:
            endpoints.append(Endpoint(endpoint, key=key))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*faults)
    return endpoints


def _accepted(settings: EndpointSettings) -> Response:
    answer = settings.answer
    headers = {} if answer.content_type is None else {"content-type": answer.content_type}
    return Response(answer.status, answer.body.encode(), headers)


def lacks_secrets(key: str) -> str:
    """Return the error text for an endpoint without secrets."""
    return f"{key}.secrets: is missing; set {key}.secrets or {key}.secret_files"
