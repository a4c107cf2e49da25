"""The chart as it is delivered: packaged, below a parent chart, with Helm 3 and Helm 4."""

import os
import re
import shutil
import subprocess
import tarfile
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.chart.rendering import (
    APP_VERSION,
    CHART,
    CI,
    HELM,
    MINIMAL,
    merged,
    pods,
    render,
)

# The other helm program that `make chart` has built, whose output must be the same.
OTHER_HELM = os.environ.get("SMS_BRIDGE_TEST_OTHER_HELM")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm programs are built by `make chart`")


def helm(*arguments: str, program: str | None = HELM) -> subprocess.CompletedProcess[str]:
    assert program is not None
    return subprocess.run(
        [program, *arguments], check=False, capture_output=True, text=True, timeout=120
    )


def test_versions_are_one() -> None:
    project = tomllib.loads((CHART.parents[1] / "pyproject.toml").read_text())["project"]

    assert project["version"] == APP_VERSION


def test_templates_use_nothing_that_varies() -> None:
    """No template asks for the time, chance or the cluster."""
    source = "".join(p.read_text() for p in (CHART / "templates").rglob("*") if p.is_file())

    assert not re.search(r"\b(now|lookup|uuidv4|rand[A-Z]\w+|gen[A-Z]\w+|Capabilities)\b", source)


def test_installs_below_a_parent_chart(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "charts" / "sms-bridge")
    (tmp_path / "Chart.yaml").write_text(
        "apiVersion: v2\nname: parent\nversion: 1.0.0\ndependencies:\n"
        "- {name: sms-bridge, version: '>=0.1.0', condition: sms-bridge.enabled}\n"
    )
    values = {
        "global": {"imageRegistry": "registry.local:5000", "of": {"the": "parent"}},
        "sms-bridge": merged(MINIMAL, {"enabled": True}),
    }
    off = {"sms-bridge": {"enabled": False}}
    images = {pod["spec"]["containers"][0]["image"] for pod in pods(render(values, chart=tmp_path))}

    assert images == {f"registry.local:5000/example/sms-bridge:{APP_VERSION}"}
    assert render(off, chart=tmp_path) == []


@needs_helm
@pytest.mark.parametrize("name", CI)
def test_helm_finds_no_fault(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), "-f", str(CHART / "ci" / f"{name}-values.yaml"))

    assert done.returncode == 0, done.stdout


@needs_helm
def test_the_package_renders_like_the_folder(tmp_path: Path) -> None:
    assert helm("package", str(CHART), "-d", str(tmp_path)).returncode == 0
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        names = set(archive.getnames())
    values = ("-f", str(CHART / "ci" / "full-values.yaml"))
    folder, packed = (
        helm("template", "rel", path, *values).stdout for path in (str(CHART), str(package))
    )

    assert folder == packed != ""
    assert {"sms-bridge/README.md", "sms-bridge/values.schema.json"} <= names
    assert not any("/ci/" in name for name in names)


@needs_helm
def test_old_clusters_are_refused() -> None:
    values = ("-f", str(CHART / "ci" / "minimal-values.yaml"))
    old, vendor = (
        helm("template", "rel", str(CHART), *values, "--kube-version", version)
        for version in ("1.29.9", "1.30.1-gke.100")
    )

    assert "kubeVersion" in old.stderr
    assert vendor.returncode == 0


@pytest.mark.skipif(OTHER_HELM is None, reason="helm programs are built by `make chart`")
@pytest.mark.parametrize("name", CI)
def test_helm_3_and_helm_4_render_alike(name: str) -> None:
    """Both give the same objects; they differ in blank lines."""
    arguments = ("template", "rel", str(CHART), "-f", str(CHART / "ci" / f"{name}-values.yaml"))
    one, other = (
        helm(*arguments, program=program).stdout.replace("\n\n", "\n")
        for program in (HELM, OTHER_HELM)
    )

    assert list(yaml.safe_load_all(one)) == list(yaml.safe_load_all(other)) != []


def documented_examples() -> list[str]:
    pages = ("deployment.md", "deployment-options.md")
    documents = (CHART / "README.md", *(CHART.parents[1] / "docs" / page for page in pages))
    block = re.compile(r"^ *```yaml\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    blocks = [
        textwrap.dedent(text)
        for document in documents
        for text in block.findall(document.read_text())
    ]
    assert len(blocks) > 5
    return blocks


def test_the_first_example_is_complete() -> None:
    """The values with which docs/deployment.md begins need nothing beside them."""
    page = (CHART.parents[1] / "docs" / "deployment.md").read_text()
    first = page.split("```yaml\n")[1].partition("```")[0]
    kinds = {manifest["kind"] for manifest in render(yaml.safe_load(first))}

    assert {"Deployment", "Ingress", "PodMonitor", "PrometheusRule"} <= kinds


@pytest.mark.parametrize("text", documented_examples())
def test_the_documents_examples_render(text: str) -> None:
    """What a reader copies from the documents is accepted, beside the values that are required."""
    values = yaml.safe_load(text)
    refs = values.get("externalSecrets", {}).get("remoteRefs", {})
    empty = {credential: {"existingSecret": ""} for credential in refs}
    # It takes the place of the service.
    alone = {"smsApi": {"baseUrl": ""}} if "sandbox" in values else {}
    given = 1 if "existingConfigMap" in values else 0

    assert len(render(merged(MINIMAL, empty, alone, values))) >= len(render(MINIMAL)) - given
