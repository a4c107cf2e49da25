"""Loads the settings: reads the YAML file, merges the environment into it, validates the result."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource
from pydantic_settings.sources.utils import parse_env_vars

from bridge.config.faults import Lines, describe, may_be_shown, unknown_key
from bridge.config.fields import did_you_mean, nearest
from bridge.config.settings import ENV_PREFIX, Settings, known_keys
from bridge.errors import ConfigError

# Far above any real configuration: a few KiB, a few hundred values, three levels deep.
MAX_FILE_BYTES: Final = 256 * 1024
MAX_VALUES: Final = 10_000
MAX_DEPTH: Final = 20
# The values below this key are JSON constants. Only they may be booleans.
JSON_AT: Final = ("sms_api", "request", "fields")
_TRUTH_VALUES: Final = ("true", "false")
_NOT_YAML: Final = (
    "is not YAML for one configuration: check for unbalanced quotes or brackets, tabs, and "
    "inconsistent indentation; text that holds `: ` or begins with @ % ` * & ! needs quotes"
)


def read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """Parse the sections of a file, and return the line of each key with them.

    Raises ConfigError with the line if the file is not valid YAML, or exceeds a limit.
    """
    try:
        values, lines = _parse(_read_text(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {_explain(error)}") from None
    except (yaml.YAMLError, ValueError):
        # A control character, or a value that only looks like a date or a number.
        why = "it contains an invalid character, date or number; put text in quotes"
        raise ConfigError(f"{path}: is not YAML: {why}") from None
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold sections such as `rabbitmq:` at the top")
    return values, lines


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        most = MAX_FILE_BYTES // 1024
        raise ConfigError(f"{path}: is larger than {most} KiB; is it the configuration?")
    return content.decode("utf-8")


def _parse(text: str) -> tuple[Any, Lines]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        for constants in _nodes_at(node, *JSON_AT):
            _know_truth_values(constants)
        return loader.construct_document(node), dict(_lines_of(node))
    finally:
        loader.dispose()


def _nodes_at(node: yaml.Node, *path: str) -> Iterator[yaml.Node]:
    if not path:
        yield node
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == path[0]:
                yield from _nodes_at(value, *path[1:])


def _know_truth_values(node: yaml.Node) -> None:
    """Tag unquoted `true` and `false` as booleans, in a value and everything below it."""
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _TRUTH_VALUES:
        node.tag = "tag:yaml.org,2002:bool"
    elif isinstance(node, yaml.SequenceNode):
        for member in node.value:
            _know_truth_values(member)
    elif isinstance(node, yaml.MappingNode):
        for _, member in node.value:
            _know_truth_values(member)


def _lines_of(node: yaml.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.SequenceNode):
        for number, member in enumerate(node.value):
            yield from _lines_of(member, (*path, str(number)))
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        below = (*path, str(name.value))
        yield below, name.start_mark.line + 1
        yield from _lines_of(value, below)


def _explain(error: yaml.MarkedYAMLError) -> str:
    # PyYAML's own text may quote the file, so only the text of `_RejectedError` is shown.
    return (error.problem or "") if isinstance(error, _RejectedError) else _NOT_YAML


class _Loader(yaml.SafeLoader):
    """Loads YAML without booleans, because no setting is one: `topology: off` is a word.

    Depth and number of values are limited; an alias counts as all the values that it repeats.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  yaml's own form
        first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith(":bool")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._values_of: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node with everything below it; reject it if it is too deep or too large."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._values
        self._depth += 1
        if self._depth > MAX_DEPTH:
            problem = f"is nested more than {MAX_DEPTH} levels deep"
            raise _RejectedError(problem=problem, problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and node not in self._values_of:
            problem = "an alias (*) is inside the value that it refers to; write the value out"
            raise _RejectedError(problem=problem, problem_mark=mark)
        self._values += self._values_of[node] if is_alias else 1
        if self._values > MAX_VALUES:
            problem = f"holds more than {MAX_VALUES:,} values; each alias (*) repeats its values"
            raise _RejectedError(problem=problem, problem_mark=mark)
        if not is_alias:
            self._values_of[node] = self._values - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Construct a map with text as keys; reject a repeated key, which PyYAML accepts."""
        seen = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                problem = "a list or a map cannot be a key; text with a [ or { needs quotes"
                raise _RejectedError(problem=problem, problem_mark=name.start_mark)
            if name.value in seen:
                which = f"the key `{name.value}`" if may_be_shown(name.value) else "a key"
                problem = f"{which} appears twice; keep one"
                raise _RejectedError(problem=problem, problem_mark=name.start_mark)
            seen.add(name.value)
            if not name.tag.endswith(":merge"):
                name.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


class _RejectedError(yaml.MarkedYAMLError):
    """A fault that PyYAML would not report; `problem` is our own text, which quotes no value."""


# The configuration file, and the commit that the image was built from.
CONFIG_VARIABLE: Final = f"{ENV_PREFIX}CONFIG"
REVISION_VARIABLE: Final = f"{ENV_PREFIX}REVISION"
_OURS: Final = (CONFIG_VARIABLE, REVISION_VARIABLE)
# After the prefix, variables for this repository's tests begin with this.
_TESTS: Final = "TEST_"
# The names, after the prefix, of variables that Kubernetes sets in every container for a Service
# whose name is or begins with `sms-bridge`: SERVICE_HOST=10.0.0.1,
# WEBHOOK_PORT_8080_TCP_ADDR=10.0.0.1.
_SERVICE: Final = re.compile(
    r"(?:\w+_)?"
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the environment's settings, and a fault for each unknown variable with our prefix.

    Lists and maps remain text, which the model parses as JSON.
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
    """Reads settings from a given mapping, as pydantic-settings does from the environment."""

    def __init__(self, settings: type[BaseSettings], environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return parse_env_vars(
            self._environ, self.case_sensitive, self.env_ignore_empty, self.env_parse_none_str
        )


def _variable(path: str) -> str:
    """Return the name of the variable that overrides a key."""
    return ENV_PREFIX + path.upper().replace(".", "__")


def _fault_of(variable: str, value: str) -> str | None:
    """Return the fault of a variable that looks like a setting but is none; None if it is fine."""
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
    # WEBHOOK_PORT=8081 may be a mistake for WEBHOOK__PORT; the value for a Service is always a URL.
    is_port = name.endswith("PORT") and value.startswith(("tcp://", "udp://", "sctp://"))
    return is_port or bool(_SERVICE.fullmatch(name))


def _remedy(name: str) -> str:
    """Return the remedy for a variable without a section: a similar name, or an example."""
    variables = [*map(_variable, known_keys()), *_OURS]
    # Compared without the common prefix, which would make all names alike.
    found = nearest(name, (one.removeprefix(ENV_PREFIX).lower() for one in variables))
    if found is None:
        return f"a setting is written like {_variable('worker.queue')}"
    return f"did you mean {ENV_PREFIX}{found.upper()}?"


def load_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Read the file, merge the environment into it, and validate the result.

    Raises ConfigError with one line for each fault. Secret files are not opened here: a role reads
    its files when it starts, and again whenever they change.
    """
    of_file, lines = ({}, {}) if path is None else read_yaml(path)
    of_environment, faults = read_environment(environ)
    try:
        settings = Settings.model_validate(_merge(of_file, of_environment))
    except ValidationError as error:
        raise ConfigError(*faults, *describe(error, lines)) from None
    if faults:
        raise ConfigError(*faults)
    return settings


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key) or {}
        if not isinstance(value, dict):
            merged[key] = value
        elif isinstance(below, dict):
            merged[key] = _merge(below, value)
    return merged
