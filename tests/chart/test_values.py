"""Every value is documented, known to the schema, and changes what is rendered."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from bridge.config.presets import PRESETS
from tests.chart.generate import documented_values
from tests.chart.rendering import (
    CHART,
    CI,
    MINIMAL,
    Values,
    config,
    leaves,
    merged,
    nested,
    render_files,
)

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = yaml.safe_load((CHART / "values.schema.json").read_text())
# A leaf is what has a comment of its own; what is below it is an example of a free form.
LEAVES = [path for path, _, _ in documented_values()]

CLUSTER: Values = {"topology": {"clusterReference": {"name": "rabbitmq"}}}
BROKER_REF: Values = {
    "smsApi": {"existingSecret": "sms-api"},
    "webhookSecrets": {"existingSecret": "webhooks"},
    "externalSecrets": {"remoteRefs": {"rabbitmq": "broker", "smsApi": "", "webhookSecrets": ""}},
}
TLS: Values = nested(
    "rabbitmq.tls", {"enabled": True, "existingSecret": "tls", "certKey": "c", "keyKey": "k"}
)


def switched_on(section: str, **more: Any) -> Values:
    return merged(MINIMAL, nested(section, {"enabled": True, **more}))


# Values in which those below a prefix matter: the first that fits, else the minimal ones.
BASES: list[tuple[str, Values]] = [
    ("externalSecrets.enabled", merged(CI["operators"], BROKER_REF)),
    ("externalSecrets.remoteRefs.rabbitmq", merged(CI["operators"], BROKER_REF)),
    ("externalSecrets.", CI["operators"]),
    ("existingConfigMap", CI["existing"]),
    ("rabbitmq.secretKeys.host", CI["existing"]),
    ("rabbitmq.secretKeys.port", CI["existing"]),
    ("rabbitmq.hosts", merged(MINIMAL, nested("rabbitmq", {"host": "", "hosts": ["a"]}))),
    ("rabbitmq.tls.enabled", MINIMAL),
    ("rabbitmq.tls.existingSecret", switched_on("rabbitmq.tls")),
    ("rabbitmq.tls.", merged(MINIMAL, TLS)),
    ("smsApi.caSecret.key", merged(MINIMAL, nested("smsApi.caSecret.name", "ca"))),
    (
        "worker.keda.authenticationRef.",
        merged(
            CI["autoscaled"],
            nested("worker.keda", {"existingSecret": "", "authenticationRef": {"name": "mine"}}),
        ),
    ),
    ("worker.keda.", CI["autoscaled"]),
    *(
        (f"{role}.autoscaling.", switched_on(f"{role}.autoscaling"))
        for role in ("worker", "webhook")
    ),
    # Beside no service at all: a release has a real one or this.
    ("sandbox.enabled", CI["webhook-only"]),
    ("sandbox.", CI["sandbox"]),
    ("networkPolicy.allowSandboxFrom", CI["sandbox"]),
    ("networkPolicy.otlpTo", CI["full"]),
    ("webhook.service.type", MINIMAL),
    ("webhook.service.", merged(MINIMAL, nested("webhook.service.type", "LoadBalancer"))),
    ("ingress.", switched_on("ingress", hosts=["sms.example.com"])),
    ("httpRoute.", switched_on("httpRoute", parentRefs=[{"name": "public"}])),
    *(
        (f"{section}.", switched_on(section))
        for section in (
            *("networkPolicy", "podMonitor", "serviceMonitor"),
            *("prometheusRule", "dashboards", "toolbox"),
        )
    ),
    ("topology.enabled", merged(MINIMAL, CLUSTER)),
    (
        "topology.clusterReference.connectionSecret",
        merged(
            CI["operators"],
            nested("topology.clusterReference", {"name": "", "connectionSecret": "management"}),
        ),
    ),
    ("topology.createUser", merged(CI["operators"], nested("rabbitmq.existingSecret", "broker"))),
    ("topology.", CI["operators"]),
]

# Flips that a rule of thumb does not find.
FLIPS: dict[str, Any] = {
    "image.digest": "sha256:" + "0" * 64,
    "image.pullPolicy": "Always",
    "serviceAccount.create": False,
    "config": {"log": {"level": "debug"}},
    "rabbitmq.hosts": ["one", "two"],
    "smsApi.preset": "telnyx",
    "smsApi.baseUrl": "https://other.example.com",
    "webhookSecrets.secretKeys": ["current", "next"],
    "externalSecrets.apiVersion": "external-secrets.io/v1beta1",
    "externalSecrets.secretStoreRef.kind": "SecretStore",
    "externalSecrets.refreshInterval": "2h",
    "tmp.medium": "",
    "tmp.sizeLimit": "8Mi",
    "sandbox.resources": {"limits": {"memory": "1Gi"}},
    "toolbox.resources": {"limits": {"memory": "1Gi"}},
    "toolbox.extraEnv": [{"name": "TZ", "value": "UTC"}],
    "webhook.path": "/other",
    "webhook.endpoints": [{"path": "/other", "existingSecret": "other"}],
    "webhook.service.type": "LoadBalancer",
    "webhook.service.loadBalancerSourceRanges": ["192.0.2.0/24"],
    "webhook.service.externalTrafficPolicy": "Local",
    "webhook.service.ipFamilyPolicy": "SingleStack",
    "worker.keda.managementUrl": "http://other:15672",
    "worker.keda.authenticationRef.kind": "ClusterTriggerAuthentication",
    "worker.keda.fallback": {"replicas": 7},
    "worker.keda.scalingModifiers": {"formula": "backlog", "target": "100"},
    "ingress.hosts": ["other.example.com"],
    "ingress.pathType": "Prefix",
    "httpRoute.hostnames": ["other.example.com"],
    "httpRoute.pathType": "PathPrefix",
    "httpRoute.timeouts": {"request": "10s"},
    "networkPolicy.dns.ports": [5353],
    "networkPolicy.smsApiPorts": [8443],
    **{
        f"{monitor}.{key}": "15s"
        for monitor in ("podMonitor", "serviceMonitor")
        for key in ("interval", "scrapeTimeout")
    },
    "podMonitor.podTargetLabels": ["team"],
    "serviceMonitor.targetLabels": ["team"],
    "prometheusRule.runbookBaseUrl": "https://runbooks.example.com",
    "prometheusRule.selector": 'namespace="sms"',
    "prometheusRule.disabled": ["SmsBridgeWorkerPausedActionRequired"],
    "prometheusRule.overrides": {"SmsBridgeWorkerPausedActionRequired": {"for": "1h"}},
    "topology.deletionPolicy": "delete",
    "topology.extraBindings": [{"destination": "team-b", "routingKey": "#"}],
    **{
        f"{role}.{key}": value
        for role in ("worker", "webhook")
        for key, value in {
            "resources": {"limits": {"memory": "1Gi"}},
            "strategy": {"rollingUpdate": {"maxSurge": 2}},
            "podDisruptionBudget.minAvailable": 1,
            "podDisruptionBudget.unhealthyPodEvictionPolicy": "IfHealthyBudget",
            "args": ["--config", "/mine/config.yaml"],
            "extraEnv": [{"name": "TZ", "value": "UTC"}],
            "terminationGracePeriodSeconds": 300,
        }.items()
    },
}


def base_for(path: str) -> Values:
    return next((base for prefix, base in BASES if path.startswith(prefix)), MINIMAL)


@cache
def rendered(values: str) -> dict[str, str]:
    return render_files(json.loads(values))


def value_at(values: Values, path: str) -> Any:
    found: Any = merged(DEFAULTS, values)
    for key in path.split("."):
        found = found[key]
    return found


def flipped(path: str, value: Any) -> Any:
    if path in FLIPS:
        return FLIPS[path]
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return f"{value}x"
        case list():
            return [{"name": "x"}]
        case _:
            return {"x": "y"}


@pytest.mark.thorough
@pytest.mark.parametrize("path", LEAVES)
def test_every_value_changes_what_is_rendered(path: str) -> None:
    """No value is ignored: another one gives other manifests. Renders the chart for each value."""
    base = base_for(path)
    other = merged(base, nested(path, flipped(path, value_at(base, path))))

    assert render_files(other) != rendered(json.dumps(base))


def test_the_presets_are_the_apps() -> None:
    """The schema takes the names of all presets; empty leaves it to `config`, or to the app."""
    assert SCHEMA["definitions"]["preset"]["enum"] == ["", *PRESETS]


def test_every_value_has_a_comment() -> None:
    """Each value in values.yaml, or the map that it is part of, is explained."""
    missing = [
        path
        for path, _ in leaves(DEFAULTS)
        if not any(path == leaf or path.startswith(f"{leaf}.") for leaf in LEAVES)
    ]

    assert missing == []
    assert len(LEAVES) == len(set(LEAVES))


def known_to_the_schema(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    reference = re.fullmatch(r"#/definitions/(\w+)", node.get("$ref", ""))
    if reference:
        node = SCHEMA["definitions"][reference[1]]
    for name, below in node.get("properties", {}).items():
        yield prefix + name
        yield from known_to_the_schema(below, f"{prefix}{name}.")


def test_the_schema_knows_the_values_and_no_others() -> None:
    """A value that is added to one file is added to the other."""
    known = set(known_to_the_schema(SCHEMA))
    missing = [leaf for leaf in LEAVES if leaf not in known]
    tops = {path.partition(".")[0] for path in known}

    assert missing == []
    # For a parent chart's condition; no template reads it.
    assert tops - DEFAULTS.keys() == {"enabled"}


def test_every_map_of_the_schema_refuses_what_it_does_not_know() -> None:
    """A map with named keys takes no others, but for the parent chart's `global`."""

    def open_maps(node: Any, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            if "properties" in node and node.get("additionalProperties") is not False:
                yield path
            for key, below in node.items():
                yield from open_maps(below, f"{path}.{key}")

    assert set(open_maps(SCHEMA, "")) == {
        ".properties.global",
        # A variable of the environment has forms that Kubernetes knows.
        *(
            f".properties.{part}.properties.extraEnv.items"
            for part in ("worker", "webhook", "toolbox")
        ),
    }


# --- The address that services call ---------------------------------------------------------------

TWILIO = nested("webhook.endpoints", [{"path": "/t", "preset": "twilio", "existingSecret": "s"}])
INGRESS = nested("ingress", {"enabled": True, "hosts": ["sms.example.com", "b.example.com"]})
ROUTE = nested(
    "httpRoute",
    {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["sms.example.com"]},
)
GIVEN = "https://a.example.com/other"


@pytest.mark.parametrize("way", [INGRESS, ROUTE], ids=["ingress", "httpRoute"])
def test_the_public_url_is_that_of_the_host(way: Values) -> None:
    webhook = config(merged(MINIMAL, TWILIO, way))["webhook"]

    assert webhook["public_url"] == "https://sms.example.com/webhooks"
    assert webhook["endpoints"][0]["public_url"] == "https://sms.example.com/t"


def test_a_public_url_that_is_given_stays() -> None:
    endpoint = {"path": "/t", "existingSecret": "s", "config": {"public_url": GIVEN}}
    given = nested("webhook.endpoints", [endpoint])
    default = nested("config.webhook.public_url", GIVEN)
    webhook = config(merged(MINIMAL, given, default, INGRESS))["webhook"]

    assert webhook["public_url"] == webhook["endpoints"][0]["public_url"] == GIVEN


@pytest.mark.parametrize(
    "way",
    [
        {},
        nested("ingress.hosts", ["sms.example.com"]),
        nested("ingress", {"hosts": ["*.a.example"], "enabled": True}),
    ],
    ids=["none", "switched off", "a wildcard"],
)
def test_without_a_host_there_is_no_public_url(way: Values) -> None:
    assert "public_url" not in config(merged(MINIMAL, way))["webhook"]


def test_a_variable_for_the_public_url_is_not_contradicted() -> None:
    """The worker would name another address than the one by which the receiver verifies."""
    variable = {"name": "SMS_BRIDGE_WEBHOOK__PUBLIC_URL", "value": GIVEN}
    values = merged(MINIMAL, INGRESS, nested("webhook.extraEnv", [variable]))

    assert "public_url" not in config(values)["webhook"]
