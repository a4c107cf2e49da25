"""A private RabbitMQ server for the demo and the tests, with its own folder and ports."""

import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
from yarl import URL

from bridge.errors import BrokerError
from bridge.sandbox.processes import Child, Guard, accepts, free_ports, guarded, wait_until

# Names a running broker for the demo and the tests to use instead.
URL_VARIABLE: Final = "SMS_BRIDGE_RABBITMQ__URL"
# Deadlines of a start, a stop, `rabbitmqctl` and a handshake.
START_SECONDS: Final = 90
STOP_SECONDS: Final = 30
CTL_SECONDS: Final = 60
HANDSHAKE_SECONDS: Final = 3
# The interval in which RabbitMQ repeats an unconfirmed move from a retry queue, for example to a
# queue that has no leader yet after a start. The default is three minutes.
_DEAD_LETTER_CONFIRM_SECONDS: Final = 3
_PACKAGE_FOLDERS = (
    "/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin",
    "/opt/rabbitmq/sbin",
    "/opt/homebrew/opt/rabbitmq/sbin",
    "/usr/local/opt/rabbitmq/sbin",
)


class Epmd:
    """Erlang's name service for nodes with the home directory `folder`, which has their cookie.

    Unlike one that a node starts, it ends with the broker.
    """

    def __init__(self, folder: Path, *, guard: Guard) -> None:
        self.folder = folder
        self.port = free_ports(1)[0]
        self._guard = guard
        self._child: Child | None = None

    def start(self) -> None:
        """Start it unless it is running; return when it accepts connections."""
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
        if self._child is not None:
            self._child.kill()


class Broker:
    """One RabbitMQ node on this computer, which keeps its data and ports in restarts.

    Nodes with the same `epmd` can form a cluster. `configuration` adds lines to `rabbitmq.conf`,
    `applications` adds terms to `advanced.config`.
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
        port, distribution, management_port = free_ports(3)
        self.url = f"amqp://guest:guest@127.0.0.1:{port}/"
        self.management_url = f"http://127.0.0.1:{management_port}" if management else None
        self.node = f"sms-bridge-{secrets.token_hex(4)}@localhost"
        if management:
            plugins = (*plugins, "rabbitmq_management")
            own = ("management.tcp.ip = 127.0.0.1", f"management.tcp.port = {management_port}")
            configuration = (*own, *configuration)
        self._environ = _environment(folder, self.node, distribution, self._epmd)
        self._environ |= shorten_code_path(folder / "code", self._scripts, plugins)
        configuration = (f"listeners.tcp.1 = 127.0.0.1:{port}", *configuration)
        _write_configuration(folder, plugins, configuration, applications)
        self._server: Child | None = None

    @property
    def _running(self) -> Child:
        if self._server is None:
            raise BrokerError("The private RabbitMQ has not been started.")
        return self._server

    @property
    def pid(self) -> int:
        """The process id of the last Erlang VM."""
        return self._running.pid

    def start(self) -> None:
        """Start, also after `stop` or `kill`; return when it answers clients."""
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
            how = f"did not answer within {START_SECONDS} s"
            if server.exit_code is not None:
                how = f"ended at once with code {server.exit_code}"
            raise BrokerError(f"The private RabbitMQ {how}; the end of its log:\n{server.tail()}")

    def stop(self) -> None:
        self.resume()
        self._running.end(grace_seconds=STOP_SECONDS)

    def flush(self) -> None:
        """Write the directory of quorum queues to disk, so that new queues survive a kill.

        RabbitMQ writes it with a delay of half a second. After a restart, a queue that is missing
        there is listed but never answers.
        """
        self.ctl("eval", "[dets:sync(Table) || Table <- dets:all()].")

    def kill(self) -> None:
        """Kill the server, like a power cut."""
        self._running.kill()

    def pause(self) -> None:
        """Freeze the server: connections stay open without answers."""
        self._running.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._running.signal(signal.SIGCONT)

    def ctl(self, *args: str, tool: str = "rabbitmqctl") -> str:
        """Run `rabbitmqctl`, or another `tool` of RabbitMQ, on this node; return its output."""
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
        """Kill the server, if it has been started, and its name service."""
        if self._server is not None:
            self._server.kill()
        self._epmd.close()

    def answers(self) -> bool:
        web = self.management_url
        return answers_amqp(self.url) and (web is None or _answers_http(f"{web}/api/overview"))


@contextmanager
def private_broker(
    *, management: bool = False, plugins: Sequence[str] = (), configuration: Sequence[str] = ()
) -> Iterator[Broker]:
    """Run a private RabbitMQ server, and remove it completely afterwards.

    Raises BrokerError if RabbitMQ is not installed or does not start.
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


def find_scripts() -> Path:
    """Find the folder of RabbitMQ's own scripts, which also has `rabbitmq-env`.

    Debian's wrappers on PATH change the user and ignore the environment. Raises BrokerError with
    the remedy if RabbitMQ is not installed.
    """
    found = [path for pattern in _PACKAGE_FOLDERS for path in sorted(Path("/").glob(pattern[1:]))]
    on_path = shutil.which("rabbitmq-server")
    if on_path is not None:
        found.insert(0, Path(on_path).resolve().parent)
    for folder in found:
        if all((folder / name).is_file() for name in ("rabbitmq-env", "rabbitmq-server")):
            return folder
    raise BrokerError(
        "No RabbitMQ server is installed: run `apt-get install rabbitmq-server`, "
        "`dnf install rabbitmq-server` or `brew install rabbitmq`, "
        f"or set {URL_VARIABLE} to a running broker."
    )


def _find_epmd() -> str:
    erlang = shutil.which("erl")
    beside = str(Path(erlang).resolve().parent) if erlang else ""
    found = shutil.which("epmd") or shutil.which("epmd", path=beside)
    if found is None:
        raise BrokerError("Erlang's `epmd` is not on PATH; install all of Erlang.")
    return found


def _environment(folder: Path, node: str, distribution_port: int, epmd: Epmd) -> dict[str, str]:
    """Return the environment of a node and its `rabbitmqctl`, which write to `folder` only."""
    # RabbitMQ and Erlang variables of the user are for another node.
    others = {k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_"))}
    local = "-kernel inet_dist_use_interface {127,0,0,1}"
    return {
        **others,
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
        # Makes the script exec the VM instead of waiting for it, so that signals reach the VM;
        # -noinput on the command line disables the input again.
        "RABBITMQ_ALLOW_INPUT": "1",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"+S 1:1 +B i {local}",
        "RABBITMQ_CTL_ERL_ARGS": f"+S 1:1 {local}",
    }


def _write_configuration(
    folder: Path, plugins: Sequence[str], lines: Sequence[str], applications: Sequence[str]
) -> None:
    # The default limit would raise an alarm on a small or full disk.
    base = ("disk_free_limit.absolute = 50MB", "log.file.level = info", "log.console = false")
    milliseconds = _DEAD_LETTER_CONFIRM_SECONDS * 1000
    rabbit = f"{{rabbit, [{{dead_letter_worker_publisher_confirm_timeout, {milliseconds}}}]}}"
    for name, text in {
        "rabbitmq.conf": "\n".join((*base, *lines)),
        "plugins": f"[{', '.join(plugins)}].",
        "advanced.config": f"[{', '.join((rabbit, *applications))}].",
    }.items():
        (folder / name).write_text(f"{text}\n", encoding="utf-8")


def shorten_code_path(folder: Path, scripts: Path, plugins: Sequence[str]) -> dict[str, str]:
    """Return variables that halve the CPU time in which a node loads its code.

    For each of its thousand modules Erlang searches the code path from the front, where RabbitMQ
    puts all plugins. `folder` replaces these by links to the enabled ones. Returns nothing if the
    layout of Erlang or RabbitMQ is unknown.
    """
    erlang = shutil.which("erl")
    if erlang is None:
        return {}
    bundled = _applications((scripts / "rabbitmq-env").resolve().parents[1] / "plugins")
    every = _applications(Path(erlang).resolve().parents[1] / "lib") | bundled
    if "rabbit" not in bundled or "kernel" not in every:
        return {}
    # RabbitMQ starts Mnesia, but does not list it as a dependency.
    needed = _with_dependencies(["rabbit", "mnesia"], every)
    linked = ((_with_dependencies(plugins, every) - needed) | {"rabbit"}) & bundled.keys()
    folder.mkdir()
    for name in linked:
        (folder / bundled[name].name).symlink_to(bundled[name])
    # Erlang reverses the order, and so searches the folders with the most modules first.
    paths = sorted((every[name] / "ebin" for name in needed), key=_count_modules)
    arguments = " ".join(["-pa", *map(str, paths)])
    return {"RABBITMQ_PLUGINS_DIR": str(folder), "ERL_AFLAGS": arguments}


def _applications(folder: Path) -> dict[str, Path]:
    # A folder has the name of the application and usually its version: `rabbit-3.13.7`.
    named = {path.name.partition("-")[0]: path for path in sorted(folder.glob("*"))}
    return {name: path for name, path in named.items() if (path / "ebin" / f"{name}.app").is_file()}


def _with_dependencies(names: Iterable[str], every: Mapping[str, Path]) -> set[str]:
    found: set[str] = set()
    left = [*names]
    while left:
        name = left.pop()
        if name in every and name not in found:
            found.add(name)
            text = (every[name] / "ebin" / f"{name}.app").read_text(encoding="utf-8")
            listed = re.search(r"\{\s*applications\s*,\s*\[([^\]]*)\]", text)
            left += re.findall(r"\w+", listed[1]) if listed else []
    return found


def _count_modules(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*.beam"))


def answers_amqp(url: str) -> bool:
    try:
        broker = URL(url)
        if broker.scheme not in {"amqp", "amqps"}:
            return False
        is_tls = broker.scheme == "amqps"
        address = (broker.host or "localhost", broker.port or (5671 if is_tls else 5672))
        with socket.create_connection(address, HANDSHAKE_SECONDS) as plain:
            if not is_tls:
                return _shakes_hands(plain)
            # No password is sent here, so the certificate does not matter.
            context = ssl._create_unverified_context()  # noqa: S323, SLF001
            with context.wrap_socket(plain, server_hostname=address[0]) as wrapped:
                return _shakes_hands(wrapped)
    except (OSError, ValueError):
        return False


def _shakes_hands(connection: socket.socket) -> bool:
    connection.sendall(b"AMQP\x00\x00\x09\x01")
    # The start of a method frame on channel 0; another version of AMQP answers "AMQP...".
    return connection.recv(3) == b"\x01\x00\x00"


def _answers_http(url: str) -> bool:
    guest = ("guest", "guest")
    try:
        return httpx.get(url, auth=guest, trust_env=False, timeout=HANDSHAKE_SECONDS).is_success
    except httpx.HTTPError:
        return False
