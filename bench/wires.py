"""What a message costs on the bridge's own wire, and through aiormq's documented methods.

    python -m bench.wires

Publishes messages with their confirms to a classic queue of a private broker, then takes and acks
them, and reads the properties of one. Prints the microseconds of CPU time for each message, as
JSON; the least of some runs.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import uvloop
from pamqp.header import ContentHeader
from pydantic import SecretStr

from bridge.amqp.channels import open_channel
from bridge.amqp.client import Connection, DeliveredMessage
from bridge.amqp.connecting import close_quietly, open_connection
from bridge.amqp.frames import CONTENT_HEADER_START, Body, content_header
from bridge.amqp.properties import ClientProperties, Properties, as_facts, read_properties
from bridge.config import RabbitMQSettings
from bridge.sandbox.broker import private_broker

MESSAGES: Final = 5_000
RUNS: Final = 5
# As many as a worker has in flight that is set to.
PREFETCH: Final = 200
QUEUE: Final = "wires"
DEADLINE_SECONDS: Final = 60.0
BODY: Final = b'{"to": "+12025550101", "from": "Acme", "text": "Your code is 4711"}'
PROPERTIES: Final = Properties(
    content_type="application/json",
    delivery_mode=2,
    message_id="0f9f3c1e",
    headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Connection]:
    settings = RabbitMQSettings.model_validate({"url": url})
    connection = await open_connection(settings, SecretStr(url), name="bench")
    try:
        yield connection
    finally:
        await close_quietly(connection)


async def _publish(connection: Connection) -> None:
    channel = await open_channel(connection, confirms=True)
    await channel.queue_declare(QUEUE)
    with connection.wire.publishing(channel) as publishing:
        for begin in range(0, MESSAGES, PREFETCH):
            confirms = []
            for number in range(begin, min(begin + PREFETCH, MESSAGES)):
                properties = Properties(
                    content_type=PROPERTIES.content_type,
                    delivery_mode=PROPERTIES.delivery_mode,
                    message_id=str(number),
                    headers=PROPERTIES.headers,
                )
                confirms.append(
                    publishing.publish(BODY, exchange="", routing_key=QUEUE, properties=properties)
                )
            if set(await asyncio.gather(*confirms)) != {"confirmed"}:
                raise ValueError("a message was not confirmed")
    await channel.close()


async def _take(connection: Connection) -> None:
    channel = await open_channel(connection)
    left, done = MESSAGES, asyncio.Event()

    def take(tag: int, _redelivered: bool, _properties: Properties, _body: Body) -> None:  # noqa: FBT001
        nonlocal left
        left -= 1
        connection.wire.ack(channel, tag)
        if not left:
            done.set()

    with connection.wire.deliveries(channel, take) as callback:
        await channel.basic_qos(prefetch_count=PREFETCH)
        await channel.basic_consume(QUEUE, callback)
        await done.wait()
        await connection.wire.acks_read(channel)
    await channel.close()


async def _publish_plain(connection: Connection) -> None:
    channel = await open_channel(connection, confirms=True)
    await channel.queue_declare(QUEUE)
    for begin in range(0, MESSAGES, PREFETCH):
        publishes = [
            channel.basic_publish(
                BODY,
                routing_key=QUEUE,
                mandatory=True,
                properties=ClientProperties(
                    content_type=PROPERTIES.content_type,
                    delivery_mode=PROPERTIES.delivery_mode,
                    message_id=str(number),
                    headers=PROPERTIES.headers,
                ),
            )
            for number in range(begin, min(begin + PREFETCH, MESSAGES))
        ]
        await asyncio.gather(*publishes)
    await channel.close()


async def _take_plain(connection: Connection) -> None:
    channel = await open_channel(connection)
    left, done = MESSAGES, asyncio.Event()

    async def take(message: DeliveredMessage) -> None:
        nonlocal left
        left -= 1
        await channel.basic_ack(message.delivery_tag or 0, wait=False)
        if not left:
            done.set()

    await channel.basic_qos(prefetch_count=PREFETCH)
    await channel.basic_consume(QUEUE, take)
    await done.wait()
    await channel.basic_qos(prefetch_count=1)  # The broker answers it after it has read the acks.
    await channel.close()


WIRES: Final = {"ours": (_publish, _take), "aiormq": (_publish_plain, _take_plain)}


async def _microseconds(work: Callable[[Connection], Awaitable[None]], url: str) -> float:
    async with asyncio.timeout(DEADLINE_SECONDS), _connected(url) as connection:
        begun = time.process_time()
        await work(connection)
        return (time.process_time() - begun) / MESSAGES * 1e6


async def _measure_wires(url: str) -> dict[str, dict[str, float]]:
    """Measure both in turn."""
    runs: dict[str, dict[str, list[float]]] = {name: {"publish": [], "take": []} for name in WIRES}
    for _ in range(RUNS):
        for name, (publish, take) in WIRES.items():
            runs[name]["publish"].append(await _microseconds(publish, url))
            runs[name]["take"].append(await _microseconds(take, url))
    return {name: {what: min(t) for what, t in times.items()} for name, times in runs.items()}


def _measure_properties() -> dict[str, float]:
    """Measure reading those of one message, with ours and with pamqp's reader."""
    header = content_header(len(BODY), PROPERTIES, max_payload_bytes=4096)
    payload = header[CONTENT_HEADER_START.size :]

    def theirs() -> Any:
        ours = ContentHeader()
        ours.unmarshal(header)
        return ours.properties

    if dict(theirs()) != as_facts(read_properties(payload)):
        raise ValueError("they do not read the same")
    least = {}
    for name, read in (("ours", lambda: read_properties(payload)), ("aiormq", theirs)):
        seconds = []
        for _ in range(RUNS):
            begun = time.process_time()
            for _ in range(MESSAGES):
                read()
            seconds.append(time.process_time() - begun)
        least[name] = min(seconds) / MESSAGES * 1e6
    return least


def main() -> None:
    """Measure, and print."""
    with private_broker() as broker, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(_measure_wires(broker.url))
    for name, microseconds in _measure_properties().items():
        results[name]["read properties"] = microseconds
    rounded = {n: {what: round(t, 1) for what, t in r.items()} for n, r in results.items()}
    json.dump(rounded, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
