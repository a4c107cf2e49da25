"""Whether what is published to an exchange reaches a queue that keeps it."""

from collections.abc import Iterator, Mapping

from bridge.admin.checks.set_up import ManagedBroker
from bridge.admin.finding import Finding
from bridge.admin.management import Management
from bridge.topology.queue_facts import QueueFacts


async def check_exchanges(broker: ManagedBroker) -> list[Finding]:
    """Look at the bindings of the webhook's exchange, and at every alternate exchange."""
    management, settings = broker.management, broker.set_up.settings
    findings: list[Finding] = []
    if "webhook" in broker.set_up.roles:
        name = settings.webhook.exchange
        if await management.exists(name):
            findings += judge_bindings(name, await management.bound_queues(name))
    for exchange in broker.set_up.topology.exchanges:
        findings += await _check_alternate(management, exchange.name)
    return findings


async def _check_alternate(management: Management, exchange: str) -> list[Finding]:
    other = await management.alternate_exchange(exchange)
    if other is None or await management.exists(other):
        return []
    return [
        Finding(
            f"exchange {exchange}",
            "warn",
            f"its alternate exchange {other} does not exist",
            "create that exchange, or remove the alternate exchange",
        )
    ]


def judge_bindings(exchange: str, bound: Mapping[str, QueueFacts]) -> Iterator[Finding]:
    """Find events that would be answered 200 and lost: no bound queue outlives the broker."""
    subject = f"exchange {exchange}"
    fragile = sorted(name for name, facts in bound.items() if _is_fragile(facts))
    if not bound:
        yield Finding(
            subject,
            "fail",
            "no queue is bound to it: every webhook is answered 503",
            "set webhook.queue, or bind a durable queue",
        )
    elif len(fragile) == len(bound):
        yield Finding(
            subject,
            "fail",
            f"no bound queue outlives a restart of the broker: {', '.join(fragile)}",
            "set webhook.queue, or bind a durable queue",
        )
    elif fragile:
        yield Finding(
            subject,
            "warn",
            f"what these queues hold is gone after a restart of the broker: {', '.join(fragile)}",
            "make them durable, if their subscribers need every event",
        )
    else:
        yield Finding(subject, "ok", f"bound to durable queues: {', '.join(sorted(bound))}")


def _is_fragile(facts: QueueFacts) -> bool:
    """Whether a queue can go away, with all that it holds."""
    is_temporary = facts.auto_delete or facts.exclusive or facts.value("expires") is not None
    return is_temporary or not facts.durable
