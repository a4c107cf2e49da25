"""A private RabbitMQ server for the demo and the tests: own folder, own ports, gone at exit."""

import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from yarl import URL

from bridge.errors import BrokerError
from bridge.sandbox.code_path import shorten_code_path
from bridge.sandbox.processes import Child, Guard, accepts, free_ports, guarded, wait_until

URL_VARIABLE = "SMS_BRIDGE_RABBITMQ__URL"

# How long starting, stopping, a handshake and `rabbitmqctl` may each take before they count as
# failed.
START_SECONDS = 90
STOP_SECONDS = 30
HANDSHAKE_SECONDS = 3
CTL_SECONDS = 60

# RabbitMQ asks once in this time whether a message that went from a retry queue to a queue without
# a leader, as there are some at the start, has arrived. Its default is three minutes.
_DEAD_LETTER_CONFIRM_SECONDS = 3

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


class Epmd:
    """Erlang's name service for the nodes that share `folder` as home, and so a cookie.

    A node would start one that outlives it, so we start one that we can end.
    """

    def __init__(self, folder: Path, *, guard: Guard) -> None:
        self.folder = folder
        self.port = free_ports(1)[0]
        self._guard = guard
        self._child: Child | None = None

    def start(self) -> None:
        """Start, unless it runs, and return when it takes connections."""
        if self._child is not None:
            return
        self._child = child = Child(
            [_find_epmd(), "-port", str(self.port), "-address", "127.0.0.1"],
            guard=self._guard,
            log=self.folder / "epmd.log",
            environ=os.environ,
        )
        if not wait_until(
            lambda: accepts(self.port),
            seconds=START_SECONDS,
            running=lambda: child.exit_code is None,
        ):
            raise BrokerError(f"epmd did not start; the end of its log:\n{child.tail()}")

    def close(self) -> None:
        """End it at once."""
        if self._child is not None:
            self._child.kill()


class Broker:
    """One RabbitMQ node on this computer; its data and ports stay the same over restarts.

    Nodes that are given the same `epmd` can be joined to a cluster. `configuration` is laid over
    ours, in the form of `rabbitmq.conf`; `applications` stand in `advanced.config` beside ours.
    """

    def __init__(
        self,
        folder: Path,
        *,
        guard: Guard,
        management: bool = False,
        epmd: Epmd | None = None,
        plugins: Sequence[str] = (),
        configuration: Sequence[str] = (),
        applications: Sequence[str] = (),
    ) -> None:
        self._scripts = find_scripts()
        self._folder = folder
        self._guard = guard
        self._epmd = Epmd(folder, guard=guard) if epmd is None else epmd
        self._port, distribution, management_port = free_ports(3)
        self.url = f"amqp://guest:guest@127.0.0.1:{self._port}/"
        self.management_url = f"http://127.0.0.1:{management_port}" if management else None
        self.node = f"sms-bridge-{secrets.token_hex(4)}@localhost"
        if management:
            plugins = (*plugins, "rabbitmq_management")
            own = ("management.tcp.ip = 127.0.0.1", f"management.tcp.port = {management_port}")
            configuration = (*own, *configuration)
        self._environ = _environment(folder, self.node, distribution, self._epmd)
        self._environ |= shorten_code_path(folder / "code", self._scripts, plugins)
        configuration = (f"listeners.tcp.1 = 127.0.0.1:{self._port}", *configuration)
        _write_configuration(folder, plugins, configuration, applications)
        self._server: Child | None = None

    @property
    def pid(self) -> int:
        """The process id of the Erlang VM that runs now, or ran last."""
        if self._server is None:
            raise BrokerError("The private RabbitMQ has not been started.")
        return self._server.pid

    def start(self) -> None:
        """Start, also after `stop` or `kill`, and return when clients are answered."""
        self._epmd.start()
        self._server = server = Child(
            [str(self._scripts / "rabbitmq-server"), "-noinput"],
            guard=self._guard,
            log=self._folder / "server.log",
            environ=self._environ,
        )
        if not wait_until(
            self.answers, seconds=START_SECONDS, running=lambda: server.exit_code is None
        ):
            raise BrokerError(self._describe_failure(server))

    def stop(self) -> None:
        """Shut down in good order."""
        if self._server is not None:
            self.resume()
            self._server.end(grace_seconds=STOP_SECONDS)

    def flush(self) -> None:
        """Have the queues that were declared just now survive a kill.

        RabbitMQ writes the directory of its quorum queues half a second late; a queue that it
        does not find there after the restart is listed and answers nothing, for ever.
        """
        self.ctl("eval", "[dets:sync(Table) || Table <- dets:all()].")

    def kill(self) -> None:
        """End at once, as a power cut would."""
        if self._server is not None:
            self._server.kill()

    def pause(self) -> None:
        """Freeze: connections stay open and nothing answers."""
        if self._server is not None:
            self._server.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._server is not None:
            self._server.signal(signal.SIGCONT)

    def ctl(self, *args: str, tool: str = "rabbitmqctl") -> str:
        """Run `rabbitmqctl`, or another such `tool`, on this node and return what it prints."""
        result = subprocess.run(
            [str(self._scripts / tool), "--quiet", "--node", self.node, *args],
            env=self._environ,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CTL_SECONDS,
            check=False,
        )
        if result.returncode != 0:
            text = (result.stderr or result.stdout).strip()
            raise BrokerError(f"{tool} {args[0]} failed: {text}")
        return result.stdout

    def close(self) -> None:
        """End the server and its name service."""
        # Nobody needs the data any more, so there is nothing to shut down in good order.
        if self._server is not None:
            self._server.kill()
        self._epmd.close()

    def answers(self) -> bool:
        """Whether clients are answered now, within seconds."""
        web = self.management_url
        return _shakes_hands(URL(self.url)) and (web is None or _serves(f"{web}/api/overview"))

    def _describe_failure(self, server: Child) -> str:
        how = f"did not answer within {START_SECONDS} s"
        if server.exit_code is not None:
            how = f"ended at once with code {server.exit_code}"
        return f"The private RabbitMQ {how}; the end of its log:\n{server.tail()}"


@contextmanager
def private_broker(
    *, management: bool = False, plugins: Sequence[str] = (), configuration: Sequence[str] = ()
) -> Iterator[Broker]:
    """Run a RabbitMQ server of our own, and leave nothing of it behind.

    Raises BrokerError when none is installed or it does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="sms-bridge-broker-"))
    try:
        with guarded() as guard:
            broker = Broker(
                folder,
                guard=guard,
                management=management,
                plugins=plugins,
                configuration=configuration,
            )
            try:
                broker.start()
                yield broker
            finally:
                broker.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_broker(environ: Mapping[str, str]) -> str | None:
    """Return the broker that the environment names, if it is one that answers."""
    value = environ.get(URL_VARIABLE, "").strip()
    for url in _split(value):
        with suppress(ValueError):
            if _shakes_hands(URL(url)):
                return url
    return None


def _split(value: str) -> list[str]:
    # The setting is one URL, or a list of them in JSON.
    if not value.startswith("["):
        return [value] if value else []
    with suppress(ValueError):
        return [str(url) for url in json.loads(value)]
    return []


def _shakes_hands(url: URL) -> bool:
    """Open a connection and see whether the other side answers as an AMQP 0-9-1 broker does."""
    secure = url.scheme == "amqps"
    address = (url.host or "localhost", url.port or (5671 if secure else 5672))
    try:
        with socket.create_connection(address, HANDSHAKE_SECONDS) as plain:
            if not secure:
                return _greets(plain)
            # The certificate is checked by the client that sends a password; here nobody does.
            context = ssl._create_unverified_context()  # noqa: S323, SLF001
            with context.wrap_socket(plain, server_hostname=address[0]) as wrapped:
                return _greets(wrapped)
    except OSError:
        return False


def _greets(connection: socket.socket) -> bool:
    connection.sendall(b"AMQP\x00\x00\x09\x01")
    # A method frame on channel 0; a broker that speaks another version answers "AMQP...".
    return connection.recv(3) == b"\x01\x00\x00"


def _serves(url: str) -> bool:
    request = urllib.request.Request(url)  # noqa: S310  always http on 127.0.0.1
    request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=HANDSHAKE_SECONDS) as answer:
            return bool(answer.status == 200)  # noqa: PLR2004
    except OSError:
        return False


def find_scripts() -> Path:
    """Find the folder of the server's own scripts.

    The commands that Debian puts on PATH change the user and ignore the environment. The scripts
    themselves have `rabbitmq-env` beside them.
    """
    found = [path for pattern in _PACKAGE_FOLDERS for path in sorted(Path("/").glob(pattern[1:]))]
    on_path = shutil.which("rabbitmq-server")
    if on_path is not None:
        found.insert(0, Path(on_path).resolve().parent)
    for folder in found:
        if all((folder / name).is_file() for name in ("rabbitmq-env", "rabbitmq-server")):
            return folder
    raise BrokerError(_NOT_FOUND)


def _find_epmd() -> str:
    erlang = shutil.which("erl")
    beside = str(Path(erlang).resolve().parent) if erlang else ""
    found = shutil.which("epmd") or shutil.which("epmd", path=beside)
    if found is None:
        raise BrokerError("Erlang's `epmd` is not on PATH; install Erlang in full.")
    return found


def _environment(folder: Path, node: str, distribution_port: int, epmd: Epmd) -> dict[str, str]:
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


def _write_configuration(
    folder: Path, plugins: Sequence[str], lines: Sequence[str], applications: Sequence[str]
) -> None:
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
