"""Erlang expressions evaluated by a RabbitMQ node.

`rabbitmqctl` starts an Erlang VM for each command, which takes 0.6 s of CPU time; `erl_call`, which
comes with Erlang, only opens a connection.
"""

import shutil
import subprocess
from pathlib import Path

from bridge.sandbox.broker import CTL_SECONDS, Broker


def evaluate(broker: Broker, expression: str) -> str:
    """Return the value of an expression in Erlang syntax. Raise if Erlang reports an error."""
    erlang = shutil.which("erl")
    assert erlang is not None
    program = Path(erlang).resolve().with_name("erl_call")
    done = subprocess.run(
        [program, "-name", broker.node, "-c", _cookie(broker), "-e"],
        input=f"{expression}.\n",
        env=broker._environ,
        capture_output=True,
        text=True,
        timeout=CTL_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{ok, "), f"{expression}: {done.stdout}"
    return done.stdout.removeprefix("{ok, ").removesuffix("}")


def version(broker: Broker) -> str:
    """Return RabbitMQ's version, such as 3.10.8."""
    return evaluate(broker, "rabbit_misc:version()").strip('"')


def _cookie(broker: Broker) -> str:
    file = Path(broker._environ["HOME"]) / ".erlang.cookie"
    return file.read_text(encoding="ascii").strip()


def binary(text: str) -> str:
    """Format a text as an Erlang binary."""
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    return f'<<"{escaped}">>'
