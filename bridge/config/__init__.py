"""Every setting: one YAML file, overridden by the environment, overridden by secret files.

What most of the bridge needs of it is handed out here: the sections, and the one way to load them.
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
