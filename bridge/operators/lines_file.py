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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def make(self) -> None:
        """Make the file if it is not made; raise BridgeError as `write` does."""
        self._write(b"")

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records, a line each, and return when they are on the disk.

        Raises BridgeError when they cannot be, or when there is a file of that name already.
        """
        self._write("".join(json.dumps(record) + "\n" for record in records).encode("ascii"))

    def _write(self, content: bytes) -> None:
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._descriptor = os.open(self._path, flags, 0o600)
                _sync_folder(self._path.parent)
            while content:
                content = content[os.write(self._descriptor, content) :]
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
