"""A release of the chart in its own namespace, and the objects that it expects."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlencode

import yaml

from bridge.sandbox.processes import wait_until
from tests.chart.rendering import CHART, ROLES, Values, merged
from tests.cluster.control_plane import Cluster, Done, Object, as_list

INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"

WAIT = ("--wait", "--timeout", "60s")
SETTLE_SECONDS = 20

# All Secrets that the chart's examples expect, with their keys.
SECRETS = {
    "sms-bridge": ["username", "password", "key", "current"],
    "broker": ["user", "pass"],
    "broker-operators": ["user", "pass"],
    "broker-tls": ["ca.crt", "tls.crt", "tls.key"],
    "sms-api": ["token"],
    "sms-api-ca": ["ca.crt"],
    "webhooks": ["current", "previous"],
    # As the cluster operator creates it.
    "rabbitmq-default-user": ["username", "password", "host", "port", "connection_string"],
    "rabbitmq-monitoring": ["username", "password"],
    "rabbitmq-management": ["uri", "username", "password"],
    "sms-bridge-tls": ["tls.crt", "tls.key"],
    "registry": [".dockerconfigjson"],
    "mirror": [".dockerconfigjson"],
}
# All ConfigMaps that examples expect.
SETTINGS = "sms-bridge-settings"
# The entries of the secret store, with their keys.
STORE = {"sms/api": ["key"], "sms/webhooks": ["current"]}

# A rollout without minReadySeconds.
QUICK: Values = {role: {"minReadySeconds": 0} for role in ROLES}

_numbers = itertools.count(1)

Check = Callable[["Release"], list[str]]


@dataclass(frozen=True)
class Release:
    """A release. `helm` is the program that manages it."""

    cluster: Cluster
    namespace: str
    values: Values
    name: str = "rel"
    chart: Path = CHART
    helm: str = "helm"

    def run(self, command: str, *arguments: str, check: bool = True) -> Done:
        """Run a Helm command on the release."""
        to = (self.name, *arguments, "--namespace", self.namespace)
        return self.cluster.run(self.helm, command, *to, check=check)

    def install(self, *flags: str, check: bool = True) -> Done:
        return self._apply("install", *flags, check=check)

    def upgrade(self, *flags: str, check: bool = True) -> Done:
        return self._apply("upgrade", *flags, check=check)

    def _apply(self, command: str, *flags: str, check: bool) -> Done:
        arguments = (command, self.name, str(self.chart), "-n", self.namespace, "-f", "-", *flags)
        return self.cluster.run(self.helm, *arguments, stdin=json.dumps(self.values), check=check)

    def render(self) -> list[Object]:
        """Render the objects without the cluster, including the pod of `helm test`."""
        done = self._apply("template", check=True)
        return [found for found in yaml.load_all(done.stdout, yaml.CSafeLoader) if found]

    def called(self, name: str) -> "Release":
        """Return another release with the same chart and values."""
        return replace(self, name=name)

    def handled_by(self, helm: str) -> "Release":
        """Return the same release, managed by another Helm."""
        return replace(self, helm=helm)

    def with_values(self, *overs: Values) -> "Release":
        """Return the same release with changed values."""
        return replace(self, values=merged(self.values, *overs))

    def status(self) -> str:
        """Return Helm's status: deployed, failed, pending-upgrade."""
        done = self.run("status", "--output", "json")
        status: str = json.loads(done.stdout)["info"]["status"]
        return status

    @property
    def selector(self) -> str:
        """Return the label selector of the release."""
        return f"{INSTANCE}={self.name}"

    def objects(self, kind: str) -> list[Object]:
        """List the release's objects of a kind."""
        return self.cluster.objects(kind, self.namespace, selector=self.selector)

    def deployments(self) -> dict[str, Object]:
        """Return the Deployments by component: roles and toolbox."""
        return {d["metadata"]["labels"][COMPONENT]: d for d in self.objects("deployments")}

    def roles(self) -> dict[str, Object]:
        """Return the Deployments of the roles, without the toolbox, which may be unavailable."""
        return {name: d for name, d in self.deployments().items() if name in ROLES}

    def pods(self) -> dict[str, Object]:
        """Return the Deployments' pods by uid, without terminating ones."""
        return {
            pod["metadata"]["uid"]: pod
            for pod in self.objects("pods")
            if "deletionTimestamp" not in pod["metadata"] and "ownerReferences" in pod["metadata"]
        }

    def wanted(self) -> dict[str, int]:
        """Return the wanted number of pods of each role."""
        return {role: d["spec"]["replicas"] for role, d in self.roles().items()}

    def scale(self, role: str, number: int) -> None:
        """Scale outside of Helm, as an autoscaler or kubectl does."""
        name = self.deployments()[role]["metadata"]["name"]
        scale = ("scale", f"deployment/{name}", f"--replicas={number}")
        self.cluster.kubectl(*scale, "-n", self.namespace)

    def troubles(self) -> list[str]:
        """Return why the cluster did not create or schedule a pod."""
        events = self.cluster.objects("events", self.namespace)
        return [e["message"] for e in events if e["reason"] in {"FailedCreate", "FailedScheduling"}]

    def settled(self) -> bool:
        """Wait until the Deployments are complete, or the cluster reports why they are not."""
        return wait_until(
            lambda: all(map(is_complete, self.deployments().values())) or bool(self.troubles()),
            seconds=SETTLE_SECONDS,
        )


def is_complete(deployment: Object) -> bool:
    """Return whether all pods of a Deployment are available and up to date."""
    status, wanted = deployment["status"], deployment["spec"]["replicas"]
    counts = {status.get(key, 0) for key in ("replicas", "updatedReplicas", "availableReplicas")}
    is_seen: bool = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return is_seen and counts == {wanted}


def is_ready(pod: Object) -> bool:
    """Return whether a pod is ready and not terminating."""
    conditions = pod["status"].get("conditions", [])
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


@contextmanager
def namespace(cluster: Cluster) -> Iterator[str]:
    """Create a restricted namespace with the objects that the chart expects."""
    name = f"sms-{next(_numbers)}"
    level = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    quota = {"pods": "40", "requests.cpu": "8", "requests.memory": "8Gi", "limits.memory": "16Gi"}
    cluster.create(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": level}},
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "all", "namespace": name},
            "spec": {"hard": quota},
        },
        *(secret(name, called, keys) for called, keys in SECRETS.items()),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": SETTINGS, "namespace": name},
            "data": {"config.yaml": "{}"},
        },
    )
    try:
        # The quota refuses every pod until it has been calculated.
        counted = ("--for=jsonpath={.status.hard.pods}=40", "resourcequota/all")
        cluster.kubectl("wait", *counted, "-n", name, "--timeout=30s")
        yield name
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")


def secret(namespace: str, name: str, keys: list[str]) -> Object:
    """Make a Secret with arbitrary values."""
    of_registry = keys == [".dockerconfigjson"]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/dockerconfigjson" if of_registry else "Opaque",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": dict.fromkeys(keys, "{}"),
    }


def act_as_operators(release: Release) -> None:
    """Create the Secrets that operators would create for an ExternalSecret and a User."""
    made = [
        secret(
            release.namespace,
            external["spec"]["target"]["name"],
            [
                key
                for entry in external["spec"]["dataFrom"]
                for key in STORE[entry["extract"]["key"]]
            ],
        )
        for external in release.objects("externalsecrets.external-secrets.io")
    ]
    made += [
        secret(
            release.namespace,
            f"{user['metadata']['name']}-user-credentials",
            ["username", "password"],
        )
        for user in release.objects("users.rabbitmq.com")
        if "importCredentialsSecret" not in user["spec"]
    ]
    if made:
        release.cluster.kubectl("apply", "-f", "-", stdin=as_list(made))


class History:
    """The changes of a release's pods since its creation."""

    def __init__(self, release: Release) -> None:
        self._release = release
        query = urlencode({"labelSelector": release.selector})
        self._path = f"/api/v1/namespaces/{release.namespace}/pods?{query}"
        self._start = self._list()

    def fewest_ready(self) -> Mapping[str, int]:
        """Return the lowest number of ready pods of each role."""
        states: list[dict[str, Object]] = []

        def complete() -> bool:
            states[:] = self._replay()
            return states[-1].keys() == {p["metadata"]["uid"] for p in self._list()["items"]}

        assert wait_until(complete, seconds=SETTLE_SECONDS)
        ready = [
            Counter(p["metadata"]["labels"][COMPONENT] for p in state.values() if is_ready(p))
            for state in states
        ]
        return {role: min(count[role] for count in ready) for role in ROLES}

    def _replay(self) -> Iterator[dict[str, Object]]:
        pods = {pod["metadata"]["uid"]: pod for pod in self._start["items"]}
        yield pods
        since = self._start["metadata"]["resourceVersion"]
        watch = f"{self._path}&watch=1&timeoutSeconds=1&resourceVersion={since}"
        for line in self._release.cluster.get_raw(watch).splitlines():
            event = json.loads(line)
            assert event["type"] in {"ADDED", "MODIFIED", "DELETED"}, event
            uid = event["object"]["metadata"]["uid"]
            pods = {other: pod for other, pod in pods.items() if other != uid}
            if event["type"] != "DELETED":
                pods[uid] = event["object"]
            yield pods

    def _list(self) -> Object:
        listed: Object = json.loads(self._release.cluster.get_raw(self._path))
        return listed
