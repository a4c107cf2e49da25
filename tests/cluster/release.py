"""A release of the chart in a namespace of its own, and what a cluster holds ready for it."""

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

# Every Secret that an example of the chart expects, with its keys.
SECRETS = {
    "sms-bridge": ["username", "password", "key", "current"],
    "broker": ["user", "pass"],
    "broker-operators": ["user", "pass"],
    "broker-tls": ["ca.crt", "tls.crt", "tls.key"],
    "sms-api": ["token"],
    "sms-api-ca": ["ca.crt"],
    "webhooks": ["current", "previous"],
    # As a cluster operator makes it.
    "rabbitmq-default-user": ["username", "password", "host", "port", "connection_string"],
    "rabbitmq-monitoring": ["username", "password"],
    "rabbitmq-management": ["uri", "username", "password"],
    "sms-bridge-tls": ["tls.crt", "tls.key"],
    "registry": [".dockerconfigjson"],
    "mirror": [".dockerconfigjson"],
}
# Every ConfigMap that an example expects.
SETTINGS = "sms-bridge-settings"
# The entries of the store that external-secrets would read, with their keys.
STORE = {"sms/api": ["key"], "sms/webhooks": ["current"]}

# A rollout that does not wait for new pods to prove themselves.
QUICK: Values = {role: {"minReadySeconds": 0} for role in ROLES}

_numbers = itertools.count(1)

Check = Callable[["Release"], list[str]]


@dataclass(frozen=True)
class Release:
    """One release; `helm` names the program that handles it."""

    cluster: Cluster
    namespace: str
    values: Values
    name: str = "rel"
    chart: Path = CHART
    helm: str = "helm"

    def run(self, command: str, *arguments: str, check: bool = True) -> Done:
        """Run a command of Helm that takes the release only."""
        to = (self.name, *arguments, "--namespace", self.namespace)
        return self.cluster.run(self.helm, command, *to, check=check)

    def install(self, *flags: str, check: bool = True) -> Done:
        """Install it."""
        return self._apply("install", *flags, check=check)

    def upgrade(self, *flags: str, check: bool = True) -> Done:
        """Upgrade it to its chart and values."""
        return self._apply("upgrade", *flags, check=check)

    def _apply(self, command: str, *flags: str, check: bool) -> Done:
        arguments = (command, self.name, str(self.chart), "-n", self.namespace, "-f", "-", *flags)
        return self.cluster.run(self.helm, *arguments, stdin=json.dumps(self.values), check=check)

    def render(self) -> list[Object]:
        """Render its objects without the cluster, the pod of `helm test` too."""
        done = self._apply("template", check=True)
        return [found for found in yaml.load_all(done.stdout, yaml.CSafeLoader) if found]

    def called(self, name: str) -> "Release":
        """Make another release of the same chart and values."""
        return replace(self, name=name)

    def handled_by(self, helm: str) -> "Release":
        """Make the same release, handled by another Helm."""
        return replace(self, helm=helm)

    def with_values(self, *overs: Values) -> "Release":
        """Make the same release with other values laid over its own."""
        return replace(self, values=merged(self.values, *overs))

    def status(self) -> str:
        """Return what Helm says of it: deployed, failed, pending-upgrade."""
        done = self.run("status", "--output", "json")
        status: str = json.loads(done.stdout)["info"]["status"]
        return status

    @property
    def selector(self) -> str:
        """Select its objects."""
        return f"{INSTANCE}={self.name}"

    def objects(self, kind: str) -> list[Object]:
        """List its objects of a kind."""
        return self.cluster.objects(kind, self.namespace, selector=self.selector)

    def deployments(self) -> dict[str, Object]:
        """Return its Deployments by component: the roles, and the toolbox."""
        return {d["metadata"]["labels"][COMPONENT]: d for d in self.objects("deployments")}

    def roles(self) -> dict[str, Object]:
        """Return the Deployments of the roles; the toolbox may be away for a moment."""
        return {name: d for name, d in self.deployments().items() if name in ROLES}

    def pods(self) -> dict[str, Object]:
        """Return the pods of its Deployments by uid, without those that are leaving."""
        return {
            pod["metadata"]["uid"]: pod
            for pod in self.objects("pods")
            if "deletionTimestamp" not in pod["metadata"] and "ownerReferences" in pod["metadata"]
        }

    def wanted(self) -> dict[str, int]:
        """Return the number of pods that each role shall have."""
        return {role: d["spec"]["replicas"] for role, d in self.roles().items()}

    def scale(self, role: str, number: int) -> None:
        """Set a number of pods as an autoscaler does, and kubectl: beside the chart."""
        name = self.deployments()[role]["metadata"]["name"]
        scale = ("scale", f"deployment/{name}", f"--replicas={number}")
        self.cluster.kubectl(*scale, "-n", self.namespace)

    def troubles(self) -> list[str]:
        """Return why the cluster did not make or place a pod in the namespace."""
        events = self.cluster.objects("events", self.namespace)
        return [e["message"] for e in events if e["reason"] in {"FailedCreate", "FailedScheduling"}]

    def settled(self) -> bool:
        """Wait until its Deployments have all their pods, or the cluster says why not."""
        return wait_until(
            lambda: all(map(is_complete, self.deployments().values())) or bool(self.troubles()),
            seconds=SETTLE_SECONDS,
        )


def is_complete(deployment: Object) -> bool:
    """Say whether a Deployment has all its pods, of its newest kind, and they are available."""
    status, wanted = deployment["status"], deployment["spec"]["replicas"]
    counts = {status.get(key, 0) for key in ("replicas", "updatedReplicas", "availableReplicas")}
    is_seen: bool = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return is_seen and counts == {wanted}


def is_ready(pod: Object) -> bool:
    """Say whether a pod is ready and stays."""
    conditions = pod["status"].get("conditions", [])
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


@contextmanager
def namespace(cluster: Cluster) -> Iterator[str]:
    """Make a namespace as a careful company has them, with what the chart expects to find."""
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
        # Until the quota has been counted it refuses every pod.
        counted = ("--for=jsonpath={.status.hard.pods}=40", "resourcequota/all")
        cluster.kubectl("wait", *counted, "-n", name, "--timeout=30s")
        yield name
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")


def secret(namespace: str, name: str, keys: list[str]) -> Object:
    """Make a Secret; what it holds does not matter."""
    of_registry = keys == [".dockerconfigjson"]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/dockerconfigjson" if of_registry else "Opaque",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": dict.fromkeys(keys, "{}"),
    }


def act_as_operators(release: Release) -> None:
    """Make the Secrets that the operators make of an ExternalSecret and of a User."""
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
    """Every change to a release's pods since it was made."""

    def __init__(self, release: Release) -> None:
        self._release = release
        query = urlencode({"labelSelector": release.selector})
        self._path = f"/api/v1/namespaces/{release.namespace}/pods?{query}"
        self._start = self._list()

    def fewest_ready(self) -> Mapping[str, int]:
        """Return the smallest number of ready pods of each role that there has been."""
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
