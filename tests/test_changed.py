"""Which tests `make test-changed` takes to be concerned."""

from pathlib import Path

import pytest

from tests.changed import AS_PROCESSES, concerned_by

ROOT = Path(__file__).parent.parent

TEXTS = {
    "tests/conftest.py": "from tests.ears import listening",
    "tests/ears.py": "from bridge.logs import outputs",
    "tests/test_logs.py": "from bridge import logs",
    "tests/test_docs.py": 'open("README.md")',
    "tests/chart/test_values.py": "",
    "tests/faults/conftest.py": "from tests.faults.bench import Bench",
    "tests/faults/bench.py": "from bridge.outbound.worker import Worker",
    "tests/faults/test_drain.py": "",
    "tests/integration/test_worker.py": "",
    "tests/outbound/pausing/test_pace.py": "from tests.ears import Ears",
    "tests/outbound/test_fates.py": "",
    "tests/providers/test_pages.py": "",
    "tests/services/comparison.py": "from bridge.config.presets import Preset",
    "tests/services/test_twilio.py": "from tests.services.comparison import Service",
}
CASES = {
    "a test": ("tests/outbound/pausing/test_pace.py", {"tests/outbound/pausing/test_pace.py"}),
    "a test that is gone": ("tests/outbound/test_gone.py", set()),
    "a module of a wing": (
        "bridge/outbound/pausing/pace.py",
        {"tests/outbound", "tests/integration/test_worker.py"},
    ),
    "a module that a folder's conftest imports through another": (
        "bridge/outbound/worker.py",
        {"tests/outbound", "tests/integration/test_worker.py", "tests/faults"},
    ),
    "what a module reads": (
        "bridge/config/presets/twilio.yaml",
        {"tests/services/test_twilio.py"},
    ),
    "a module of the ground floor": (
        "bridge/logs.py",
        {"tests/test_logs.py", "tests/outbound/pausing/test_pace.py"},
    ),
    "a file of the chart": ("helm/sms-bridge/templates/services.yaml", {"tests/chart"}),
    "what a test reads": ("tests/chart/golden/full.yaml", {"tests/chart"}),
    "what a test names": ("README.md", {"tests/test_docs.py"}),
    "an example": ("examples/go/publish/main.go", {"tests/integration/test_examples.py"}),
    "a page": ("docs/faults.md", {"tests/test_docs.py", "tests/test_site.py"}),
    "a page with tests of its own": (
        "docs/providers/twilio.md",
        {"tests/test_docs.py", "tests/test_site.py", "tests/providers"},
    ),
    "what no test names": ("docs/img/worker.png", set()),
    "the fixtures of all": ("tests/conftest.py", {"tests"}),
    "the dependencies": ("uv.lock", {"tests"}),
}


@pytest.mark.parametrize(("changed", "concerned"), CASES.values(), ids=CASES)
def test_what_a_change_concerns(changed: str, concerned: set[str]) -> None:
    """The tests that mirror a file, run it or import it are concerned, and no others."""
    assert concerned_by([changed], TEXTS) == concerned


def test_changes_add_up() -> None:
    """Several changes concern what each of them does, and what all concern is named once."""
    changed = ["README.md", "tests/outbound/pausing/test_pace.py", "bridge/outbound/fates.py"]

    assert concerned_by(changed, TEXTS) == {
        "tests/outbound",
        "tests/integration/test_worker.py",
        "tests/test_docs.py",
    }


def test_wings_that_run_as_processes_are_there() -> None:
    """Each wing of the table, and each test that runs it, exists."""
    named = [*AS_PROCESSES, *(path for paths in AS_PROCESSES.values() for path in paths)]

    assert [path for path in named if not (ROOT / path).exists()] == []
