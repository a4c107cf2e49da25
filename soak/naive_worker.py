"""The usual ways, as a program: a few lines with the libraries alone, as one writes them at first.

python soak/naive_worker.py STYLE AMQP_URL API_URL QUEUE
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final

import aio_pika
import httpx
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

PREFETCH: Final = 20
UNAVAILABLE: Final = 503

Handle = Callable[[AbstractIncomingMessage], Awaitable[None]]
Post = Callable[[AbstractIncomingMessage], Awaitable[int]]


def handlers(post: Post, channel: AbstractChannel, queue: str) -> dict[str, Handle]:
    """Return each style's way to handle a message."""

    async def process(message: AbstractIncomingMessage) -> None:
        async with message.process():
            if await post(message) == UNAVAILABLE:
                raise RuntimeError

    async def callback(message: AbstractIncomingMessage) -> None:
        await post(message)
        await message.ack()

    async def requeue(message: AbstractIncomingMessage) -> None:
        if await post(message) == UNAVAILABLE:
            await message.nack(requeue=True)
        else:
            await message.ack()

    async def copy(message: AbstractIncomingMessage) -> None:
        if await post(message) == UNAVAILABLE:
            again = aio_pika.Message(message.body, delivery_mode=2)
            await channel.default_exchange.publish(again, f"{queue}.retry")
        await message.ack()

    return {"process": process, "callback": callback, "requeue": requeue, "copy": copy}


async def main(style: str, amqp_url: str, api_url: str, queue_name: str) -> None:
    """Consume until SIGTERM, then cancel what is being done."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    connection = await aio_pika.connect_robust(amqp_url, reconnect_interval=0.2, timeout=5)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=PREFETCH)
    arguments = {"x-queue-type": "quorum"}
    queue = await channel.declare_queue(queue_name, durable=True, arguments=arguments)
    tasks: set[asyncio.Task[object]] = set()
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:

        async def post(message: AbstractIncomingMessage) -> int:
            url, headers = f"{api_url}/v1/messages", {"Authorization": "Bearer an-api-key"}
            return (await client.post(url, content=message.body, headers=headers)).status_code

        handle = handlers(post, channel, queue_name)[style]

        async def on_message(message: AbstractIncomingMessage) -> None:
            task = asyncio.current_task()
            if task is not None:
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await handle(message)

        await queue.consume(on_message)
        sys.stdout.write('{"event":"consuming"}\n')
        sys.stdout.flush()
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await connection.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
