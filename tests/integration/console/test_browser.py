"""The pages in a real browser: Debian's Chromium, driven by Playwright; axe-core judges accessibility."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from bridge.config.approvals import ApprovalSettings
from bridge.lab.servicebus import ServiceBusLab
from tests.support.bus import QUEUE
from tests.support.console import STRUCTURED, FleetVm, RunningConsole, event, event_id, running_console
from tests.support.npm import node_modules
from tests.support.process import LIMIT_SECONDS

NOW = datetime.now(UTC)
CHROMIUM = shutil.which("chromium")
HOSTILE = "<img src=x onerror=alert(1)><a href=//evil.example>x</a>\"'javascript:alert(1)"
STORY = f"/event/{event_id('browser')}"
PAGES = ("/", "/?window=7d", "/fleet", "/fleet?view=table", "/history", STORY, "/nowhere")
PHONE = {"width": 390, "height": 800}
TOKEN = "the-token"  # noqa: S105 - of a test
SECRET = "a secret that proves the proxy"  # noqa: S105 - of a test

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Playwright's driver
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return a browser for all tests; each opens windows of its own."""
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console with a fleet that has everything that the pages can show."""
    with running_console(tmp_path_factory.mktemp("console")) as running:
        vms = [FleetVm(f"web-{number}", zone=str(1 + number % 2)) for number in range(8)]
        reboot = event("browser", at=NOW, vms=["web-0", "web-1", "gone"])
        started = event("freeze", at=NOW, vms=["web-2"], type="Freeze", EventStatus="Started", NotBefore="")
        past = event("past", at=NOW, vms=["web-3"], type="Redeploy", minutes=1)
        hostile = event("hostile", at=NOW, vms=[HOSTILE], type=HOSTILE, Description=HOSTILE, minutes=60)
        running.send(
            *(vm.heartbeat(NOW) for vm in vms),
            *(vm.change("scheduled", reboot, NOW) for vm in vms),
            vms[0].receipt(reboot, NOW, outcome="rejected", reason="denied"),
            vms[2].change("started", started, NOW),
            vms[3].change("completed", past, NOW, previous=past),
            vms[4].unreachable(NOW, since=NOW),
            vms[5].loss(NOW),
            vms[6].change("scheduled", hostile, NOW),
            vms[7].heartbeat(NOW, reason="Stopping"),
        )
        yield running


@contextmanager
def window(browser: Browser, console: RunningConsole, **options: Any) -> Iterator[Page]:
    """Open a window; an error on its pages fails the test."""
    context = browser.new_context(base_url=console.url, **options)
    page = context.new_page()
    page.set_default_timeout(1000 * LIMIT_SECONDS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    try:
        yield page
    finally:
        context.close()
    assert [error for error in errors if "status of 404" not in error and "status of 403" not in error] == []


@pytest.fixture(scope="module")
def axe() -> str:
    """Return the script of axe-core."""
    return (node_modules("axe-core@4.10.3") / "axe-core" / "axe.min.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_any_page(
    browser: Browser, console: RunningConsole, axe: str, scheme: str
) -> None:
    with window(browser, console, color_scheme=scheme, bypass_csp=True) as page:
        for path in PAGES:
            page.goto(path)
            page.evaluate(axe)
            found = page.evaluate("() => axe.run()")["violations"]
            shown = [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found]
            assert shown == [], f"{path} in {scheme}"


def test_on_a_phone_no_page_is_wider_than_the_screen(browser: Browser, console: RunningConsole) -> None:
    with window(browser, console, viewport=PHONE, is_mobile=True) as page:
        for path in PAGES:
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path


def test_text_from_events_runs_no_script_and_makes_no_link(browser: Browser, console: RunningConsole) -> None:
    with window(browser, console) as page:
        for path in (*PAGES, f"/event/{event_id('hostile')}"):
            page.goto(path)
            assert page.locator("img").count() == 0
            assert page.locator("a[href*=evil]").count() == 0


def test_a_change_appears_without_a_reload_and_times_count(browser: Browser, console: RunningConsole) -> None:
    with window(browser, console) as page:
        page.goto("/")
        expect(page.get_by_role("status")).to_have_text("Live.")
        page.evaluate("window.kept = true")
        change = event("live", at=datetime.now(UTC), vms=["live-0"], type="Preempt")
        console.send(FleetVm("live-0").change("scheduled", change, datetime.now(UTC)))
        expect(page.get_by_role("table").first).to_contain_text("live-0")
        assert page.evaluate("window.kept")
        countdown = page.locator(".note time").last
        before = countdown.inner_text()
        expect(countdown).not_to_have_text(before)


def test_filters_are_in_the_address(browser: Browser, console: RunningConsole) -> None:
    with window(browser, console) as page:
        page.goto("/")
        page.get_by_label("Type").select_option("Freeze")
        page.get_by_role("button", name="Show").click()
        expect(page).to_have_url(re.compile("type=Freeze"))
        expect(page.get_by_role("table").first).to_contain_text("web-2")
        expect(page.get_by_role("table").first).not_to_contain_text("web-0")


def test_the_keyboard_alone_is_enough(browser: Browser, console: RunningConsole) -> None:
    with window(browser, console) as page:
        page.goto("/")
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()
        link = page.get_by_role("link", name="web-0, web-1").first
        for _ in range(20):
            page.keyboard.press("Tab")
            if link.evaluate("element => element === document.activeElement"):
                break
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("/event/"))


def test_without_javascript_every_page_and_the_filters_work(
    browser: Browser, console: RunningConsole
) -> None:
    with window(browser, console, java_script_enabled=False) as page:
        page.goto("/")
        page.get_by_label("Type").select_option("Freeze")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_role("table").first).to_contain_text("web-2")
        page.get_by_role("link", name="Fleet").click()
        expect(page.locator(".cell").first).to_be_visible()
        page.get_by_role("link", name="History").click()
        expect(page.get_by_text("20 event(s) lost: SizeLimit")).to_be_visible()


def send(console: RunningConsole, *bodies: bytes) -> None:
    for body in bodies:
        assert (
            console.post(body, {**STRUCTURED, "Authorization": f"Bearer {TOKEN}"}).status_code
            == HTTPStatus.OK
        )


class Approving:
    """A console whose people may approve, and a signed-in window."""

    def __init__(self, folder: Path, bus: ServiceBusLab) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.approvals = ApprovalSettings.model_validate(
            {"connection_string": bus.connection_string, "queue": QUEUE}
        )
        self.folder = folder
        self.settings: dict[str, Any] = {
            "listen": f"127.0.0.1:{port}",
            "auth": "proxy",
            "public_url": f"http://127.0.0.1:{port}",
            "proxy": {"secret": SECRET},
            "approver_groups": ["ops"],
            "ingest": {"bearer_token": TOKEN},
        }
        self.headers = {
            "X-Proxy-Secret": SECRET,
            "X-Forwarded-User": "ana@contoso.example",
            "X-Forwarded-Groups": "ops",
        }


def test_an_approval_is_confirmed_sent_and_shown_with_its_receipt(
    tmp_path: Path, bus: ServiceBusLab, browser: Browser
) -> None:
    rig = Approving(tmp_path, bus)
    reboot = event("browser", at=NOW, vms=["web-0", "web-1"])
    vm = FleetVm("web-0")
    with running_console(tmp_path, approvals=rig.approvals, **rig.settings) as console:
        send(console, vm.heartbeat(NOW), vm.change("scheduled", reboot, NOW))
        with window(browser, console, extra_http_headers=rig.headers) as page:
            page.goto(STORY)
            expect(page.get_by_label("Approve", exact=True)).to_contain_text("all 2 VMs")
            page.get_by_label("Reason").fill("drained")
            page.get_by_label("The last 4 characters").fill("0000")
            page.get_by_role("button", name="Approve the reboot").click()
            expect(page.get_by_text("Not approved.")).to_be_visible()
            page.goto(STORY)
            page.get_by_label("Reason").fill("drained")
            page.get_by_label("The last 4 characters").fill(event_id("browser")[-4:])
            page.context.clear_cookies()
            page.get_by_role("button", name="Approve the reboot").click()
            expect(page.get_by_text("session has expired")).to_be_visible()
            page.goto(STORY)
            page.get_by_label("Reason").fill("drained")
            page.get_by_label("The last 4 characters").fill(event_id("browser")[-4:])
            page.get_by_role("button", name="Approve the reboot").click()
            expect(page.get_by_text("Waiting for its receipt")).to_be_visible()
            command_id = page.url.rpartition("=")[2]
            send(console, vm.receipt(reboot, NOW).replace(b"order-17", command_id.encode()))
            expect(page.get_by_text("has arrived")).to_be_visible()
            expect(page.get_by_text("Approval accepted")).to_be_visible()
    assert len(bus.entity(QUEUE).messages) == 1
