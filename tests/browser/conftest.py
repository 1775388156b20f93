"""The browser that all pages of a run are opened in, and a page of the console that a file of tests has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import chromium, opened
from tests.support.console import RunningConsole


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, console: RunningConsole) -> Iterator[Page]:
    with opened(browser, console.url) as one:
        yield one
