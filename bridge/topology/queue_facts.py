"""Queues and exchanges as they exist on the broker, and how a queue can lose messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_LIMITS: Final = ("message-ttl", "expires", "max-length", "max-length-bytes", "delivery-limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """A queue as it exists on the broker.

    `policy` has the values of the policies in force, operator policies included; `policy_name`
    names the ordinary one. For a queue that was declared just now, they may not be known yet.
    """

    name: str
    type: str = "quorum"
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    policy_name: str | None = None
    is_policy_known: bool = True

    def value(self, key: str) -> Any:  # noqa: ANN401  numbers and texts
        """Return the value that applies for a key such as `message-ttl`, or None."""
        argument, policy = self.arguments.get(f"x-{key}"), self.policy.get(key)
        if argument is None or policy is None:
            return policy if argument is None else argument
        return _smaller(argument, policy) if key in _LIMITS else argument

    @property
    def has_dead_letters(self) -> bool:
        """Whether RabbitMQ dead-letters the messages that it would otherwise drop."""
        return self.value("dead-letter-exchange") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """An exchange as it exists on the broker."""

    type: str = "topic"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _smaller(first: int, second: int) -> int:
    # A negative value means no limit.
    return min((value for value in (first, second) if value >= 0), default=first)


NOT_DURABLE: Final = "it is gone after a restart of the broker"
AUTO_DELETED: Final = (
    "it is deleted with its messages when its last consumer ends: a restart or a pause is enough"
)


def deleted_when_unused(facts: QueueFacts) -> str:
    """Describe after which time a queue with `expires` is deleted."""
    return f"it is deleted with its messages when unused for {facts.value('expires') / 1000:g} s"


def dropped_by_age(facts: QueueFacts) -> str | None:
    """Describe after which age a message is dropped; None if there is no such limit."""
    ttl_ms = facts.value("message-ttl")
    return (
        None if ttl_ms is None else f"messages are dropped after {ttl_ms / 1000:g} s (message-ttl)"
    )


def dropped_by_length(facts: QueueFacts) -> str | None:
    """Describe the limit at which the oldest message is dropped; None if there is none."""
    limits = [key for key in ("max-length", "max-length-bytes") if facts.value(key) is not None]
    if not limits or refuses_when_full(facts):
        return None
    return f"the oldest message is dropped when it is full ({' and '.join(limits)}, drop-head)"


# A quorum queue tries again after that time to dead-letter messages that its target refused.
RETRIES_REFUSED: Final = (
    "when it is full, it rejects publishes and returning retries; RabbitMQ tries to return these "
    "every three minutes, and meanwhile no queue contains them"
)


def refuses_when_full(facts: QueueFacts) -> bool:
    """Whether the queue has a length limit, and rejects publishes when it is full."""
    has_limit = any(facts.value(key) is not None for key in ("max-length", "max-length-bytes"))
    return has_limit and facts.value("overflow") in {"reject-publish", "reject-publish-dlx"}


def dropped_by_delivery_limit(limit: int) -> str:
    """Describe after how many returns a message is dropped."""
    return (
        f"a message that is returned {limit + 1} times is dropped (delivery-limit): "
        "each crash of a consumer counts, and each look at the message"
    )


def dropped_to(facts: QueueFacts, text: str) -> str:
    """Turn "dropped" in a text into "dead-lettered" if the queue has a dead-letter exchange."""
    if not facts.has_dead_letters:
        return text
    dead_lettered = text.replace("dropped", "dead-lettered")
    return f"{dead_lettered}, without the bridge, to {dead_letters_of(facts)}"


def dead_letters_of(facts: QueueFacts) -> str:
    """Return the name of the exchange to which RabbitMQ dead-letters."""
    return facts.value("dead-letter-exchange") or "the default exchange"
