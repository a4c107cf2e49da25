"""Checks before a role starts: its settings, secrets and files."""

from collections.abc import Callable, Collection

from bridge.amqp.connecting import login_files, tls_context
from bridge.config import Role, Settings
from bridge.config.webhook import DEFAULT_ENDPOINT
from bridge.credentials import load_authorities
from bridge.errors import ConfigError
from bridge.telemetry.trace_context import is_exporter_installed
from bridge.worker.service.shape import shape_from


def check_start(settings: Settings, roles: Collection[Role]) -> None:
    """Check everything that these roles need to start, except whether their ports are free.

    Raises ConfigError with one line for each fault.
    """
    steps: list[Callable[[Settings], object]] = [
        lambda one: login_files(one.rabbitmq),
        _check_broker_tls,
        _check_tracing,
    ]
    if "worker" in roles:
        steps += [lambda one: shape_from(one.sms_api, one.callback_url), _check_api_tls]
    if "webhook" in roles:
        steps += [_check_endpoints, _check_ports]
    faults: list[str] = []
    for step in steps:
        try:
            step(settings)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*faults)


def check_roles(settings: Settings, roles: Collection[Role]) -> dict[Role, str | None]:
    """Return for each role the error text if it is unconfigured, or None if it can start.

    Raises ConfigError if a role is partly configured and cannot start.
    """
    api, webhook = settings.sms_api, settings.webhook
    parts: dict[Role, tuple[object, ...]] = {
        "worker": (api.base_url, api.preset != "generic", api.key, api.key_file),
        "webhook": (webhook.has_secrets, webhook.endpoints),
    }
    missing = {role: None if any(parts[role]) else _why_missing(role) for role in roles}
    check_start(settings, [role for role, why in missing.items() if why is None])
    if missing.get("webhook"):
        from bridge.webhook.signatures.schemes import scheme_from

        scheme_from(webhook.signature, webhook.public_url)
    return missing


def _why_missing(role: Role) -> str:
    """Return the error text for the missing setting of an unconfigured role."""
    if role == "worker":
        return "sms_api.base_url: is missing; the worker needs it"
    from bridge.webhook.endpoint import lacks_secrets

    return lacks_secrets(DEFAULT_ENDPOINT)


def _check_endpoints(settings: Settings) -> None:
    from bridge.webhook.endpoint import endpoints_from

    endpoints_from(settings.webhook)


def _check_broker_tls(settings: Settings) -> None:
    tls = settings.rabbitmq.tls
    if any((tls.ca_file, tls.cert_file, tls.key_file)):
        tls_context(settings.rabbitmq)


def _check_tracing(settings: Settings) -> None:
    if settings.tracing.otlp_endpoint is not None and not is_exporter_installed():
        raise ConfigError(
            "tracing.otlp_endpoint: this installation cannot export spans; "
            "install sms-bridge[tracing], which the image contains, or set it to null"
        )


def _check_api_tls(settings: Settings) -> None:
    if settings.sms_api.ca_file is not None:
        load_authorities("sms_api.ca_file", settings.sms_api.ca_file)


def _check_ports(settings: Settings) -> None:
    webhook, admin = settings.webhook, settings.admin
    hosts = {webhook.host, admin.host}
    is_one_family = (":" in webhook.host) == (":" in admin.host)
    # `::` stands for every address, including those of IPv4.
    is_one_address = (
        len(hosts) == 1 or "::" in hosts or (is_one_family and "0.0.0.0" in hosts)  # noqa: S104
    )
    if webhook.port == admin.port != 0 and is_one_address:
        raise ConfigError(
            "admin.port: must differ from webhook.port; set another port, or 0 for any free one"
        )
