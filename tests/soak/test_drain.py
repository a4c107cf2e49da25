"""A worker that is stopped just after it lost its connection, with a real broker."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bridge.sandbox.broker import private_broker
from bridge.sandbox.processes import guarded, wait_until
from tests.soak.bench import Bench
from tests.soak.publisher import Publisher, Request, plan_requests

MESSAGES = 1500
ROUNDS = 2
RATE = 100


def test_a_stop_after_a_lost_connection_sends_nothing_again(tmp_path: Path) -> None:
    """What was sent but could not be acked is acked before the worker ends; nobody sends it."""
    requests = plan_requests(MESSAGES, seed=0)
    with private_broker(management=True) as broker, guarded() as guard:
        bench = Bench(broker, tmp_path, guard)
        try:
            accepted = _send_and_disturb(bench, broker.url, requests)
        finally:
            bench.close()

    assert max(accepted.values()) == 1


def _send_and_disturb(bench: Bench, url: str, requests: Sequence[Request]) -> Counter[str]:
    """Close the consuming connection and stop the worker at once, while requests are in flight."""
    bench.start()
    publisher = Publisher(url, "sms.outbound", requests)
    publisher.floor = RATE
    publisher.start()
    for done in range(1, ROUNDS + 1):
        assert wait_until(lambda d=done: len(publisher.confirmed) > 200 * d, seconds=30)  # type: ignore[misc]
        bench.close_connection(_consuming_connection(bench))
        bench.end_worker()
        bench.start_worker()
    assert wait_until(lambda: publisher.is_done and not bench.count_waiting(), seconds=60)
    publisher.stop()
    return Counter(str(post.message_id) for post in bench.read_posts(requests) if post.accepted)


def _consuming_connection(bench: Bench) -> str:
    found: list[str] = []

    def look() -> bool:
        found.extend(name for name, owner in bench.connections().items() if "consume" in owner)
        return bool(found)

    assert wait_until(look, seconds=15)
    return found[0]
