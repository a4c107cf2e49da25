"""The checks find what they look for: each is shown a copy of the chart that is broken for it."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.chart.rendering import CHART, CI, MINIMAL, Values, merged
from tests.cluster import checks
from tests.cluster.control_plane import NO_TOOLS, TOOLS, Cluster
from tests.cluster.release import QUICK, Check, Release, namespace

if TOOLS is None:
    pytest.skip(NO_TOOLS, allow_module_level=True)

DEPLOYMENTS = "templates/deployments.yaml"
HELPERS = "templates/_helpers.tpl"
BUDGETS = "templates/poddisruptionbudgets.yaml"
SERVICES = "templates/services.yaml"


@dataclass(frozen=True)
class Fault:
    """A fault of a chart: what is replaced in which file, and what the check says of it."""

    check: Check
    says: str
    file: str
    old: str
    new: str
    values: Values = field(default_factory=lambda: MINIMAL)

    def build_into(self, folder: Path) -> Path:
        """Copy the chart and break the copy."""
        chart = folder / "sms-bridge"
        shutil.copytree(CHART, chart)
        text = (chart / self.file).read_text()
        assert self.old in text
        (chart / self.file).write_text(text.replace(self.old, self.new))
        return chart


SECURITY = "securityContext: {{- toYaml $.Values.securityContext | nindent 12 }}"
SCALED = "{{- if not (or $r.autoscaling.enabled ($r.keda | default dict).enabled) }}"
CHECKSUM = """"checksum/config" (include "sms-bridge.config" .root | sha256sum)"""
ACCOUNT_NOTES = '"annotations" .Values.serviceAccount.annotations'

FAULTS: Mapping[str, Fault] = {
    "a container without a security context": Fault(
        checks.refused, "allowPrivilegeEscalation", DEPLOYMENTS, SECURITY, ""
    ),
    "a container that PodSecurity refuses": Fault(
        checks.not_running, "violates PodSecurity", DEPLOYMENTS, SECURITY, ""
    ),
    "a Secret that is missing": Fault(
        checks.dangling,
        "names the Secret sms-bridge-x",
        "templates/_secrets.tpl",
        '"credential" "smsApi") | quote }}',
        '"credential" "smsApi") }}-x',
    ),
    "a Service's port that is none of the pod": Fault(
        checks.misrouted, "leads to no pod: http", SERVICES, "targetPort: http", "targetPort: web"
    ),
    "a budget that allows nothing": Fault(
        checks.unguarded,
        "allows no disruption",
        BUDGETS,
        "maxUnavailable: {{ .maxUnavailable | toJson }}",
        "maxUnavailable: 0",
    ),
    "an alert that leads nowhere": Fault(
        checks.unexplained,
        "SmsBridgeWorkerDown has no runbook",
        "templates/runbooks.yaml",
        '"suffix" "runbooks"',
        '"suffix" "runbook"',
        merged(MINIMAL, {"prometheusRule": {"enabled": True}}),
    ),
    "pods that share a node": Fault(
        checks.crowded,
        "crowd",
        DEPLOYMENTS,
        "enableServiceLinks: false",
        "nodeSelector: {kubernetes.io/hostname: node-0}",
    ),
    "an annotation that is different each time": Fault(
        checks.replaced_for_nothing, "replaced", HELPERS, CHECKSUM, '"at" (now | toString)'
    ),
    "a change that the pods do not show": Fault(
        checks.kept_in_spite_of_a_change, "kept", HELPERS, CHECKSUM, '"at" "never"'
    ),
    "a rollout that stops pods before it starts others": Fault(
        checks.gaps_in_a_rollout,
        "had 1 ready pods instead of 2",
        DEPLOYMENTS,
        "strategy: {{- toYaml $r.strategy | nindent 4 }}",
        "strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}",
    ),
    "pods that a drain takes all at once": Fault(
        checks.gaps_in_drains,
        "had 0 ready pods instead of 1",
        BUDGETS,
        "{{- if and $r.enabled $r.podDisruptionBudget.enabled }}",
        "{{- if false }}",
    ),
    "replicas beside an autoscaler": Fault(
        checks.reset_by_an_upgrade,
        ".spec.replicas",
        DEPLOYMENTS,
        SCALED,
        "{{- if true }}",
        CI["autoscaled"],
    ),
    "a name that two releases share": Fault(
        checks.beside_another,
        "cannot be imported into the current release",
        HELPERS,
        'printf "%s-%s" .Release.Name $name',
        'printf "%s-%s" "rel" $name',
    ),
    "a hook's object that stays": Fault(
        checks.left_behind,
        "left behind: ServiceAccount rel-sms-bridge",
        "templates/serviceaccount.yaml",
        ACCOUNT_NOTES,
        '"annotations" (dict "helm.sh/hook" "pre-install")',
    ),
    "an object that no upgrade changes": Fault(
        checks.not_as_rendered,
        "not rendered: ServiceAccount rel-sms-bridge",
        "templates/serviceaccount.yaml",
        ACCOUNT_NOTES,
        '"annotations" (dict "helm.sh/hook" "pre-install")',
    ),
}


@pytest.fixture
def empty(cluster: Cluster) -> Iterator[str]:
    """Make a namespace."""
    with namespace(cluster) as name:
        yield name


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_broken_chart_is_noticed(
    fault: Fault, cluster: Cluster, empty: str, tmp_path: Path
) -> None:
    """The check names the fault, in a chart that is installed without a complaint."""
    chart = fault.build_into(tmp_path)
    release = Release(cluster, empty, merged(fault.values, QUICK), chart=chart)
    if fault.check is not checks.refused:
        release.install()
        assert release.settled()

    found = fault.check(release)

    assert any(fault.says in text for text in found), found
