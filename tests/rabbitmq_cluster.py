"""A private RabbitMQ cluster: three nodes on loopback, joined, gone at exit."""

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
# How long a node may take to be a member of every queue again after its start.
IN_SYNC_SECONDS: Final = 60
# What RabbitMQ's documents recommend for three nodes: those that are cut off from the others take
# no clients until they are back. The default would go on with two clusters. And what
# docs/topology.md advises for a node that hangs: it is counted out after five seconds, give or
# take a quarter, not after sixty, and its queues have another leader after two, not ten.
CONFIGURATION: Final = ("cluster_partition_handling = pause_minority", "net_ticktime = 5")
# `raft.adaptive_failure_detector.poll_interval`, which 3.10.8 does not know in its `rabbitmq.conf`.
APPLICATIONS: Final = ("{aten, [{poll_interval, 1000}]}",)


class Cluster:
    """Nodes that are one broker, of which each can be killed and started as any `Broker`.

    With `management` the first has the management API.
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
        """The nodes' URLs, as `rabbitmq.url` takes them."""
        return [node.url for node in self.nodes]

    @property
    def url(self) -> str:
        """The first node's URL."""
        return self.nodes[0].url

    def start(self) -> None:
        """Start all nodes, each alone."""
        # The first writes the cookie that the others have to read.
        self.nodes[0].start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(Broker.start, self.nodes[1:]))

    def join(self) -> None:
        """Join the other nodes to the first; a quorum queue declared from then on is on three."""
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
        """Return when all nodes take clients, and every quorum queue has its members online."""

        def is_in_sync() -> bool:
            if not all(node.answers() for node in self.nodes):
                return False
            try:
                text = self.ctl("list_queues", "--formatter", "json", "type", "members", "online")
            except BrokerError:  # of a node that is going down or coming up
                return False
            rows = [row for row in json.loads(text) if row["type"] == "quorum"]
            return all(len(row["members"]) == len(row["online"]) for row in rows)

        if not wait_until(is_in_sync, seconds=IN_SYNC_SECONDS):
            raise BrokerError(f"after {IN_SYNC_SECONDS} s a queue still lacks a member")

    def cut_off(self, node: Broker) -> None:
        """Cut a node's connections to the others, which cannot be made again until `heal`."""
        # A node takes no other node with another cookie.
        cut = "erlang:set_cookie(N, other), erlang:disconnect_node(N)"
        node.ctl("eval", f"[begin {cut} end || N <- [{self._others(node)}]].")

    def heal(self, node: Broker) -> None:
        """Let a node that was cut off reach the others again."""
        back = "erlang:set_cookie(N, erlang:get_cookie())"
        node.ctl("eval", f"[{back} || N <- [{self._others(node)}]].")

    def _others(self, node: Broker) -> str:
        return ",".join(f"'{other.node}'" for other in self.nodes if other is not node)

    def flush(self) -> None:
        """Have the queues that were declared just now survive a kill, on every node."""
        for node in self.nodes:
            node.flush()

    def freeze(self, node: Broker) -> None:
        """Stop a node in the middle of everything; its connections stay open."""
        self._frozen.append(node)
        node.pause()

    def thaw(self) -> None:
        """Let the nodes that were frozen go on."""
        while self._frozen:
            self._frozen.pop().resume()

    def ctl(self, *args: str) -> str:
        """Run `rabbitmqctl` on the first node that answers."""
        *others, last = (node for node in self.nodes if node not in self._frozen)
        for node in others:
            try:
                return node.ctl(*args)
            except BrokerError:
                continue
        return last.ctl(*args)

    def close(self) -> None:
        """End all nodes and their name service."""
        for node in self.nodes:
            node.close()
        self._epmd.close()


@contextmanager
def private_cluster(*, management: bool = False) -> Iterator[Cluster]:
    """Run three nodes of our own, to be joined, and leave nothing of them behind.

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
