"""Every error that the bridge raises itself, classed by what happens to the message next.

BridgeError
    ConfigError              a setting is wrong               -> exit 2, a line for each fault
    InvalidMessageError      the body is not a send request   -> dead letter `invalid`
    InvalidSignatureError    the webhook is not authentic     -> 401
    BrokerError              no usable connection or topology -> connect again, with back-off
      ConnectError           no connection at all; `fault` says which kind
      CopyRefusedError       it takes all but one message's copy -> that message stays unacked
    PublishError             the broker did not store it      -> hold the delivery; 503 to a webhook
    AttemptError             the SMS API gave no answer       -> a fate, as each status has one

What the SMS API answers is no error but data: see `fates`.
Anything else that is raised is a bug: caught once at a task's edge, dead letter `internal_error`.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

SignatureFault = Literal["missing", "malformed", "mismatch", "ambiguous", "stale", "future"]
ConnectFault = Literal["auth_failed", "refused", "tls_failed", "timeout", "client_unsupported"]
# What became of a connection to the broker.
ConnectOutcome = Literal["opened", ConnectFault, "closed_by_broker"]
# `error`: the channel ended before the broker answered. `timeout`: whoever waited has given up.
PublishFault = Literal["returned", "nacked", "timeout", "error"]
# What became of a publish.
Confirm = Literal["confirmed", PublishFault]
# How an attempt, one POST, ended without an answer.
AttemptFault = Literal[
    # Not one byte of the request's body was written.
    "connect_failed",
    "connect_timeout",
    "proxy_failed",
    "pool_exhausted",
    "tls_failed",
    # The request may have arrived.
    "answer_timeout",
    "connection_lost",
    "not_http",
]


class BridgeError(Exception):
    """The root of the bridge's own errors."""


class ConfigError(BridgeError):
    """The configuration cannot be used; `faults` holds one readable line for each reason."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class InvalidMessageError(BridgeError):
    """A message is not a send request; the text names the field and never its value."""


class InvalidSignatureError(BridgeError):
    """A webhook is not authentic; `fault` says how, for metrics and logs, never for the sender."""

    def __init__(self, fault: SignatureFault) -> None:
        super().__init__(fault)
        self.fault: SignatureFault = fault


class BrokerError(BridgeError):
    """The broker cannot be used now; the text says why and what to do."""


class ConnectError(BrokerError):
    """There is no connection to the broker; `fault` is the kind, for metrics and the back-off."""

    def __init__(self, fault: ConnectFault, text: str) -> None:
        super().__init__(text)
        self.fault: ConnectFault = fault


class CopyRefusedError(BrokerError):
    """The broker refuses one message's copy for itself; the text holds the broker's reason."""


class Refusal(NamedTuple):
    """How the broker ended a channel, or its connection, because of what was published there.

    `why`: its own words. `is_certain`: no other message would have been refused in the same way.
    """

    why: str
    is_certain: bool


class PublishError(BridgeError):
    """The broker did not confirm that it stored a message; it may or may not have it.

    `refusal`: it has refused this message for itself, which was published alone.
    """

    def __init__(
        self, fault: PublishFault, detail: str = "", *, refusal: Refusal | None = None
    ) -> None:
        super().__init__(detail or fault)
        self.fault: PublishFault = fault
        self.refusal = refusal

    @property
    def why(self) -> str:
        """What went wrong, without the routing key that the text of `returned` names.

        A key may be a `reply_to` with a number in it, or any text that the service sent.
        """
        return "no queue takes it" if self.fault == "returned" else str(self)


class ExchangeRefusedError(PublishError):
    """The broker refuses an exchange: it is missing, or the user may not publish to it."""


class AttemptError(BridgeError):
    """The SMS API gave no answer; `fault` says how, and so whether the request may have arrived."""

    def __init__(self, fault: AttemptFault) -> None:
        super().__init__(fault)
        self.fault: AttemptFault = fault


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, each once.

    A chain may run in a circle: aiormq raises one error from another and back.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
