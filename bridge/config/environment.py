"""Settings of the environment: `SMS_BRIDGE_<SECTION>__<KEY>`, and variables that look like one."""

from collections.abc import Mapping
from typing import Any

from pydantic_settings import BaseSettings, EnvSettingsSource
from pydantic_settings.sources.utils import parse_env_vars

from bridge.config.faults import did_you_mean, unknown_key
from bridge.config.settings import ENV_PREFIX, Settings, known_keys


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values that variables give, and a fault for each that looks like a setting.

    Lists and maps are still text: the model reads them as JSON.
    """
    known: dict[str, str] = {}
    faults: list[str] = []
    for name, value in environ.items():
        fault = _fault_of(name, value)
        if fault is None:
            known[name] = value
        else:
            faults.append(fault)
    return _Environment(Settings, known)(), faults


class _Environment(EnvSettingsSource):
    """pydantic-settings' reader of the environment, over a mapping that is handed in."""

    def __init__(self, settings: type[BaseSettings], environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return parse_env_vars(
            self._environ, self.case_sensitive, self.env_ignore_empty, self.env_parse_none_str
        )


def _variable(path: str) -> str:
    """Name the variable that overrides a key."""
    return ENV_PREFIX + path.upper().replace(".", "__")


def _fault_of(variable: str, value: str) -> str | None:
    """Describe a variable that looks like a setting and is none."""
    name = variable.upper()
    path = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
    if not name.startswith(ENV_PREFIX) or path in known_keys():
        return None
    if "." not in path:
        # Kubernetes adds such names by itself for a Service: SMS_BRIDGE_WEBHOOK_PORT=tcp://...
        is_of_kubernetes = value.startswith(("tcp://", "udp://", "sctp://"))
        meant = None if is_of_kubernetes else _flat_keys().get(name)
        return f"{variable}: is not read; did you mean {meant}?" if meant else None
    section = path.partition(".")[0]
    if section not in Settings.model_fields:
        return f"{variable}: unknown section{did_you_mean(section, Settings.model_fields)}"
    return unknown_key(path.split("."), variable)


def _flat_keys() -> dict[str, str]:
    """Map each variable, written with single underscores, to how it is written."""
    return {
        _variable(path).replace("__", "_"): _variable(path) for path in known_keys() if "." in path
    }
