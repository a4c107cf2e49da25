"""The sandbox's page with a whole bridge behind it: RabbitMQ, the worker, the webhook receiver."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel
from playwright.async_api import Page, expect

from bridge.amqp.connecting import close_quietly
from bridge.sandbox.demo.environment import DemoEnvironment
from tests.browser.conftest import SECONDS, Tab

pytestmark = pytest.mark.slow

NUMBER = "+491713920001"
TRIES = 5


@pytest.fixture
async def channel(stage: DemoEnvironment) -> AsyncIterator[AbstractChannel]:
    """Connect to the broker, with confirms, and have the service behave and forget."""
    async with httpx.AsyncClient(base_url=stage.sandbox_url, trust_env=False) as client:
        for what in ("messages", "requests", "faults"):
            (await client.delete(f"/sandbox/{what}")).raise_for_status()
    connection = await stage.connect("browser test")
    try:
        yield await connection.channel()
    finally:
        await close_quietly(connection)


async def publish(stage: DemoEnvironment, channel: AbstractChannel, text: str) -> None:
    """Publish a send request as a team does, and wait for the confirm."""
    body = json.dumps({"to": NUMBER, "from": "Acme", "text": text}).encode()
    message = Message(body, message_id=text, delivery_mode=DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, stage.settings.worker.queue)


async def open_phone(page: Page) -> None:
    """Open the conversation of the number, whether it has messages or not."""
    await page.get_by_role("searchbox").fill(NUMBER)
    known, new = page.locator(".row"), page.get_by_role("button", name="Write from")
    await known.or_(new).first.click()
    await page.get_by_role("searchbox").fill("")
    await expect(page.get_by_role("heading", name=NUMBER)).to_be_visible()


async def test_a_published_message_appears_within_a_second(
    stage: DemoEnvironment, channel: AbstractChannel, tab: Tab
) -> None:
    """What is published stands on the page soon, with sender, segments and encoding."""
    page = await tab(stage.sandbox_url)
    await open_phone(page)
    took = []
    for number in range(TRIES):
        begun = time.monotonic()
        await publish(stage, channel, f"Code {number} €")
        await page.locator(".bubble", has_text=f"Code {number}").wait_for()
        took.append(time.monotonic() - begun)

    article = page.get_by_role("article").last
    await expect(article).to_contain_text("Acme")
    await expect(article).to_contain_text("1 segment · GSM-7")
    assert min(took) < 1


async def test_a_reply_is_published_by_the_bridge(
    stage: DemoEnvironment, channel: AbstractChannel, tab: Tab
) -> None:
    """A text from the phone is an event on the queue, and the page says what the bridge said."""
    queue = await channel.get_queue(str(stage.settings.webhook.queue))
    await queue.purge()
    page = await tab(stage.sandbox_url)
    await open_phone(page)
    await page.get_by_role("textbox", name="Reply").fill("YES please")
    await page.get_by_role("button", name="Send", exact=True).click()
    await expect(page.get_by_role("article").last).to_contain_text("the bridge answered 200")
    event = await queue.get(timeout=SECONDS, no_ack=True)

    assert event is not None
    data = json.loads(event.body)["data"]
    assert (data["from"], data["text"]) == (NUMBER, "YES please")


async def test_a_forged_reply_is_refused(
    stage: DemoEnvironment, channel: AbstractChannel, tab: Tab
) -> None:
    """Forged on order, it is answered 401, published nowhere, and told as what it should be."""
    queue = await channel.get_queue(str(stage.settings.webhook.queue))
    await queue.purge()
    page = await tab(stage.sandbox_url)
    await open_phone(page)
    await page.get_by_label("How the webhook is sent").select_option("forged signature")
    await page.get_by_role("textbox", name="Reply").fill("I am the bank")
    await page.keyboard.press("Enter")
    answer = page.get_by_role("article").last.locator(".tag.good")
    await expect(answer).to_have_text("the bridge answered 401")

    assert await queue.get(fail=False) is None


async def test_a_fault_is_seen_and_so_is_the_retry(
    stage: DemoEnvironment, channel: AbstractChannel, tab: Tab
) -> None:
    """A fault of the panel is done to the next request; the bridge's second try brings it in."""
    page = await tab(stage.sandbox_url)
    await open_phone(page)
    await page.get_by_role("tab", name="Faults").click()
    await page.get_by_label("What goes wrong").select_option("503, with Retry-After")
    await page.get_by_role("button", name="Add this fault").click()
    await expect(page.locator("#fault-list")).to_contain_text("answers 503, Retry-After: 2")
    await publish(stage, channel, "Second try")
    await expect(page.locator("#log")).to_contain_text("a request was answered 503")
    await expect(page.locator(".bubble")).to_have_text(["Second try"])
    await expect(page.locator("#no-faults")).to_be_visible()
    await page.get_by_role("tab", name="Requests").click()
    await expect(page.locator("#request-list .tag")).to_have_text(["202", "503"])


async def test_a_request_is_shown_whole_but_for_its_key(
    stage: DemoEnvironment, channel: AbstractChannel, tab: Tab
) -> None:
    """Headers and body are those that the worker sent; curl of it holds no key, and works."""
    page = await tab(stage.sandbox_url)
    await publish(stage, channel, "It's 'quoted'; $(id)")
    await (
        page.locator("#request-list button", has_text="202")
        .or_(page.locator("#request-list button", has_text=NUMBER))
        .first.click()
    )
    detail = page.locator("#request-detail")
    await expect(detail).to_contain_text("POST /v1/messages")
    await expect(detail).to_contain_text("Bearer ***")
    await expect(detail).to_contain_text("It's 'quoted'")
    await page.get_by_role("button", name="Copy as curl").click()
    await expect(page.get_by_role("button", name="Copied")).to_be_visible()
    command = await page.evaluate("navigator.clipboard.readText()")
    key = stage.api_key
    shell = await asyncio.create_subprocess_shell(
        command.replace("Bearer ***", f"Bearer {key}").replace("curl ", "curl -s --max-time 10 "),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await shell.communicate()

    assert key not in await page.content()
    assert json.loads(output)["id"]
    await expect(page.locator("#totals")).to_have_text("2 messages")
