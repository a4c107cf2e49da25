"""Kubernetes, and the operators, take every object of every example."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.chart.rendering import CI, MINIMAL, Manifest, Values, merged, render

# The oldest version that Chart.yaml takes, one between, and the newest whose schemas there are.
VERSIONS = ("1.30", "1.33", "1.37")
CUSTOM = (
    *("monitoring.coreos.com", "keda.sh", "gateway.networking.k8s.io"),
    *("external-secrets.io", "rabbitmq.com"),
)
# A folder with the operators' own definitions, which `make chart` fetches.
DEFINITIONS = os.environ.get("SMS_BRIDGE_TEST_CRDS")

EXTRA: dict[str, Values] = {
    "every option of a pod": {
        "worker": {
            "extraEnv": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "extraEnvFrom": [{"configMapRef": {"name": "c"}}],
            "initContainers": [{"name": "i", "image": "i"}],
            "sidecars": [{"name": "s", "image": "s"}],
            "runtimeClassName": "gvisor",
            "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
            "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["sms.example.com"]}],
            "strategy": {"type": "Recreate", "rollingUpdate": None},
            "preStopSleepSeconds": 5,
        },
        "scrapeAnnotations": True,
    },
    "every option of the Service": {
        "webhook": {
            "service": {
                "type": "LoadBalancer",
                "nodePort": 30080,
                "loadBalancerClass": "example.com/internal",
                "trafficDistribution": "PreferClose",
                "ipFamilyPolicy": "PreferDualStack",
            }
        },
    },
}
EXAMPLES = CI | {name: merged(MINIMAL, values) for name, values in EXTRA.items()}


@pytest.fixture(scope="module", autouse=True)
def read_schemas_once() -> Iterator[None]:
    """Keep kubernetes-validate from reading a version's schemas anew for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


def is_custom(manifest: Manifest) -> bool:
    """Say whether an object belongs to an operator."""
    group: str = manifest["apiVersion"].partition("/")[0]
    return group in CUSTOM


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_kubernetes_takes_every_object(name: str, version: str) -> None:
    """Each object fits the strict schema of Kubernetes: no unknown field, no wrong type."""
    manifests = [m for m in render(EXAMPLES[name]) if not is_custom(m)]

    assert manifests
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Make a schema of a custom resource refuse what it does not know, as the API server does."""
    made = {key: value for key, value in schema.items() if not key.startswith("x-")}
    for key in ("properties", "patternProperties"):
        if key in made:
            made[key] = {name: strict(below) for name, below in made[key].items()}
    if isinstance(made.get("items"), dict):
        made["items"] = strict(made["items"])
    if isinstance(made.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(made["additionalProperties"])
    elif "properties" in made and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    if made.get("pattern", "").startswith("^(?"):
        # Go's flags inside a pattern; Python has them at its start only.
        del made["pattern"]
    if schema.get("nullable"):
        made["type"] = [made["type"], "null"]
    return made


def definitions() -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    assert DEFINITIONS is not None
    for path in sorted(Path(DEFINITIONS).glob("*.yaml")):
        definition = yaml.load(path.read_text(), yaml.CSafeLoader)
        spec = definition["spec"]
        for version in spec["versions"]:
            kind = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            yield kind, schema


@pytest.fixture(scope="module")
def schemas() -> dict[tuple[str, str], dict[str, Any]]:
    """Read the definitions of the custom resources, by apiVersion and kind."""
    if DEFINITIONS is None:
        pytest.skip("the operators' definitions are fetched by `make chart`")
    return dict(definitions())


@pytest.mark.parametrize("name", CI)
def test_the_operators_take_every_object(
    name: str, schemas: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """Each custom resource fits its operator's own definition, with no unknown field."""
    for manifest in filter(is_custom, render(CI[name])):
        jsonschema.validate(manifest, schemas[manifest["apiVersion"], manifest["kind"]])
