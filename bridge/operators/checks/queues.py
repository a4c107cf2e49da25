"""Whether a limit, an argument or a policy makes one of the queues lose messages."""

import asyncio
from dataclasses import replace

from bridge.operators.checks.queue_rules import judge_queue, judge_retry_queue
from bridge.operators.checks.set_up import ManagedBroker
from bridge.operators.finding import CheckResult, Finding
from bridge.topology.declarations import Queue


async def check_queues(broker: ManagedBroker) -> list[Finding]:
    """Judge every queue that the roles need and that is there."""
    queues = broker.set_up.topology.queues
    found = await asyncio.gather(*(_check_queue(broker, queue) for queue in queues))
    faults = [finding for findings in found for finding in findings]
    return faults or [
        Finding("queue limits", "ok", "no argument or policy makes a queue lose messages")
    ]


async def _check_queue(broker: ManagedBroker, queue: Queue) -> list[Finding]:
    facts = await broker.management.queue(queue.name)
    if facts is None:
        return []
    main_queue = broker.set_up.settings.worker.queue
    if queue.name.startswith(f"{main_queue}.retry.") and len(queue.arguments) > 1:
        return list(judge_retry_queue(facts, queue))
    # Subscribers decide themselves about messages that keep coming back.
    drops: CheckResult = "warn" if queue.use == "subscribed" else "fail"
    found = list(judge_queue(facts, version=broker.version, drops=drops))
    if queue.use == "own":
        return found
    # Arguments that others declared are used as they are; a policy can always be changed.
    as_needed = replace(
        facts, arguments=queue.arguments, durable=True, auto_delete=False, exclusive=False
    )
    of_policies = set(judge_queue(as_needed, version=broker.version, drops=drops))
    return [one if one in of_policies else replace(one, result="warn") for one in found]
