"""The sandbox's page in a real browser, without a bridge: what it shows, to whom, how quickly."""

from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridge.sandbox.api import create_app
from bridge.sandbox.webhooks import Signer
from tests.browser.conftest import NARROW, Alone, Tab, serving

NUMBER = "+491713920001"
HOSTILE = """<img src=x onerror="document.title='hit'"><script>document.title='hit'</script>
'\"&lt;b&gt; {{7*7}} \u202egnorw\u202c ${alert(1)}"""


async def open_phone(page: Page, number: str = NUMBER) -> None:
    """Open a conversation with the mouse."""
    await page.get_by_role("option", name=number).click()
    await expect(page.get_by_role("heading", name=number)).to_be_visible()


async def test_an_empty_sandbox_teaches(alone: Alone, tab: Tab) -> None:
    """Without messages the page says how to configure the bridge, to publish and to wait."""
    page = await tab(alone.url)
    welcome = page.locator("#welcome")

    await expect(welcome).to_contain_text(f"base_url: {alone.url}")
    await expect(welcome).to_contain_text("sms-bridge send --to")
    await expect(welcome).to_contain_text("/sandbox/messages?to=")
    await expect(page.locator("#webhook-where")).to_contain_text("--webhook-url")


async def test_hostile_text_stays_text(alone: Alone, tab: Tab) -> None:
    """Markup, scripts and odd characters are shown as they came, wherever they are shown."""
    alone.take(NUMBER, HOSTILE, sender="<b>Acme</b>")
    page = await tab(alone.url)
    await open_phone(page)

    assert await page.locator(".bubble").text_content() == HOSTILE
    assert await page.locator(".sender").text_content() == "<b>Acme</b>"
    assert "<img src=x" in (await page.locator(".row .what").text_content() or "")
    assert await page.locator(".phones img, main img, main script, main b").count() == 0
    assert await page.title() == "sms-bridge sandbox"


async def test_the_policy_blocks_what_it_should(alone: Alone, tab: Tab) -> None:
    """The browser refuses inline styles, markup and code made of text, and other hosts."""
    page = await tab(alone.url, may_complain=True)
    blocked: list[str] = await page.evaluate(
        """async () => {
            const seen = [];
            addEventListener("securitypolicyviolation", (e) => seen.push(e.effectiveDirective));
            const attempt = async (work) => { try { await work(); } catch {} };
            await attempt(() => { document.body.innerHTML = "<b>hit</b>"; });
            await attempt(() => { document.body.setAttribute("style", "color: red"); });
            await attempt(() => fetch("http://192.0.2.1/"));
            await attempt(() => {
                const image = new Image();
                image.src = "http://192.0.2.1/x.png";
                document.body.append(image);
            });
            await attempt(() => eval("1"));
            const deadline = performance.now() + 5000;
            while (new Set(seen).size < 4 && performance.now() < deadline)
                await new Promise(requestAnimationFrame);
            return seen;
        }"""
    )

    assert {"require-trusted-types-for", "style-src-attr", "connect-src", "img-src"} <= set(blocked)


async def test_two_tabs_agree(alone: Alone, tab: Tab) -> None:
    """What one tab does and reads is so in the other, and a message is in both."""
    one, other = await tab(alone.url), await tab(alone.url)
    alone.take(NUMBER, "For both")
    alone.take("+15550100", "Unread")
    await expect(other.locator(".row .badge:visible")).to_have_count(2)
    await open_phone(one)
    await expect(other.locator(".row.unread .who")).to_have_text(["+15550100"])
    await expect(other).to_have_title("(1) sms-bridge sandbox")
    await one.get_by_role("tab", name="Faults").click()
    await one.get_by_role("button", name="Add this fault").click()
    await other.get_by_role("tab", name="Faults").click()
    await expect(other.locator("#fault-list li")).to_have_count(1)
    await other.get_by_role("button", name="End all").click()
    await expect(one.locator("#fault-list li")).to_have_count(0)
    await other.get_by_role("button", name="Clear").click()
    await expect(one.locator(".row")).to_have_count(0)
    await expect(other.locator("#welcome")).to_be_visible()


async def test_a_page_finds_back_to_a_sandbox_that_was_restarted(tab: Tab, port: int) -> None:
    """It says that nobody answers, tries again, and shows what the new one has."""
    before, after = (create_app() for _ in range(2))
    async with serving(before, port) as url:
        Alone(url, before.state.store).take(NUMBER, "Before")
        page = await tab(url)
        await open_phone(page)
    await expect(page.locator("#live")).to_have_attribute("data-state", "away")
    async with serving(after, port) as url:
        Alone(url, after.state.store).take(NUMBER, "After")
        await expect(page.locator(".bubble")).to_have_text(["After"])
        await expect(page.locator("#live")).to_have_text("Live")


async def test_a_page_that_missed_too_much_looks_anew(alone: Alone, tab: Tab) -> None:
    """After more happenings than are kept it shows the same as one that is opened then."""
    page = await tab(alone.url)
    alone.take(NUMBER, "First")
    await open_phone(page)
    # At once, so that none of it can be told before all has happened.
    for number in range(5000):
        alone.take("+15550100", f"Message {number}")
    await expect(page.locator("#totals")).to_have_text("5,001 messages")


async def test_all_can_be_done_with_the_keyboard(alone: Alone, tab: Tab) -> None:
    """Search, go through phones, open a request and order a fault: without a mouse."""
    for number in range(30):
        alone.take(f"+155501{number:02}", f"Message {number}")
    page = await tab(alone.url)
    press = page.keyboard.press
    await press("/")
    await expect(page.get_by_role("searchbox")).to_be_focused()
    await page.keyboard.type("message 17")
    await expect(page.locator(".row")).to_have_count(1)
    await press("ArrowDown")
    await expect(page.locator(".bubble")).to_have_text(["Message 17"])
    await page.get_by_role("searchbox").fill("")
    await page.get_by_role("listbox").focus()
    await press("End")
    await expect(page.locator(".bubble")).to_have_text(["Message 0"])
    await press("Home")
    await expect(page.locator(".bubble")).to_have_text(["Message 29"])
    await press("ArrowDown")
    await expect(page.locator(".bubble")).to_have_text(["Message 28"])
    await expect(page.locator(".row[aria-selected=true] .who")).to_have_text("+15550128")
    await page.get_by_role("tab", name="Requests").focus()
    await press("ArrowRight")
    await press("Tab")
    await expect(page.get_by_label("What goes wrong")).to_be_focused()
    await press("Tab")
    await page.keyboard.type("500")
    await press("Enter")
    await expect(page.locator("#fault-list li")).to_have_count(1)


async def test_the_page_fits_a_phone(alone: Alone, tab: Tab) -> None:
    """On a narrow screen the panes follow each other, and nothing stands beyond its edge."""
    alone.take(NUMBER, "W" * 300)
    page = await tab(alone.url, viewport=NARROW)
    await open_phone(page)
    await expect(page.locator(".phones")).to_be_hidden()
    await expect(page.locator(".bubble")).to_be_in_viewport()
    assert await overflow(page) == 0
    await page.get_by_role("button", name="Phones").click()
    await expect(page.get_by_role("option")).to_be_visible()
    await page.get_by_role("button", name="Faults").click()
    await expect(page.get_by_role("button", name="Add this fault")).to_be_in_viewport()
    assert await overflow(page) == 0
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("option")).to_be_visible()


async def overflow(page: Page) -> int:
    """Return by how many pixels the page is wider than its window."""
    pixels: int = await page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return pixels


async def test_axe_finds_no_violation(alone: Alone, tab: Tab) -> None:
    """Names, roles and contrasts are as WCAG wants them: empty, full, in each panel, narrow."""
    page = await tab(alone.url)
    found: dict[str, list[Any]] = {}

    async def look(view: str) -> None:
        await page.emulate_media(color_scheme="light")
        found[view] = await violations(page)
        await page.emulate_media(color_scheme="dark")
        found[f"{view}, dark"] = await violations(page, {"runOnly": ["color-contrast"]})

    await look("empty")
    alone.take(NUMBER, "Hello", key="same")
    alone.take(NUMBER, "Hello", key="same")
    alone.take("+15550100", "Unread")
    await page.request.post(
        f"{alone.url}/v1/messages", data={"to": "me"}, headers={"Authorization": "Bearer any"}
    )
    await expect(page.locator("#request-list li")).to_have_count(1)
    await open_phone(page)
    await look("full")
    await page.locator("#request-list button").click()
    await expect(page.locator("#request-detail")).to_contain_text("Bearer ***")
    await look("request")
    await page.get_by_role("tab", name="Faults").click()
    await page.get_by_role("button", name="Add this fault").click()
    await expect(page.locator("#fault-list li")).to_have_count(1)
    await look("faults")
    await page.get_by_role("tab", name="Webhooks").click()
    await look("webhooks")
    await page.set_viewport_size(NARROW)
    await look("narrow panel")
    await page.keyboard.press("Escape")
    await look("narrow")

    assert found == {view: [] for view in found}


async def violations(page: Page, options: dict[str, Any] | None = None) -> list[Any]:
    """Return axe-core's violations: the rule and the elements of each."""
    results = await Axe().run(page, options=options)
    return [
        (one["id"], [node["html"] for node in one["nodes"]])
        for one in results.response["violations"]
    ]


async def take_webhook(_request: Request) -> Response:
    """Answer a webhook as a bridge does that trusts it."""
    return Response(status_code=200)


async def test_a_service_is_played_with_its_receipts_and_errors(tab: Tab, port: int) -> None:
    """A preset's receipts are sent from a message, and its own errors are among the faults."""
    url = f"http://127.0.0.1:{port}/webhooks/twilio"
    app = create_app(preset="twilio", signer=Signer("twilio", url, None))
    bridge = Starlette(routes=[Route("/webhooks/twilio", take_webhook, methods=["POST"])])
    async with serving(bridge, port), serving(app) as sandbox_url:
        Alone(sandbox_url, app.state.store).take(NUMBER, "Hello")
        page = await tab(sandbox_url)
        await open_phone(page)
        message = page.get_by_role("article").first
        await message.hover()
        await message.get_by_role("button", name="delivered").click()
        await expect(page.get_by_role("article").last).to_contain_text("receipt “delivered”")
        await expect(page.get_by_role("article").last).to_contain_text("the bridge answered 200")
        await page.get_by_role("tab", name="Faults").click()
        stopped = "400 (21610): The recipient replied STOP."
        await page.get_by_label("What goes wrong").select_option(stopped)
        await page.get_by_role("button", name="Add this fault").click()
        await expect(page.locator("#fault-list")).to_contain_text("The recipient replied STOP.")
        answer = await page.request.post(
            f"{sandbox_url}/2010-04-01/Accounts/any/Messages.json",
            form={"To": NUMBER, "From": "+15550101", "Body": "Hi"},
            headers={"Authorization": "Basic YW55OmtleQ=="},
        )
        await expect(page.locator("#log")).to_contain_text("a request was answered 400")

    assert (answer.status, (await answer.json())["code"]) == (400, 21610)


# A list has 60 rows until it is scrolled; a row has up to ten elements.
MAX_ELEMENTS = 2500
# A new message draws one item and the row of its phone, whatever else the lists hold.
MAX_NODES_PER_MESSAGE = 100
NEWS = 5
SCROLL = """async ([id, end]) => {
    const box = document.getElementById(id);
    for (let step = 0; step < 60; step++) {
        box.scrollTop = end === "top" ? 0 : box.scrollHeight;
        await new Promise(requestAnimationFrame);
    }
}"""
COUNT_DRAWN = """() => {
    const nodesIn = (node) => 1 + [...node.childNodes].map(nodesIn).reduce((a, b) => a + b, 0);
    window.drawn = 0;
    new MutationObserver((changes) => {
        for (const { addedNodes } of changes) for (const node of addedNodes) drawn += nodesIn(node);
    }).observe(document, { childList: true, subtree: true });
}"""
COUNT_NODES = "document.evaluate('count(//node())', document).numberValue"


@pytest.mark.slow
async def test_thousands_of_messages_stay_fluent(alone: Alone, tab: Tab) -> None:
    """Lists grow as they are scrolled, and only what is new is drawn.

    Nodes are counted rather than seconds, which say more of the machine than of the page.
    """
    for number in range(2000):
        alone.take(f"+9995{number:06}", f"Message {number}")
        alone.take(NUMBER, f"Message {number} of the long one, which may take a line or two. " * 2)
    page = await tab(alone.url)
    await expect(page.locator("#totals")).to_have_text("4,000 messages")
    await open_phone(page)
    await expect(page.locator(".bubble", has_text="Message 1999 of")).to_be_in_viewport()
    elements = await page.locator("*").count()
    await page.evaluate(COUNT_DRAWN)
    for box, end in (("log", "top"), ("phone-scroller", "bottom")):
        await page.evaluate(SCROLL, [box, end])
    bubbles, rows = await page.locator(".bubble").count(), await page.locator(".row").count()
    drawn, nodes = await page.evaluate("drawn"), await page.evaluate(COUNT_NODES)
    await page.get_by_role("button", name="Newest message").click()
    await expect(page.locator(".bubble", has_text="Message 1999 of")).to_be_in_viewport()
    before = await page.evaluate("drawn")
    for number in range(NEWS):
        alone.take(NUMBER, f"News {number}")
        await page.locator(".bubble", has_text=f"News {number}").wait_for()
    drawn_by_news = await page.evaluate("drawn") - before

    assert elements < MAX_ELEMENTS
    assert min(bubbles, rows) > 500
    # A row is drawn once, however often its list grows. Its texts count twice: they are set later.
    assert drawn < 2 * nodes
    assert drawn_by_news < NEWS * MAX_NODES_PER_MESSAGE
