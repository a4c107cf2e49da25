"""Checks through RabbitMQ's management API: policies, members, alarms, bindings.

The functions `judge_...` are pure. Since RabbitMQ 4.0 a quorum queue without a delivery limit has
one of 20, and a negative limit means none; older versions read a negative limit as: drop whatever
comes back once.
"""

import asyncio
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from bridge.admin.checks.findings import CheckedBroker, CheckResult, Finding, judge_clock
from bridge.admin.management import Members
from bridge.topology import queue_facts
from bridge.topology.declarations import Queue
from bridge.topology.queue_facts import QueueFacts

DEFAULT_DELIVERY_LIMIT: Final = 20
_DEFAULT_LIMIT_SINCE: Final = (4, 0)
SHORT_CONSUMER_TIMEOUT_MS: Final = 15 * 60 * 1000
# With fewer than three members a quorum queue loses its majority with the first node.
WANTED_MEMBERS: Final = 3
_RISKS: Final[Mapping[int, str]] = {
    1: "while that one is away nothing goes in or out, and its disk has the only copy",
    2: "while one of them is away nothing goes in or out",
}


async def check_alarms(broker: CheckedBroker) -> list[Finding]:
    """Find each node that accepts no messages because memory or disk runs out."""
    return [
        Finding(
            f"broker node {node['name']}",
            "fail",
            f"{what} alarm: it takes no messages",
            f"free {what} on it",
        )
        for node in await broker.management.read("nodes") or ()
        for what, key in (("memory", "mem_alarm"), ("disk", "disk_free_alarm"))
        if node.get(key)
    ]


async def check_brokers_clock(broker: CheckedBroker) -> list[Finding]:
    """Compare the clocks, by the Date of the management API's last answer."""
    return judge_clock("broker", broker.management.clock_skew_seconds)


# Queues. Their arguments are compared over AMQP; the policies in force are judged here.


async def check_queues(broker: CheckedBroker) -> list[Finding]:
    """Judge the policies of every queue that the roles need and that exists."""
    queues = broker.topology.queues
    found = await asyncio.gather(*(broker.management.queue(queue.name) for queue in queues))
    faults: list[Finding] = []
    limited: list[QueueFacts] = []
    for queue, facts in zip(queues, found, strict=True):
        if facts is None:
            continue
        faults += judge_policies(facts, queue, broker.version)
        # A retry queue has no consumer, so nothing comes back to it.
        if not _is_retry(queue) and has_default_limit(facts, broker.version):
            limited.append(facts)
    if limited:
        faults.append(judge_default_limit(limited, vhost=broker.management.vhost))
    return faults or [Finding("queue limits", "ok", "no policy makes a queue lose messages")]


def _is_retry(queue: Queue) -> bool:
    return "x-dead-letter-routing-key" in queue.arguments


def judge_policies(facts: QueueFacts, needed: Queue, version: tuple[int, ...]) -> Iterator[Finding]:
    """Find policies that would drop or refuse messages of a queue."""
    subject = f"queue {facts.name}"
    if not facts.is_policy_known:
        yield Finding(
            subject,
            "warn",
            "which policy is in force is not known yet",
            "run this again; if it stays so, look at the queue's leader: "
            f"rabbitmq-queues quorum_status {facts.name}",
        )
    as_needed = replace(facts, arguments=needed.arguments)
    if as_needed.value("expires") is not None:
        text = queue_facts.deleted_when_unused(as_needed)
        yield Finding(subject, "fail", text, "remove `expires` from its policy")
    if _is_retry(needed):
        ttl, needed_ttl = as_needed.value("message-ttl"), needed.arguments["x-message-ttl"]
        if ttl != needed_ttl:
            text = f"message-ttl is {ttl} and must be {needed_ttl}, or messages come back too early"
            yield Finding(subject, "fail", text, "remove `message-ttl` from its policy")
        return
    # Subscribers decide for themselves about messages that keep coming back.
    yield from _judge_drops(as_needed, version, "warn" if needed.use == "subscribed" else "fail")
    if facts.type == "classic" and facts.value("ha-mode") is not None:
        yield Finding(
            subject,
            "warn",
            "it is mirrored (ha-mode): a mirror that is not in step loses messages when it takes "
            "over, and RabbitMQ 4 has no mirrors",
            "make it a quorum queue",
        )
    timeout_ms = as_needed.value("consumer-timeout")
    if timeout_ms is not None and timeout_ms < SHORT_CONSUMER_TIMEOUT_MS:
        text = (
            f"consumer-timeout is {timeout_ms / 1000:g} s: a paused worker holds a message longer"
        )
        yield Finding(subject, "warn", text, "raise it to 30 minutes")
    if needed.use == "consumed" and queue_facts.refuses_when_full(as_needed):
        yield Finding(
            subject,
            "warn",
            queue_facts.RETRIES_REFUSED,
            "remove the limit from its policy, and bound publishers in another way; "
            "`sms-bridge status` counts retries that are late",
        )


def _judge_drops(
    facts: QueueFacts, version: tuple[int, ...], drops: CheckResult
) -> Iterator[Finding]:
    lift = "remove `delivery-limit` from its policy"
    if version >= _DEFAULT_LIMIT_SINCE:
        lift = "set `delivery-limit` to -1 in its policy"
    age = "remove `message-ttl` from its policy; for requests set worker.max_age"
    result: CheckResult = "warn" if facts.has_dead_letters else drops
    for text, fix in (
        (queue_facts.dropped_by_age(facts), age),
        (queue_facts.dropped_by_length(facts), "set `overflow: reject-publish` beside the limit"),
        (_over_delivery_limit(facts, version), lift),
    ):
        if text is not None:
            told = queue_facts.dropped_to(facts, text)
            yield Finding(f"queue {facts.name}", result, told, fix)


def _over_delivery_limit(facts: QueueFacts, version: tuple[int, ...]) -> str | None:
    limit = facts.value("delivery-limit")
    if facts.type != "quorum" or limit is None:
        return None
    if limit >= 0:
        return queue_facts.dropped_by_delivery_limit(limit, "delivery-limit")
    if version >= _DEFAULT_LIMIT_SINCE:
        return None
    return "delivery-limit is below zero, which this RabbitMQ reads as: drop what comes back once"


def has_default_limit(facts: QueueFacts, version: tuple[int, ...]) -> bool:
    """Whether RabbitMQ's own delivery limit is in force, because none is set."""
    is_limited = facts.type == "quorum" and version >= _DEFAULT_LIMIT_SINCE
    return is_limited and facts.is_policy_known and facts.value("delivery-limit") is None


def judge_default_limit(queues: Sequence[QueueFacts], *, vhost: str) -> Finding:
    """Explain the cost of RabbitMQ's default delivery limit, and how to lift it."""
    names = ", ".join(facts.name for facts in queues)
    text = (
        f"RabbitMQ drops a message that came back {DEFAULT_DELIVERY_LIMIT + 1} times, its default "
        f"since version 4, as from a worker that dies again and again: {names}"
    )
    free = [facts.name for facts in queues if facts.policy_name is None]
    fixes = []
    if free:
        pattern = "|".join(exactly(name) for name in free)
        where = "" if vhost == "/" else f"-p {shlex.quote(vhost)} "
        policy = shlex.quote(f"sms-bridge-{free[0]}")
        fixes.append(
            f"rabbitmqctl set_policy {where}--apply-to queues {policy} "
            f"'^({pattern})$' '{{\"delivery-limit\":-1}}'"
        )
    # Only one policy is in force on a queue.
    fixes += [
        f"add delivery-limit -1 to the policy {facts.policy_name}, in force on {facts.name}"
        for facts in queues
        if facts.policy_name is not None
    ]
    return Finding("delivery limit", "warn", text, "; ".join(fixes))


def exactly(name: str) -> str:
    """Write a name as a pattern that matches only it.

    With brackets rather than backslashes, which a shell or a YAML file may take away.
    """
    return re.sub(r"[^\w/-]", r"[\g<0>]", name)


# Members. A quorum queue gets its members when it is declared, three if there are as many nodes;
# nodes that join later get none by themselves.


async def check_replicas(broker: CheckedBroker) -> list[Finding]:
    """On a cluster, compare the members of every queue with the nodes."""
    management = broker.management
    nodes = [str(node["name"]) for node in await management.read("nodes") or ()]
    if len(nodes) == 1:
        return []
    found = {queue.name: await management.members(queue.name) for queue in broker.topology.queues}
    queues = {name: members for name, members in found.items() if members is not None}
    return [*judge_members(queues, nodes, vhost=management.vhost), *judge_online(queues)]


def judge_members(
    queues: Mapping[str, Members], nodes: Sequence[str], *, vhost: str
) -> Iterator[Finding]:
    """Find queues on fewer nodes than possible; queues with the same members share a finding."""
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
        away = ", ".join(node for node in members.nodes if node not in members.online)
        fix = f"bring it back; rabbitmq-queues quorum_status {name}"
        if away and 2 * len(members.online) > len(members.nodes):
            text = f"its member on {away} is away: one more, and it has no majority"
            yield Finding(f"queue {name}", "warn", text, fix)
        elif away:
            text = f"it has no majority, so it takes and gives nothing: {away} is away"
            yield Finding(f"queue {name}", "fail", text, fix)


# Exchanges


async def check_exchanges(broker: CheckedBroker) -> list[Finding]:
    """Look at the bindings of the webhook's exchange, and at every alternate exchange."""
    management, name = broker.management, broker.settings.webhook.exchange
    findings: list[Finding] = []
    if "webhook" in broker.roles and await management.exists(name):
        findings.append(judge_bindings(name, await management.bound_queues(name)))
    for exchange in broker.topology.exchanges:
        other = await management.alternate_exchange(exchange.name)
        if other is not None and not await management.exists(other):
            text = f"its alternate exchange {other} does not exist"
            fix = "create that exchange, or remove the alternate exchange"
            findings.append(Finding(f"exchange {exchange.name}", "warn", text, fix))
    return findings


def judge_bindings(exchange: str, bound: Mapping[str, QueueFacts]) -> Finding:
    """Find events that would be answered 200 and lost: no bound queue outlives the broker."""
    subject, fix = f"exchange {exchange}", "set webhook.queue, or bind a durable queue"
    fragile = ", ".join(sorted(name for name, facts in bound.items() if _is_fragile(facts)))
    if not bound:
        text = "no queue is bound to it: every webhook is answered 503"
        return Finding(subject, "fail", text, fix)
    if all(map(_is_fragile, bound.values())):
        text = f"no bound queue outlives a restart of the broker: {fragile}"
        return Finding(subject, "fail", text, fix)
    if fragile:
        text = f"what these queues hold is gone after a restart of the broker: {fragile}"
        fix = "make them durable, if their subscribers need every event"
        return Finding(subject, "warn", text, fix)
    return Finding(subject, "ok", f"bound to durable queues: {', '.join(sorted(bound))}")


def _is_fragile(facts: QueueFacts) -> bool:
    """Whether the queue can disappear, with all its messages."""
    is_temporary = facts.auto_delete or facts.exclusive or facts.value("expires") is not None
    return is_temporary or not facts.durable
