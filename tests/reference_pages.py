"""Generates the reference tables of docs/ from code, presets, alerts and dashboards.

python -m tests.reference_pages

The texts come from metrics' help, comments in config.example.yaml, commands' help and the presets.
Only the meaning of a log event is written in docs/log-events.md itself, and kept.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from pydantic import BaseModel
from typer._click.core import Command, Context, Parameter
from typer.core import TyperGroup
from typer.main import get_command

from bridge.__main__ import app
from bridge.admin.message_models import (
    DeadLetterHeaders,
    EventHeaders,
    EventProperties,
    OutcomeBody,
    RequestHeaders,
)
from bridge.config import Settings
from bridge.config.presets import (
    PRESETS,
    Preset,
    code_meanings,
    preset_settings,
    receipt_meanings,
)
from bridge.config.settings import known_keys
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from bridge.webhook.metrics import WebhookMetrics
from bridge.worker.metrics import WorkerMetrics
from bridge.worker.request import SendRequest
from tests.markdown import table, with_part

PROJECT: Final = Path(__file__).parents[1]
DOCS: Final = PROJECT / "docs"
CHART_FILES: Final = PROJECT / "helm" / "sms-bridge" / "files"
EXAMPLE: Final = PROJECT / "config.example.yaml"
NOT_WRITTEN: Final = "TODO"


def code(words: Iterable[object]) -> str:
    """Format each word as code."""
    return " ".join(f"`{word}`" for word in words)


# Metrics


class Metric(NamedTuple):
    """A metric of a role, with the label values that it starts with."""

    name: str
    kind: str
    text: str
    labels: Mapping[str, list[str]]


# Labels whose values come from settings or the environment.
OPEN_LABELS: Final = {
    "queue": "the configured queues",
    "exchange": "the configured exchanges, and `default`",
    "entity": "the configured queues and exchanges",
    "route": "the endpoints' paths, the health path, and `unmatched`",
    "event_type": "the types in `webhook.event_types`, `other` and `unknown`",
    "version": "the running version",
    "revision": "the image's commit",
    "component": "`worker`, `webhook` or `all`",
}


def metrics() -> dict[str, list[Metric]]:
    """Return the metrics of both roles, of the worker and of the webhook receiver."""
    registries = {name: new_registry() for name in ("both", "worker", "webhook")}
    BridgeMetrics(
        registries["both"],
        component="worker",
        version="1",
        revision="1",
        exchanges=["e"],
        entities=["e"],
    )
    WorkerMetrics(registries["worker"], queue="q", urgent_queue="u", retry_queues=["r"], dead="d")
    WebhookMetrics(
        registries["webhook"],
        paths=["/p"],
        event_types=Settings().webhook.event_types,
        queues=["q"],
    )
    return {
        name: [_metric(one) for one in registry.collect() if one.name.startswith("sms_bridge_")]
        for name, registry in registries.items()
    }


def _metric(family: Any) -> Metric:
    labels: dict[str, list[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le" and value not in labels.setdefault(label, []):
                labels[label].append(value)
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return Metric(name, family.type, family.documentation, labels)


def metrics_part(found: Iterable[Metric]) -> str:
    """Make the tables of a role's metrics and of their label values."""
    alerts = alert_expressions()
    rows = [
        (
            f"`{metric.name}`",
            metric.kind,
            code(metric.labels) or "-",
            metric.text,
            "<br>".join(
                f"[{name}](runbooks.md#{name.lower()})" for name in _using(metric.name, alerts)
            )
            or "-",
        )
        for metric in found
    ]
    return table(("Metric", "Type", "Labels", "Meaning", "Alerts"), rows)


def labels_part(found: Iterable[Metric]) -> str:
    """Make the table of the label values."""
    values: dict[tuple[str, str], list[str]] = defaultdict(list)
    for metric in found:
        for label, known in metric.labels.items():
            values[label, OPEN_LABELS.get(label) or code(known)].append(metric.name)
    return table(
        ("Label", "Values", "Metrics"),
        (
            (
                f"`{label}`",
                shown,
                code(sorted(names))
                if label not in OPEN_LABELS
                else "every metric above with this label",
            )
            for (label, shown), names in values.items()
        ),
    )


def _using(metric: str, expressions: Mapping[str, str]) -> list[str]:
    series = re.compile(rf"\b{metric}(?:_bucket|_sum|_count)?\b(?!:)")
    return [name for name, expression in expressions.items() if series.search(expression)]


def alert_expressions() -> dict[str, str]:
    """Return the expression of each alert, including those of its recording rules."""
    rules = [
        rule
        for name in ("alerts", "broker-alerts")
        for group in yaml.safe_load((CHART_FILES / f"{name}.yaml").read_text(encoding="utf-8"))[
            "groups"
        ]
        for rule in group["rules"]
    ]
    records = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}
    return {
        rule["alert"]: _with_records(rule["expr"], records) for rule in rules if "alert" in rule
    }


def _with_records(expression: str, records: Mapping[str, str]) -> str:
    read = [text for name, text in records.items() if name in expression]
    return " ".join([expression, *read])


# Log events

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_METHODS: Final = {level: level for level in LEVELS} | {"exception": "error", "info_facts": "info"}


class Event(NamedTuple):
    """A log event, with all facts that its lines may have."""

    name: str
    levels: list[str]
    fields: list[str]


def events() -> list[Event]:
    """Find every event that the bridge's source logs, by name."""
    levels: dict[str, set[str]] = defaultdict(set)
    fields: dict[str, dict[str, None]] = defaultdict(dict)
    for path in sorted((PROJECT / "bridge").rglob("*.py")):
        for name, level, facts in _logged(ast.parse(path.read_text(encoding="utf-8"))):
            levels[name].add(level)
            fields[name] |= dict.fromkeys(facts)
    return [
        Event(name, [level for level in LEVELS if level in levels[name]], list(fields[name]))
        for name in sorted(levels)
    ]


def _logged(module: ast.Module) -> Iterator[tuple[str, str, list[str]]]:
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    for call in calls:
        if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) != "log":
            continue
        level = _METHODS[call.func.attr]
        facts = [one.arg for one in call.keywords if one.arg not in {None, "cause"}]
        if call.func.attr == "exception":
            facts += ["error", "at"]
        if call.func.attr == "info_facts":
            facts = list(_keys_of("facts", module))
        if any(one.arg == "cause" and ast.unparse(one.value) != "None" for one in call.keywords):
            facts += ["error", "at"]
        for name in _constants(call.args[0], module):
            yield name, level, [fact for fact in facts if fact]
    for name, attribute in _counted(module):
        for call in calls:
            if ast.unparse(call.func) == f"self.{attribute}.info":
                yield name, "info", [*(one.arg for one in call.keywords if one.arg), "count"]


def _counted(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the event of each CountedLog, and the attribute that holds it."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if ast.unparse(node.value.func) == "CountedLog" and isinstance(
            node.targets[0], ast.Attribute
        ):
            yield from (
                (name, node.targets[0].attr) for name in _constants(node.value.args[1], module)
            )


def _constants(node: ast.expr, module: ast.Module) -> Iterator[str]:
    """Yield the possible texts of an expression."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.IfExp):
        yield from _constants(node.body, module)
        yield from _constants(node.orelse, module)
    elif isinstance(node, ast.Name):
        for value in _assigned(node.id, module):
            yield from _constants(value, module)
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from _constants(value, module)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        # `mapping.get(key, default)`.
        yield from _constants(node.func.value, module)
        yield from _constants(node.args[-1], module)
    else:
        raise TypeError(f"write the event as a text: {ast.unparse(node)}")


def _assigned(name: str, module: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            targets = [node.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert node.value is not None
            yield node.value


def _keys_of(name: str, module: ast.Module) -> Iterator[str]:
    for value in _assigned(name, module):
        if isinstance(value, ast.Dict):
            yield from (str(key.value) for key in value.keys if isinstance(key, ast.Constant))


def events_parts(text: str) -> dict[str, str]:
    """Make the tables of events by highest level. Keep the last column of each row."""
    kept = {row[0].strip("`"): row[-1] for row in rows_of(text)}
    tables = dict[str, list[tuple[str, ...]]](problems=[], normal=[], details=[])
    for event in events():
        part = {"debug": "details", "info": "normal"}.get(event.levels[-1], "problems")
        meaning = kept.get(event.name, NOT_WRITTEN)
        row = (f"`{event.name}`", ", ".join(event.levels), code(event.fields) or "-", meaning)
        tables[part].append(row)
    head = ("Event", "Level", "Fields", "Meaning")
    return {name: table(head, rows) for name, rows in tables.items()}


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of all table rows whose first cell is code."""
    lines = re.findall(r"^\| (`.*) \|$", text, re.MULTILINE)
    return [[cell.replace("\\|", "|") for cell in re.split(r" (?<!\\)\| ", line)] for line in lines]


# Settings


def settings_part(section: str) -> str:
    """Make the table of a section's settings."""
    comments, defaults = comments_of(EXAMPLE.read_text(encoding="utf-8"))
    schema = Settings.model_json_schema()
    return table(
        ("Setting", "Default", "Takes", "Meaning"),
        (
            (f"`{key}`", f"`{defaults[key]}`", allowed(key, schema), comments[key])
            for key in known_keys()
            if key.startswith(f"{section}.") and key in defaults
        ),
    )


def comments_of(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the comment of each key in config.example.yaml, and the value of each setting.

    A comment ends before an example of several lines.
    """
    comments: dict[str, str] = {}
    values: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    lines: list[str] = []
    for line in text.splitlines():
        if found := re.fullmatch(r"( *)# ?(.*)", line):
            lines.append(found[2])
        elif found := re.fullmatch(r"( *)(\w+):(?: (.*))?", line):
            above = [one for one in above if one[0] < len(found[1])] + [(len(found[1]), found[2])]
            path = ".".join(name for _, name in above)
            words = " ".join(one for one in lines if not one.startswith("  "))
            comments[path] = re.sub(r" For example:$", "", words)
            if found[3]:
                values[path] = found[3]
            lines = []
        else:
            lines = []
    return comments, values


def allowed(key: str, schema: Mapping[str, Any]) -> str:
    """Describe a setting's type, words and bounds."""
    options = [schema]
    for name in key.split("."):
        (section,) = (one for one in options if "properties" in one)
        options = list(_options(section["properties"][name], schema))
    kinds = dict.fromkeys(map(_kind, options))
    if "duration" in kinds:
        # A duration is a number of seconds too.
        del kinds["more than 0"]
    return " or ".join(kinds)


def _options(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the alternatives of a node, and follow references."""
    if "$ref" in node:
        yield from _options(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
    elif "anyOf" in node:
        for one in node["anyOf"]:
            yield from _options(one, schema)
    else:
        yield node


def _kind(node: Mapping[str, Any]) -> str:
    if words := node.get("enum") or ([node["const"]] if "const" in node else None):
        return code(words)
    match node.get("type"):
        case "null":
            return "null"
        case "boolean":
            return "boolean"
        case "array":
            # pydantic writes the bounds of a converted list as those of a text.
            most = node.get("maxItems", node.get("maxLength"))
            return f"list of at most {most}" if most else "list"
        case "object":
            return "map"
        case "integer" | "number" as kind:
            return _number(kind, node)
        case _:
            return "duration" if node.get("title") == "Duration" else "text"


def _number(kind: str, node: Mapping[str, Any]) -> str:
    least, most, above = (node.get(name) for name in ("minimum", "maximum", "exclusiveMinimum"))
    if least is not None and most is not None:
        return f"{least} to {most}"
    if above is not None:
        return f"more than {above}"
    return f"{least} or more" if least is not None else kind


# Commands

PROGRAM: Final = get_command(app)
NAME: Final = "sms-bridge"


def commands(command: Command = PROGRAM, name: str = NAME) -> Iterator[tuple[str, Command]]:
    """Yield every command and group with its full name, in the order of the help."""
    if isinstance(command, TyperGroup):
        for below, one in command.commands.items():
            yield f"{name} {below}", one
            yield from commands(one, f"{name} {below}")


def commands_parts() -> dict[str, str]:
    """Make the table of commands, and a section with the help of each."""
    found = list(commands())
    index = table(
        ("Command", "What it does"),
        ((f"[`{name}`](#{name.replace(' ', '-')})", _first_sentence(one)) for name, one in found),
    )
    return {"index": index, "help": "\n\n".join(_command_part(*one) for one in found)}


def _first_sentence(command: Command) -> str:
    return re.split(r"(?<=\.)\s", command.help or "")[0]


def _command_part(name: str, command: Command) -> str:
    parts = [f"### {name}", *_paragraphs(command.help)]
    context = Context(command, info_name=name)
    rows = [
        _option_row(option, context)
        for option in command.params
        if not {"--help", "--config"} & set(option.opts)
    ]
    if rows and not isinstance(command, TyperGroup):
        parts.append(table(("Option", "Meaning"), rows))
    if command.epilog:
        parts += _epilog_parts(command.epilog)
    return "\n\n".join(parts)


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(one.split()) for one in re.split(r"\n\s*\n", text or "") if one.strip()]


def _option_row(option: Parameter, context: Context) -> tuple[str, ...]:
    names, text = option.get_help_record(context) or ("", "")
    return f"`{names}`", " ".join(text.split())


def _epilog_parts(epilog: str) -> list[str]:
    """Return the text of an epilog, and its examples as a code block."""
    prose, _, examples = epilog.partition("Examples:")
    parts = _paragraphs(prose.replace("\b", ""))
    if examples:
        lines = "\n".join(line.strip() for line in examples.replace("\b", "").splitlines())
        parts.append(f"```text\n{lines.strip()}\n```")
    return parts


# Error codes


OWN_RECEIPT_CODES: Final = "Delivery receipts from this service use different codes:"


def error_codes_part() -> str:
    """Make the tables of error codes for each preset that has some."""
    return "\n\n".join(
        part
        for preset in PRESETS
        if code_meanings(preset) or receipt_meanings(preset)
        for part in _error_codes_of(preset)
    )


def _error_codes_of(preset: Preset) -> Iterator[str]:
    """Yield a service's heading, its table of codes, and its table of receipt codes."""
    title, *_ = (DOCS / "providers" / f"{preset}.md").read_text(encoding="utf-8").splitlines()
    yield f"#{title}"
    yield f"The preset is [`{preset}`](providers/{preset}.md)."
    meanings, in_receipts = code_meanings(preset), receipt_meanings(preset)
    answers = preset_settings(preset)["response"]
    fates = {one: code([fate]) for one, fate in answers["errors"].items()}
    if (duplicate := answers.get("duplicate", {}).get("code")) is not None:
        fates[duplicate] = "The message counts as sent."
    if meanings:
        rows = ((f"`{one}`", meanings[one], fates.get(one, "-")) for one in _in_order(meanings))
        yield table(("Code", "Meaning", "Fate"), rows)
    if in_receipts and in_receipts != meanings:
        yield OWN_RECEIPT_CODES
        receipt_rows = ((f"`{one}`", in_receipts[one]) for one in _in_order(in_receipts))
        yield table(("Code", "Meaning"), receipt_rows)


def _in_order(codes: Iterable[str]) -> list[str]:
    """Sort numbers by value, before words."""
    return sorted(codes, key=lambda one: (not one.isdecimal(), len(one), one))


# Messages


def members_part(column: str, model: type[BaseModel]) -> str:
    """Make the table of a model's headers, properties or members."""
    rows = (
        (f"`{field.alias or name}`", field.description or NOT_WRITTEN)
        for name, field in model.model_fields.items()
    )
    return table((column, "meaning"), rows)


# Pages


def pages() -> dict[Path, str]:
    """Generate every reference page by path. Text outside the marks is kept."""
    found = metrics()
    parts = {
        "reference": {
            "request": members_part("member", SendRequest),
            "request-headers": members_part("header", RequestHeaders),
            "dead-letter-headers": members_part("header", DeadLetterHeaders),
            "outcome": members_part("member", OutcomeBody),
            "event-properties": members_part("property", EventProperties),
            "event-headers": members_part("header", EventHeaders),
        },
        "metrics": {
            **{role: metrics_part(ones) for role, ones in found.items()},
            "labels": labels_part(one for ones in found.values() for one in ones),
        },
        "log-events": events_parts((DOCS / "log-events.md").read_text(encoding="utf-8")),
        "configuration": {section: settings_part(section) for section in Settings.model_fields},
        "commands": commands_parts(),
        "error-codes": {"codes": error_codes_part()},
    }
    made = {}
    for page, own in parts.items():
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        for name, part in own.items():
            text = with_part(text, name, part, target="reference-pages")
        made[DOCS / f"{page}.md"] = text
    return made


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
