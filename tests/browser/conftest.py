"""A real Chromium without a network. Where there is none tests are skipped; in continuous integration they fail."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
HERE = ("file:", "data:", "blob:", "about:")  # addresses that need no network

OpenPage = Callable[..., Page]


# Of a module, not of the session: Playwright keeps an event loop running, in which no other test could start its own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser of this machine."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        missing = f"needs a browser: one of {', '.join(PROGRAMS)}; `make browser` installs one"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[OpenPage]:
    """`page(width, colour_scheme)`: an empty page without a network; the test fails if it reports errors."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.append(f"console: {message.text}")

    def open_page(width: int = 1280, colour_scheme: Literal["light", "dark"] = "light") -> Page:
        viewport = {"width": width, "height": 844}
        context = browser.new_context(viewport=viewport, color_scheme=colour_scheme, offline=True)
        contexts.append(context)
        context.on("console", hear)
        context.on("weberror", lambda error: complaints.append(f"uncaught: {error.error}"))
        context.on("request", lambda sent: sent.url.startswith(HERE) or complaints.append(f"asked for {sent.url}"))
        return context.new_page()

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints, "\n".join(complaints)
