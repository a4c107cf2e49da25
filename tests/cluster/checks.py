"""Checks a release on a cluster. Each check returns a list of faults."""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bridge.sandbox.processes import wait_until
from tests.chart.rendering import ROLES, Values, nested, selects
from tests.cluster.control_plane import Object, as_list
from tests.cluster.release import (
    COMPONENT,
    INSTANCE,
    WAIT,
    Check,
    History,
    Release,
    is_complete,
    is_ready,
)

# Seconds for the controllers.
PATIENCE_SECONDS = 10
CHANGE = nested("config.log.level", "warning")
# For releases with an existing ConfigMap.
CHANGED_PODS: Values = {role: {"podAnnotations": {"example.com/changed": "yes"}} for role in ROLES}
# A number of pods that no example has. Autoscalers do not change it, because there are no metrics.
SCALED = 4
KEEP = "helm.sh/resource-policy"

# A reference in an object: kind, name and keys.
Reference = tuple[str, str, list[str]]


def lasting(check: Check, release: Release) -> list[str]:
    """Repeat a check until it finds no fault, or return its faults."""
    found: list[str] = []

    def nothing() -> bool:
        found[:] = check(release)
        return not found

    wait_until(nothing, seconds=PATIENCE_SECONDS)
    return found


# Installed objects


def refused(release: Release) -> list[str]:
    """Send every object to the API server in strict mode, and list errors and warnings."""
    objects = release.called(f"{release.name}-strict").render()
    # The API server accepts a pod only if its service account exists.
    accounts = [o for o in objects if o["kind"] == "ServiceAccount"]
    others = [o for o in objects if o["kind"] != "ServiceAccount"]
    create = ("create", "--validate=strict", "-f", "-")
    run = release.cluster.run
    run("kubectl", *create, stdin=as_list(accounts))
    shown = run("kubectl", *create, "--dry-run=server", stdin=as_list(others), check=False)
    run("kubectl", "delete", "-f", "-", stdin=as_list(accounts))
    return shown.stderr.splitlines()


def not_running(release: Release) -> list[str]:
    """List Deployments with missing pods, and why the cluster did not create or schedule them."""
    lacking = [
        f"{d['metadata']['name']} is not complete: {d['status']}"
        for d in release.deployments().values()
        if not is_complete(d)
    ]
    return lacking + release.troubles()


def dangling(release: Release) -> list[str]:
    """List references of pods and of operators' objects that do not exist."""
    kinds = "secrets,configmaps,serviceaccounts,services,deployments.apps"
    kinds += ",triggerauthentications.keda.sh,users.rabbitmq.com"
    there = {
        (o["kind"], o["metadata"]["name"]): {*o.get("data", {})}
        for o in release.cluster.objects(kinds, release.namespace)
    }
    faults = []
    for owner, kind, name, keys in named(release):
        if (kind, name) not in there:
            faults.append(f"{owner} names the {kind} {name}, which is missing")
        else:
            missing = set(keys) - there[kind, name]
            faults += [f"{owner} names a key that {kind} {name} lacks: {key}" for key in missing]
    return faults + [fault for pod in all_pods(release) for fault in unknown_ports(pod)]


def named(release: Release) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield each reference, with its object."""
    for pod in all_pods(release):
        for kind, name, keys in named_by_pod(pod["spec"]):
            yield pod["metadata"]["name"], kind, name, keys
    for made in release.render():
        if made["kind"] in NAMED_BY:
            for kind, name, keys in NAMED_BY[made["kind"]](made["spec"]):
                yield f"{made['kind']} {made['metadata']['name']}", kind, name, keys


def all_pods(release: Release) -> list[Object]:
    """Return the running pods and the pod of `helm test`."""
    return [*release.pods().values(), *(o for o in release.render() if o["kind"] == "Pod")]


def named_by_pod(spec: Object) -> Iterator[Reference]:
    """Yield the required references of a pod."""
    yield "ServiceAccount", spec["serviceAccountName"], []
    for pull in spec.get("imagePullSecrets", []):
        yield "Secret", pull["name"], [".dockerconfigjson"]
    for volume in spec.get("volumes", []):
        for source in volume.get("projected", {}).get("sources", [volume]):
            for key, kind in (("secret", "Secret"), ("configMap", "ConfigMap")):
                if key in source and not source[key].get("optional"):
                    name = source[key].get("name") or source[key]["secretName"]
                    yield kind, name, [item["key"] for item in source[key].get("items", [])]
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        for variable in container.get("env", []):
            for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                reference = variable.get("valueFrom", {}).get(key)
                if reference and not reference.get("optional"):
                    yield kind, reference["name"], [reference["key"]]


# References of objects for operators and controllers, by kind.
NAMED_BY: dict[str, Callable[[Object], list[Reference]]] = {
    "HorizontalPodAutoscaler": lambda spec: [("Deployment", spec["scaleTargetRef"]["name"], [])],
    "ScaledObject": lambda spec: [
        ("Deployment", spec["scaleTargetRef"]["name"], []),
        *(
            ("TriggerAuthentication", trigger["authenticationRef"]["name"], [])
            for trigger in spec["triggers"]
            if "authenticationRef" in trigger
        ),
    ],
    "TriggerAuthentication": lambda spec: [
        ("Secret", target["name"], [target["key"]]) for target in spec["secretTargetRef"]
    ],
    "Permission": lambda spec: [("User", spec["userReference"]["name"], [])],
    "Queue": lambda spec: [
        ("Secret", reference["name"], ["uri", "username", "password"])
        for reference in filter(None, [spec["rabbitmqClusterReference"].get("connectionSecret")])
    ],
    "Ingress": lambda spec: [
        *(("Secret", tls["secretName"], ["tls.crt", "tls.key"]) for tls in spec.get("tls", [])),
        *(
            ("Service", path["backend"]["service"]["name"], [])
            for rule in spec["rules"]
            for path in rule["http"]["paths"]
        ),
    ],
    "HTTPRoute": lambda spec: [
        ("Service", backend["name"], [])
        for rule in spec["rules"]
        for backend in rule["backendRefs"]
    ],
}


def unknown_ports(pod: Object) -> list[str]:
    """List ports in probes that no container declares."""
    faults = []
    for container in pod["spec"]["containers"]:
        declared: set[Any] = set()
        for port in container.get("ports", []):
            declared |= {port["containerPort"], port.get("name")}
        probes = [
            container.get(f"{probe}Probe", {}) for probe in ("startup", "liveness", "readiness")
        ]
        asked = [probe.get("httpGet") or probe.get("tcpSocket") for probe in probes]
        faults += [
            f"{pod['metadata']['name']} has no port {get['port']}, which a probe asks"
            for get in filter(None, asked)
            if get["port"] not in declared
        ]
    return faults


def misrouted(release: Release) -> list[str]:
    """List Services with missing pods, foreign pods or undeclared ports."""
    faults = []
    pods = {pod["metadata"]["name"]: pod for pod in release.pods().values()}
    for service in release.objects("services"):
        name, labels = service["metadata"]["name"], service["metadata"]["labels"]
        slices = release.cluster.objects(
            "endpointslices", release.namespace, selector=f"kubernetes.io/service-name={name}"
        )
        reached = set()
        for found in slices:
            ports = {port["port"] for port in found["ports"] or []}
            names = {port["name"] for port in found["ports"] or []}
            unmapped = {port["name"] for port in service["spec"]["ports"]} - names
            faults += [f"{name} has a port that leads to no pod: {port}" for port in unmapped]
            for endpoint in found["endpoints"] or []:
                pod = pods.get(endpoint["targetRef"]["name"])
                if pod is None or pod["metadata"]["labels"][COMPONENT] != labels[COMPONENT]:
                    faults.append(f"{name} leads to {endpoint['targetRef']['name']}")
                    continue
                reached.add(pod["metadata"]["name"])
                faults += [
                    f"{name} leads to a port that {pod['metadata']['name']} lacks: {port}"
                    for port in ports - declared_ports(pod)
                ]
        wanted = {p["metadata"]["name"] for p in of_component(release, labels[COMPONENT])}
        faults += [f"{name} does not lead to {pod}" for pod in sorted(wanted - reached)]
    return faults


def declared_ports(pod: Object) -> set[int]:
    """Return the ports that a pod's containers declare."""
    containers = pod["spec"]["containers"]
    return {port["containerPort"] for c in containers for port in c.get("ports", [])}


def of_component(release: Release, component: str) -> list[Object]:
    """Return the ready pods of a role."""
    pods = release.pods().values()
    return [p for p in pods if p["metadata"]["labels"][COMPONENT] == component and is_ready(p)]


def unguarded(release: Release) -> list[str]:
    """List roles without exactly one budget, and budgets that are shared or allow no disruption."""
    faults = []
    budgets = release.cluster.objects("poddisruptionbudgets", release.namespace)
    deployments = release.cluster.objects("deployments", release.namespace)
    for budget in budgets:
        name = budget["metadata"]["name"]
        covered = [d["metadata"]["name"] for d in deployments if covers(budget, d)]
        if len(covered) != 1:
            faults.append(f"budget {name} covers {covered}")
        if budget.get("status", {}).get("disruptionsAllowed", 0) < 1:
            faults.append(f"budget {name} allows no disruption")
    for deployment in release.roles().values():
        covering = [b["metadata"]["name"] for b in budgets if covers(b, deployment)]
        if len(covering) != 1:
            faults.append(f"{deployment['metadata']['name']} is covered by {covering}")
    return faults


def covers(budget: Object, deployment: Object) -> bool:
    """Return whether a budget covers a Deployment's pods."""
    return selects(budget["spec"]["selector"]["matchLabels"], deployment["spec"]["template"])


def crowded(release: Release) -> list[str]:
    """List Deployments with two more pods on one node than on another."""
    faults = []
    nodes = [n["metadata"]["name"] for n in release.cluster.objects("nodes", "")]
    for role in release.deployments():
        placed = Counter(pod["spec"]["nodeName"] for pod in of_component(release, role))
        counts = [placed[node] for node in nodes]
        if max(counts) - min(counts) > 1:
            faults.append(f"the pods of {role} crowd: {dict(placed)}")
    return faults


def unexplained(release: Release) -> list[str]:
    """Run the first alert's runbook command, and report if it prints no runbook."""
    alerts = [
        rule
        for made in release.render()
        if made["kind"] == "PrometheusRule"
        for group in made["spec"]["groups"]
        for rule in group["rules"]
        if "runbook" in rule.get("annotations", {})
    ]
    faults = []
    for alert in alerts[:1]:
        program, *arguments = shlex.split(alert["annotations"]["runbook"])
        shown = release.cluster.run(program, *arguments, check=False)
        if "**Do.**" not in shown.stdout:
            faults.append(f"{alert['alert']} has no runbook: {shown.stderr}")
    return faults


INSTALLED = (not_running, dangling, misrouted, unguarded, crowded, unexplained)


# Changes


def replaced_for_nothing(release: Release) -> list[str]:
    """Upgrade without a change, and list replaced pods."""
    before = release.pods()
    release.upgrade(*WAIT)
    gone = set(before) - set(release.pods())
    return [f"replaced for nothing: {before[uid]['metadata']['name']}" for uid in gone]


def kept_in_spite_of_a_change(release: Release) -> list[str]:
    """Change the configuration, and list pods with the old one."""
    before = release.pods()
    release.with_values(CHANGE).upgrade(*WAIT)
    kept = set(before) & set(release.pods())
    return [f"kept in spite of a change: {before[uid]['metadata']['name']}" for uid in kept]


def gaps_in_a_rollout(release: Release) -> list[str]:
    """Change the configuration, and list roles that had fewer ready pods than wanted."""
    history, wanted = History(release), release.wanted()
    change = CHANGED_PODS if "existingConfigMap" in release.values else CHANGE
    release.with_values(change).upgrade(*WAIT)
    return gaps(history, wanted)


def gaps_in_drains(release: Release) -> list[str]:
    """Drain every node, and list roles that lacked more than one pod.

    Before the last node is drained, it runs all pods.
    """
    history = History(release)
    wanted = {role: number - 1 for role, number in release.wanted().items()}
    nodes = [node["metadata"]["name"] for node in release.cluster.objects("nodes", "")]
    kubectl = release.cluster.kubectl
    lacking = []
    try:
        for node in nodes:
            if node == nodes[-1]:
                kubectl("uncordon", *nodes[:-1])
            ours = f"--pod-selector={release.selector}"
            kubectl("drain", node, ours, "--delete-emptydir-data", "--timeout=90s")
            lacking += lasting(not_running, release)
    finally:
        kubectl("uncordon", *nodes)
    return lacking + gaps(history, wanted)


def gaps(history: History, wanted: Mapping[str, int]) -> list[str]:
    """List roles that had fewer ready pods than wanted."""
    fewest = history.fewest_ready()
    return [
        f"{role} had {fewest[role]} ready pods instead of {number}"
        for role, number in wanted.items()
        if fewest[role] < number
    ]


def beside_another(release: Release) -> list[str]:
    """Install a second release into the namespace, and list faults of both."""
    other = release.called("other")
    done = other.install(*WAIT, check=False)
    if done.returncode:
        return [done.stderr]
    checks = (not_running, misrouted, unguarded)
    return [fault for r in (release, other) for check in checks for fault in lasting(check, r)]


def reset_by_an_upgrade(release: Release) -> list[str]:
    """Scale every role outside of Helm, upgrade, and list roles whose number was reset."""
    roles = release.roles()
    for role in roles:
        release.scale(role, SCALED)
    upgraded = release.with_values(CHANGE).upgrade(*WAIT, check=False)
    found = release.wanted()
    reset = [
        f"{role} has {found[role]} instead of {SCALED} pods"
        for role in roles
        if found[role] != SCALED
    ]
    return [*reset, *([upgraded.stderr] if upgraded.returncode else [])]


def left_behind(release: Release) -> list[str]:
    """Uninstall, and list remaining objects without a keep annotation."""
    release.run("uninstall", *WAIT)
    return lasting(not_removed, release)


def not_removed(release: Release) -> list[str]:
    """List objects of a release without a keep annotation."""
    return [
        f"left behind: {found['kind']} {found['metadata']['name']}"
        for found in everything(release)
        if found["metadata"].get("annotations", {}).get(KEEP) != "keep"
    ]


def not_as_rendered(release: Release) -> list[str]:
    """List differences between a release's existing and rendered objects.

    Ignores hooks, kept objects, objects of controllers and objects with another label.
    """
    there = {
        (found["kind"], found["metadata"]["name"])
        for found in everything(release)
        if not {"ownerReferences", "deletionTimestamp"} & found["metadata"].keys()
        and found["kind"] != "Endpoints"
        and found.get("type") != "helm.sh/release.v1"
        and KEEP not in found["metadata"].get("annotations", {})
    }
    rendered = {
        (made["kind"], made["metadata"]["name"])
        for made in release.render()
        if made["metadata"].get("labels", {}).get(INSTANCE) == release.name
        and not {KEEP, "helm.sh/hook"} & made["metadata"].get("annotations", {}).keys()
    }
    return [
        *(f"not rendered: {kind} {name}" for kind, name in sorted(there - rendered)),
        *(f"not there: {kind} {name}" for kind, name in sorted(rendered - there)),
    ]


def everything(release: Release) -> list[Object]:
    """List all objects with the release's label, and Helm's record."""
    kubectl = release.cluster.kubectl
    kinds = set(kubectl("api-resources", "--verbs=list,delete", "--output=name").split())
    listed = kubectl(
        *("get", ",".join(sorted(kinds - {"events", "events.events.k8s.io"}))),
        *("--all-namespaces", "-l", release.selector, "-o", "json"),
    )
    record = f"owner=helm,name={release.name}"
    records = release.cluster.objects("secrets", release.namespace, selector=record)
    places = {release.namespace, None}
    return [
        *(o for o in json.loads(listed)["items"] if o["metadata"].get("namespace") in places),
        *records,
    ]
