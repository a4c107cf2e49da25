"""The bridge between RabbitMQ and an SMS service."""

from importlib.metadata import version

__version__ = version("sms-bridge")
