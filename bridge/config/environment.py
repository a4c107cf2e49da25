"""Settings of the environment: `SMS_BRIDGE_<SECTION>__<KEY>`, and variables that look like one."""

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic_settings import BaseSettings, EnvSettingsSource
from pydantic_settings.sources.utils import parse_env_vars

from bridge.config.faults import unknown_key
from bridge.config.settings import ENV_PREFIX, Settings, known_keys
from bridge.config.spelling import did_you_mean, nearest

# The configuration file, the commit that the image was built from, and what carries messages
# between us and the broker, which `amqp.connecting` explains.
CONFIG_VARIABLE: Final = f"{ENV_PREFIX}CONFIG"
REVISION_VARIABLE: Final = f"{ENV_PREFIX}REVISION"
WIRE_VARIABLE: Final = f"{ENV_PREFIX}WIRE"
_OURS: Final = (CONFIG_VARIABLE, REVISION_VARIABLE, WIRE_VARIABLE)
# What WIRE_VARIABLE may be; without it, or with it empty, the wire is `stream`.
_WIRES: Final = ("plain", "stream", "")
# How the names continue that tell this repository's tests what to run with.
_TESTS: Final = "TEST_"
# How the names continue that Kubernetes sets in every container for a Service whose name is or
# begins with `sms-bridge`: SERVICE_HOST=10.0.0.1, WEBHOOK_PORT_8080_TCP_ADDR=10.0.0.1.
_SERVICE: Final = re.compile(
    r"(?:\w+_)?"
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)


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
    """Describe a variable that looks like ours and is not read, or cannot be used as it is."""
    if variable == WIRE_VARIABLE and value not in _WIRES:
        return f"{variable}: must be plain or stream, or not set"
    name = variable.upper()
    if not name.startswith(ENV_PREFIX) or _is_of_others(variable, value):
        return None
    path = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
    if path in known_keys():
        return None
    section, _, below = path.partition(".")
    if not below:
        return f"{variable}: is not read; {_remedy(path)}"
    if section not in Settings.model_fields:
        return f"{variable}: unknown section{did_you_mean(section, Settings.model_fields)}"
    for name_of_list in _lists_of_sections():
        if path.startswith(f"{name_of_list}."):
            whole = _variable(name_of_list)
            return f"{variable}: is not read; give the whole list as JSON in {whole}"
    return unknown_key(path.split("."), variable)


def _lists_of_sections() -> set[str]:
    """Return the keys of lists whose members have keys, which no variable can name."""
    return {key.partition(".*.")[0] for key in known_keys(in_lists=True) if ".*." in key}


def _is_of_others(variable: str, value: str) -> bool:
    """Whether a variable is read elsewhere, or is meant for other programs."""
    name = variable.upper().removeprefix(ENV_PREFIX)
    if variable in _OURS or name.startswith(_TESTS):
        return True
    # WEBHOOK_PORT=8081 may be meant for WEBHOOK__PORT; a Service's is always a URL.
    is_port = name.endswith("PORT") and value.startswith(("tcp://", "udp://", "sctp://"))
    return is_port or bool(_SERVICE.fullmatch(name))


def _remedy(name: str) -> str:
    """Name the variable that was meant by one without a section, or say how one is written."""
    variables = [*map(_variable, known_keys()), *_OURS]
    # Compared without the common prefix, which would make all names alike.
    found = nearest(name, (one.removeprefix(ENV_PREFIX).lower() for one in variables))
    if found is None:
        return f"a setting is written like {_variable('worker.queue')}"
    return f"did you mean {ENV_PREFIX}{found.upper()}?"
