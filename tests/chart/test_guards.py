"""Values that cannot work are refused with a sentence, and typos with the key."""

import re
import shutil
from pathlib import Path

import pytest

from bridge.app import CLOSE_SECONDS
from bridge.config.presets import PRESETS, Preset, preset_settings
from tests.chart.generate import documented_values
from tests.chart.rendering import CHART, MINIMAL, RenderError, Values, merged, nested, render

# Marks a switch that needs more to be complete.
KEDA: Values = nested(
    "worker.keda", {"enabled": True, "managementUrl": "http://r:15672", "existingSecret": "m"}
)
INGRESS: Values = {"ingress": {"enabled": True, "hosts": ["a.example"]}}
VAULT: Values = {"externalSecrets": {"enabled": True, "secretStoreRef": {"name": "vault"}}}
CLUSTER: Values = {"topology": {"enabled": True, "clusterReference": {"name": "rabbitmq"}}}


def endpoints(*paths: str) -> Values:
    return nested("webhook.endpoints", [{"path": p, "existingSecret": "s"} for p in paths])


def test_defaults_alone_name_what_is_missing() -> None:
    with pytest.raises(RenderError) as caught:
        render({})

    for value in (
        "image.repository",
        "rabbitmq.host",
        "rabbitmq.existingSecret",
        "smsApi.baseUrl",
        "smsApi.existingSecret",
        "webhookSecrets.existingSecret",
    ):
        assert f"- {value} is empty: " in str(caught.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            merged(nested("worker.enabled", False), nested("webhook.enabled", False)),
            "there is nothing to deploy",
        ),
        (nested("image.repository", ""), "image.repository is empty"),
        (nested("rabbitmq.host", ""), "rabbitmq.host is empty"),
        (
            nested("rabbitmq.secretKeys.host", "host"),
            "rabbitmq.host and rabbitmq.secretKeys.host are both set",
        ),
        (
            nested("rabbitmq.hosts", ["one", "two"]),
            "rabbitmq.host and rabbitmq.hosts are both set",
        ),
        (
            {"rabbitmq": {"host": "", "hosts": ["one"], "secretKeys": {"host": "host"}}},
            "rabbitmq.hosts and rabbitmq.secretKeys.host are both set",
        ),
        (
            merged(nested("rabbitmq.port", 5673), nested("rabbitmq.secretKeys.port", "port")),
            "rabbitmq.port and rabbitmq.secretKeys.port are both set",
        ),
        (
            {"rabbitmq": {"existingSecret": "", "host": "", "secretKeys": {"host": "h"}}},
            "--from-literal=password=... --from-literal=h=...`",
        ),
        (
            nested("rabbitmq.existingSecret", ""),
            "NAME --namespace sms --from-literal=username=... --from-literal=password=...`",
        ),
        (nested("smsApi.baseUrl", ""), "smsApi.baseUrl is empty"),
        (nested("smsApi.existingSecret", ""), "--from-literal=key=..."),
        (
            nested("smsApi", {"existingSecret": "", "secretKeys": {"username": "user"}}),
            "--from-literal=key=... --from-literal=user=...",
        ),
        (nested("webhookSecrets.existingSecret", ""), "--from-literal=current=..."),
        (nested("webhook.containerPort", 9090), "metrics must not be public"),
        (
            merged(VAULT, nested("externalSecrets.remoteRefs.rabbitmq", "sms/broker")),
            "rabbitmq.existingSecret and externalSecrets.remoteRefs.rabbitmq are both set",
        ),
        (
            merged(VAULT, nested("smsApi.existingSecret", "")),
            "or set externalSecrets.remoteRefs.smsApi.",
        ),
        (nested("externalSecrets.enabled", True), "externalSecrets.secretStoreRef.name is empty"),
        (nested("rabbitmq.tls.existingSecret", "tls"), "rabbitmq.tls.enabled is false"),
        (
            nested("rabbitmq.tls", {"enabled": True, "existingSecret": "tls", "keyKey": "k"}),
            "go together: set both or neither",
        ),
        (
            nested("rabbitmq.tls", {"enabled": True, "certKey": "c", "keyKey": "k"}),
            "rabbitmq.tls.existingSecret is empty",
        ),
        (
            nested("rabbitmq.tls", {"enabled": True, "existingSecret": "tls", "caKey": ""}),
            "caKey and certKey are both empty",
        ),
        (
            {"existingConfigMap": "mine", "config": {"log": {"level": "debug"}}},
            "config and existingConfigMap are both set",
        ),
        (
            merged(nested("smsApi.preset", "telnyx"), nested("config.sms_api.preset", "generic")),
            "smsApi.preset and config.sms_api.preset are both set",
        ),
        (
            merged(nested("smsApi.account", "AC1"), nested("config.sms_api.account", "AC2")),
            "smsApi.account and config.sms_api.account are both set",
        ),
        # What the program would refuse as well, in a pod that cannot start.
        (
            nested("smsApi.preset", "twilio"),
            "smsApi.account is empty: the preset twilio needs the Account SID",
        ),
        (
            nested(
                "webhook.endpoints", [{"path": "/t", "preset": "twilio", "existingSecret": "s"}]
            ),
            "config.public_url of the webhook.endpoints with the path /t is empty: twilio signs",
        ),
        (
            nested("config.webhook.signature.preset", "plivo"),
            "config.webhook.public_url is empty: plivo signs",
        ),
        (
            nested("config.sms_api.auth.username_file", "/x"),
            "config.sms_api.auth.username_file is set by the chart: use smsApi.secretKeys.username",
        ),
        # What the chart sets itself.
        (
            nested("config.sms_api.proxy", "http://user:secret@proxy:3128"),
            "config.sms_api.proxy contains a user or a password",
        ),
        (
            nested("config.rabbitmq.url", "amqp://a/"),
            "config.rabbitmq.url is set by the chart: use rabbitmq.host",
        ),
        (
            nested("config.rabbitmq.password", "p"),
            "config.rabbitmq.password is set by the chart: use rabbitmq.existingSecret",
        ),
        (
            nested("config.sms_api.key", "k"),
            "config.sms_api.key is set by the chart: use smsApi.existingSecret",
        ),
        (
            nested("config.webhook.secrets", ["s"]),
            "config.webhook.secrets is set by the chart: use webhookSecrets.existingSecret",
        ),
        (
            nested("config.worker.shutdown_timeout_seconds", 60),
            "is set by the chart: use worker.shutdownTimeoutSeconds",
        ),
        (
            nested("worker.extraEnv", [{"name": "sms_bridge_admin__port", "value": "1"}]),
            "worker.extraEnv sets sms_bridge_admin__port, which the chart sets: use admin.port",
        ),
        (
            nested("webhook.extraEnv", [{"name": "SMS_BRIDGE_RABBITMQ__TLS__CA_FILE"}]),
            "which the chart sets: use rabbitmq.tls",
        ),
        (
            nested("toolbox.extraEnv", [{"name": "SMS_BRIDGE_SMS_API__KEY", "value": "k"}]),
            "toolbox.extraEnv sets SMS_BRIDGE_SMS_API__KEY, which the chart sets",
        ),
        # Stopping.
        (
            nested("worker.terminationGracePeriodSeconds", 29),
            "worker.terminationGracePeriodSeconds (29) is below the 30 seconds that stopping takes",
        ),
        (
            nested("webhook.terminationGracePeriodSeconds", 34),
            "webhook.terminationGracePeriodSeconds (34) is below the 35 seconds",
        ),
        (
            nested("smsApi.timeoutSeconds", 25.5),
            "worker.shutdownTimeoutSeconds (25) is below smsApi.timeoutSeconds (25.5)",
        ),
        (
            nested("config.webhook.body_timeout_seconds", "18s"),
            "webhook.shutdownTimeoutSeconds (20) is below the 20.5 seconds",
        ),
        # Scaling.
        (
            merged(KEDA, nested("config.worker.ordering", "recipient")),
            "an autoscaler would only add standbys",
        ),
        (
            merged(KEDA, nested("worker.autoscaling.enabled", True)),
            "KEDA creates its own HorizontalPodAutoscaler",
        ),
        (merged(KEDA, nested("worker.keda.managementUrl", "")), "managementUrl is empty"),
        (
            merged(KEDA, nested("worker.keda.existingSecret", "")),
            "worker.keda needs either existingSecret",
        ),
        (
            merged(KEDA, nested("worker.keda.authenticationRef.name", "mine")),
            "worker.keda needs either existingSecret",
        ),
        (
            merged(KEDA, nested("worker.keda.minReplicaCount", 11)),
            "worker.keda.minReplicaCount (11) is above maxReplicaCount (10)",
        ),
        (
            nested("webhook.autoscaling", {"enabled": True, "minReplicas": 11}),
            "webhook.autoscaling.minReplicas (11) is above maxReplicas (10)",
        ),
        (
            nested("webhook.autoscaling", {"enabled": True, "targetCPUUtilizationPercentage": 0}),
            "webhook.autoscaling has no metric",
        ),
        (
            merged(
                nested("webhook.autoscaling.enabled", True),
                nested("webhook.resources.requests", {"cpu": None, "memory": "1Gi"}),
            ),
            "in percent of webhook.resources.requests.cpu, which is empty",
        ),
        (
            nested("worker.podDisruptionBudget.minAvailable", 2),
            "worker.podDisruptionBudget.minAvailable (2) keeps all pods (2)",
        ),
        (
            nested("worker.podDisruptionBudget.minAvailable", "51%"),
            "worker.podDisruptionBudget.minAvailable (51%) keeps all pods (2)",
        ),
        (
            merged(KEDA, nested("worker.podDisruptionBudget.minAvailable", 1)),
            "worker.podDisruptionBudget.minAvailable (1) keeps all pods (1)",
        ),
        # Endpoints.
        (
            merged(endpoints("/a", "/a"), nested("webhookSecrets.existingSecret", "")),
            "webhook.endpoints has the path /a twice",
        ),
        (endpoints("/webhooks"), "or it is also webhook.path"),
        (
            merged(
                endpoints("/a"),
                {"webhookSecrets": {"existingSecret": ""}, "tests": {"signed": True}},
            ),
            "tests.signed is true but webhookSecrets.existingSecret is empty",
        ),
        (
            merged(
                endpoints("/a"),
                {"webhookSecrets": {"existingSecret": ""}, "webhook": {"path": "/b"}},
            ),
            "webhook.path is set but webhookSecrets.existingSecret is empty",
        ),
        (
            nested("config.webhook.endpoints", []),
            "config.webhook.endpoints is set by the chart: use webhook.endpoints",
        ),
        # Exposure and monitoring.
        (merged(INGRESS, nested("webhook.enabled", False)), "there is nothing to route to"),
        (
            {
                "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
                "webhook": {"enabled": False},
            },
            "httpRoute.enabled is true but webhook.enabled is false",
        ),
        (nested("ingress.enabled", True), "ingress.hosts is empty"),
        (nested("httpRoute.enabled", True), "httpRoute.parentRefs is empty"),
        (
            nested("webhook.service.nodePort", 30080),
            "webhook.service.type is ClusterIP: it needs NodePort or LoadBalancer",
        ),
        (
            nested("webhook.service", {"type": "NodePort", "loadBalancerClass": "a"}),
            "webhook.service.type is NodePort: it needs LoadBalancer",
        ),
        (
            merged(nested("podMonitor.enabled", True), nested("serviceMonitor.enabled", True)),
            "every pod would be scraped twice",
        ),
        (
            merged(
                nested("networkPolicy.enabled", True), nested("rabbitmq.secretKeys.port", "port")
            ),
            "networkPolicy.enabled needs RabbitMQ's port",
        ),
        # Topology.
        (nested("topology.enabled", True), "topology.clusterReference needs either"),
        (
            merged(CLUSTER, nested("topology.clusterReference.connectionSecret", "s")),
            "topology.clusterReference needs either",
        ),
        (
            merged(
                CLUSTER,
                nested("topology.createUser", True),
                nested("rabbitmq.secretKeys.username", "user"),
            ),
            "topology.createUser needs rabbitmq.secretKeys to be username and password",
        ),
        (
            merged(
                CLUSTER,
                nested("topology.createUser", True),
                nested("rabbitmq", {"existingSecret": "", "secretKeys": {"port": "port"}}),
            ),
            "topology.createUser makes a Secret without host and port",
        ),
        (nested("topology.createUser", True), "nothing would create the user"),
        (
            nested("topology.extraBindings", [{"destination": "a", "routingKey": "#"}]),
            "topology.extraBindings is set but topology.enabled is false",
        ),
        (
            merged(
                CLUSTER,
                nested("topology.extraBindings", [{"destination": "a", "routingKey": "#"}]),
                nested("webhook.enabled", False),
            ),
            "there is no exchange to bind to",
        ),
        (
            merged(
                CLUSTER,
                nested(
                    "topology.extraBindings",
                    [
                        {"destination": "a", "routingKey": "#"},
                        {"destination": "a", "routingKey": "#", "destinationType": "queue"},
                    ],
                ),
            ),
            "topology.extraBindings names a with the routing key # twice",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(values: Values, sentence: str) -> None:
    with pytest.raises(RenderError) as caught:
        render(merged(MINIMAL, values))

    assert sentence in str(caught.value)
    assert str(caught.value).count("\n- ") == 1


@pytest.mark.parametrize(
    ("preset", "way"),
    [*((preset, "smsApi.preset") for preset in PRESETS), ("twilio", "config.sms_api.preset")],
)
def test_an_address_is_asked_for_where_the_preset_knows_none(preset: Preset, way: str) -> None:
    given = nested("smsApi", {"baseUrl": "", "account": "an-account"})
    values = merged(MINIMAL, given, nested(way, preset))
    if preset_settings(preset)["base_url"] is not None:
        assert render(values)
    else:
        with pytest.raises(RenderError, match=rf"baseUrl is empty.* the preset {preset} has none"):
            render(values)


def test_the_comment_names_the_presets_without_an_address() -> None:
    (comment,) = (c for path, _, c in documented_values() if path == "smsApi.baseUrl")
    without = [name for name in PRESETS if preset_settings(name)["base_url"] is None]

    names = " and ".join(f"`{name}`" for name in without)
    assert comment.endswith(f"The presets {names} have none.")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            merged(CLUSTER, nested("config.worker.retry_delays", ["5 minutes"])),
            '"5 minutes" in config is no duration',
        ),
        (
            nested("prometheusRule", {"enabled": True, "overrides": {"NoSuchAlert": {}}}),
            "names NoSuchAlert, but there is no such alert; there are: SmsBridge",
        ),
        (
            nested("prometheusRule", {"enabled": True, "disabled": ["NoSuchAlert"]}),
            "(and with prometheusRule.brokerAlerts those of the broker)",
        ),
        (
            nested(
                "prometheusRule",
                {"enabled": True, "brokerAlerts": True, "disabled": ["SmsBridgeQueueIsGrown"]},
            ),
            "SmsBridgeQueueHasNoConsumers, SmsBridgeQueueIsGrowing",
        ),
    ],
)
def test_names_that_do_not_exist_are_refused(values: Values, sentence: str) -> None:
    """What cannot be read, or names nothing, is quoted."""
    with pytest.raises(RenderError) as caught:
        render(merged(MINIMAL, values))

    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("alerts.yaml", "groups: ["), ("broker-alerts.yaml", "groups: []"), ("runbooks.yaml", "")],
)
def test_files_that_cannot_be_read_are_refused(name: str, text: str, tmp_path: Path) -> None:
    chart = shutil.copytree(CHART, tmp_path / "sms-bridge")
    (chart / "files" / name).write_text(text)
    on = {"enabled": True, "brokerAlerts": True}
    with pytest.raises(RenderError, match=rf"files/{re.escape(name)} holds no (groups|runbooks)"):
        render(merged(MINIMAL, {"prometheusRule": on}), chart=chart)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"imagee": {}}, "imagee"),
        (nested("worker.replicas", 3), "replicas"),
        (nested("config.worker.concurency", 5), "concurency"),
        (nested("config.admin.port", 1), "admin"),
        (nested("image.digest", "sha256:abc"), "digest"),
        (nested("rabbitmq.host", "user:secret@rabbitmq"), "host"),
        (nested("rabbitmq.hosts", ["user:secret@rabbitmq"]), "hosts"),
        (nested("rabbitmq.hosts", ["one", "one"]), "hosts"),
        (nested("smsApi.preset", "twillio"), "preset"),
        (nested("smsApi.baseUrl", "https://user:secret@sms.example.com"), "baseUrl"),
        (nested("worker.keda.managementUrl", "http://user:secret@r:15672"), "managementUrl"),
        (nested("worker.keda.scalingModifiers", {"formula": "backlog"}), "target"),
        # KEDA would take every worker away while it cannot read the queue.
        (nested("worker.keda.fallback.replicas", 0), "replicas"),
        (nested("webhookSecrets.secretKeys", []), "secretKeys"),
        (nested("webhook.endpoints", [{"path": "/a", "existingSecret": ""}]), "existingSecret"),
        (nested("webhook.endpoints", [{"path": "a", "existingSecret": "s"}]), "path"),
        (
            nested(
                "webhook.endpoints",
                [{"path": "/a", "existingSecret": "s", "config": {"secrets": ["s"]}}],
            ),
            "secrets",
        ),
        (nested("rabbitmq.secretKeys.host", "a/b"), "host"),
        (nested("webhookSecrets.secretKeys", ["../key"]), "secretKeys"),
        (nested("worker.podDisruptionBudget.maxUnavailable", 0), "maxUnavailable"),
        (nested("prometheusRule.overrides", {"A": {"four": "5m"}}), "four"),
        (nested("prometheusRule.selector", '{namespace="sms"}'), "selector"),
        (nested("topology.deletionPolicy", "Retain"), "deletionPolicy"),
        (nested("topology.extraBindings", [{"destination": "a"}]), "routingKey"),
        (nested("fullnameOverride", "Upper_Case"), "fullnameOverride"),
    ],
)
def test_typos_are_refused(values: Values, named: str) -> None:
    with pytest.raises(RenderError, match=named):
        render(merged(MINIMAL, values))


def test_the_time_to_close_is_the_apps() -> None:
    """The 5 seconds that a grace period keeps for closing are enough for what the app takes."""
    assert CLOSE_SECONDS < 5
