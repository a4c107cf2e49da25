"""The roles on the wire through aiormq: the core of what the files beside show of the other wire.

`make test-plain-wire` runs all of these files on it.
"""

from pathlib import Path

import pytest

from tests.integration.conftest import Canaries, Launcher, Service, unique
from tests.integration.test_lifecycle import (
    ANOTHER_STREAM,
    WEBHOOK,
    _worker_settings,
    stage,
    test_a_drain_finishes_what_is_posted_and_gives_back_what_waits,
    test_a_role_outlives_its_broker,
)
from tests.integration.test_worker import (
    line,
    shared_line,
    test_a_broken_property_stops_nothing,
    test_a_direct_reply,
    test_a_missing_reply_queue_does_no_harm,
    test_a_passing_fault_is_survived,
    test_nothing_is_acked_before_its_copy_is_stored,
)

# Fixtures and tests that are collected here once more.
__all__ = [
    "line",
    "shared_line",
    "stage",
    "test_a_broken_property_stops_nothing",
    "test_a_direct_reply",
    "test_a_drain_finishes_what_is_posted_and_gives_back_what_waits",
    "test_a_missing_reply_queue_does_no_harm",
    "test_a_passing_fault_is_survived",
    "test_a_role_outlives_its_broker",
    "test_nothing_is_acked_before_its_copy_is_stored",
]


@pytest.fixture(scope="module")
def wire() -> str:
    """Run the processes of this file on the wire through aiormq."""
    return "plain"


@pytest.mark.parametrize("role", ["worker", "webhook"])
async def test_a_client_library_that_passes_the_other_wire_by_does_no_harm(
    launcher: Launcher,
    session_service: Service,
    canaries: Canaries,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ANOTHER_STREAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = _worker_settings(session_service, canaries, unique("plain"))
    ours = await launcher.role(role, settings={**settings, **WEBHOOK}, is_forked=False)
    await ours.until_metric("sms_bridge_amqp_connection_up", 1)

    assert {line["wire"] for line in ours.logged("broker_connected")} == {"plain"}
