"""Checks through RabbitMQ's management API: policies, members, alarms, bindings.

The functions `judge_...` are pure. Since RabbitMQ 4.0 the default delivery limit of a quorum queue
is 20, and a negative limit means none; for older versions a negative limit means that a message is
dropped when it comes back once.
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
# With fewer than three members a quorum queue loses its majority with one node.
WANTED_MEMBERS: Final = 3
_RISKS: Final[Mapping[int, str]] = {
    1: "unavailable while that node is offline, and its disk has the only copy",
    2: "unavailable while either of them is offline",
}


async def check_alarms(broker: CheckedBroker) -> list[Finding]:
    """Find nodes that accept no messages because memory or disk space runs out."""
    return [
        Finding(
            f"broker node {node['name']}",
            "fail",
            f"{what} alarm: it accepts no messages",
            f"free {what} on it",
        )
        for node in await broker.management.read("nodes") or ()
        for what, key in (("memory", "mem_alarm"), ("disk", "disk_free_alarm"))
        if node.get(key)
    ]


async def check_brokers_clock(broker: CheckedBroker) -> list[Finding]:
    """Compare the clocks by the Date header of the management API's last answer."""
    return judge_clock("the broker", broker.management.clock_skew_seconds)


# Queues. Their arguments are compared over AMQP; here their policies are judged.


async def check_queues(broker: CheckedBroker) -> list[Finding]:
    queues = broker.topology.queues
    found = await asyncio.gather(*(broker.management.queue(queue.name) for queue in queues))
    faults: list[Finding] = []
    limited: list[QueueFacts] = []
    for queue, facts in zip(queues, found, strict=True):
        if facts is None:
            continue
        faults += judge_policies(facts, queue, broker.version)
        # Nothing comes back to a retry queue, which has no consumer.
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
            "the policy in force is not known yet",
            "run this again; if this persists, look at the queue's leader: "
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
    # For queues of subscribers, who decide themselves about redeliveries, it is a warning.
    yield from _judge_drops(as_needed, version, "warn" if needed.use == "subscribed" else "fail")
    if facts.type == "classic" and facts.value("ha-mode") is not None:
        yield Finding(
            subject,
            "warn",
            "it is mirrored (ha-mode): an unsynchronised mirror loses messages when it takes over, "
            "and RabbitMQ 4 has no mirrors",
            "replace it by a quorum queue",
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
            "remove the limit from its policy, and limit the publishers in another way; "
            "`sms-bridge status` counts late retries",
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
        return queue_facts.dropped_by_delivery_limit(limit)
    if version >= _DEFAULT_LIMIT_SINCE:
        return None
    return "delivery-limit is negative: this RabbitMQ drops a message that comes back once"


def has_default_limit(facts: QueueFacts, version: tuple[int, ...]) -> bool:
    is_limited = facts.type == "quorum" and version >= _DEFAULT_LIMIT_SINCE
    return is_limited and facts.is_policy_known and facts.value("delivery-limit") is None


def judge_default_limit(queues: Sequence[QueueFacts], *, vhost: str) -> Finding:
    """Explain the cost of RabbitMQ's default delivery limit, and how to lift it."""
    names = ", ".join(facts.name for facts in queues)
    text = (
        f"RabbitMQ drops a message that is returned {DEFAULT_DELIVERY_LIMIT + 1} times, for "
        f"example by a worker that keeps crashing; this is the default since version 4: {names}"
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
    """Return a pattern that matches only this name.

    It has no backslashes, because a shell or a YAML file may remove them.
    """
    return re.sub(r"[^\w/-]", r"[\g<0>]", name)


# Members. A quorum queue gets up to three members when it is declared; nodes that join later do not
# become members by themselves.


async def check_replicas(broker: CheckedBroker) -> list[Finding]:
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
    """Find queues with too few members; queues with the same members share a finding."""
    wanted = min(WANTED_MEMBERS, len(nodes))
    alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, members in queues.items():
        # A queue has a member at least; without any, the management API has not named them.
        if 0 < len(members.nodes) < wanted:
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
    for name, members in queues.items():
        away = ", ".join(node for node in members.nodes if node not in members.online)
        fix = f"start it again; rabbitmq-queues quorum_status {name}"
        if away and 2 * len(members.online) > len(members.nodes):
            text = f"its member on {away} is offline; with one more offline it has no majority"
            yield Finding(f"queue {name}", "warn", text, fix)
        elif away:
            text = f"it has no majority, so it is unavailable: {away} is offline"
            yield Finding(f"queue {name}", "fail", text, fix)


# Exchanges


async def check_exchanges(broker: CheckedBroker) -> list[Finding]:
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
    """Find out whether a bound queue survives a restart of the broker, so that no event is lost."""
    subject, fix = f"exchange {exchange}", "set webhook.queue, or bind a durable queue"
    fragile = ", ".join(sorted(name for name, facts in bound.items() if _is_fragile(facts)))
    if not bound:
        text = "no queue is bound to it: every webhook is answered 503"
        return Finding(subject, "fail", text, fix)
    if all(map(_is_fragile, bound.values())):
        text = f"no bound queue survives a restart of the broker: {fragile}"
        return Finding(subject, "fail", text, fix)
    if fragile:
        text = f"messages in these queues are lost when the broker restarts: {fragile}"
        fix = "make them durable if their subscribers need every event"
        return Finding(subject, "warn", text, fix)
    return Finding(subject, "ok", f"bound to durable queues: {', '.join(sorted(bound))}")


def _is_fragile(facts: QueueFacts) -> bool:
    """Whether the queue can disappear with its messages."""
    is_temporary = facts.auto_delete or facts.exclusive or facts.value("expires") is not None
    return is_temporary or not facts.durable
