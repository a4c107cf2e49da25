"""A real browser on the sandbox's page, with or without the bridge."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
from playwright.async_api import (
    Browser,
    ConsoleMessage,
    Page,
    ViewportSize,
    async_playwright,
    expect,
)
from starlette.applications import Starlette

from bridge.sandbox.api import create_app
from bridge.sandbox.demo.environment import DemoEnvironment, open_environment
from bridge.sandbox.processes import free_ports
from bridge.sandbox.records import AcceptedMessage
from bridge.sandbox.server import serve
from bridge.sandbox.store import SandboxStore

# Limit for every wait, long because the machine may be busy.
SECONDS = 30.0
expect.set_options(timeout=SECONDS * 1000)
WIDE: ViewportSize = {"width": 1440, "height": 900}
NARROW: ViewportSize = {"width": 390, "height": 844}
# Chromium's messages about an answer above 399 or a missing answer, which tests cause.
OF_THE_NETWORK = "Failed to load resource"


def find_chromium() -> str:
    """Find the system's Chromium, because Playwright's own is not installed."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "Chromium is not installed; `make browser` does that"
    return found


def launch_arguments() -> list[str]:
    """Return Chromium's arguments. As root, it needs --no-sandbox."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Start a headless browser."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=find_chromium(), args=launch_arguments()
        )
        yield browser
        await browser.close()


Tab = Callable[..., Awaitable[Page]]


@pytest.fixture
async def tab(browser: Browser) -> AsyncIterator[Tab]:
    """Open tabs, and fail if one of them has logged an error."""
    complaints: list[str] = []
    async with AsyncExitStack() as stack:

        def note(said: ConsoleMessage) -> None:
            if said.type in {"error", "warning"} and OF_THE_NETWORK not in said.text:
                complaints.append(said.text)

        async def open_tab(
            url: str, *, viewport: ViewportSize = WIDE, may_complain: bool = False
        ) -> Page:
            context = await browser.new_context(
                color_scheme="light",
                viewport=viewport,
                permissions=["clipboard-read", "clipboard-write"],
            )
            stack.push_async_callback(context.close)
            context.set_default_timeout(SECONDS * 1000)
            page = await context.new_page()
            if not may_complain:
                page.on("pageerror", lambda error: complaints.append(str(error)))
                page.on("console", note)
            await page.goto(url)
            await page.locator("#live[data-state=live]").wait_for()
            return page

        yield open_tab

    assert complaints == []


@dataclass
class Alone:
    """A sandbox in this process, without the bridge."""

    url: str
    store: SandboxStore

    def take(self, to: str, text: str, *, sender: str = "Acme", key: str | None = None) -> None:
        """Make the service accept a message."""
        number = self.store.feed.last + 1
        moment = 1_800_000_000 + number
        self.store.add_message(
            AcceptedMessage(f"id-{number}", to, sender, text, key or f"k-{number}", moment)
        )


@asynccontextmanager
async def serving(app: Starlette, port: int = 0) -> AsyncIterator[str]:
    """Serve a sandbox, and yield its URL."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(app, port=port, announce=url.set_result))
    try:
        yield await asyncio.wait_for(url, SECONDS)
    finally:
        server.cancel()
        with suppress(asyncio.CancelledError):
            await server


@pytest.fixture
async def alone() -> AsyncIterator[Alone]:
    """Serve a sandbox that the test fills with records."""
    app = create_app()
    async with serving(app) as url:
        yield Alone(url, app.state.store)


@pytest.fixture
def port() -> int:
    """Find a port for a sandbox that is restarted."""
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def stage() -> Iterator[DemoEnvironment]:
    """Start a broker, the sandbox and both roles, as `sms-bridge demo` does."""
    with open_environment() as stage:
        stage.start()
        yield stage
