"""What a private RabbitMQ node is started with: its environment and its files."""

import os
from collections.abc import Sequence
from pathlib import Path

from bridge.sandbox.epmd import Epmd

# RabbitMQ asks once in this time whether a message that went from a retry queue to a queue without
# a leader, as there are some at the start, has arrived. Its default is three minutes.
_DEAD_LETTER_CONFIRM_SECONDS = 3


def node_environment(folder: Path, node: str, distribution_port: int, epmd: Epmd) -> dict[str, str]:
    """Return the variables of a node and its `rabbitmqctl`; all that they write is in `folder`."""
    # The user's own RabbitMQ and Erlang variables are meant for another node.
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_"))}
    local = "-kernel inet_dist_use_interface {127,0,0,1}"
    return {
        **ours,
        "HOME": str(epmd.folder),  # of the Erlang cookie
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "ERL_EPMD_PORT": str(epmd.port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": node,
        "RABBITMQ_DIST_PORT": str(distribution_port),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "none.conf"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        # With this the script becomes the VM instead of waiting for it, so that a signal to our
        # child is a signal to the VM; -noinput on the command line takes the input away again.
        "RABBITMQ_ALLOW_INPUT": "1",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"+S 1:1 +B i {local}",
        "RABBITMQ_CTL_ERL_ARGS": f"+S 1:1 {local}",
    }


def write_configuration(
    folder: Path, plugins: Sequence[str], lines: Sequence[str], applications: Sequence[str]
) -> None:
    """Write a node's files; `lines` are of `rabbitmq.conf`, `applications` of `advanced.config`."""
    # The default limit, a share of the memory, raises an alarm on a small and busy disk.
    base = ("disk_free_limit.absolute = 50MB", "log.file.level = info", "log.console = false")
    milliseconds = _DEAD_LETTER_CONFIRM_SECONDS * 1000
    rabbit = f"{{rabbit, [{{dead_letter_worker_publisher_confirm_timeout, {milliseconds}}}]}}"
    for name, text in {
        "rabbitmq.conf": "\n".join((*base, *lines)),
        "plugins": f"[{', '.join(plugins)}].",
        "advanced.config": f"[{', '.join((rabbit, *applications))}].",
    }.items():
        (folder / name).write_text(f"{text}\n", encoding="utf-8")
