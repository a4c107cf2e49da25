"""Every example of the chart, installed with Helm 4 on a real API server."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bridge.sandbox.processes import wait_until
from tests.chart.rendering import CI
from tests.cluster import checks
from tests.cluster.control_plane import NO_TOOLS, TOOLS, Cluster
from tests.cluster.release import (
    COMPONENT,
    QUICK,
    SETTLE_SECONDS,
    WAIT,
    Release,
    act_as_operators,
    namespace,
)

if TOOLS is None:
    pytest.skip(NO_TOOLS, allow_module_level=True)

# To delete one of these may delete what it stands for on the broker, with its messages.
ENTITIES = {"Queue", "Exchange", "Binding", "Policy"}


@pytest.fixture(scope="module", params=CI)
def installed(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Release]:
    """Install an example; every test leaves it running."""
    with namespace(cluster) as name:
        release = Release(cluster, name, CI[request.param])
        release.install(*WAIT)
        act_as_operators(release)
        yield release


def test_every_object_is_taken_without_a_warning(installed: Release) -> None:
    """Strict mode knows every field, custom resources too, and PodSecurity warns of nothing."""
    assert checks.refused(installed) == []


def test_every_pod_runs(installed: Release) -> None:
    """Restricted pods under a quota are all made, placed and ready."""
    assert installed.deployments()
    assert checks.lasting(checks.not_running, installed) == []


def test_all_that_is_named_exists(installed: Release) -> None:
    """No pod waits for a Secret, a key or an account, and no probe asks a port that is none."""
    assert checks.dangling(installed) == []


def test_services_lead_to_ready_pods_of_their_role(installed: Release) -> None:
    """Every Service has an endpoint for each ready pod of its role, on a declared port."""
    assert checks.lasting(checks.misrouted, installed) == []


def test_each_role_has_a_budget(installed: Release) -> None:
    """Exactly one budget covers it, and lets a pod go."""
    assert checks.lasting(checks.unguarded, installed) == []


def test_pods_keep_apart(installed: Release) -> None:
    """The nodes share the pods of a Deployment evenly."""
    assert checks.crowded(installed) == []


def test_an_alert_leads_to_its_runbook(installed: Release) -> None:
    """The command that an alert names prints what to do."""
    assert checks.unexplained(installed) == []


def test_helm_test_passes(installed: Release) -> None:
    """The test's pod is admitted, and gone when it has passed."""
    tested = any(made["kind"] == "Pod" for made in installed.render())

    installed.run("test")

    assert tested == ("webhook" in installed.deployments())
    assert all("ownerReferences" in pod["metadata"] for pod in installed.objects("pods"))


def test_an_upgrade_without_a_change_replaces_no_pod(installed: Release) -> None:
    """The same chart with the same values leaves every pod alone."""
    assert checks.replaced_for_nothing(installed) == []


def test_a_change_is_rolled_out_without_a_gap(installed: Release) -> None:
    """Every pod is replaced, and at no moment are fewer ready than are wanted."""
    # The sandbox reads no configuration, and would forget its messages.
    before = {
        uid
        for uid, pod in installed.pods().items()
        if pod["metadata"]["labels"][COMPONENT] != "sandbox"
    }

    assert checks.gaps_in_a_rollout(installed) == []
    assert before.isdisjoint(installed.pods())


@pytest.mark.parametrize("example", CI)
def test_uninstall_leaves_what_is_to_be_kept(example: str, cluster: Cluster) -> None:
    """Of all kinds only RabbitMQ's entities stay, and the next installation takes them over."""
    with namespace(cluster) as name:
        release = Release(cluster, name, CI[example]).with_values(QUICK)
        release.install(*WAIT)

        assert checks.left_behind(release) == []
        kept = {found["kind"] for found in checks.everything(release)}
        assert kept == {made["kind"] for made in release.render()} & ENTITIES
        release.install(*WAIT)


def address_given(release: Release) -> bool:
    """Give a LoadBalancer its address, as a cloud does; Helm 3 waits for it, Helm 4 does not."""
    services = [s for s in release.objects("services") if s["spec"]["type"] == "LoadBalancer"]
    for service in services:
        status = {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}}
        patch = ("--subresource=status", "--type=merge", "-p", json.dumps(status))
        named = ("service", service["metadata"]["name"], "-n", release.namespace)
        release.cluster.kubectl("patch", *named, *patch)
    return bool(services)


def test_helm_3_installs_everything_at_once(cluster: Cluster) -> None:
    """The fullest example runs when Helm 3 says so, and an upgrade of its replaces no pod."""
    with namespace(cluster) as name:
        release = Release(cluster, name, CI["full"]).handled_by("helm3")
        with ThreadPoolExecutor() as pool:
            installing = pool.submit(release.install, *WAIT)
            assert wait_until(lambda: address_given(release), seconds=SETTLE_SECONDS)
            installing.result()

        for check in checks.INSTALLED:
            assert checks.lasting(check, release) == []
        assert checks.replaced_for_nothing(release) == []


def test_the_number_that_an_autoscaler_chose_survives_an_upgrade(cluster: Cluster) -> None:
    """Where something else scales a role, an upgrade leaves its number of pods alone."""
    with namespace(cluster) as name:
        release = Release(cluster, name, CI["autoscaled"]).with_values(QUICK)
        release.install(*WAIT)

        assert checks.reset_by_an_upgrade(release) == []
