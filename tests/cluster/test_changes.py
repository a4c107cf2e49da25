"""What happens to an installed release: upgrades, faults, drains, with Helm 4 and Helm 3."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.chart.rendering import CI, MINIMAL, nested
from tests.cluster import checks
from tests.cluster.control_plane import NO_TOOLS, TOOLS, Cluster
from tests.cluster.release import QUICK, WAIT, History, Release, namespace

if TOOLS is None:
    pytest.skip(NO_TOOLS, allow_module_level=True)

# What a careful upgrade is called.
UNDO = {"helm": "--rollback-on-failure", "helm3": "--atomic"}
BAD = nested("image.repository", "example/never-ready")


@pytest.fixture
def bare(cluster: Cluster) -> Iterator[Release]:
    """Prepare the minimal example, not installed."""
    with namespace(cluster) as name:
        yield Release(cluster, name, MINIMAL).with_values(QUICK)


@pytest.fixture
def release(bare: Release) -> Release:
    """Install the minimal example with Helm 4."""
    bare.install(*WAIT)
    return bare


@pytest.fixture(params=UNDO)
def of_either(request: pytest.FixtureRequest, bare: Release) -> Release:
    """Install the minimal example, once with Helm 4 and once with Helm 3."""
    release = bare.handled_by(request.param)
    release.install(*WAIT)
    return release


def configuration(release: Release) -> object:
    """Return what the pods read."""
    (found,) = release.objects("configmaps")
    return found["data"]


def test_helm_3_installs_changes_and_removes(bare: Release) -> None:
    """All that Helm 4 does with the example, Helm 3 does as well."""
    release = bare.handled_by("helm3")
    release.install(*WAIT)

    for check in checks.INSTALLED:
        assert checks.lasting(check, release) == []
    release.run("test")
    assert checks.replaced_for_nothing(release) == []
    assert checks.gaps_in_a_rollout(release) == []
    assert checks.left_behind(release) == []


def test_helm_4_takes_over_from_helm_3(bare: Release) -> None:
    """A release of Helm 3 goes on with Helm 4, which replaces no pod for it."""
    bare.handled_by("helm3").install(*WAIT)

    assert checks.replaced_for_nothing(bare) == []
    assert checks.kept_in_spite_of_a_change(bare) == []


def test_pods_that_never_get_ready_are_taken_back(of_either: Release) -> None:
    """A failing upgrade undoes itself; the pods that ran before it run on all the while."""
    release = of_either
    before, history, wanted = release.pods(), History(release), release.wanted()
    bad = release.with_values(BAD, checks.CHANGE)
    was = configuration(release)

    failed = bad.upgrade(UNDO[release.helm], "--wait", "--timeout", "10s", check=False)

    assert failed.returncode != 0
    assert release.status() == "deployed"
    assert configuration(release) == was
    assert checks.lasting(checks.not_running, release) == []
    assert release.pods().keys() == before.keys()
    assert checks.gaps(history, wanted) == []


def test_a_change_can_be_rolled_back(of_either: Release) -> None:
    """`helm rollback` brings the old configuration back, without a gap."""
    release = of_either
    was = configuration(release)
    release.with_values(checks.CHANGE).upgrade(*WAIT)
    history = History(release)
    assert configuration(release) != was

    release.run("rollback", "1", *WAIT)

    assert configuration(release) == was
    assert checks.lasting(checks.not_running, release) == []
    assert checks.gaps(history, release.wanted()) == []


def test_each_example_can_become_the_next(of_either: Release) -> None:
    """An upgrade adds what the values switch on, and removes what they switch off."""
    for example in ("full", "autoscaled", "operators", "worker-only", "webhook-only", "full"):
        release = replace(of_either, values=CI[example])
        release.upgrade()

        assert checks.lasting(checks.not_as_rendered, release) == []


def test_a_test_that_fails_is_reported(release: Release) -> None:
    """`helm test` fails when its pod does."""
    release.with_values(nested("image.repository", "example/failing")).upgrade(*WAIT)

    assert release.run("test", check=False).returncode != 0


def test_every_node_can_be_drained(release: Release) -> None:
    """One pod of a role goes at a time, also from the last node, where all pods have met."""
    assert checks.gaps_in_drains(release) == []


def test_two_releases_live_side_by_side(release: Release) -> None:
    """A second release in the namespace shares no object, no Service and no budget."""
    assert checks.beside_another(release) == []

    assert checks.left_behind(release.called("other")) == []
    for check in checks.INSTALLED:
        assert checks.lasting(check, release) == []


def test_helm_4_stops_half_way_after_kubectl_scale(release: Release) -> None:
    """The upgrade fails at the scaled Deployment; what it has changed by then stays changed."""
    release.scale("worker", 3)
    was = configuration(release)
    workers = {pod["metadata"]["uid"] for pod in checks.of_component(release, "worker")}

    failed = release.with_values(checks.CHANGE).upgrade(*WAIT, check=False)

    assert failed.returncode != 0
    assert 'conflict with "kubectl" with subresource "scale"' in failed.stderr
    assert ".spec.replicas" in failed.stderr
    assert release.status() == "failed"
    assert configuration(release) != was
    assert release.wanted()["worker"] == 3
    assert workers <= release.pods().keys()


def test_a_rollback_meets_the_conflict_too(release: Release) -> None:
    """It puts the configuration back, and the next upgrade without a conflict goes through."""
    release.scale("worker", 3)
    was = configuration(release)
    changed = release.with_values(checks.CHANGE)

    failed = changed.upgrade("--rollback-on-failure", *WAIT, check=False)

    assert "an error occurred while rolling back the release" in failed.stderr
    assert release.status() == "failed"
    assert configuration(release) == was
    changed.with_values(nested("worker.replicaCount", 3)).upgrade(*WAIT)
    assert release.status() == "deployed"
    assert release.wanted()["worker"] == 3


def test_force_conflicts_takes_the_number_of_the_values(release: Release) -> None:
    """With the flag the upgrade goes through, and resets what `kubectl scale` has set."""
    release.scale("worker", 3)

    release.upgrade("--force-conflicts", *WAIT)

    assert release.wanted()["worker"] == 2


def test_the_scaled_number_in_the_values_is_no_conflict(release: Release) -> None:
    """Who writes the number that `kubectl scale` has set into the values may upgrade."""
    release.scale("worker", 3)

    assert checks.replaced_for_nothing(release.with_values(nested("worker.replicaCount", 3))) == []
    assert release.wanted()["worker"] == 3


def test_helm_3_resets_what_kubectl_scale_has_set(bare: Release) -> None:
    """Helm 3 knows no conflict: the upgrade takes the number of the values without a word."""
    release = bare.handled_by("helm3")
    release.install(*WAIT)
    release.scale("worker", 3)

    release.upgrade(*WAIT)

    assert release.wanted()["worker"] == 2


def test_an_autoscaler_takes_over_without_a_gap(release: Release) -> None:
    """When another has a hand on the number first, no pod goes as the chart lets go of it."""
    history, wanted = History(release), release.wanted()
    name = release.deployments()["webhook"]["metadata"]["name"]
    hand = ("apply", "--server-side", "--field-manager=autoscaler", "--validate=false", "-f", "-")
    number = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": release.namespace},
        "spec": {"replicas": wanted["webhook"]},
    }

    release.cluster.kubectl(*hand, stdin=json.dumps(number))
    release.with_values(nested("webhook.autoscaling.enabled", True)).upgrade(*WAIT)

    assert checks.lasting(checks.not_running, release) == []
    assert checks.gaps(history, wanted) == []
