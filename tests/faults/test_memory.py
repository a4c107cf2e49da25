"""The memory of a worker process whose queue is full of large bodies.

Takes seconds: the bodies are those that hurt, and pass the broker four times.
"""

import hashlib
import re
from pathlib import Path

import yaml

from tests.faults.bench import Bench, eventually, make_numbers

MIB = 1024 * 1024
VALUES = Path(__file__).parents[2] / "helm" / "sms-bridge" / "values.yaml"
BODIES = 24
BODY_BYTES = 15 * MIB


def peak_memory_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def read_limit_bytes() -> int:
    values = yaml.safe_load(VALUES.read_text(encoding="utf-8"))
    limit: str = values["worker"]["resources"]["limits"]["memory"]
    return int(limit.removesuffix("Mi")) * MIB


async def test_large_bodies_stay_below_the_limit_of_the_chart(bench: Bench, tmp_path: Path) -> None:
    await bench.declare_main()
    for number in range(BODIES):
        await bench.amqp.publish(bench.queue, b"%02d" % number * (BODY_BYTES // 2))
    numbers = make_numbers(3)
    await bench.publish(numbers)
    # Past the proxy, which reads ahead of the worker.
    past_proxy = [bench.broker.url]
    log = tmp_path / "worker.log"
    with bench.worker_process(
        log, is_forked=False, worker__concurrency=50, rabbitmq__url=past_proxy
    ) as worker:

        async def all_are_dead() -> bool:
            assert worker.exit_code is None, worker.tail()
            return await bench.amqp.count_if_there(bench.dead_queue) == BODIES

        await eventually(all_are_dead, what="dead letters", seconds=60)
        await bench.until_taken(numbers)
        peak = peak_memory_bytes(worker.pid)
        worker.end(grace_seconds=20)

    letters = await bench.dead_letters()
    expected = {hashlib.sha256(b"%02d" % n * (BODY_BYTES // 2)).digest() for n in range(BODIES)}
    assert {hashlib.sha256(letter.body).digest() for letter in letters} == expected
    assert {letter.headers["sms-bridge-reason"] for letter in letters} == {"invalid"}
    print(f"{BODIES} bodies of {BODY_BYTES // MIB} MiB: {peak / MIB:.0f} MiB at most")  # noqa: T201
    assert peak < read_limit_bytes()
    assert '"event":"broker_lost"' not in log.read_text()


async def test_the_prefetch_follows_the_size_of_bodies(bench: Bench) -> None:
    """While bodies are large few are taken at once, so that other workers have the rest.

    The log tells the larger prefetch of the two queues, which is the urgent one's at first.
    """
    async with bench.worker() as live:

        def prefetches() -> list[int]:
            return [line["prefetch"] for line in live.logged("consuming")]

        for _ in range(3):
            await bench.amqp.publish(bench.queue, bytes(5 * MIB))
        await eventually(lambda: prefetches() == [22, 2], what="a smaller prefetch")
        await bench.until_settled(live)
        numbers = await bench.publish(200)
        await bench.until_taken(numbers)
        await eventually(lambda: prefetches()[-1] == 22, what="the usual prefetch")

    assert len(await bench.dead_letters()) == 3
    assert bench.extra_posts(numbers) == {}
