"""A new file of JSON lines, on the disk before what it tells of is removed from a queue."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from bridge.errors import BridgeError


class NewLinesFile:
    """A file of JSON lines that nobody else can read; made with the first line, or by `make`.

    `option` is the one that names another file, for the error that says so.
    """

    def __init__(self, path: Path, *, option: str) -> None:
        self._path = path
        self._option = option
        self._descriptor: int | None = None
        self._is_empty = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def make(self) -> None:
        """Make the file if it is not made; raise BridgeError as `write` does."""
        self._write(())

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records, a line each, and return when they are on the disk.

        Raises BridgeError when they cannot be, or when there is a file of that name already.
        """
        # One after the other: a record may have megabytes.
        self._write(f"{json.dumps(record)}\n".encode("ascii") for record in records)

    def remove_if_empty(self) -> None:
        """Remove the file when nothing was written to it."""
        if self._descriptor is not None and self._is_empty:
            self._path.unlink(missing_ok=True)

    def _write(self, lines: Iterable[bytes]) -> None:
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._descriptor = os.open(self._path, flags, 0o600)
                _sync_folder(self._path.parent)
            for line in lines:
                content = memoryview(line)
                while content:
                    content = content[os.write(self._descriptor, content) :]
                self._is_empty = False
            os.fsync(self._descriptor)
        except OSError as error:
            raise BridgeError(
                f"{self._path}: {error.strerror}; what is not in it is still in the queue; "
                f"name another file with {self._option}"
            ) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
