"""What workers say to each other as bytes: what is read again, what is ignored, what is refused."""

import json

import pytest

from bridge.worker.cluster.messages import (
    MAX_BYTES,
    Beat,
    Hello,
    new_worker_id,
    read_message,
    write_message,
)

WORKER = "0123456789abcdef"


def written(**changed: object) -> bytes:
    """Write the message of a worker by hand."""
    message = {"v": 1, "worker_id": WORKER, "kind": "hello", "facts": {}}
    return json.dumps(message | changed).encode()


def test_what_is_written_is_read() -> None:
    """Kind, facts and who says it come through."""
    worker_id = new_worker_id()
    message = read_message(write_message(worker_id, Beat(beside={"paused": {"seconds": 1.5}})))

    assert message is not None
    assert (message.worker_id, message.kind) == (worker_id, "beat")
    assert Beat.model_validate(message.facts).beside == {"paused": {"seconds": 1.5}}


def test_ids_differ() -> None:
    """No two processes have the same id, and it holds nothing but random digits."""
    assert len({new_worker_id() for _ in range(100)}) == 100


def test_a_newer_worker_may_say_more() -> None:
    """Members and facts that are unknown here are left out."""
    message = read_message(written(facts={"new": 1}, also="new"))

    assert message is not None
    assert Hello.model_validate(message.facts) == Hello()


def test_another_version_of_the_protocol_is_ignored() -> None:
    """It is no fault, and not read."""
    assert read_message(written(v=2)) is None


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff", id="no text"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b"{}", id="no members"),
        pytest.param(b"[" * 5000, id="deep"),
        pytest.param(written(v="new"), id="version"),
        pytest.param(written(worker_id=WORKER[1:]), id="short id"),
        pytest.param(written(worker_id=WORKER + "\n"), id="long id"),
        pytest.param(written(worker_id="host.example.com"), id="no id"),
        pytest.param(written(kind=None), id="no kind"),
        pytest.param(written(kind="k" * 65), id="long kind"),
        pytest.param(written(facts=[]), id="no facts"),
        pytest.param(written(facts={"long": "x" * MAX_BYTES}), id="large"),
    ],
)
def test_what_no_worker_says_is_refused(body: bytes) -> None:
    """It raises ValueError, whatever it is."""
    with pytest.raises(ValueError, match=r"validation error|too large"):
        read_message(body)
