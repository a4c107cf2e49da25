"""Takes pictures of the sandbox's page: `make pictures` writes docs/img/sandbox*.png.

The messages and replies pass through RabbitMQ, the worker and the webhook receiver. Numbers and
texts are invented.
"""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from PIL import Image
from playwright.async_api import Page, ViewportSize, async_playwright, expect

from bridge.amqp.client import DeliveryMode, Message
from bridge.amqp.connecting import close_quietly
from bridge.sandbox.demo.environment import DemoEnvironment, open_environment
from tests.browser.conftest import NARROW, SECONDS, find_chromium, launch_arguments

IMAGES = Path(__file__).parent / "img"
WIDE: ViewportSize = {"width": 1360, "height": 800}
COLOURS = 128
NUMBER = "+491713920001"
CODES = range(204_113, 999_999, 99_537)
PARCEL = "Your parcel comes today between 2 and 4 pm. Not at home? Reply NO."
FAULT = {"to": NUMBER, "status": 503, "count": 1, "headers": {"Retry-After": "1"}}


async def main(stage: DemoEnvironment) -> None:
    """Send texts and replies, and take both pictures."""
    async with httpx.AsyncClient(
        base_url=stage.sandbox_url, trust_env=False, timeout=2 * SECONDS
    ) as client:
        connection = await stage.connect("pictures")
        try:
            channel = await connection.channel()

            async def send(to: str, text: str, sender: str = "Acme") -> None:
                known = (await client.get("/sandbox/messages", params={"to": to})).json()[
                    "messages"
                ]
                after = {"after": known[-1]["id"]} if known else {}
                body = json.dumps({"to": to, "from": sender, "text": text}).encode()
                message = Message(body, delivery_mode=DeliveryMode.PERSISTENT)
                await channel.default_exchange.publish(message, stage.settings.worker.queue)
                asked = {"to": to, "wait_seconds": SECONDS, **after}
                (await client.get("/sandbox/messages", params=asked)).raise_for_status()

            await play(client, send)
        finally:
            await close_quietly(connection)
    await take(stage.sandbox_url)


async def play(client: httpx.AsyncClient, send: Callable[..., Awaitable[None]]) -> None:
    """Send texts and replies."""
    for number, code in enumerate(CODES):
        await send(f"+120255501{number:02}", f"Your code is {code}. It is valid for 10 minutes.")
    await send(NUMBER, "Your code is 493027. Never tell it to anybody.")
    await client.put("/sandbox/faults", json=[FAULT])
    await send(NUMBER, PARCEL, "Acme Post")
    await client.post("/sandbox/replies", json={"from": NUMBER, "text": "NO"})
    await send(NUMBER, "Dziękujemy! Paczka będzie u sąsiada, pod numerem 12.", "Acme Post")
    forged = {"from": NUMBER, "text": "This is your bank", "forged": True}
    await client.post("/sandbox/replies", json=forged)


async def take(url: str) -> None:
    """Take a picture of a wide page and one of a narrow page."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=find_chromium(), args=launch_arguments()
        )
        for name, viewport in (("sandbox", WIDE), ("sandbox-narrow", NARROW)):
            page = await browser.new_page(viewport=viewport, color_scheme="light")
            await page.goto(url)
            await page.get_by_role("option", name=NUMBER).click()
            await expect(page.locator("#log")).to_contain_text("the bridge answered 401")
            await save(page, name)
        await browser.close()


async def save(page: Page, name: str) -> None:
    """Save a picture with a reduced palette."""
    picture = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    picture.quantize(COLOURS).save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    with open_environment() as the_stage:
        the_stage.start()
        asyncio.run(main(the_stage))
