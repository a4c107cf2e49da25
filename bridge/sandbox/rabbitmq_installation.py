"""Where RabbitMQ is installed on this computer."""

import shutil
from pathlib import Path

from bridge.errors import BrokerError
from bridge.sandbox.reachability import URL_VARIABLE

_PACKAGE_FOLDERS = (
    "/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin",
    "/opt/rabbitmq/sbin",
    "/opt/homebrew/opt/rabbitmq/sbin",
    "/usr/local/opt/rabbitmq/sbin",
)
_NOT_FOUND = (
    "No RabbitMQ server is installed: run `apt-get install rabbitmq-server`, "
    "`dnf install rabbitmq-server` or `brew install rabbitmq`, "
    f"or set {URL_VARIABLE} to a broker that runs."
)


def find_scripts() -> Path:
    """Find the folder of the server's own scripts.

    The commands that Debian puts on PATH change the user and ignore the environment. The scripts
    themselves have `rabbitmq-env` beside them. Raises BrokerError, with what to install.
    """
    found = [path for pattern in _PACKAGE_FOLDERS for path in sorted(Path("/").glob(pattern[1:]))]
    on_path = shutil.which("rabbitmq-server")
    if on_path is not None:
        found.insert(0, Path(on_path).resolve().parent)
    for folder in found:
        if all((folder / name).is_file() for name in ("rabbitmq-env", "rabbitmq-server")):
            return folder
    raise BrokerError(_NOT_FOUND)
