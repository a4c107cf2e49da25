"""Files are written all or none, and never over another by accident."""

from pathlib import Path

import pytest

from bridge.admin.wizard.new_files import SECRET_MODE, NewFile, write_files
from bridge.errors import BridgeError, ConfigError


def names(folder: Path) -> set[str]:
    """List all that is in a folder, hidden files too."""
    return {path.name for path in folder.iterdir()}


def test_each_has_its_mode(tmp_path: Path) -> None:
    """A secret is its owner's alone; what is none may be read."""
    write_files(
        [NewFile(tmp_path / "key", "k\n", SECRET_MODE), NewFile(tmp_path / "config.yaml", "c\n")]
    )

    assert (tmp_path / "key").read_text() == "k\n"
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o644
    assert names(tmp_path) == {"key", "config.yaml"}


def test_one_that_exists_stops_all(tmp_path: Path) -> None:
    """What is there stays as it is, and what was written before it goes again."""
    (tmp_path / "config.yaml").write_text("mine")

    with pytest.raises(ConfigError, match="exists and is left as it is; --force"):
        write_files([NewFile(tmp_path / "key", "k"), NewFile(tmp_path / "config.yaml", "c")])

    assert (tmp_path / "config.yaml").read_text() == "mine"
    assert names(tmp_path) == {"config.yaml"}


def test_a_secret_that_appears_meanwhile_saves_the_old_configuration(tmp_path: Path) -> None:
    """What may be replaced is replaced last: a fault before it leaves it as it was."""
    (tmp_path / "config.yaml").write_text("mine")
    (tmp_path / "key").write_text("mine")

    with pytest.raises(ConfigError, match="key: exists"):
        write_files(
            [
                NewFile(tmp_path / "config.yaml", "c", replaces=True),
                NewFile(tmp_path / "key", "k"),
            ]
        )

    assert {path.read_text() for path in tmp_path.iterdir()} == {"mine"}
    assert names(tmp_path) == {"config.yaml", "key"}


def test_a_file_is_replaced_where_that_is_wanted(tmp_path: Path) -> None:
    """The new one takes the place of the old one in one step."""
    (tmp_path / "config.yaml").write_text("old")
    write_files([NewFile(tmp_path / "config.yaml", "new", replaces=True)])

    assert (tmp_path / "config.yaml").read_text() == "new"
    assert names(tmp_path) == {"config.yaml"}


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    """The fault names the file that was meant, and nothing is left of the others."""
    missing = tmp_path / "no folder" / "config.yaml"

    with pytest.raises(BridgeError, match=r"config\.yaml: cannot be written: No such file"):
        write_files([NewFile(tmp_path / "key", "k"), NewFile(missing, "c")])

    assert names(tmp_path) == set()


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two files takes the first back."""
    link = Path.hardlink_to

    def interrupted(self: Path, target: Path) -> None:
        if self.name == "config.yaml":
            raise KeyboardInterrupt
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_files([NewFile(tmp_path / "key", "k"), NewFile(tmp_path / "config.yaml", "c")])

    assert names(tmp_path) == set()


def test_no_secret_is_shown_with_the_file(tmp_path: Path) -> None:
    """What a file holds stands in no traceback."""
    assert "Canary" not in repr(NewFile(tmp_path / "key", "Canary"))
