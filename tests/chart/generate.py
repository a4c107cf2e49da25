"""Generates the chart's README, metadata, runbooks and tables, and the golden renders.

python -m tests.chart.generate
"""

import base64
import json
import re
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bridge.config.presets import PRESETS, needed_settings, preset_endpoint, preset_settings
from bridge.webhook.signatures.schemes import SCHEMES
from tests.chart.rendering import CHART, CI, render

README = CHART / "README.md"
METADATA = CHART / "Chart.yaml"
LICENSE = CHART / "LICENSE"
RUNBOOKS = CHART / "files" / "runbooks.yaml"
SMS_APIS = CHART / "files" / "sms-apis.yaml"
NEEDS = CHART / "files" / "service-needs.yaml"
DASHBOARDS = CHART / "files" / "dashboards"
PROJECT = CHART.parents[1]
RUNBOOKS_DOCUMENT = PROJECT / "docs" / "runbooks.md"
GOLDEN = Path(__file__).parent / "golden"
MAX_DEFAULT = 60
# Height of a text panel in Grafana's grid. The text scrolls, and a link shows the panel alone.
TEXT_ROWS = 9
# URL of a single panel: the dashboard's name, and the panel's number.
PANEL_ADDRESS = "/d/sms-bridge-{}?viewPanel={}"
# A panel in docs/runbooks.md: the dashboard, and the panel's title.
NAMED_PANEL = re.compile(r"\*(Overview|Worker|Webhook): ([^*]+)\*")
# Keys that the dashboards share.
OF_DASHBOARDS = {"schemaVersion", "editable", "graphTooltip", "timezone", "links"}


def documented_values() -> Iterator[tuple[str, Any, str]]:
    text = (CHART / "values.yaml").read_text()
    defaults = yaml.safe_load(text)
    above: list[tuple[int, str]] = []
    comment = None
    for line in text.splitlines():
        found = re.match(r"( *)(# -- |)([^#:]+?)(:|$)", line)
        if found is None:
            comment = None
        elif found[2]:
            comment = line.strip().removeprefix("# -- ")
        elif found[4]:
            indent = len(found[1])
            above = [*(key for key in above if key[0] < indent), (indent, found[3])]
            if comment is not None:
                path = [key for _, key in above]
                default = defaults
                for key in path:
                    default = default[key]
                yield ".".join(path), default, comment
            comment = None


def readme() -> str:
    """Generate the table of values in the README, and keep the text above it.

    Values with the same default and comment share a row.
    """
    text = README.read_text()
    heading = "\n## Values\n"
    rows: dict[tuple[str, str], list[str]] = {}
    for path, default, comment in documented_values():
        quoted = f"`{json.dumps(default)}`"
        shown = quoted if len(quoted) <= MAX_DEFAULT else "see `values.yaml`"
        rows.setdefault((shown, comment), []).append(f"`{path}`")
    lines = ["| Key | Default | Meaning |", "|---|---|---|"]
    for (shown, comment), paths in rows.items():
        lines.append(f"| {' '.join(paths)} | {shown} | {comment.replace('|', chr(92) + '|')} |")
    return text.partition(heading)[0] + heading + "\n" + "\n".join(lines) + "\n"


def changes() -> list[dict[str, str]]:
    """Return the chart's changes in the newest part of CHANGELOG.md, in Artifact Hub's format."""
    _, newest, *_ = (PROJECT / "CHANGELOG.md").read_text().split("\n## ")
    _, *kinds = newest.split("\n### ")
    return [
        {"kind": part.partition("\n")[0].lower(), "description": line}
        for part in kinds
        for line in re.findall(r"^- (Helm chart.*)", part, re.MULTILINE)
    ]


def metadata() -> str:
    """Update the icon and the changes in Chart.yaml."""
    icon = base64.b64encode((CHART / "icon.svg").read_bytes()).decode()
    # JSON is YAML with quotes.
    listed = "".join(f"    - {json.dumps(change, ensure_ascii=False)}\n" for change in changes())
    text = METADATA.read_text()
    text = re.sub(r"(?<=\nicon:).*", f" data:image/svg+xml;base64,{icon}", text)
    return re.sub(r"(?<=artifacthub\.io/changes: \|\n)(    .*\n)*", lambda _: listed, text)


def runbook_sections(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield each section of docs/runbooks.md: part, name and text."""
    part = ""
    for found in re.finditer(r"^(##|###) (.*)\n((?:(?!##).*\n)*)", text, re.MULTILINE):
        level, name, said = found.groups()
        if level == "##":
            part = name
        if said.strip():
            yield part, name, said.strip()


def runbooks() -> str:
    """Generate files/runbooks.yaml: the sections of docs/runbooks.md by alert, and the README.

    Links become plain text, because they would not work in a terminal.
    """
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", RUNBOOKS_DOCUMENT.read_text())
    lines = ["# Generated from docs/runbooks.md by `make chart-files`."]
    kept = {"README": text.partition("\n## Worker\n")[0].strip()}
    kept |= {name: said for part, name, said in runbook_sections(text) if name != part}
    for name, section in kept.items():
        lines += [f"{name}: |", textwrap.indent(section, "  ")]
    return "\n".join(lines) + "\n"


def runbook_panel(name: str) -> int:
    """Return the number of a section's panel, which stays the same if sections are added."""
    return zlib.crc32(name.encode()) % 1_000_000


def on_call() -> str:
    text = _linked_in_grafana(RUNBOOKS_DOCUMENT.read_text())
    shared = {key: value for key, value in _dashboard("overview").items() if key in OF_DASHBOARDS}
    head = text.partition("\n## ")[0].partition("\n")[2].strip()
    panels = [_text_panel("Before you look", head, x=0, y=0, width=24)]
    parts: list[str] = []
    x, y = 0, TEXT_ROWS
    for part, name, said in runbook_sections(text):
        if part not in parts:
            parts.append(part)
            x, y = 0, y if x == 0 else y + TEXT_ROWS
            panels.append(_row(part, y))
            y += 1
        panels.append(_text_panel(name, said, x=x, y=y, width=12))
        x, y = (12, y) if x == 0 else (0, y + TEXT_ROWS)
    board = {
        "uid": "sms-bridge-on-call",
        "title": "SMS bridge / on-call",
        "description": "The runbook of each alert, from docs/runbooks.md.",
        "tags": ["sms-bridge"],
        **shared,
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": panels,
    }
    return json.dumps(board, indent=2, ensure_ascii=False) + "\n"


def _linked_in_grafana(text: str) -> str:
    """Link sections and panels (`*Overview: Sent*`) within Grafana.

    Links to other documents become plain text.
    """
    sections = {name.lower(): runbook_panel(name) for _, name, _ in runbook_sections(text)}
    text = re.sub(
        r"\]\(#(smsbridge\w+)\)",
        lambda found: f"]({PANEL_ADDRESS.format('on-call', sections[found[1]])})",
        text,
    )
    text = re.sub(r"\[([^]]+)\]\((?!/d/)[^)]+\)", r"\1", text)

    def link(found: re.Match[str]) -> str:
        board = found[1].lower()
        number = next(p["id"] for p in _dashboard(board)["panels"] if p["title"] == found[2])
        return f"[{found[0].strip('*')}]({PANEL_ADDRESS.format(board, number)})"

    return re.sub(NAMED_PANEL, link, text)


def _dashboard(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DASHBOARDS / f"{name}.json").read_text())
    return found


def _row(title: str, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": 24, "x": 0, "y": y}
    number = runbook_panel(f"row {title}")
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place}


def _text_panel(title: str, text: str, *, x: int, y: int, width: int) -> dict[str, Any]:
    return {
        "id": runbook_panel(title),
        "type": "text",
        "title": title,
        "gridPos": {"h": TEXT_ROWS, "w": width, "x": x, "y": y},
        "options": {"mode": "markdown", "content": text},
    }


def sms_apis() -> str:
    """Generate files/sms-apis.yaml: the address of each preset's service.

    If a preset has none, the chart requires it.
    """
    lines = ["# Generated from the presets by `make chart-files`."]
    lines += [f"{name}: {json.dumps(preset_settings(name)['base_url'] or '')}" for name in PRESETS]
    return "\n".join(lines) + "\n"


def service_needs() -> str:
    """Generate files/service-needs.yaml: settings that the bridge requires for a preset.

    `account` is the service's name for it. `public_url` is true if the service signs the address.
    """
    needs: dict[str, dict[str, Any]] = {}
    for name in PRESETS:
        scheme = SCHEMES[preset_endpoint(name).get("signature", {}).get("preset", "plain")]
        needs[name] = {
            key: value
            for key, value in (
                ("account", needed_settings(name).get("account")),
                ("public_url", "{url}" in (scheme.signed_content or "") or None),
            )
            if value is not None
        }
    head = "# Generated from the presets by `make chart-files`.\n"
    return head + yaml.safe_dump(needs, sort_keys=False, width=100)


def golden(name: str) -> str:
    """Render an example, so that reviews show every change of an object.

    Alerts, runbooks and dashboards are left out, because their own files show changes.
    """
    manifests = render(CI[name])
    for manifest in manifests:
        if manifest["kind"] == "PrometheusRule":
            manifest["spec"]["groups"] = [group["name"] for group in manifest["spec"]["groups"]]
        is_of_file = manifest["metadata"]["name"].endswith("-runbooks")
        for key in manifest.get("data", {}):
            if is_of_file or key.endswith(".json"):
                manifest["data"][key] = "..."
    documents = sorted(manifests, key=lambda m: (m["kind"], m["metadata"]["name"]))
    return yaml.safe_dump_all(documents, width=100)


def files_of_the_chart() -> dict[Path, str]:
    """Generate the chart's files, by path."""
    licence = (PROJECT / "LICENSE").read_text()
    return {
        README: readme(),
        METADATA: metadata(),
        RUNBOOKS: runbooks(),
        DASHBOARDS / "on-call.json": on_call(),
        SMS_APIS: sms_apis(),
        NEEDS: service_needs(),
        LICENSE: licence,
    }


def goldens() -> dict[Path, str]:
    """Render each example, by path."""
    return {GOLDEN / f"{name}.yaml": golden(name) for name in CI}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    # The renders contain the generated files.
    for make in (files_of_the_chart, goldens):
        for path, text in make().items():
            path.write_text(text)
    for stale in set(GOLDEN.glob("*.yaml")) - {GOLDEN / f"{name}.yaml" for name in CI}:
        stale.unlink()
