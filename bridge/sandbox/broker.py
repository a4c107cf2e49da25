"""A private RabbitMQ server for the demo and the tests: own folder, own ports, gone at exit."""

import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from yarl import URL

from bridge.errors import BrokerError
from bridge.sandbox.code_path import shorten_code_path
from bridge.sandbox.epmd import Epmd
from bridge.sandbox.node_setup import node_environment, write_configuration
from bridge.sandbox.processes import Child, Guard, free_ports, guarded, wait_until
from bridge.sandbox.rabbitmq_installation import find_scripts
from bridge.sandbox.reachability import serves, shakes_hands

# How long starting, stopping and `rabbitmqctl` may each take before they count as failed.
START_SECONDS = 90
STOP_SECONDS = 30
CTL_SECONDS = 60


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
        self._environ = node_environment(folder, self.node, distribution, self._epmd)
        self._environ |= shorten_code_path(folder / "code", self._scripts, plugins)
        configuration = (f"listeners.tcp.1 = 127.0.0.1:{self._port}", *configuration)
        write_configuration(folder, plugins, configuration, applications)
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
        return shakes_hands(URL(self.url)) and (web is None or serves(f"{web}/api/overview"))

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
