"""Chromium for tests, and axe-core for what it shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Request, expect, sync_playwright

from tests.support.npm import node_modules
from tests.support.process import LIMIT_SECONDS
from tests.support.programs import tool

AXE = "axe-core@4.14.1"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the machine's Chromium; skip if it is missing."""
    path = tool("chromium")
    expect.set_options(timeout=LIMIT_SECONDS * 1000)
    with sync_playwright() as playwright:
        # Root, as in a container, cannot use Chromium's sandbox; the pages are the tests' own.
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-lcd-text"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Give a page of a context of its own, in which nothing fails and nothing else than `url` is requested.

    Args:
        browser: any.
        url: the console's, which paths are relative to.
        options: of the context.
    """
    context = browser.new_context(base_url=url, **{"timezone_id": "Europe/Berlin", **options})
    context.set_default_timeout(LIMIT_SECONDS * 1000)
    page = context.new_page()
    faults = _recorded_faults(page, url)
    try:
        yield page
        assert faults == []
    finally:
        context.close()


def _recorded_faults(page: Page, url: str) -> list[str]:
    faults: list[str] = []

    def on_dialog(dialog: Dialog) -> None:
        faults.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def on_request(request: Request) -> None:
        if not request.url.startswith(f"{url}/"):
            faults.append(f"a request: {request.url}")

    def on_message(message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text:
            faults.append(message.text)

    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", on_dialog)
    page.on("request", on_request)
    page.on("console", on_message)
    return faults


def axe_faults(page: Page, *rules: str) -> list[tuple[str, list[str]]]:
    """Return what axe-core finds wrong on a page: the rules, of all or of some, and the elements."""
    if not page.evaluate("Boolean(window.axe)"):
        # Not as a script element: the page's policy allows only its own.
        page.evaluate((node_modules(AXE) / "axe-core" / "axe.min.js").read_text(encoding="utf-8"))
    options: dict[str, object] = {"rules": {"target-size": {"enabled": True}}}
    if rules:
        options["runOnly"] = {"type": "rule", "values": rules}
    found = page.evaluate("options => axe.run(options).then(found => found.violations)", options)
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]
