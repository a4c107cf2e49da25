"""The door to RabbitMQ's client libraries: every other wing takes their names from here."""

from aio_pika import Connection, DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from aiormq import Channel
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    PublishError,
)

__all__ = [
    "AMQPError",
    "AbstractChannel",
    "AbstractIncomingMessage",
    "AbstractQueue",
    "Channel",
    "ChannelAccessRefused",
    "ChannelClosed",
    "ChannelInvalidStateError",
    "ChannelLockedResource",
    "ChannelNotFoundEntity",
    "ChannelPreconditionFailed",
    "Connection",
    "DeliveredMessage",
    "DeliveryError",
    "DeliveryMode",
    "Message",
    "PublishError",
]
