"""Secret files: reading, faults that do not quote the secret, and changes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from bridge import credentials
from bridge.credentials import Credential, Secrets, check_header_value, read_secret
from bridge.errors import ConfigError
from bridge.telemetry.metrics import BridgeMetrics, new_registry

CANARY = "Canary7Secret"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Provide a secret file."""
    path = tmp_path / "key"
    path.write_text("first", encoding="utf-8")
    return path


# --- Reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"s3cret",
        b"s3cret\n",
        b"s3cret\r\n",
        b"\xef\xbb\xbfs3cret",
        b"\xef\xbb\xbf s3cret \r\n\r\n",
        b"\ts3cret\t",
    ],
    ids=["plain", "newline", "CRLF", "BOM", "BOM and blanks", "tabs"],
)
def test_a_secret_is_stripped(tmp_path: Path, content: bytes) -> None:
    """White space that editors and `echo` add around a secret is not part of it."""
    path = tmp_path / "key"
    path.write_bytes(content)

    assert read_secret("sms_api.key_file", path) == "s3cret"


def test_blanks_inside_stay(tmp_path: Path) -> None:
    """A password may contain blanks and any other character."""
    path = tmp_path / "password"
    path.write_text('a b"c\té\n', encoding="utf-8")

    assert read_secret("rabbitmq.password_file", path) == 'a b"c\té'


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

    assert str(caught.value) == f"sms_api.key_file: {path} {says}; put the secret alone into it"


def test_missing_file(tmp_path: Path) -> None:
    """The fault of a missing file names setting, path and remedy."""
    told = r"^a\.b: .*/nothing cannot be read: No such file or directory; correct the path or "
    with pytest.raises(ConfigError, match=told):
        read_secret("a.b", tmp_path / "nothing")


def test_folder_for_a_file(tmp_path: Path) -> None:
    """A folder in place of the file is a fault of the configuration, not a crash."""
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_secret("a.b", tmp_path)


@given(content=st.binary(max_size=60))
def test_any_content_is_a_secret_or_a_fault(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    """Any file content results in a secret that is not blank, or in a fault."""
    path = tmp_path_factory.mktemp("secret") / "key"
    path.write_bytes(content)
    try:
        secret = read_secret("a.b", path)
    except ConfigError:
        secret = "refused"

    assert secret.strip()


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
    "no-break space": f"{CANARY}\u00a0",
}


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_invalid_header_value(value: str) -> None:
    """A secret that would break a header is refused at the start."""
    with pytest.raises(ConfigError, match=r"^sms_api\.key: must be visible ASCII"):
        check_header_value("sms_api.key", value)


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_refusal_does_not_quote_the_secret(value: str) -> None:
    """The refusal is logged, so it does not contain the secret."""
    with pytest.raises(ConfigError) as caught:
        check_header_value("sms_api.key", value)

    assert CANARY not in f"{caught.value} {caught.value!r}"


def test_empty_header_value() -> None:
    """An empty secret is no header value."""
    with pytest.raises(ConfigError):
        check_header_value("sms_api.key", "")


# --- One secret over time ------------------------------------------------------------------------


def test_fixed_value() -> None:
    """A secret without a file is the configured one."""
    assert Credential("sms_api.key", value=SecretStr(" s3cret\n")).current == "s3cret"


def test_fixed_value_never_changes() -> None:
    """A secret without a file is never read again."""
    assert not Credential("sms_api.key", value=SecretStr("s3cret")).reread()


def test_file_goes_before_value(file: Path) -> None:
    """If both are given, the secret in the file counts."""
    assert Credential("k", value=SecretStr("fixed"), file=file).current == "first"


def test_neither_file_nor_value() -> None:
    """The fault names both settings."""
    with pytest.raises(ConfigError, match=r"sms_api\.key or sms_api\.key_file"):
        Credential("sms_api.key")


def test_check_at_the_start(file: Path) -> None:
    """A secret in a file that does not pass its check prevents the start."""
    file.write_text("a b", encoding="utf-8")

    with pytest.raises(ConfigError):
        Credential("sms_api.key", file=file, check=check_header_value)


def test_check_of_a_fixed_value() -> None:
    """A configured secret is checked, too."""
    with pytest.raises(ConfigError):
        Credential("sms_api.key", value=SecretStr("a b"), check=check_header_value)


def test_unchanged_file(file: Path) -> None:
    """Reading the same content again is no change."""
    assert not Credential("k", file=file).reread()


def test_newline_more_is_no_change(file: Path) -> None:
    """Only the secret counts, not the bytes around it."""
    credential = Credential("k", file=file)
    file.write_text("first\n", encoding="utf-8")

    assert not credential.reread()


def test_changed_file(file: Path) -> None:
    """A changed file is a change, without a restart."""
    credential = Credential("k", file=file)
    file.write_text("second", encoding="utf-8")

    assert (credential.reread(), credential.current) == (True, "second")


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

    assert credential.reread()


def _remove(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_text("", encoding="utf-8")


def _break(path: Path) -> None:
    path.write_text("a b", encoding="utf-8")


BREAKS = {"missing": _remove, "empty": _empty, "refused by its check": _break}


@pytest.mark.parametrize("spoil", BREAKS.values(), ids=BREAKS)
def test_spoilt_file_is_a_fault(file: Path, spoil: Callable[[Path], None]) -> None:
    """A file that cannot be used any more raises a fault that the caller can log."""
    credential = Credential("k", file=file, check=check_header_value)
    spoil(file)

    with pytest.raises(ConfigError, match=r"^k: "):
        credential.reread()


@pytest.mark.parametrize("spoil", BREAKS.values(), ids=BREAKS)
def test_last_good_secret_stays(file: Path, spoil: Callable[[Path], None]) -> None:
    """While the file cannot be used, the last good secret stays in use."""
    credential = Credential("k", file=file, check=check_header_value)
    spoil(file)
    with pytest.raises(ConfigError):
        credential.reread()

    assert credential.current == "first"


@pytest.mark.parametrize("spoil", BREAKS.values(), ids=BREAKS)
def test_repaired_file_is_a_change(file: Path, spoil: Callable[[Path], None]) -> None:
    """A spoilt file that is repaired with another secret is a change."""
    credential = Credential("k", file=file, check=check_header_value)
    spoil(file)
    with pytest.raises(ConfigError):
        credential.reread()
    file.write_text("second", encoding="utf-8")

    assert credential.reread()


def test_a_failed_read_keeps_the_time(file: Path) -> None:
    """The time of the last read is that of the last successful one."""
    credential = Credential("k", file=file)
    credential.read_at = 1.0
    file.unlink()
    with pytest.raises(ConfigError):
        credential.reread()

    assert credential.read_at == 1.0


def test_credential_does_not_show_its_secret(file: Path) -> None:
    """A credential in a log or a traceback does not show its secret."""
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
        """Replace both secrets at once."""
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
def mounted(mount: Mount) -> list[Credential]:
    """Provide the secrets as they were read at the start."""
    return [Credential("webhook.secret_files", file=file) for file in mount.files]


@pytest.fixture
def secrets(mounted: list[Credential]) -> Secrets:
    """Follow the secrets."""
    labels = {"component": "webhook", "version": "0", "revision": "0"}
    ours = Secrets(BridgeMetrics(new_registry(), **labels, exchanges=()))
    for credential in mounted:
        ours.watch("webhook", credential, lambda: None)
    return ours


def _current(mounted: list[Credential]) -> list[str]:
    return [credential.current for credential in mounted]


def _meddle(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Make a change between reading one file and reading the next."""
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
