"""Headers of a publisher that leave no room for ours, or that the broker itself reads."""

import struct
from typing import Any

import pamqp.encode
import pytest

from bridge.amqp.headers import HeaderTable
from tests.faults.bench import Bench, eventually, make_numbers
from tests.faults.traffic import NOT_SENT, REFUSED, TOO_EARLY, once_each


def table_of(*entries: bytes) -> bytes:
    joined = b"".join(entries)
    return struct.pack(">I", len(joined)) + joined


def header(name: str, kind: bytes, value: bytes) -> bytes:
    """Write an entry of a table."""
    return bytes([len(name)]) + name.encode() + kind + value


def text_header(name: str, length: int) -> bytes:
    """Write an entry whose value is a text of so many bytes."""
    return header(name, b"S", struct.pack(">I", length) + b"x" * length)


def nested_table() -> bytes:
    inner = table_of()
    for _ in range(1000):
        inner = table_of(header("deep", b"F", inner))
    return inner


# Of 32 bits each: 90 KB, and twice as much if they were written as 64.
FLOATS = table_of(*[b"f" + struct.pack(">f", number % 10) for number in range(18_000)])
# What a frame has beside its ends, the content header, and the flags of the properties.
FRAME_BYTES = 131_072 - 8 - 12 - 2
# The entries of a table, and the names of those that a copy has.
ODD_HEADERS: dict[str, tuple[list[bytes], set[str]]] = {
    "too_deep": ([header("deep", b"F", nested_table())], {"deep"}),
    "floats": ([header("floats", b"A", FLOATS)], {"floats"}),
    "one_too_large": (
        [text_header("small", 10), text_header("large", FRAME_BYTES - 150)],
        {"small"},
    ),
    "ours_too_large": ([text_header("sms-bridge-ordering-key", FRAME_BYTES - 150)], set()),
    # The broker itself adds what makes a copy too large for another one.
    "nearly_too_large": ([text_header("large", FRAME_BYTES - 700)], {"large"}),
}


async def publish_raw(bench: Bench, number: str, table: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pamqp.encode.METHODS, "table", lambda _headers: table)
        await bench.publish([number], headers={"any": 1})


@pytest.mark.parametrize("odd", ODD_HEADERS)
async def test_headers_that_hardly_fit(bench: Bench, odd: str) -> None:
    """A dead letter has its message's headers to the byte, but for those that no frame holds."""
    entries, kept = ODD_HEADERS[odd]
    numbers = make_numbers(1)
    bench.service.misbehave({**REFUSED, "to": numbers[0]})
    async with bench.worker() as live:
        await publish_raw(bench, numbers[0], table_of(*entries))
        await eventually(lambda: bench.service.posts(numbers), what="a POST")
        # The next one waits for nothing.
        await bench.until_taken(await bench.publish(1))
        await bench.until_settled(live)

    (letter,) = await bench.dead_letters()
    named = {entry[1 : 1 + entry[0]].decode(): entry for entry in entries}
    assert letter.headers["sms-bridge-reason"] == "refused"
    assert {name for name in named if name in letter.headers} == kept
    headers = letter.headers
    assert isinstance(headers, HeaderTable)
    assert all(named[name] in headers.written for name in kept)


@pytest.mark.parametrize("odd", ODD_HEADERS)
async def test_headers_that_hardly_fit_are_no_matter_for_retries(bench: Bench, odd: str) -> None:
    """A message with odd headers is sent after two waits on the ladder, and holds up no other."""
    entries, _ = ODD_HEADERS[odd]
    numbers = make_numbers(1)
    bench.service.misbehave(*once_each(numbers, NOT_SENT), *once_each(numbers, NOT_SENT))
    async with bench.worker() as live:
        await publish_raw(bench, numbers[0], table_of(*entries))
        await eventually(lambda: bench.service.posts(numbers), what="a POST")
        await bench.until_taken(await bench.publish(1))
        await bench.until_taken(numbers)
        await bench.until_settled(live)

        assert len(bench.service.posts(numbers)) == 3


# Headers that RabbitMQ writes itself, with values that it never writes. Some of them end, in
# 3.10.8, the process that returns messages from all retry queues, until its supervisor gives up.
OF_THE_BROKER: dict[str, Any] = {
    "history_of_texts": {"x-death": ["a text"]},
    "history_without_counts": {"x-death": [{"queue": "{retry}", "reason": "expired"}]},
    "history_counted_in_words": {
        "x-death": [{"queue": "{retry}", "reason": "expired", "count": "many"}]
    },
    "history_that_is_a_text": {"x-death": "a text", "x-invalid-headers": "a text"},
    "first_death": {"x-first-death-queue": 1, "x-first-death-reason": [1], "x-last-death-queue": 2},
    "counts": {"x-delivery-count": "many", "x-acquired-count": [1]},
    "federated": {"x-received-from": 1, "x-original-cc": 1, "x-shovelled": [1]},
}


def of_queue(value: Any, retry: str) -> Any:
    if isinstance(value, dict):
        return {name: of_queue(inner, retry) for name, inner in value.items()}
    if isinstance(value, list):
        return [of_queue(inner, retry) for inner in value]
    return value.replace("{retry}", retry) if isinstance(value, str) else value


@pytest.mark.parametrize("odd", OF_THE_BROKER)
async def test_headers_of_the_broker_stop_no_retry(bench: Bench, odd: str) -> None:
    numbers = make_numbers(2)
    headers = of_queue(OF_THE_BROKER[odd], f"{bench.queue}.retry.1s")
    bench.service.misbehave(*once_each(numbers, TOO_EARLY))
    async with bench.worker() as live:
        await bench.publish(numbers[:1], headers=headers | {"x-own": 1})
        await bench.until_taken(numbers[:1])
        await bench.publish(numbers[1:])
        await bench.until_taken(numbers)
        await bench.until_settled(live)

    assert bench.sent_twice(numbers) == {}
