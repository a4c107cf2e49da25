"""Loads secrets and certificates; secret files are read again every five seconds."""

import asyncio
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from pydantic import SecretStr

from bridge.errors import ConfigError
from bridge.telemetry.logs import Log
from bridge.telemetry.metrics import BridgeMetrics

log = Log(__name__)

MAX_SECRET_BYTES: Final = 64 * 1024
REREAD_SECONDS: Final = 5.0
# If files still change after this many rounds, the next reread covers the rest.
MAX_ROUNDS: Final = 3
_REMEDY: Final = "write only the secret into it"


def read_secret(key: str, path: Path) -> str:
    """Read a secret file and strip white space, because `echo` adds a newline.

    Raises ConfigError with `key` and the remedy if the file is missing, empty or not text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SECRET_BYTES + 1)
        text = content.decode("utf-8-sig").strip()
    except OSError as error:
        raise unreadable(key, path, error) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path} is not UTF-8 text; {_REMEDY}") from None
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigError(f"{key}: {path} is larger than {MAX_SECRET_BYTES} bytes; {_REMEDY}")
    if not text:
        raise ConfigError(f"{key}: {path} is empty; {_REMEDY}")
    return text


def unreadable(key: str, path: Path | None, error: OSError) -> ConfigError:
    """Build the error for a configured file that cannot be read."""
    return ConfigError(
        f"{key}: {path} cannot be read: {error.strerror}; correct the path or its permissions"
    )


def load_authorities(key: str, path: Path | None) -> ssl.SSLContext:
    """Create a TLS context that trusts the authorities in a file, or those of the system.

    Raises ConfigError with `key` and the remedy if the file cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise ConfigError(f"{key}: {path} holds no certificates; it must be a PEM file") from None
    except OSError as error:
        raise unreadable(key, path, error) from None


def check_header_value(key: str, value: str) -> str:
    """Return a secret that is valid in an HTTP header; otherwise raise ConfigError without it."""
    if not re.fullmatch(r"[!-~]+", value):
        raise ConfigError(f"{key}: must be visible ASCII without spaces or line breaks")
    return value


class Credential:
    """One secret: read from `file` if that is given, otherwise the fixed `value`."""

    def __init__(
        self,
        key: str,
        *,
        value: SecretStr | None = None,
        file: Path | None = None,
        check: Callable[[str, str], str] = lambda _key, value: value,
    ) -> None:
        self._key = key
        self._file = file
        self._check = check
        if file is None and value is None:
            raise ConfigError(f"{key}: is missing; set {key} or {key}_file")
        given = "" if value is None else value.get_secret_value().strip()
        self.current = check(self._key, read_secret(self._key, file) if file else given)
        self.read_at = time.time()

    def reread(self) -> bool:
        """Read the file again and return whether the secret changed.

        Raises ConfigError if the file cannot be used now; the last good secret stays.
        """
        if self._file is None:
            return False
        before = self.current
        self.current = self._check(self._key, read_secret(self._key, self._file))
        self.read_at = time.time()
        return self.current != before


@dataclass(slots=True)
class _WatchedSecret:
    label: str
    credential: Credential
    on_change: Callable[[], None]
    is_failing: bool = False


class Secrets:
    """The secrets of a process: reads them every few seconds, and keeps the last good ones."""

    def __init__(self, metrics: BridgeMetrics) -> None:
        self._metrics = metrics
        self._watched: list[_WatchedSecret] = []

    def watch(self, label: str, credential: Credential, on_change: Callable[[], None]) -> None:
        """Read a secret again at intervals, and call `on_change` after each change."""
        self._watched.append(_WatchedSecret(label, credential, on_change))

    async def follow(self) -> NoReturn:
        while True:
            self.reread()
            await asyncio.sleep(REREAD_SECONDS)

    def reread(self) -> None:
        """Read all secrets again, until a round finds no change.

        If several files are replaced together, one round may read some of them before the change
        and the others after it. Nothing here awaits, so no request is verified between two rounds,
        and only the secrets of the last round are used.
        """
        for _ in range(MAX_ROUNDS):
            changed = [self._reread(secret) for secret in self._watched]
            if not any(changed):
                return

    def _reread(self, secret: _WatchedSecret) -> bool:
        try:
            changed = secret.credential.reread()
        except ConfigError as error:
            self._metrics.secret_reloads.labels(secret.label, "failed").inc()
            if not secret.is_failing:
                log.warning("secret_not_read", why=str(error))
            secret.is_failing = True
            return False
        secret.is_failing = False
        read_at = secret.credential.read_at
        self._metrics.secret_last_reload.labels(secret.label).set(read_at)
        if changed:
            self._metrics.secret_reloads.labels(secret.label, "changed").inc()
            log.info("secret_changed", secret=secret.label)
            secret.on_change()
        return changed
