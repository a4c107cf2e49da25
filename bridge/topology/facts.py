"""A queue or an exchange as the broker has it, and which of an argument and a policy applies.

Pure. The rules are RabbitMQ's: where an argument and a policy both set a limit, the smaller one
applies; for everything else the argument applies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_LIMITS: Final = ("message-ttl", "expires", "max-length", "max-length-bytes", "delivery-limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """A queue as the broker has it.

    `policy` is what the policies in force set, operator policies included; `policy_name` names the
    ordinary one. Of a queue that was declared just now they may not be known yet.
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
        """Whether RabbitMQ dead-letters what it would drop."""
        return self.value("dead-letter-exchange") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """An exchange as the broker has it."""

    type: str = "topic"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _smaller(first: int, second: int) -> int:
    # A negative value means no limit.
    return min((value for value in (first, second) if value >= 0), default=first)
