"""A log that nobody reads."""

import os
from pathlib import Path

from tests.faults.bench import Bench, eventually


async def test_standard_output_that_nobody_reads(bench: Bench, tmp_path: Path) -> None:
    await bench.declare_main()
    log = tmp_path / "log"
    os.mkfifo(log)
    unread = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    with bench.worker_process(log, is_forked=False) as child:
        await eventually(lambda: bench.amqp.consumers(bench.queue), what="a consumer")
        # A pipe holds 64 KiB, which are some 250 lines.
        numbers = await bench.publish(1000)
        await bench.until_taken(numbers)
        child.ask_to_end()
        await eventually(lambda: child.exit_code == 0, what="a clean end")
    os.close(unread)

    assert bench.extra_posts(numbers) == {}
