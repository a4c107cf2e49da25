"""The configuration: a YAML file, overridden by environment variables and by secret files.

Exports the sections, and `load_settings`, which is the only way to load them.
"""

from bridge.config.api_request import RequestSettings
from bridge.config.loading import load_settings
from bridge.config.settings import (
    ENV_PREFIX,
    AdminSettings,
    OnUncertain,
    RabbitMQSettings,
    RateLimitSettings,
    Role,
    Settings,
    TopologyMode,
    WorkerSettings,
)
from bridge.config.sms_api import SmsApiSettings
from bridge.config.webhook import EndpointSettings, SignatureSettings, WebhookSettings

__all__ = [
    "ENV_PREFIX",
    "AdminSettings",
    "EndpointSettings",
    "OnUncertain",
    "RabbitMQSettings",
    "RateLimitSettings",
    "RequestSettings",
    "Role",
    "Settings",
    "SignatureSettings",
    "SmsApiSettings",
    "TopologyMode",
    "WebhookSettings",
    "WorkerSettings",
    "load_settings",
]
