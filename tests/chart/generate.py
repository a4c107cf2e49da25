"""Writes what is made from other files: the chart's documents and metadata, golden renders.

python -m tests.chart.generate
"""

import base64
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bridge.config.presets import PRESETS, preset_settings
from tests.chart.rendering import CHART, CI, render

README = CHART / "README.md"
METADATA = CHART / "Chart.yaml"
LICENSE = CHART / "LICENSE"
RUNBOOKS = CHART / "files" / "runbooks.yaml"
SMS_APIS = CHART / "files" / "sms-apis.yaml"
PROJECT = CHART.parents[1]
GOLDEN = Path(__file__).parent / "golden"
MAX_DEFAULT = 60


def documented_values() -> Iterator[tuple[str, Any, str]]:
    """Yield each value that values.yaml explains: its path, its default, the comment above it."""
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
    """Make the README: what stands above the table is kept, the table is made anew."""
    text = README.read_text()
    heading = "\n## Values\n"
    rows = ["| Key | Default | What it is |", "|---|---|---|"]
    for path, default, comment in documented_values():
        written = f"`{json.dumps(default)}`"
        shown = written if len(written) <= MAX_DEFAULT else "see `values.yaml`"
        rows.append(f"| `{path}` | {shown} | {comment.replace('|', chr(92) + '|')} |")
    return text.partition(heading)[0] + heading + "\n" + "\n".join(rows) + "\n"


def changes() -> list[dict[str, str]]:
    """List what the newest part of CHANGELOG.md says of the chart, as Artifact Hub reads it."""
    _, newest, *_ = (PROJECT / "CHANGELOG.md").read_text().split("\n## ")
    _, *kinds = newest.split("\n### ")
    return [
        {"kind": part.partition("\n")[0].lower(), "description": line}
        for part in kinds
        for line in re.findall(r"^- (Helm chart.*)", part, re.MULTILINE)
    ]


def metadata() -> str:
    """Make Chart.yaml: its icon and its changes are put in, all else is kept."""
    icon = base64.b64encode((CHART / "icon.svg").read_bytes()).decode()
    # JSON is YAML, and quotes whatever needs it.
    listed = "".join(f"    - {json.dumps(change, ensure_ascii=False)}\n" for change in changes())
    text = METADATA.read_text()
    text = re.sub(r"(?<=\nicon:).*", f" data:image/svg+xml;base64,{icon}", text)
    return re.sub(r"(?<=artifacthub\.io/changes: \|\n)(    .*\n)*", lambda _: listed, text)


def runbooks() -> str:
    """Make files/runbooks.yaml: each section of docs/runbooks.md by its alert, the head as README.

    Links become their words: from where this is read they lead nowhere.
    """
    text = (PROJECT / "docs" / "runbooks.md").read_text()
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
    head, *parts = re.split(r"^#{2,3} ", text, flags=re.MULTILINE)
    sections = dict(part.split("\n", 1) for part in parts)
    kept = {"README": head} | {name: s for name, s in sections.items() if s.strip()}
    lines = ["# Made of docs/runbooks.md by `make chart-files`."]
    for name, section in kept.items():
        lines += [f"{name}: |", textwrap.indent(section.strip(), "  ")]
    return "\n".join(lines) + "\n"


def sms_apis() -> str:
    """Make files/sms-apis.yaml: the address of each preset's service, as far as it has one for all.

    Without one the chart asks for it.
    """
    lines = ["# Made of the presets of sms_api by `make chart-files`."]
    lines += [f"{name}: {json.dumps(preset_settings(name)['base_url'] or '')}" for name in PRESETS]
    return "\n".join(lines) + "\n"


def golden(name: str) -> str:
    """Render an example in a form that shows every change of an object in a review.

    The alerts, runbooks and dashboards are files of the chart, shown by their own change.
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
    """Make every generated file that is part of the chart, by path."""
    licence = (PROJECT / "LICENSE").read_text()
    return {
        README: readme(),
        METADATA: metadata(),
        RUNBOOKS: runbooks(),
        SMS_APIS: sms_apis(),
        LICENSE: licence,
    }


def goldens() -> dict[Path, str]:
    """Make the golden render of each example, by path."""
    return {GOLDEN / f"{name}.yaml": golden(name) for name in CI}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    # What is rendered holds what is written first.
    for make in (files_of_the_chart, goldens):
        for path, text in make().items():
            path.write_text(text)
    for stale in set(GOLDEN.glob("*.yaml")) - {GOLDEN / f"{name}.yaml" for name in CI}:
        stale.unlink()
