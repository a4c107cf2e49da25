"""Writes what is made from other files: the chart's README, metadata and licence, golden renders.

python -m tests.chart.generate
"""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.chart.rendering import CHART, CI, render

README = CHART / "README.md"
METADATA = CHART / "Chart.yaml"
LICENSE = CHART / "LICENSE"
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


def golden(name: str) -> str:
    """Render an example in a form that shows every change of an object in a review.

    The alerts and dashboards are files of the chart, shown by their own change.
    """
    manifests = render(CI[name])
    for manifest in manifests:
        if manifest["kind"] == "PrometheusRule":
            manifest["spec"]["groups"] = [group["name"] for group in manifest["spec"]["groups"]]
        for key in manifest.get("data", {}):
            if key.endswith(".json"):
                manifest["data"][key] = "..."
    documents = sorted(manifests, key=lambda m: (m["kind"], m["metadata"]["name"]))
    return yaml.safe_dump_all(documents, width=100)


def generated() -> dict[Path, str]:
    """Make every generated file, by path."""
    licence = (PROJECT / "LICENSE").read_text()
    made = {README: readme(), METADATA: metadata(), LICENSE: licence}
    return made | {GOLDEN / f"{name}.yaml": golden(name) for name in CI}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for stale in set(GOLDEN.glob("*.yaml")) - generated().keys():
        stale.unlink()
    for path, text in generated().items():
        path.write_text(text)
