"""A private RabbitMQ cluster of three nodes on loopback."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bridge.errors import BrokerError
from bridge.sandbox.broker import Broker, Epmd
from bridge.sandbox.processes import Guard, guarded, wait_until

NODES: Final = 3
# How long a restarted node may take to rejoin all its queues.
IN_SYNC_SECONDS: Final = 60
# RabbitMQ's documentation recommends pause_minority for three nodes: an isolated node refuses
# clients. By default, it would go on as a second cluster. net_ticktime and the poll interval follow
# docs/topology.md: a hanging node is removed after 5 s instead of 60, and its queues elect a
# leader after 2 s instead of 10.
CONFIGURATION: Final = ("cluster_partition_handling = pause_minority", "net_ticktime = 5")
# RabbitMQ 3.10.8 has no `raft.adaptive_failure_detector.poll_interval` in `rabbitmq.conf`.
APPLICATIONS: Final = ("{aten, [{poll_interval, 1000}]}",)


class Cluster:
    """The nodes of a cluster, each of which is a `Broker`.

    With `management`, the first node has the management API.
    """

    def __init__(self, folder: Path, *, guard: Guard, management: bool = False) -> None:
        self._epmd = Epmd(folder, guard=guard)
        self._frozen: list[Broker] = []
        self.nodes: list[Broker] = []
        for number in range(1, NODES + 1):
            place = folder / str(number)
            place.mkdir()
            node = Broker(
                place,
                guard=guard,
                management=management and number == 1,
                epmd=self._epmd,
                configuration=CONFIGURATION,
                applications=APPLICATIONS,
            )
            self.nodes.append(node)

    @property
    def urls(self) -> list[str]:
        """The nodes' URLs, for `rabbitmq.url`."""
        return [node.url for node in self.nodes]

    @property
    def url(self) -> str:
        """The first node's URL."""
        return self.nodes[0].url

    def start(self) -> None:
        """Start all nodes, before they are joined."""
        # The first node writes the cookie that the others read.
        self.nodes[0].start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(Broker.start, self.nodes[1:]))

    def join(self) -> None:
        """Join the nodes. Quorum queues declared afterwards have three members."""
        for node in self.nodes[1:]:
            node.ctl("stop_app")
            node.ctl("join_cluster", self.nodes[0].node)
            node.ctl("start_app")

    def leader(self, queue: str) -> Broker:
        text = self.ctl("list_queues", "--formatter", "json", "name", "leader")
        leaders = {row["name"]: row["leader"] for row in json.loads(text)}
        for node in self.nodes:
            if node.node == leaders.get(queue):
                return node
        raise BrokerError(f"queue {queue} has no leader")

    def until_in_sync(self) -> None:
        """Wait until all nodes accept clients, and all members of quorum queues are online."""

        def is_in_sync() -> bool:
            if not all(node.answers() for node in self.nodes):
                return False
            try:
                text = self.ctl("list_queues", "--formatter", "json", "type", "members", "online")
            except BrokerError:  # a node is stopping or starting
                return False
            rows = [row for row in json.loads(text) if row["type"] == "quorum"]
            return all(len(row["members"]) == len(row["online"]) for row in rows)

        if not wait_until(is_in_sync, seconds=IN_SYNC_SECONDS):
            raise BrokerError(f"after {IN_SYNC_SECONDS} s a queue still lacks a member")

    def cut_off(self, node: Broker) -> None:
        """Cut a node off from the others until `heal`."""
        # Nodes with different cookies refuse each other.
        cut = "erlang:set_cookie(N, other), erlang:disconnect_node(N)"
        node.ctl("eval", f"[begin {cut} end || N <- [{self._others(node)}]].")

    def heal(self, node: Broker) -> None:
        """Reconnect a node that was cut off."""
        back = "erlang:set_cookie(N, erlang:get_cookie())"
        node.ctl("eval", f"[{back} || N <- [{self._others(node)}]].")

    def _others(self, node: Broker) -> str:
        return ",".join(f"'{other.node}'" for other in self.nodes if other is not node)

    def flush(self) -> None:
        """Make new queues survive a kill, on every node."""
        for node in self.nodes:
            node.flush()

    def freeze(self, node: Broker) -> None:
        """Freeze a node. Its connections stay open."""
        self._frozen.append(node)
        node.pause()

    def thaw(self) -> None:
        """Resume frozen nodes."""
        while self._frozen:
            self._frozen.pop().resume()

    def ctl(self, *args: str) -> str:
        """Run `rabbitmqctl` on the first available node."""
        *others, last = (node for node in self.nodes if node not in self._frozen)
        for node in others:
            try:
                return node.ctl(*args)
            except BrokerError:
                continue
        return last.ctl(*args)

    def close(self) -> None:
        """Stop all nodes and epmd."""
        for node in self.nodes:
            node.close()
        self._epmd.close()


@contextmanager
def private_cluster(*, management: bool = False) -> Iterator[Cluster]:
    """Run three nodes, which are not joined yet, and remove them afterwards.

    Raises as `private_broker` does.
    """
    folder = Path(tempfile.mkdtemp(prefix="sms-bridge-cluster-"))
    try:
        with guarded() as guard:
            cluster = Cluster(folder, guard=guard, management=management)
            try:
                cluster.start()
                yield cluster
            finally:
                cluster.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
