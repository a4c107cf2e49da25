"""Signs the sandbox's webhooks as the service of a preset does, and says what verifies them."""

import base64
import secrets
import time
import uuid
from typing import Final
from urllib.parse import urlsplit

from bridge.config import EndpointSettings
from bridge.config.presets import Preset
from bridge.errors import ConfigError
from bridge.webhook.signatures.ed25519 import make_pair
from bridge.webhook.signatures.schemes import Scheme, decode_secret, scheme_from
from bridge.webhook.signatures.verify import Signed, sign

_SECRET_BYTES: Final = 32


class Signer:
    """Signs for one URL; `secret` None has it make one.

    `shown_secret` is then what the bridge needs to verify, which of a pair of keys is the public
    one. Raises ConfigError when the secret cannot be one of this service.
    """

    def __init__(self, preset: Preset, url: str, secret: str | None) -> None:
        address = urlsplit(url)
        self.path = address.path or "/"
        self._query = address.query.encode()
        endpoint = EndpointSettings.model_validate({"path": self.path, "preset": preset})
        # What the bridge has to be told where the preset knows no scheme: as a proxy would sign.
        self.scheme_name = None if endpoint.knows_signature else endpoint.signature.preset
        public_url = address._replace(query="", fragment="").geturl()
        self.scheme = scheme_from(endpoint.signature, public_url)
        # The URL, if that is signed, as the bridge has to know it.
        self.public_url = public_url if "{url}" in self.scheme.signed_content else None
        self.shown_secret: str | None = None
        if self.scheme.algorithm == "ed25519":
            if secret is not None:
                raise ConfigError(
                    f"--webhook-secret: {preset} signs with a pair of keys, which the sandbox "
                    "makes; leave it out"
                )
            self._key, public = make_pair()
            self._wrong_key, _ = make_pair()
            self.shown_secret = base64.b64encode(public).decode()
            return
        if secret is None:
            secret = self.shown_secret = _make_secret(self.scheme)
        self._key = decode_secret(self.scheme, secret, setting="--webhook-secret")
        self._wrong_key = secrets.token_bytes(_SECRET_BYTES)

    def __call__(self, body: bytes, *, content_type: str, forged: bool = False) -> Signed:
        """Make headers and query of a webhook; what is forged is signed with another key.

        Raises InvalidSignatureError for a form that the service's scheme cannot sign unmistakably.
        """
        return sign(
            self.scheme,
            self._wrong_key if forged else self._key,
            body,
            now=time.time(),
            event_id=uuid.uuid4().hex,
            query=self._query,
            content_type=content_type,
        )


def _make_secret(scheme: Scheme) -> str:
    key = secrets.token_bytes(_SECRET_BYTES)
    match scheme.secret_encoding:
        case "utf8" | "hex":
            return key.hex()
        case "base64":
            return base64.b64encode(key).decode()
        case "whsec":
            return f"whsec_{base64.b64encode(key).decode()}"
