"""The bridge's own errors, by their effect on the message, and the exit codes of all commands.

BridgeError
    ConfigError              a setting is wrong               -> exit 2, one line per fault
    InvalidMessageError      body or header is not valid      -> dead letter `invalid`
    InvalidSignatureError    the webhook is not authentic     -> 401, for some services 503
    BrokerError              no usable connection or topology -> reconnect, with back-off
      ConnectError           no connection; `fault` names the kind
      CopyRefusedError       the broker refuses the copy of one message -> it stays unacked
    PublishError             the broker did not confirm       -> delivery stays unacked; 503
    PostError                the SMS API gave no answer       -> a fate (`fates`), as for a status

An answer of the SMS API is data and not an error: see `fates`.
Any other exception is a bug; it is logged, and the next message is processed. Until the outcome of
a message is decided, a bug makes it a dead letter `internal_error`. After that the message is never
sent again. If the bug prevents its ack, it stays unacked until the session ends; then the outcome
is settled, by this process if it receives the message, or by its answer to the worker that does.
"""

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

# Supervisors and scripts rely on these exit codes.
EXIT_CLEAN: Final = 0
EXIT_FAILED: Final = 1
# typer also exits with this code for an invalid option.
EXIT_USAGE: Final = 2
# EX_TEMPFAIL of sysexits.h: the next start continues with the remaining messages.
EXIT_DRAIN_TIMED_OUT: Final = 75

SignatureFault = Literal["missing", "malformed", "mismatch", "ambiguous", "stale", "future"]
ConnectFault = Literal["auth_failed", "refused", "tls_failed", "timeout", "client_unsupported"]
# How connecting to the broker ended, or a connection. `closed_by_broker`: it ended before its role
# did, for whatever reason; the process may have given it up itself.
ConnectOutcome = Literal["opened", ConnectFault, "closed_by_broker"]
# `error`: the channel ended before the broker answered. `timeout`: the deadline has passed.
PublishFault = Literal["returned", "nacked", "timeout", "error"]
# How a publish ended.
Confirm = Literal["confirmed", PublishFault]
# Why a POST ended without an answer.
PostFault = Literal[
    # No byte of the request's body was written.
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
    """The base of the bridge's own errors."""


class ConfigError(BridgeError):
    """The configuration is invalid; `faults` has one readable line for each fault."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class InvalidMessageError(BridgeError):
    """A body or header of a send request is invalid; the text names it, never its value."""


class InvalidSignatureError(BridgeError):
    """A webhook is not authentic; `fault` is for metrics and logs, never for the sender."""

    def __init__(self, fault: SignatureFault) -> None:
        super().__init__(fault)
        self.fault: SignatureFault = fault


class BrokerError(BridgeError):
    """The broker cannot be used now; the text names the reason and the remedy."""


class ConnectError(BrokerError):
    """The connection failed; `fault` is the kind, for the metrics."""

    def __init__(self, fault: ConnectFault, text: str) -> None:
        super().__init__(text)
        self.fault: ConnectFault = fault


class CopyRefusedError(BrokerError):
    """The broker refuses the copy of one message; the text has the broker's reason."""


class Refusal(NamedTuple):
    """The broker closed a channel or connection because of a message published there.

    `why` is the broker's text. `is_certain` means that the refusal concerns this message only.
    """

    why: str
    is_certain: bool


class PublishError(BridgeError):
    """The broker did not confirm a message; it may or may not have stored it.

    `refusal` is set if the broker refused this message, which was then the only unconfirmed one.
    """

    def __init__(
        self, fault: PublishFault, detail: str = "", *, refusal: Refusal | None = None
    ) -> None:
        super().__init__(detail or fault)
        self.fault: PublishFault = fault
        self.refusal = refusal

    @property
    def why(self) -> str:
        """The reason, without the routing key that the text of `returned` contains.

        A routing key may be a `reply_to` with a phone number, or any text from the service.
        """
        return "no queue is bound for it" if self.fault == "returned" else str(self)


class ExchangeRefusedError(PublishError):
    """The broker refuses an exchange: it is missing, or the user may not publish to it."""


class PostError(BridgeError):
    """The SMS API gave no answer; `fault` shows whether the request may have arrived."""

    def __init__(self, fault: PostFault) -> None:
        super().__init__(fault)
        self.fault: PostFault = fault


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes, each once.

    The chain may be circular: aiormq raises two errors from each other.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
