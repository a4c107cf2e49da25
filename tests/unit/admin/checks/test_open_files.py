"""Whether this process may open as many files as the roles need connections."""

import pytest

from bridge.admin.checks.findings import SetUp
from bridge.admin.checks.local import check_open_files
from bridge.config import Settings


@pytest.mark.parametrize(("limit", "result"), [(163, "warn"), (164, "ok")])
async def test_open_files_are_counted_by_the_connections(
    monkeypatch: pytest.MonkeyPatch, limit: int, result: str
) -> None:
    """The webhook needs a file for each connection that its port takes, and a few more."""
    settings = Settings.model_validate({"webhook": {"max_connections": 100, "max_in_flight": 10}})
    monkeypatch.setattr("resource.getrlimit", lambda _what: (limit, limit))
    (finding,) = await check_open_files(SetUp(settings=settings, roles=["webhook"]))

    assert (finding.result, finding.text) == (result, f"{limit} may be open, about 164 are needed")
