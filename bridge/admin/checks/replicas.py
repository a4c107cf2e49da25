"""Whether each queue outlives the loss of a node, on a cluster of several.

A quorum queue gets its members when it is declared, three where there are as many nodes; nodes that
join later get none by themselves (RabbitMQ docs, "Quorum Queues", section "Replica Management").
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from bridge.admin.checks.queue_rules import exactly
from bridge.admin.checks.set_up import ManagedBroker
from bridge.admin.finding import Finding
from bridge.admin.management import Members

# With fewer than three members a quorum queue loses its majority with the first node.
WANTED_MEMBERS: Final = 3
_RISKS: Final[Mapping[int, str]] = {
    1: "while that one is away nothing goes in or out, and its disk has the only copy",
    2: "while one of them is away nothing goes in or out",
}


async def check_replicas(broker: ManagedBroker) -> list[Finding]:
    """Compare the members of every queue that the roles need with the nodes that there are."""
    management = broker.management
    nodes = [str(node["name"]) for node in await management.read("nodes") or ()]
    if len(nodes) == 1:
        return []
    names = [queue.name for queue in broker.set_up.topology.queues]
    found = {name: await management.members(name) for name in names}
    queues = {name: members for name, members in found.items() if members is not None}
    return [*judge_members(queues, nodes, vhost=management.vhost), *judge_online(queues)]


def judge_members(
    queues: Mapping[str, Members], nodes: Sequence[str], *, vhost: str
) -> Iterator[Finding]:
    """Find queues on fewer nodes than they could be; those that miss the same have one finding."""
    wanted = min(WANTED_MEMBERS, len(nodes))
    alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, members in queues.items():
        if len(members.nodes) < wanted:
            alike[tuple(sorted(members.nodes))].append(name)
    for held, names in alike.items():
        others = [node for node in nodes if node not in held][: wanted - len(held)]
        yield Finding(
            "replicas",
            "warn",
            f"{', '.join(names)}: on {len(held)} of {len(nodes)} nodes; {_RISKS[len(held)]}",
            "; ".join(_grow(node, names, vhost) for node in others),
        )


def _grow(node: str, names: Collection[str], vhost: str) -> str:
    queues = "|".join(exactly(name) for name in names)
    vhosts = f"--vhost-pattern '^{exactly(vhost)}$'"
    return f"rabbitmq-queues grow {node} all {vhosts} --queue-pattern '^({queues})$'"


def judge_online(queues: Mapping[str, Members]) -> Iterator[Finding]:
    """Find queues of which a member is away."""
    for name, members in queues.items():
        away = [node for node in members.nodes if node not in members.online]
        if not away:
            continue
        subject, fix = f"queue {name}", f"bring it back; rabbitmq-queues quorum_status {name}"
        if 2 * len(members.online) > len(members.nodes):
            text = f"its member on {', '.join(away)} is away: one more, and it has no majority"
            yield Finding(subject, "warn", text, fix)
        else:
            text = f"it has no majority, so it takes and gives nothing: {', '.join(away)} is away"
            yield Finding(subject, "fail", text, fix)
