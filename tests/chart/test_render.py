"""What the Helm chart makes of its values, rendered by Helm's own engine, without a cluster."""

import copy
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from bridge.config import load_settings

CHART = Path(__file__).parents[2] / "helm" / "sms-bridge"
ROLES = ("worker", "webhook")
MOUNTED = "/etc/sms-bridge"

Values = dict[str, Any]
Manifest = dict[str, Any]


def ci_values(name: str) -> Values:
    """Load one of the chart's own examples."""
    values: Values = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
    return values


CI = {name: ci_values(name) for name in ("full", "worker-only", "webhook-only")}


def merged(base: Values, over: Values) -> Values:
    """Lay one set of values over another, as Helm does."""
    result = copy.deepcopy(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


# Both roles, and nothing but what is required.
BOTH = merged(merged(CI["worker-only"], CI["webhook-only"]), {"worker": {"enabled": True}})
BOTH["webhook"]["enabled"] = True


def render_files(
    values: Values, *, release: str = "rel", namespace: str = "sms", chart: Path = CHART
) -> dict[str, str]:
    """Check values against the schema and render every template; the only door to Helm."""
    with helm_python.Chart.load(chart) as loaded:
        loaded.validate_schema(values)
        return loaded.render(values, name=release, namespace=namespace)


def render(values: Values, *, release: str = "rel", chart: Path = CHART) -> list[Manifest]:
    """Render the chart into its objects."""
    files = render_files(values, release=release, chart=chart)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Pick the objects of one kind, by name."""
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


def pods(manifests: list[Manifest]) -> list[Manifest]:
    """Pick every pod: those of Deployments, and the test pod."""
    templates = [m["spec"]["template"] for m in of_kind(manifests, "Deployment").values()]
    return [*templates, *of_kind(manifests, "Pod").values()]


def deployment(values: Values, role: str) -> Manifest:
    """Render one role's Deployment."""
    return of_kind(render(values), "Deployment")[f"rel-sms-bridge-{role}"]


def config(values: Values) -> dict[str, Any]:
    """Render the app's config.yaml."""
    (found,) = of_kind(render(values), "ConfigMap").values()
    loaded: dict[str, Any] = yaml.safe_load(found["data"]["config.yaml"])
    return loaded


def secret_files(pod: Manifest) -> dict[str, str]:
    """Map the path of each mounted secret file to `secret/key`."""
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
    """Say whether a selector matches a pod."""
    labels: dict[str, str] = pod["metadata"]["labels"]
    return selector.items() <= labels.items()


# What renders


def test_both_roles_render() -> None:
    """The required values alone give both roles, the Service, and what keeps them safe."""
    found = {f"{m['kind']}/{m['metadata']['name']}" for m in render(BOTH)}

    assert found == {
        "ConfigMap/rel-sms-bridge",
        "ServiceAccount/rel-sms-bridge",
        "Deployment/rel-sms-bridge-worker",
        "Deployment/rel-sms-bridge-webhook",
        "PodDisruptionBudget/rel-sms-bridge-worker",
        "PodDisruptionBudget/rel-sms-bridge-webhook",
        "Service/rel-sms-bridge-webhook",
        "Pod/rel-sms-bridge-test",
    }


@pytest.mark.parametrize("role", ROLES)
def test_one_role_renders_alone(role: str) -> None:
    """A role that is switched off leaves no object and needs no value."""
    manifests = render(CI[f"{role}-only"])
    components = {m["metadata"]["labels"].get("app.kubernetes.io/component") for m in manifests}

    assert list(of_kind(manifests, "Deployment")) == [f"rel-sms-bridge-{role}"]
    assert components <= {role, None, "test"}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_runs_its_own_command(role: str) -> None:
    """Each Deployment starts the image with its role as the only argument."""
    container = deployment(BOTH, role)["spec"]["template"]["spec"]["containers"][0]

    assert container["args"] == [role]
    assert "command" not in container


def test_full_example_renders_what_is_optional() -> None:
    """An Ingress and one PodMonitor for each role come with their switches."""
    manifests = render(CI["full"])
    (ingress,) = of_kind(manifests, "Ingress").values()
    paths = {p["path"] for r in ingress["spec"]["rules"] for p in r["http"]["paths"]}

    assert paths == {"/hooks/sms"}
    assert set(of_kind(manifests, "PodMonitor")) == {f"rel-sms-bridge-{r}" for r in ROLES}


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({}, "ghcr.io/example/sms-bridge:0.1.0"),
        ({"tag": "1.2.3"}, "ghcr.io/example/sms-bridge:1.2.3"),
        (
            {"digest": "sha256:" + "a" * 64},
            "ghcr.io/example/sms-bridge@sha256:" + "a" * 64,
        ),
        ({"registry": ""}, "example/sms-bridge:0.1.0"),
    ],
    ids=["appVersion", "tag", "digest", "no registry"],
)
def test_image_reference(image: Values, expected: str) -> None:
    """The image is named by registry, repository, and tag or digest."""
    pod = deployment(merged(BOTH, {"image": image}), "worker")["spec"]["template"]

    assert pod["spec"]["containers"][0]["image"] == expected


def test_long_release_names_fit() -> None:
    """The longest release name that Helm takes still gives names of at most 63 characters."""
    manifests = render(CI["full"], release="r" * 53)

    assert max(len(m["metadata"]["name"]) for m in manifests) <= 63


def test_two_renders_are_identical() -> None:
    """The same values give the same bytes, so that GitOps tools see no change."""
    assert render_files(CI["full"]) == render_files(CI["full"])


def test_templates_use_nothing_that_varies() -> None:
    """No template asks for the time, chance or the cluster."""
    source = "".join(p.read_text() for p in (CHART / "templates").rglob("*") if p.is_file())

    assert not re.search(r"\b(now|lookup|uuidv4|rand[A-Z]\w+|gen[A-Z]\w+|Capabilities)\b", source)


def test_installs_below_a_parent_chart(tmp_path: Path) -> None:
    """A parent chart may switch it on with `enabled` and set the registry in `global`."""
    shutil.copytree(CHART, tmp_path / "charts" / "sms-bridge")
    (tmp_path / "Chart.yaml").write_text(
        "apiVersion: v2\nname: parent\nversion: 1.0.0\ndependencies:\n"
        "- {name: sms-bridge, version: 0.1.0, condition: sms-bridge.enabled}\n"
    )
    values = {
        "global": {"imageRegistry": "registry.local:5000"},
        "sms-bridge": {**BOTH, "enabled": True},
    }
    images = {pod["spec"]["containers"][0]["image"] for pod in pods(render(values, chart=tmp_path))}

    assert images == {"registry.local:5000/example/sms-bridge:0.1.0"}


# What is refused


def test_defaults_alone_name_what_is_missing() -> None:
    """Without values the error names every value that must be given, all at once."""
    with pytest.raises(helm_python.HelmError) as caught:
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
            {"worker": {"enabled": False}, "webhook": {"enabled": False}},
            "there is nothing to deploy",
        ),
        ({"image": {"repository": ""}}, "image.repository is empty"),
        ({"rabbitmq": {"host": ""}}, "rabbitmq.host is empty"),
        (
            {"rabbitmq": {"existingSecret": ""}},
            "--namespace sms --from-literal=username=... --from-literal=password=...",
        ),
        ({"smsApi": {"baseUrl": ""}}, "smsApi.baseUrl is empty"),
        ({"smsApi": {"existingSecret": ""}}, "--from-literal=key=..."),
        ({"webhookSecrets": {"existingSecret": ""}}, "--from-literal=current=..."),
        (
            {"worker": {"terminationGracePeriodSeconds": 25}},
            "worker.terminationGracePeriodSeconds (25) must exceed the 25 seconds",
        ),
        (
            {"webhook": {"terminationGracePeriodSeconds": 30}},
            "webhook.terminationGracePeriodSeconds (30) must exceed the 30 seconds",
        ),
        (
            {"smsApi": {"timeoutSeconds": 25.5}},
            "worker.shutdownTimeoutSeconds (25) is below smsApi.timeoutSeconds (25.5)",
        ),
        (
            {"ingress": {"enabled": True, "hosts": ["a.example"]}, "webhook": {"enabled": False}},
            "there is nothing to route to",
        ),
        ({"ingress": {"enabled": True}}, "ingress.hosts is empty"),
        (
            {"rabbitmq": {"tls": {"existingSecret": "tls"}}},
            "rabbitmq.tls.enabled is false",
        ),
        (
            {"rabbitmq": {"tls": {"enabled": True, "existingSecret": "tls", "keyKey": "k"}}},
            "a client certificate needs its private key",
        ),
        (
            {"rabbitmq": {"tls": {"enabled": True, "certKey": "c", "keyKey": "k"}}},
            "rabbitmq.tls.existingSecret is empty",
        ),
        (
            {"rabbitmq": {"tls": {"enabled": True, "existingSecret": "tls", "caKey": ""}}},
            "caKey and certKey are both empty",
        ),
        (
            {"config": {"sms_api": {"proxy": "http://user:secret@proxy:3128"}}},
            "config.sms_api.proxy holds a user or a password",
        ),
        (
            {"config": {"rabbitmq": {"url": "amqp://a/"}}},
            "config.rabbitmq.url is set by the chart: use rabbitmq.host",
        ),
        (
            {"config": {"rabbitmq": {"password": "p"}}},
            "config.rabbitmq.password is set by the chart: use rabbitmq.existingSecret",
        ),
        (
            {"config": {"sms_api": {"key": "k"}}},
            "config.sms_api.key is set by the chart: use smsApi.existingSecret",
        ),
        (
            {"config": {"webhook": {"secrets": ["s"]}}},
            "config.webhook.secrets is set by the chart: use webhookSecrets.existingSecret",
        ),
        (
            {"config": {"worker": {"shutdown_timeout_seconds": 60}}},
            "is set by the chart: use worker.shutdownTimeoutSeconds",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(values: Values, sentence: str) -> None:
    """Values that contradict each other, or would leak a secret, fail with one sentence."""
    with pytest.raises(helm_python.HelmError) as caught:
        render(merged(BOTH, values))

    assert sentence in str(caught.value)
    assert str(caught.value).count("\n- ") == 1


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"imagee": {}}, "imagee"),
        ({"worker": {"replicas": 3}}, "replicas"),
        ({"webhook": {"service": {"ports": 80}}}, "ports"),
        ({"config": {"wroker": {}}}, "wroker"),
        ({"config": {"admin": {"port": 1}}}, "admin"),
        ({"image": {"digest": "sha256:abc"}}, "digest"),
        ({"rabbitmq": {"host": "user:secret@rabbitmq"}}, "host"),
        ({"smsApi": {"baseUrl": "https://user:secret@sms.example.com"}}, "baseUrl"),
        ({"webhookSecrets": {"secretKeys": []}}, "secretKeys"),
        ({"webhookSecrets": {"secretKeys": ["../key"]}}, "secretKeys"),
        ({"worker": {"podDisruptionBudget": {"maxUnavailable": 0}}}, "maxUnavailable"),
    ],
)
def test_typos_are_refused(values: Values, named: str) -> None:
    """The schema refuses a name or a form that it does not know, and says which."""
    with pytest.raises(helm_python.HelmError, match=named):
        render(merged(BOTH, values))


# What is safe


@pytest.mark.parametrize("values", [BOTH, *CI.values()], ids=["both", *CI])
def test_every_container_is_restricted(values: Values) -> None:
    """Every pod, the test pod too, fits the Pod Security Standard `restricted`."""
    for pod in pods(render(values)):
        spec = pod["spec"]
        allowed = {"name", "configMap", "projected", "emptyDir"}

        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(volume.keys() <= allowed for volume in spec.get("volumes", []))
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert all("hostPort" not in port for port in container.get("ports", []))


@pytest.mark.parametrize("values", [BOTH, *CI.values()], ids=["both", *CI])
def test_no_secret_is_in_the_environment(values: Values) -> None:
    """The environment names the config file and nothing else; the chart makes no Secret."""
    manifests = render(values)
    containers = [container for pod in pods(manifests) for container in pod["spec"]["containers"]]

    assert not of_kind(manifests, "Secret")
    for container in containers:
        assert "envFrom" not in container
        assert container.get("env", []) in (
            [],
            [{"name": "SMS_BRIDGE_CONFIG", "value": f"{MOUNTED}/config/config.yaml"}],
        )


def test_a_role_gets_its_own_secrets_only() -> None:
    """The worker never sees a webhook secret, and the webhook role never sees the API key."""
    worker, webhook = (
        secret_files(deployment(CI["full"], role)["spec"]["template"]) for role in ROLES
    )

    assert f"{MOUNTED}/secrets/sms-api/key" in worker.keys() - webhook.keys()
    assert webhook.keys() - worker.keys() == {
        f"{MOUNTED}/secrets/webhook/current",
        f"{MOUNTED}/secrets/webhook/previous",
    }
    assert worker[f"{MOUNTED}/secrets/rabbitmq/password"] == "broker/pass"


def test_secrets_follow_their_rotation() -> None:
    """Secrets are mounted as whole directories, which Kubernetes keeps up to date."""
    for pod in pods(render(CI["full"])):
        for mount in pod["spec"]["containers"][0].get("volumeMounts", []):
            assert "subPath" not in mount


@pytest.mark.parametrize("role", ROLES)
def test_probes_use_the_admin_port(role: str) -> None:
    """Each probe asks its own path of the admin port, where the config puts it."""
    container = deployment(BOTH, role)["spec"]["template"]["spec"]["containers"][0]
    asked = {name: container[name]["httpGet"] for name in container if name.endswith("Probe")}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}

    assert asked == {
        "startupProbe": {"path": "/startupz", "port": "admin"},
        "livenessProbe": {"path": "/livez", "port": "admin"},
        "readinessProbe": {"path": "/readyz", "port": "admin"},
    }
    assert ports["admin"] == config(BOTH)["admin"]["port"] == 9090


def test_service_leads_to_the_webhook_port_only() -> None:
    """The public Service has one port, where the webhook role listens; never the admin port."""
    (service,) = of_kind(render(BOTH), "Service").values()
    (port,) = service["spec"]["ports"]
    container = deployment(BOTH, "webhook")["spec"]["template"]["spec"]["containers"][0]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}

    assert (port["port"], port["targetPort"]) == (80, "http")
    assert ports["http"] == config(BOTH)["webhook"]["port"]


def test_selectors_match_one_role_of_one_release() -> None:
    """No Service, PDB, Deployment or PodMonitor takes in a pod of another role or release."""
    ours, theirs = (render(CI["full"], release=name) for name in ("one", "two"))
    owners = [m for m in ours if m["kind"] not in {"Pod", "ConfigMap", "ServiceAccount", "Ingress"}]
    assert len(owners) == 7
    for owner in owners:
        selector = owner["spec"]["selector"]
        labels = selector.get("matchLabels", selector)
        found = [pod for pod in pods(ours) + pods(theirs) if selects(labels, pod)]

        assert len(found) == 1
        assert (
            found[0]["metadata"]["labels"]["app.kubernetes.io/component"]
            == (owner["metadata"]["labels"]["app.kubernetes.io/component"])
        )


def test_pod_labels_cannot_break_the_selector() -> None:
    """A label of the user's own never takes the place of one that the selector needs."""
    values = merged(
        BOTH, {"worker": {"podLabels": {"app.kubernetes.io/component": "x", "team": "a"}}}
    )
    labels = deployment(values, "worker")["spec"]["template"]["metadata"]["labels"]

    assert labels["app.kubernetes.io/component"] == "worker"
    assert labels["team"] == "a"


def test_webhook_serves_on_while_load_balancers_forget_it() -> None:
    """The webhook role sleeps before it stops, the worker stops at once."""
    worker, webhook = (
        deployment(BOTH, role)["spec"]["template"]["spec"]["containers"][0] for role in ROLES
    )

    assert webhook["lifecycle"] == {"preStop": {"sleep": {"seconds": 10}}}
    assert "lifecycle" not in worker


# What the app reads


@pytest.mark.parametrize("values", [BOTH, *CI.values()], ids=["both", *CI])
def test_the_app_accepts_the_config(values: Values, tmp_path: Path) -> None:
    """The app's own loader reads the rendered config.yaml without a fault."""
    text = yaml.safe_dump(config(values)).replace(MOUNTED, str(tmp_path))
    path = tmp_path / "config.yaml"
    path.write_text(text)
    settings = load_settings(path, {})

    assert settings.admin.port == 9090
    assert settings.rabbitmq.username_file == tmp_path / "secrets/rabbitmq/username"
    assert settings.rabbitmq.password_file == tmp_path / "secrets/rabbitmq/password"


def test_the_app_gets_the_values_of_the_full_example(tmp_path: Path) -> None:
    """What the values say is what the app's settings hold."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config(CI["full"])))
    settings = load_settings(path, {})

    assert [url.get_secret_value() for url in settings.rabbitmq.url] == [
        "amqps://rabbitmq.example.com:5671/%2Fteam%2Fsms%20bridge"
    ]
    assert settings.rabbitmq.tls.server_name == "rabbitmq.internal"
    assert settings.sms_api.timeout_seconds == 12.5
    assert settings.worker.rate_limit.per_second == 20
    assert settings.webhook.path == "/hooks/sms"
    assert settings.webhook.max_body_bytes == 1_000_000
    assert settings.webhook.queue is None


@pytest.mark.parametrize("role", ROLES)
def test_files_in_the_config_are_mounted(role: str) -> None:
    """Every secret file that the config names for a role is one that its pod mounts."""
    mounted = secret_files(deployment(CI["full"], role)["spec"]["template"])
    sections = ["rabbitmq", {"worker": "sms_api", "webhook": "webhook"}[role]]
    rendered = config(CI["full"])
    named = re.findall(rf"{MOUNTED}\S+", yaml.safe_dump([rendered[s] for s in sections]))

    assert sorted(named) == sorted(mounted)


@pytest.mark.parametrize(
    ("rabbitmq", "url"),
    [
        ({}, "amqp://rabbitmq:5672/%2F"),
        ({"vhost": "sms"}, "amqp://rabbitmq:5672/sms"),
        ({"vhost": "a/b +%"}, "amqp://rabbitmq:5672/a%2Fb%20%2B%25"),
        ({"port": 5673}, "amqp://rabbitmq:5673/%2F"),
        ({"tls": {"enabled": True}}, "amqps://rabbitmq:5671/%2F"),
        ({"tls": {"enabled": True}, "port": 5673}, "amqps://rabbitmq:5673/%2F"),
    ],
)
def test_broker_url(rabbitmq: Values, url: str) -> None:
    """The URL is made of host, port and virtual host, and holds no credentials."""
    assert config(merged(BOTH, {"rabbitmq": rabbitmq}))["rabbitmq"]["url"] == url


def test_pods_roll_when_the_config_changes_and_only_then() -> None:
    """A changed setting rolls the pods; a changed number of replicas does not."""

    def template(over: Values) -> Manifest:
        pod: Manifest = deployment(merged(BOTH, over), "worker")["spec"]["template"]
        return pod

    assert template({"config": {"worker": {"concurrency": 7}}}) != template({})
    assert template({"worker": {"replicaCount": 7}}) == template({})


# What people read


def test_notes_name_the_next_commands() -> None:
    """After the install the notes name commands that fit what was installed."""
    both, worker = (
        render_files(values)["sms-bridge/templates/NOTES.txt"]
        for values in (BOTH, CI["worker-only"])
    )

    assert "kubectl -n sms rollout status deployment/rel-sms-bridge-webhook" in both
    assert "helm test rel -n sms" in both
    assert "webhook" not in worker
    assert "helm test" not in worker


def test_readme_lists_every_value() -> None:
    """The README's table has a row for each value, or for the map that it is part of."""
    rows = set(re.findall(r"^\| `([\w.]+)` \|", (CHART / "README.md").read_text(), re.MULTILINE))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    missing = [
        path
        for path, _ in leaves(values)
        if not any(path == row or path.startswith(f"{row}.") for row in rows)
    ]

    assert missing == []


@pytest.mark.parametrize(("status", "code"), [(401, 0), (200, 1), (503, 1)])
def test_helm_test_wants_an_unsigned_webhook_refused(status: int, code: int) -> None:
    """The test pod's program passes when an unsigned webhook is answered 401, and only then."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    (pod,) = of_kind(render(BOTH), "Pod").values()
    program, url = pod["spec"]["containers"][0]["args"]
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request).start()
        done = subprocess.run(
            [sys.executable, "-c", program, f"http://127.0.0.1:{server.server_port}/webhooks"],
            check=False,
            capture_output=True,
            timeout=30,
            env={},
        )

    assert url == "http://rel-sms-bridge-webhook:80/webhooks"
    assert done.returncode == code
