"""Whether a limit, an argument or a policy makes one of the queues lose messages."""

import asyncio
from dataclasses import replace

from bridge.admin.checks.queue_rules import (
    has_default_limit,
    judge_default_limit,
    judge_policy,
    judge_queue,
    judge_refusals,
    judge_retry_queue,
)
from bridge.admin.checks.set_up import ManagedBroker
from bridge.admin.finding import CheckResult, Finding
from bridge.topology.declarations import Queue
from bridge.topology.queue_facts import QueueFacts


async def check_queues(broker: ManagedBroker) -> list[Finding]:
    """Judge every queue that the roles need and that is there."""
    queues = broker.set_up.topology.queues
    found = await asyncio.gather(*(broker.management.queue(queue.name) for queue in queues))
    faults: list[Finding] = []
    limited: list[QueueFacts] = []
    for queue, facts in zip(queues, found, strict=True):
        if facts is None:
            continue
        faults += [*_judge(broker, queue, facts), *judge_policy(facts)]
        # A retry queue takes what it delivers as new, and nobody else consumes it.
        if not _is_retry(broker, queue) and has_default_limit(facts, broker.version):
            limited.append(facts)
    if limited:
        faults.append(judge_default_limit(limited, vhost=broker.management.vhost))
    return faults or [
        Finding("queue limits", "ok", "no argument or policy makes a queue lose messages")
    ]


def _is_retry(broker: ManagedBroker, queue: Queue) -> bool:
    main_queue = broker.set_up.settings.worker.queue
    return queue.name.startswith(f"{main_queue}.retry.") and len(queue.arguments) > 1


def _judge(broker: ManagedBroker, queue: Queue, facts: QueueFacts) -> list[Finding]:
    if _is_retry(broker, queue):
        return list(judge_retry_queue(facts, queue))
    # Subscribers decide themselves about messages that keep coming back.
    drops: CheckResult = "warn" if queue.use == "subscribed" else "fail"
    found = list(judge_queue(facts, version=broker.version, drops=drops))
    if queue.use == "consumed":
        found += judge_refusals(facts)
    if queue.use == "own":
        return found
    # Arguments that others declared are used as they are; a policy can always be changed.
    as_needed = replace(
        facts, arguments=queue.arguments, durable=True, auto_delete=False, exclusive=False
    )
    of_policies = set(judge_queue(as_needed, version=broker.version, drops=drops))
    return [one if one in of_policies else replace(one, result="warn") for one in found]
