"""Secret files: reading, faults that do not quote the secret, and changes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from bridge import credentials
from bridge.credentials import Credential, Secrets, check_header_value, read_secret
from bridge.errors import ConfigError
from bridge.telemetry.metrics import BridgeMetrics, new_registry

CANARY = "Canary7Secret"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("first", encoding="utf-8")
    return path


# --- Reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        (b"s3cret", "s3cret"),
        (b"\xef\xbb\xbf s3cret \r\n\r\n", "s3cret"),
        (b"\ts3cret\t", "s3cret"),
        (b'a b"c\t\xc3\xa9\n', 'a b"c\té'),
    ],
    ids=["plain", "BOM and blanks", "tabs", "blanks inside"],
)
def test_a_secret_is_stripped(tmp_path: Path, content: bytes, secret: str) -> None:
    """White space that editors and `echo` add around a secret is not part of it."""
    path = tmp_path / "key"
    path.write_bytes(content)

    assert read_secret("sms_api.key_file", path) == secret


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \r\n\t", "is empty"),
        (b"\xef\xbb\xbf\n", "is empty"),
        (CANARY.encode() + b"\xff", "is not UTF-8 text"),
        (CANARY.encode("utf-16"), "is not UTF-8 text"),
        (CANARY.encode() * 10_000, "is larger than 65536 bytes"),
    ],
    ids=["empty", "blank", "only a BOM", "binary", "UTF-16", "large"],
)
def test_file_without_a_secret(tmp_path: Path, content: bytes, says: str) -> None:
    """The fault of a file without a secret names setting, path and remedy."""
    path = tmp_path / "key"
    path.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        read_secret("sms_api.key_file", path)

    assert str(caught.value) == f"sms_api.key_file: {path} {says}; write only the secret into it"


def test_missing_file(tmp_path: Path) -> None:
    """The fault of a missing file, or of a folder, names setting, path and remedy."""
    told = r"^a\.b: .*/nothing cannot be read: No such file or directory; correct the path or "
    with pytest.raises(ConfigError, match=told):
        read_secret("a.b", tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_secret("a.b", tmp_path)


# --- What may stand in a header ------------------------------------------------------------------


@pytest.mark.parametrize("value", ["sk_live_1", "a.b-c~d/e+f==", "!", "~"])
def test_header_value(value: str) -> None:
    """Visible ASCII is valid in a header."""
    assert check_header_value("sms_api.key", value) == value


BAD_VALUES = {
    "newline inside": f"{CANARY}\nX-Evil: 1",
    "newline at the end": f"{CANARY}\n",
    "carriage return": f"{CANARY}\r",
    "space": f"{CANARY} x",
    "tab": f"{CANARY}\t",
    "NUL": f"{CANARY}\0",
    "not ASCII": f"{CANARY}é",
    "DEL": f"{CANARY}\x7f",
    "empty": "",
}


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_invalid_header_value(value: str) -> None:
    """A secret that would break a header is refused at the start, and not quoted."""
    with pytest.raises(ConfigError, match=r"^sms_api\.key: must be visible ASCII") as caught:
        check_header_value("sms_api.key", value)

    assert CANARY not in f"{caught.value} {caught.value!r}"


# --- One secret over time ------------------------------------------------------------------------


def test_fixed_value() -> None:
    """A secret without a file is the configured one, and never changes."""
    credential = Credential("sms_api.key", value=SecretStr(" s3cret\n"))

    assert (credential.current, credential.reread()) == ("s3cret", False)


def test_neither_file_nor_value() -> None:
    """The fault names both settings."""
    with pytest.raises(ConfigError, match=r"sms_api\.key or sms_api\.key_file"):
        Credential("sms_api.key")


def test_check_at_the_start(file: Path) -> None:
    """A secret that does not pass its check prevents the start, in a file or configured."""
    file.write_text("a b", encoding="utf-8")

    with pytest.raises(ConfigError):
        Credential("sms_api.key", file=file, check=check_header_value)
    with pytest.raises(ConfigError):
        Credential("sms_api.key", value=SecretStr("a b"), check=check_header_value)


def test_newline_more_is_no_change(file: Path) -> None:
    """Only the secret counts, not the bytes around it."""
    credential = Credential("k", file=file)
    file.write_text("first\n", encoding="utf-8")

    assert not credential.reread()


def test_change_by_symlink(tmp_path: Path) -> None:
    """A change as Kubernetes makes it, by another target of the folder's link, is noticed."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text(name, encoding="utf-8")
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "key").symlink_to("..data/key")
    credential = Credential("k", file=tmp_path / "key")
    (tmp_path / "..new").symlink_to("second")
    (tmp_path / "..new").rename(tmp_path / "..data")

    assert (credential.reread(), credential.current) == (True, "second")


def test_same_length_and_time(file: Path) -> None:
    """A change is noticed by the content, not by the size or time of the file."""
    credential = Credential("k", file=file)
    before = file.stat()
    file.write_text("other", encoding="utf-8")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert (credential.reread(), credential.current) == (True, "other")


def _remove(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_text("", encoding="utf-8")


def _break(path: Path) -> None:
    path.write_text("a b", encoding="utf-8")


BREAKS = {"missing": _remove, "empty": _empty, "refused by its check": _break}


@pytest.mark.parametrize("spoil", BREAKS.values(), ids=BREAKS)
def test_last_good_secret_stays(file: Path, spoil: Callable[[Path], None]) -> None:
    """While the file cannot be used, the last good secret stays in use; a repair is a change."""
    credential = Credential("k", file=file, check=check_header_value)
    spoil(file)
    with pytest.raises(ConfigError, match=r"^k: "):
        credential.reread()
    assert credential.current == "first"
    file.write_text("second", encoding="utf-8")

    assert (credential.reread(), credential.current) == (True, "second")


def test_a_failed_read_keeps_the_time(file: Path) -> None:
    """The time of the last read is that of the last successful one."""
    credential = Credential("k", file=file)
    credential.read_at = 1.0
    file.unlink()
    with pytest.raises(ConfigError):
        credential.reread()

    assert credential.read_at == 1.0


def test_credential_does_not_show_its_secret(file: Path) -> None:
    file.write_text(CANARY, encoding="utf-8")

    assert CANARY not in repr(Credential("k", file=file))


# --- All secrets of a process --------------------------------------------------------------------


class Mount:
    """Two secret files as Kubernetes mounts them: links into a folder that is replaced."""

    def __init__(self, folder: Path) -> None:
        self.files = [folder / "current", folder / "previous"]
        self._folder = folder
        self._generation = 0

    def put(self, current: str, previous: str) -> None:
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
    ours = Mount(tmp_path)
    ours.put("a", "b")
    return ours


@pytest.fixture
def mounted(mount: Mount) -> list[Credential]:
    return [Credential("webhook.secret_files", file=file) for file in mount.files]


@pytest.fixture
def secrets(mounted: list[Credential]) -> Secrets:
    labels = {"component": "webhook", "version": "0", "revision": "0"}
    ours = Secrets(BridgeMetrics(new_registry(), **labels, exchanges=()))
    for credential in mounted:
        ours.watch("webhook", credential, lambda: None)
    return ours


def _current(mounted: list[Credential]) -> list[str]:
    return [credential.current for credential in mounted]


def _meddle(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    genuine = credentials.read_secret
    pending = [change]

    def read_then_change(key: str, path: Path) -> str:
        secret = genuine(key, path)
        if pending:
            pending.pop()()
        return secret

    monkeypatch.setattr(credentials, "read_secret", read_then_change)


def test_secrets_that_swap_while_they_are_read(
    secrets: Secrets, mounted: list[Credential], mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that is in the files before and after a change is always in use."""
    _meddle(monkeypatch, lambda: mount.put("b", "a"))

    secrets.reread()

    assert _current(mounted) == ["b", "a"]


def test_secrets_that_change_all_the_time(
    secrets: Secrets, mounted: list[Credential], mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that change all the time do not block the process."""
    genuine = credentials.read_secret

    def change_then_read(key: str, path: Path) -> str:
        current, previous = (genuine(key, file) for file in mount.files)
        mount.put(f"{current}+", f"{previous}+")
        return genuine(key, path)

    monkeypatch.setattr(credentials, "read_secret", change_then_read)
    secrets.reread()

    assert all(secret.endswith("+") for secret in _current(mounted))


def test_a_missing_file_does_not_affect_the_other(
    secrets: Secrets, mounted: list[Credential], mount: Mount
) -> None:
    """A file that cannot be read keeps its last good secret; the other one is rotated."""
    mount.put("c", "a")
    mount.files[1].unlink()

    secrets.reread()

    assert _current(mounted) == ["c", "b"]
