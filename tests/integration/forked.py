"""Commands of the program, forked from a process that has imported what takes long.

To import the libraries is most of what a command computes. A command that is forked has a process,
an environment and standard streams of its own, as one that a shell starts, and imports our modules
for itself.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import anyio.to_thread

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["aio_pika", "httpx", "prometheus_client", "pydantic_settings", "typer", "uvloop", "yaml"]
)
# How long a caller that is cancelled may be kept waiting.
JOIN_SECONDS = 0.2
KILL_SECONDS = 5


async def run_forked(
    args: Sequence[str], *, given: bytes, environ: Mapping[str, str]
) -> CompletedProcess[bytes]:
    """Run a command to its end; it is killed when this is cancelled."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        streams[0].write_bytes(given)
        process = _CONTEXT.Process(target=_be_program, args=(args, dict(environ), streams))
        try:
            # The first one waits for the imports.
            await anyio.to_thread.run_sync(process.start)
            while process.exitcode is None:
                await anyio.to_thread.run_sync(process.join, JOIN_SECONDS)
        finally:
            if process.pid is not None:
                process.kill()
                process.join(KILL_SECONDS)
            code = process.exitcode
            process.close()
        assert code is not None
        return CompletedProcess(args, code, streams[1].read_bytes(), streams[2].read_bytes())


def _be_program(args: Sequence[str], environ: Mapping[str, str], streams: Sequence[Path]) -> None:
    """Become what `python -m bridge` is, but for what is imported."""
    os.environ.clear()
    os.environ.update(environ)
    for number, path in enumerate(streams):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = os.fdopen(0, encoding="utf-8")  # a process of multiprocessing has none
    sys.argv = ["sms-bridge", *args]
    from bridge.__main__ import main  # noqa: PLC0415  as a new process does

    main()
