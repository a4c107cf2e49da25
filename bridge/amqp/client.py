"""The door to RabbitMQ's client libraries: every other wing takes their names from here."""

import aio_pika
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from aiormq import Channel
from aiormq.abc import ConsumerCallback, DeliveredMessage
from aiormq.connection import SSLContextProvider, TransportFactory
from aiormq.exceptions import (
    AMQPConnectionError,
    AMQPError,
    AuthenticationError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionNotAllowed,
    ConnectionNotImplemented,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
    DeliveryError,
    InvalidFrameError,
    ProbableAuthenticationError,
    PublishError,
)

from bridge.amqp.wire import Wire

__all__ = [
    "AMQPConnectionError",
    "AMQPError",
    "AbstractChannel",
    "AbstractIncomingMessage",
    "AbstractQueue",
    "AuthenticationError",
    "Channel",
    "ChannelAccessRefused",
    "ChannelClosed",
    "ChannelInvalidStateError",
    "ChannelLockedResource",
    "ChannelNotFoundEntity",
    "ChannelPreconditionFailed",
    "Connection",
    "ConnectionFrameError",
    "ConnectionInternalError",
    "ConnectionNotAllowed",
    "ConnectionNotImplemented",
    "ConnectionSyntaxError",
    "ConnectionUnexpectedFrame",
    "ConsumerCallback",
    "DeliveredMessage",
    "DeliveryError",
    "DeliveryMode",
    "InvalidFrameError",
    "Message",
    "ProbableAuthenticationError",
    "PublishError",
    "SSLContextProvider",
    "TransportFactory",
]


class Connection(aio_pika.Connection):
    """A connection and the wire that carries its messages; `open_connection` makes both."""

    wire: Wire
