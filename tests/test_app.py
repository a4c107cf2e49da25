"""The secrets of a process: what happens when their files change while they are read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import credentials
from bridge.app import Secrets, webhook_secrets
from bridge.config import Settings
from bridge.credentials import Credential
from bridge.errors import ConfigError
from bridge.metrics import BridgeMetrics, new_registry
from bridge.signature import Scheme


class Mount:
    """Two secret files as Kubernetes mounts them: links into a folder that is exchanged whole."""

    def __init__(self, folder: Path) -> None:
        self.files = [folder / "current", folder / "previous"]
        self._folder = folder
        self._generation = 0

    def put(self, current: str, previous: str) -> None:
        """Exchange both secrets at once."""
        self._generation += 1
        fresh = self._folder / f"..{self._generation}"
        fresh.mkdir()
        (fresh / "current").write_text(current, encoding="utf-8")
        (fresh / "previous").write_text(previous, encoding="utf-8")
        link = self._folder / "..new"
        link.symlink_to(fresh.name)
        link.replace(self._folder / "..data")
        for file in self.files:
            if not file.is_symlink():
                file.symlink_to(Path("..data") / file.name)


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    """Mount the secrets `a` and `b`."""
    ours = Mount(tmp_path)
    ours.put("a", "b")
    return ours


@pytest.fixture
def given(mount: Mount) -> list[Credential]:
    """Give the secrets as they were read at the start."""
    return [Credential("webhook.secret_files", file=file) for file in mount.files]


@pytest.fixture
def secrets(given: list[Credential]) -> Secrets:
    """Follow the secrets."""
    labels = {"component": "webhook", "version": "0", "revision": "0"}
    ours = Secrets(BridgeMetrics(new_registry(), **labels, exchanges=()))
    for credential in given:
        ours.watch("webhook", credential, lambda: None)
    return ours


def _current(given: list[Credential]) -> list[str]:
    return [credential.current for credential in given]


def _meddle(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Have a change happen between the reading of one file and that of the next."""
    genuine = credentials.read_secret
    pending = [change]

    def read_then_change(key: str, path: Path) -> str:
        secret = genuine(key, path)
        if pending:
            pending.pop()()
        return secret

    monkeypatch.setattr(credentials, "read_secret", read_then_change)


def test_secrets_that_change_places_while_they_are_read(
    secrets: Secrets, given: list[Credential], mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that is in the files before and after an exchange is in use all the time."""
    _meddle(monkeypatch, lambda: mount.put("b", "a"))

    secrets.reread()

    assert _current(given) == ["b", "a"]


def test_secrets_that_change_all_the_time(
    secrets: Secrets, given: list[Credential], mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that never come to rest do not hold the process up."""
    genuine = credentials.read_secret

    def change_then_read(key: str, path: Path) -> str:
        current, previous = (genuine(key, file) for file in mount.files)
        mount.put(f"{current}+", f"{previous}+")
        return genuine(key, path)

    monkeypatch.setattr(credentials, "read_secret", change_then_read)
    secrets.reread()

    assert all(secret.endswith("+") for secret in _current(given))


def test_one_file_that_is_gone_does_not_hold_the_other_up(
    secrets: Secrets, given: list[Credential], mount: Mount
) -> None:
    """A file that cannot be read keeps its last good secret; the other one is rotated."""
    mount.put("c", "a")
    mount.files[1].unlink()

    secrets.reread()

    assert _current(given) == ["c", "b"]


def test_a_secret_that_cannot_be_used_is_told_by_its_setting(mount: Mount) -> None:
    """Of several secret files the one that is not in the scheme's encoding is named."""
    mount.put("00ff", "no hex")
    settings = Settings.model_validate({"webhook": {"secret_files": mount.files}})
    scheme = Scheme(header="X-Signature", secret_encoding="hex")

    with pytest.raises(ConfigError, match=r"^webhook\.secret_files\.1: the secret is empty or not"):
        webhook_secrets(settings, scheme)
