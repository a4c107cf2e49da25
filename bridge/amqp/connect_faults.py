"""What went wrong when no connection opened: the fault, its cause and the remedy, in one error."""

import socket
import ssl
from importlib.metadata import version
from typing import Final, assert_never

from bridge.amqp.client import (
    AuthenticationError,
    ConnectionNotAllowed,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from bridge.errors import ConnectError, ConnectFault, causes_of

_CLIENT: Final = ("aio-pika", "aiormq", "pamqp")

# What another version of a library raises when we call it like the one that we know.
OTHER_INTERFACE = (AttributeError, TypeError)
_LOGIN_FAULTS = (ProbableAuthenticationError, AuthenticationError, ConnectionNotAllowed)
# The reply codes `access-refused` and `not-allowed` (AMQP 0-9-1, 1.2): the broker knows no such
# virtual host, or the user has no right to it.
_REFUSED_LOGIN: Final = (403, 530)
# OpenSSL's reasons when the peer's first bytes are not TLS; the second comes with Python 3.13.
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
# How a TLS alert begins: its record type and the major version (RFC 8446, 5.1).
_TLS_ALERT: Final = b"\x15\x03"


def refusal(error: Exception, host: str, closed: tuple[int, str], foreign: bytes) -> ConnectError:
    """Make the error that names the fault and the remedy of a connection that did not open.

    `closed` is the code and the text with which the broker closed it, `foreign` how the answer
    began if it was not AMQP.
    """
    if isinstance(error, OTHER_INTERFACE):
        return unsupported(host)
    code, said = closed
    is_refused = code in _REFUSED_LOGIN or (not code and _is_closed_instead_of_opened(error))
    fault = "auth_failed" if is_refused else _classify(error)
    why = f"{fault}: {said}" if said else fault
    cause, remedy = _look_closer(error, foreign) or (why, _remedy_for(fault))
    return ConnectError(fault, f"no connection to {host} ({cause}); {remedy}")


def _is_closed_instead_of_opened(error: Exception) -> bool:
    """Whether the broker has answered, with a user that it knows, but not opened the virtual host.

    aiormq does not say which frame came in place of the one that it names, but a broker has only
    one choice: it closes the connection.
    """
    return isinstance(error, InvalidFrameError) and "Connection.OpenOk" in str(error)


def unsupported(host: str) -> ConnectError:
    """Make the error of an installed client library that the bridge does not work with."""
    installed = ", ".join(f"{name} {version(name)}" for name in _CLIENT)
    fault: ConnectFault = "client_unsupported"
    cause = f"no connection to {host} ({fault}: {installed})"
    return ConnectError(fault, f"{cause}; {_remedy_for(fault)}")


def is_unreachable(error: BaseException) -> bool:
    """Whether nothing answered at all: the connection was refused, or it timed out."""
    return _classify(error) in {"refused", "timeout"}


def _classify(error: BaseException) -> ConnectFault:
    causes = list(causes_of(error))
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "tls_failed"
    if any(isinstance(cause, _LOGIN_FAULTS) for cause in causes):
        return "auth_failed"
    return "timeout" if any(isinstance(cause, TimeoutError) for cause in causes) else "refused"


def _remedy_for(fault: ConnectFault) -> str:
    match fault:
        case "auth_failed":
            return "check rabbitmq.username, rabbitmq.password and the vhost in rabbitmq.url"
        case "refused":
            return "check that RabbitMQ runs and that rabbitmq.url names its host and port"
        case "tls_failed":
            return "check rabbitmq.tls and the broker's certificate"
        case "timeout":
            return "check the network to the broker, and the port in rabbitmq.url: nothing answered"
        case "client_unsupported":
            versions = "install the versions that uv.lock names, or use the released image"
            return f"nothing would be delivered: {versions}"
        case _:
            assert_never(fault)


def _look_closer(error: BaseException, foreign: bytes) -> tuple[str, str] | None:
    """Name the cause and the remedy where more is known than the fault itself.

    `foreign` is how the answer began if it was not AMQP.
    """
    ports = "it is usually 5672, with TLS 5671"
    if any(isinstance(cause, socket.gaierror) for cause in causes_of(error)):
        return "its name is not found", "check the host in rabbitmq.url and the resolver"
    if any(getattr(cause, "reason", "") in _NO_TLS for cause in causes_of(error)):
        return "no TLS is spoken there", f"write amqp:// in rabbitmq.url, or its port: {ports}"
    if foreign.startswith(b"HTTP/"):
        return "HTTP is spoken there, not AMQP", f"correct the port in rabbitmq.url: {ports}"
    if foreign.startswith(_TLS_ALERT):
        return "TLS is spoken there", f"write amqps:// in rabbitmq.url, or its port: {ports}"
    if foreign:
        return "what answers there is no RabbitMQ", f"correct rabbitmq.url; its port: {ports}"
    return None
