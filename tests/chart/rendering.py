"""Renders the Helm chart, and finds objects in the result."""

import copy
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

from bridge.config import Role

CHART = Path(__file__).parents[2] / "helm" / "sms-bridge"
APP_VERSION: str = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
ROLES: tuple[Role, ...] = ("worker", "webhook")
MOUNTED = "/etc/sms-bridge"

# A helm program instead of the Python engine. `make chart` uses Helm 4 and Helm 3.
HELM = os.environ.get("SMS_BRIDGE_TEST_HELM")

Values = dict[str, Any]
Manifest = dict[str, Any]


class RenderError(Exception):
    """Helm refused the chart or its values."""


def render_files(
    values: Values, *, release: str = "rel", namespace: str = "sms", chart: Path = CHART
) -> dict[str, str]:
    """Check values against the schema, and render every template, by name.

    A helm program does not render the notes. Raises RenderError with Helm's message.
    """
    if HELM is not None:
        return _render_by_program(HELM, values, release=release, namespace=namespace, chart=chart)
    try:
        with helm_python.Chart.load(chart) as loaded:
            return loaded.render(values, name=release, namespace=namespace)
    except helm_python.HelmError as error:
        raise RenderError(str(error)) from None


def _render_by_program(
    program: str, values: Values, *, release: str, namespace: str, chart: Path
) -> dict[str, str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        done = subprocess.run(
            [program, "template", release, str(chart), "-n", namespace, "-f", file.name],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    if done.returncode:
        raise RenderError(done.stderr)
    files: dict[str, str] = {}
    for document in re.split(r"^---\n", done.stdout, flags=re.MULTILINE):
        source, _, text = document.partition("\n")
        if document.strip():
            name = source.removeprefix("# Source: ")
            files[name] = files.get(name, "") + f"---\n{text}"
    return files


def render(values: Values, *, release: str = "rel", chart: Path = CHART) -> list[Manifest]:
    """Render the chart's objects."""
    files = _rendered(json.dumps(values), release, chart)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    # libyaml's loader, which is ten times as fast.
    return [m for text in texts for m in yaml.load_all(text, yaml.CSafeLoader) if m]


@cache
def _rendered(values: str, release: str, chart: Path) -> dict[str, str]:
    return render_files(json.loads(values), release=release, chart=chart)


def merged(base: Values, *overs: Values) -> Values:
    """Merge values as Helm does."""
    result = copy.deepcopy(base)
    for over in overs:
        for key, value in over.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def nested(path: str, value: Any) -> Values:
    """Make values that set one key, such as `worker.replicaCount`."""
    for key in reversed(path.split(".")):
        value = {key: value}
    result: Values = value
    return result


def _ci_values() -> dict[str, Values]:
    files = sorted((CHART / "ci").glob("*-values.yaml"))
    return {
        file.name.removesuffix("-values.yaml"): yaml.safe_load(file.read_text()) for file in files
    }


# The chart's examples. `minimal` has both roles and only the required values.
CI = _ci_values()
MINIMAL = CI["minimal"]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Return the objects of a kind, by name."""
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


def pods(manifests: list[Manifest]) -> list[Manifest]:
    """Return all pods: of Deployments, and the test pod."""
    templates = [m["spec"]["template"] for m in of_kind(manifests, "Deployment").values()]
    return [*templates, *of_kind(manifests, "Pod").values()]


def deployment(values: Values, role: str) -> Manifest:
    return of_kind(render(values), "Deployment")[f"rel-sms-bridge-{role}"]


def container(values: Values, role: str) -> dict[str, Any]:
    """Render the container of a role."""
    found: dict[str, Any] = deployment(values, role)["spec"]["template"]["spec"]["containers"][0]
    return found


def config(values: Values) -> dict[str, Any]:
    """Render the bridge's config.yaml."""
    found = of_kind(render(values), "ConfigMap")["rel-sms-bridge"]
    loaded: dict[str, Any] = yaml.safe_load(found["data"]["config.yaml"])
    return loaded


def environment(values: Values, role: str, secrets: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable in container(values, role)["env"]:
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        if reference:
            found[variable["name"]] = secrets["{name}/{key}".format(**reference)]
        else:
            # Kubernetes only replaces variables that are defined before.
            found[variable["name"]] = re.sub(
                r"\$\(([^)]+)\)", lambda named: found.get(named[1], named[0]), variable["value"]
            )
    return found


def secret_files(pod: Manifest) -> dict[str, str]:
    mounts = {m["name"]: m["mountPath"] for m in pod["spec"]["containers"][0]["volumeMounts"]}
    return {
        f"{mounts[volume['name']]}/{item['path']}": f"{source['secret']['name']}/{item['key']}"
        for volume in pod["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
        for item in source["secret"]["items"]
    }


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in nested settings with its path."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree


def selects(selector: Mapping[str, str], pod: Manifest) -> bool:
    """Return whether a selector matches a pod."""
    labels: dict[str, str] = pod["metadata"]["labels"]
    return selector.items() <= labels.items()
