"""Writes files all or none: nobody ever sees half of one, or of several the first alone."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bridge.errors import BridgeError, ConfigError

SECRET_MODE: Final = 0o600
# What the configuration names is no secret, and a container reads it as another user.
PLAIN_MODE: Final = 0o644


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be written; only `replaces` allows that there is one already."""

    path: Path
    text: str = field(repr=False)
    mode: int = PLAIN_MODE
    replaces: bool = False


def write_files(files: Sequence[NewFile]) -> None:
    """Write all of the files, or on any fault or Ctrl-C leave all as it was.

    Raises ConfigError when one exists that may not be replaced, BridgeError when one cannot be
    written.
    """
    staged: dict[NewFile, Path] = {}
    try:
        for file in files:
            staged[file] = _stage(file)
        _put_in_place(staged)
    except FileExistsError as error:
        raise already_there(Path(error.filename2)) from None
    except OSError as error:
        named = next((file.path for file in files if file not in staged), files[-1].path)
        raise BridgeError(f"{named}: cannot be written: {error.strerror}") from None
    finally:
        for path in staged.values():
            path.unlink(missing_ok=True)


def already_there(path: Path) -> ConfigError:
    """Make the error of a file that exists."""
    return ConfigError(
        f"{path}: exists and is left as it is; --force replaces config.yaml or values.yaml, "
        "--output names another file"
    )


def _stage(file: NewFile) -> Path:
    """Write beside where it goes, on the same file system, what is then moved in one step."""
    handle, name = tempfile.mkstemp(prefix=f".{file.path.name}.", dir=file.path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(file.text)
            opened.flush()
            os.fchmod(opened.fileno(), file.mode)
            os.fsync(opened.fileno())
    except BaseException:
        Path(name).unlink()
        raise
    return Path(name)


def _put_in_place(staged: Mapping[NewFile, Path]) -> None:
    placed: list[Path] = []
    # What may replace a file comes last: nothing can fail behind it that would have to bring the
    # old one back.
    in_order = sorted(staged, key=lambda file: file.replaces)
    try:
        for file in in_order:
            if file.replaces:
                staged[file].replace(file.path)
            else:
                # Unlike a move, a link fails where there is something.
                file.path.hardlink_to(staged[file])
                placed.append(file.path)
    except BaseException:
        for path in placed:
            path.unlink(missing_ok=True)
        raise
