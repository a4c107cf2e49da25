"""Which objects the Helm chart makes of its values, and that they are safe to run."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.config import SignatureSettings
from bridge.webhook.signatures.schemes import scheme_from
from bridge.webhook.signatures.verify import sign
from tests.chart.rendering import (
    APP_VERSION,
    CI,
    HELM,
    MINIMAL,
    MOUNTED,
    ROLES,
    Manifest,
    Values,
    container,
    deployment,
    merged,
    nested,
    of_kind,
    pods,
    render,
    render_files,
    secret_files,
    selects,
)

every_example = pytest.mark.parametrize("values", CI.values(), ids=CI)


def names(manifests: list[Manifest]) -> set[str]:
    return {f"{m['kind']}/{m['metadata']['name']}" for m in manifests}


def added(*overs: Values) -> set[str]:
    """List what values add to the minimal example."""
    return names(render(merged(MINIMAL, *overs))) - names(render(MINIMAL))


# What renders


@pytest.mark.parametrize("role", ROLES)
def test_a_role_that_is_off_takes_all_its_objects_along(role: str) -> None:
    off: Values = {
        role: {"enabled": False},
        "ingress": {"enabled": False},
        "httpRoute": {"enabled": False},
        "topology": {"extraBindings": []},
    }
    for example in ("full", "autoscaled", "operators"):
        for manifest in render(merged(CI[example], off, {"extraObjects": []})):
            assert manifest["metadata"]["labels"].get("app.kubernetes.io/component") != role


@pytest.mark.parametrize(
    ("values", "objects"),
    [
        (nested("serviceMonitor.enabled", True), {"ServiceMonitor", "Service"}),
        (nested("podMonitor.enabled", True), {"PodMonitor"}),
        (nested("networkPolicy.enabled", True), {"NetworkPolicy"}),
        (
            merged(
                nested("worker.autoscaling.enabled", True),
                nested("webhook.autoscaling.enabled", True),
            ),
            {"HorizontalPodAutoscaler"},
        ),
    ],
    ids=["serviceMonitor", "podMonitor", "networkPolicy", "autoscaling"],
)
def test_what_is_optional_comes_for_each_role(values: Values, objects: set[str]) -> None:
    found = added(values)

    assert {name.partition("/")[0] for name in found} == objects
    assert len(found) == len(objects) * len(ROLES)


def test_the_service_account_may_be_somebody_elses() -> None:
    values = merged(MINIMAL, {"serviceAccount": {"create": False, "name": "theirs"}})

    assert not of_kind(render(values), "ServiceAccount")
    for pod in pods(render(values)):
        assert pod["spec"]["serviceAccountName"] == "theirs"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({}, f"ghcr.io/example/sms-bridge:{APP_VERSION}"),
        ({"digest": "sha256:" + "a" * 64}, "ghcr.io/example/sms-bridge@sha256:" + "a" * 64),
        (
            {"tag": "1.2.3", "digest": "sha256:" + "a" * 64},
            "ghcr.io/example/sms-bridge:1.2.3@sha256:" + "a" * 64,
        ),
        ({"registry": ""}, f"example/sms-bridge:{APP_VERSION}"),
    ],
    ids=["appVersion", "digest", "tag and digest", "no registry"],
)
def test_image_reference(image: Values, expected: str) -> None:
    for pod in pods(render(merged(MINIMAL, {"image": image}))):
        assert pod["spec"]["containers"][0]["image"] == expected


def test_long_release_names_fit() -> None:
    """The longest release name that Helm takes still gives names of at most 63 characters."""
    for example in ("full", "autoscaled"):
        for manifest in render(CI[example], release="r" * 53):
            if manifest["apiVersion"] != "rabbitmq.com/v1beta1":
                assert len(manifest["metadata"]["name"]) <= 63


@every_example
def test_every_object_has_its_namespace_and_labels(values: Values) -> None:
    """Rendered text can be applied as it is, and each object says to whom it belongs."""
    common = {"commonLabels": {"example.com/a": "b"}, "commonAnnotations": {"example.com/c": "d"}}
    for manifest in render(merged(values, common, {"extraObjects": []})):
        metadata = manifest["metadata"]

        assert metadata["namespace"] == "sms"
        assert metadata["labels"]["app.kubernetes.io/instance"] == "rel"
        assert metadata["labels"]["example.com/a"] == "b"
        assert metadata["annotations"]["example.com/c"] == "d"


def test_another_namespace_is_used_everywhere() -> None:
    """A parent chart may put all objects into a namespace of its choice."""
    values = merged(CI["full"], {"namespaceOverride": "elsewhere"})

    assert {m["metadata"]["namespace"] for m in render(values)} == {"elsewhere"}


def test_the_toolbox_is_there_when_it_is_asked_for() -> None:
    """One pod for operators' commands, which nothing connects to and no autoscaler counts."""
    on = nested("toolbox.enabled", True)
    guarded = nested("networkPolicy.enabled", True)
    policies = of_kind(render(merged(MINIMAL, on, guarded)), "NetworkPolicy")
    toolbox, worker = (policies[f"rel-sms-bridge-{name}"]["spec"] for name in ("toolbox", "worker"))
    alone = merged(MINIMAL, on, guarded, nested("worker.enabled", False))
    (inbound,) = (
        policy["spec"]
        for name, policy in of_kind(render(alone), "NetworkPolicy").items()
        if name.endswith("toolbox")
    )

    assert added(on) == {"Deployment/rel-sms-bridge-toolbox"}
    assert deployment(merged(MINIMAL, on), "toolbox")["spec"]["replicas"] == 1
    assert toolbox["ingress"] == []
    # The broker, and the API for `check --online`.
    assert toolbox["egress"] == worker["egress"]
    assert inbound["egress"] == worker["egress"][:-1]


# Says which signals are blocked before it waits for one.
WATCHED = """
import signal
wait = signal.sigwait
def watched(mask):
    print([blocked.name for blocked in signal.pthread_sigmask(signal.SIG_BLOCK, [])], flush=True)
    return wait(mask)
signal.sigwait = watched
"""


def test_the_toolbox_waits_until_it_is_told_to_stop() -> None:
    """It ends at once on SIGTERM, which it has blocked: process 1 would never see it otherwise."""
    found = container(merged(MINIMAL, nested("toolbox.enabled", True)), "toolbox")
    assert found["command"] == ["python", "-c"]
    (program,) = found["args"]
    with subprocess.Popen(
        [sys.executable, "-c", WATCHED + program], stdout=subprocess.PIPE, text=True
    ) as waiting:
        try:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == "['SIGTERM']\n"
            waiting.terminate()
            assert waiting.wait(timeout=10) == 0
        finally:
            waiting.kill()


# What scales


@pytest.mark.parametrize("scaler", ["autoscaling", "keda"])
def test_an_upgrade_leaves_scaled_deployments_alone(scaler: str) -> None:
    over: Values = {"enabled": True}
    if scaler == "keda":
        over |= {"managementUrl": "http://rabbitmq:15672", "existingSecret": "monitoring"}

    assert (
        "replicas"
        not in deployment(merged(MINIMAL, nested(f"worker.{scaler}", over)), "worker")["spec"]
    )
    assert deployment(MINIMAL, "worker")["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    ("urgent", "names"),
    [("team.codes", {"team.sms", "team.codes"}), (None, {"team.sms"})],
)
def test_keda_counts_both_queues_of_requests(urgent: str | None, names: set[str]) -> None:
    values = merged(
        CI["autoscaled"],
        nested("config.worker.queue", "team.sms"),
        nested("config.worker.urgent_queue", urgent),
    )
    (scaled,) = of_kind(render(values), "ScaledObject").values()
    metadata = scaled["spec"]["triggers"][0]["metadata"]
    candidates = ("team.sms", "team.codes", "team.sms.retry.5s", "team.sms.dead", "team-sms")
    counted = {
        name
        for name in candidates
        if (
            re.search(metadata["queueName"], name)
            if "useRegex" in metadata
            else metadata["queueName"] == name
        )
    }

    assert counted == names
    assert metadata.get("operation") == (None if urgent is None else "sum")


@pytest.mark.parametrize(
    ("values", "spec"),
    [
        ({}, {"maxUnavailable": 1}),
        ({"maxUnavailable": "50%"}, {"maxUnavailable": "50%"}),
        ({"minAvailable": 1}, {"minAvailable": 1}),
    ],
    ids=["default", "percentage", "minAvailable"],
)
def test_a_disruption_budget_keeps_pods(values: Values, spec: dict[str, Any]) -> None:
    """A node drain stops as many pods as the budget lets it, and broken ones always."""
    manifests = render(merged(MINIMAL, nested("worker.podDisruptionBudget", values)))
    budget = of_kind(manifests, "PodDisruptionBudget")["rel-sms-bridge-worker"]["spec"]
    kept = {key: budget[key] for key in ("maxUnavailable", "minAvailable") if key in budget}

    assert kept == spec
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_spread_counts_the_pods_of_its_role() -> None:
    bare = {"topologyKey": "rack", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}
    theirs = bare | {"labelSelector": {"matchLabels": {"app": "theirs"}}}
    values = nested("worker.topologySpreadConstraints", [bare, theirs])
    spec = deployment(merged(MINIMAL, values), "worker")["spec"]
    own = {"labelSelector": spec["selector"], "matchLabelKeys": ["pod-template-hash"]}

    assert spec["template"]["spec"]["topologySpreadConstraints"] == [bare | own, theirs]


# What is safe


def unrestricted(spec: dict[str, Any]) -> list[str]:
    pod = spec.get("securityContext", {})
    faults = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    kinds = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "projected", "secret"}
    kinds |= {"name", "persistentVolumeClaim"}
    faults += [v["name"] for v in spec.get("volumes", []) if not v.keys() <= kinds]
    for each in [*spec["containers"], *spec.get("initContainers", [])]:
        own = each.get("securityContext", {})
        rules = {
            "escalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities": own.get("capabilities", {}).get("drop") == ["ALL"]
            and set(own["capabilities"].get("add", [])) <= {"NET_BIND_SERVICE"},
            "non-root": own.get("runAsNonRoot", pod.get("runAsNonRoot")) is True,
            "user": own.get("runAsUser", pod.get("runAsUser")) != 0,
            "seccomp": own.get("seccompProfile", pod.get("seccompProfile", {})).get("type")
            in {"RuntimeDefault", "Localhost"},
            "privileged": not own.get("privileged"),
            "host port": all(not port.get("hostPort") for port in each.get("ports", [])),
        }
        faults += [f"{each['name']}: {rule}" for rule, kept in rules.items() if not kept]
    return faults


@every_example
def test_every_pod_is_restricted(values: Values) -> None:
    for pod in pods(render(values)):
        spec = pod["spec"]

        assert unrestricted(spec) == []
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        for each in spec["containers"]:
            assert each["securityContext"]["readOnlyRootFilesystem"] is True
            assert {"cpu", "memory"} <= each["resources"]["requests"].keys()
            assert each["resources"]["limits"].keys() == {"memory"}


@every_example
def test_the_chart_makes_no_secret(values: Values) -> None:
    manifests = render(values)

    assert not of_kind(manifests, "Secret")
    for pod in pods(manifests):
        for each in pod["spec"]["containers"]:
            assert "envFrom" not in each
            variables = [v for v in each.get("env", []) if "valueFrom" in v]
            # The broker's address is no secret; a cluster operator keeps it beside its secrets.
            assert {v["valueFrom"]["secretKeyRef"]["key"] for v in variables} <= {"host", "port"}


def test_a_role_gets_its_own_secrets_only() -> None:
    worker, webhook = (
        secret_files(deployment(CI["full"], role)["spec"]["template"]) for role in ROLES
    )

    assert f"{MOUNTED}/secrets/sms-api/key" in worker.keys() - webhook.keys()
    assert webhook.keys() - worker.keys() == {
        f"{MOUNTED}/secrets/webhook/current",
        f"{MOUNTED}/secrets/webhook/previous",
    }
    assert worker[f"{MOUNTED}/secrets/rabbitmq/password"] == "broker/pass"


def test_a_user_that_is_imported_comes_from_a_labelled_secret() -> None:
    imported = merged(CI["operators"], nested("externalSecrets.remoteRefs.rabbitmq", "sms/broker"))
    manifests = render(imported)
    targets = {
        m["spec"]["target"]["name"]: m["spec"]["target"].get("template")
        for m in of_kind(manifests, "ExternalSecret").values()
    }
    (user,) = of_kind(manifests, "User").values()
    labelled = {"metadata": {"labels": {"rabbitmq.com/topology-operator": "true"}}}

    assert user["spec"]["importCredentialsSecret"] == {"name": "rel-sms-bridge-rabbitmq"}
    assert targets == {
        "rel-sms-bridge-rabbitmq": labelled,
        "rel-sms-bridge-sms-api": None,
        "rel-sms-bridge-webhook": None,
    }


def test_the_toolbox_has_the_secrets_of_the_roles() -> None:
    """It has what the roles' commands need; its broker user may be one of the operators' own."""
    on = nested("toolbox.enabled", True)
    values = CI["full"]
    of_roles = {
        path: secret
        for role in ROLES
        for path, secret in secret_files(deployment(values, role)["spec"]["template"]).items()
    }

    def files(*overs: Values) -> dict[str, str]:
        own = nested("toolbox.existingSecret", "")
        return secret_files(
            deployment(merged(values, on, own, *overs), "toolbox")["spec"]["template"]
        )

    mine = files(nested("toolbox.existingSecret", "mine"))
    without_webhook = files(nested("webhook.enabled", False), nested("ingress.enabled", False))

    assert files() == of_roles
    assert {path for path in of_roles if mine[path] != of_roles[path]} == {
        f"{MOUNTED}/secrets/rabbitmq/username",
        f"{MOUNTED}/secrets/rabbitmq/password",
    }
    assert mine[f"{MOUNTED}/secrets/rabbitmq/password"] == "mine/pass"
    assert not any("/webhook/" in path for path in without_webhook)


@pytest.mark.parametrize("has_default", [True, False])
def test_every_endpoint_is_reached(has_default: bool) -> None:  # noqa: FBT001
    values = merged(
        CI["services"],
        {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}},
        {"webhookSecrets": {"existingSecret": "default" if has_default else ""}},
    )
    paths = ["/webhooks"] * has_default + ["/webhooks/twilio", "/webhooks/orders"]
    (ingress,) = of_kind(render(values), "Ingress").values()
    (route,) = of_kind(render(values), "HTTPRoute").values()
    (pod,) = of_kind(render(values), "Pod").values()
    (rule,) = ingress["spec"]["rules"]
    (matches,) = (rule["matches"] for rule in route["spec"]["rules"])

    assert [path["path"] for path in rule["http"]["paths"]] == paths
    assert [match["path"]["value"] for match in matches] == paths
    assert pod["spec"]["containers"][0]["args"][-1].endswith(f":80{paths[0]}")
    if HELM is None:
        notes = render_files(values)["sms-bridge/templates/NOTES.txt"]
        assert re.findall(r"https://sms\.example\.com(\S+)", notes) == paths
        assert "https://sms.example.com/webhooks/twilio (twilio)" in notes
        assert "  orders (current)" in notes


def selectors(manifest: Manifest) -> list[dict[str, str]]:
    """Pick the labels by which an object finds its pods."""
    spec = manifest["spec"]
    found = spec.get("selector", spec.get("podSelector"))
    return [] if found is None else [found.get("matchLabels", found)]


@pytest.mark.parametrize("example", ["full", "autoscaled"])
def test_selectors_match_one_role_of_one_release(example: str) -> None:
    ours, theirs = (render(CI[example], release=name) for name in ("one", "two"))
    candidates = pods(ours) + pods(theirs)
    checked = set()
    for owner in ours:
        if owner["kind"] == "ServiceMonitor" or not owner.get("spec"):
            continue
        for selector in selectors(owner):
            found = [pod["metadata"]["labels"] for pod in candidates if selects(selector, pod)]
            component = owner["metadata"]["labels"]["app.kubernetes.io/component"]
            checked.add(owner["kind"])

            assert [labels["app.kubernetes.io/instance"] for labels in found] == ["one"]
            assert found[0]["app.kubernetes.io/component"] == component
    assert checked >= {"Deployment", "PodDisruptionBudget", "Service"}


def test_pod_labels_cannot_break_the_selector() -> None:
    """A label of the user's own never takes the place of one that the selector needs."""
    labels = {"app.kubernetes.io/component": "x", "team": "a"}
    values = merged(MINIMAL, {"worker": {"podLabels": labels}, "commonLabels": labels})
    found = deployment(values, "worker")

    assert found["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
    assert (
        found["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
    )
    assert found["spec"]["template"]["metadata"]["labels"]["team"] == "a"


@pytest.mark.parametrize(
    ("api", "proxy", "port"),
    [
        ("https://sms.example.com", None, 443),
        ("http://sms.example.com/a", None, 80),
        ("https://[2001:db8::1]:8443/a", None, 8443),
        ("https://sms.example.com", "http://proxy:3128", 3128),
    ],
)
def test_the_network_policy_opens_the_port_of_the_api(
    api: str, proxy: str | None, port: int
) -> None:
    values = merged(
        MINIMAL,
        nested("networkPolicy.enabled", True),
        nested("smsApi.baseUrl", api),
        nested("config.sms_api.proxy", proxy),
    )
    policy = of_kind(render(values), "NetworkPolicy")["rel-sms-bridge-worker"]

    assert policy["spec"]["egress"][-1]["ports"] == [{"port": port}]


# How pods come and go


@pytest.mark.parametrize(
    ("role", "values", "seconds"),
    [
        ("worker", {}, 35),
        ("webhook", {}, 40),
        ("worker", {"shutdownTimeoutSeconds": 100, "preStopSleepSeconds": 5}, 115),
        ("worker", {"terminationGracePeriodSeconds": 300}, 300),
    ],
)
def test_the_grace_period_follows_from_the_time_outs(
    role: str, values: Values, seconds: int
) -> None:
    """Kubernetes waits for the sleep, the drain and the closing, or as long as it is told."""
    spec = deployment(merged(MINIMAL, {role: values}), role)["spec"]["template"]["spec"]

    assert spec["terminationGracePeriodSeconds"] == seconds


def test_pods_roll_when_the_config_changes_and_only_then() -> None:
    def template(over: Values) -> Manifest:
        pod: Manifest = deployment(merged(MINIMAL, over), "worker")["spec"]["template"]
        return pod

    assert template({"config": {"worker": {"concurrency": 7}}}) != template({})
    assert template({"worker": {"replicaCount": 7}}) == template({})
    # Nothing that the chart renders says what is in a ConfigMap of the user's own.
    mine = template({"existingConfigMap": "mine"})
    assert "checksum/config" not in mine["metadata"]["annotations"]
    assert {"name": "config", "configMap": {"name": "mine"}} in mine["spec"]["volumes"]


def test_further_objects_may_be_templates() -> None:
    name = '{{ include "sms-bridge.fullname" . }}'
    text = f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}-b}}\n"
    objects = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-a"}}, text]
    found = of_kind(render(merged(MINIMAL, {"extraObjects": objects})), "ConfigMap")

    assert {"rel-sms-bridge-a", "rel-sms-bridge-b"} <= found.keys()


# What people read


def post_to_a_receiver(
    program: str, answer: Callable[[Message, bytes], int], environ: Mapping[str, str]
) -> "subprocess.CompletedProcess[bytes]":
    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(answer(self.headers, body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.handle_request).start()
        return subprocess.run(
            [sys.executable, "-c", program, f"http://127.0.0.1:{server.server_port}/webhooks"],
            check=False,
            capture_output=True,
            timeout=60,
            env=environ,
        )


@pytest.mark.parametrize(("status", "code"), [(401, 0), (200, 1), (503, 1)])
def test_helm_test_wants_an_unsigned_webhook_refused(status: int, code: int) -> None:
    (pod,) = of_kind(render(MINIMAL), "Pod").values()
    program, url = pod["spec"]["containers"][0]["args"]
    done = post_to_a_receiver(program, lambda _headers, _body: status, {})

    assert url == "http://rel-sms-bridge-webhook.sms:80/webhooks"
    assert done.returncode == code


@pytest.mark.parametrize(("secret", "code"), [("right", 0), ("wrong", 1)])
def test_helm_test_wants_a_signed_webhook_taken_in(secret: str, code: int, tmp_path: Path) -> None:
    scheme = scheme_from(SignatureSettings(), None)

    def answer(headers: Message, body: bytes) -> int:
        _, wanted = sign(scheme, b"right", body, now=0, event_id="").headers[0]
        return 200 if headers["X-Service-Signature"] == wanted else 401

    (pod,) = of_kind(render(merged(MINIMAL, nested("tests.signed", True))), "Pod").values()
    program, url = pod["spec"]["containers"][1]["args"]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"webhook": {"secrets": [secret]}}))
    environ = {"PATH": str(Path(sys.executable).parent), "SMS_BRIDGE_CONFIG": str(path)}
    done = post_to_a_receiver(program, answer, environ)

    assert url == pod["spec"]["containers"][0]["args"][1]
    assert done.returncode == code, done.stderr


def test_helm_test_gets_no_secret_but_those_of_webhooks() -> None:
    """Only the container that signs mounts anything, and neither broker's nor API's keys."""
    (plain,) = of_kind(render(MINIMAL), "Pod").values()
    (signed,) = of_kind(render(CI["full"]), "Pod").values()
    first, second = signed["spec"]["containers"]
    sources = signed["spec"]["volumes"][1]["projected"]["sources"]

    assert "volumes" not in plain["spec"]
    assert "volumeMounts" not in first
    assert {mount["name"] for mount in second["volumeMounts"]} == {"config", "secrets"}
    assert [source["secret"]["name"] for source in sources] == ["webhooks"]
