"""The console's pages in a browser: what people see, with and without script, and what hostile events cannot do."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.support.browser import axe_faults, chromium, opened
from tests.support.bus import QUEUE
from tests.support.console import (
    ANA,
    FleetVm,
    RunningConsole,
    approvable,
    approval_console,
    behind_proxy,
    event,
    event_id,
    running_console,
)
from tests.support.servicebus import ServiceBusLab

NOW = datetime.now(UTC)
PHONE: ViewportSize = {"width": 320, "height": 640}  # also a desktop of 1280 pixels at 400%: WCAG 1.4.10
HOSTILE = f"<img src=x onerror=alert(1)><a href=javascript:alert(2)>http://evil.example\u202e{'x' * 300}"
PAGES = (
    "/",
    "/?type=Reboot&vm=web&window=7d",
    "/fleet",
    "/fleet?view=table",
    "/history",
    f"/event/{event_id('reboot').lower()}",
    "/no-such-page",
)
# A stream of events in the hands of the test.
OTHER_STREAM = """
window.streams = [];
window.EventSource = class extends EventTarget {
  static CLOSED = 2;
  readyState = 1;
  constructor() { super(); streams.push(this); }
  say(version) { this.dispatchEvent(new MessageEvent("version", { data: version })); }
  close() { this.readyState = 2; }
};
"""

# Playwright's driver leaves its pipes to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Playwright's driver leaves its pipes open
    pytest.mark.usefixtures("this_moment"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console with a small fleet; tests that add to it use names of their own."""
    with (
        running_console(tmp_path_factory.mktemp("console")) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys.modules[__name__], "NOW", datetime.now(UTC))  # as `this_moment`
        running.send(*fleet())
        yield running


@pytest.fixture
def page(browser: Browser, console: RunningConsole) -> Iterator[Page]:
    with opened(browser, console.url) as one:
        yield one


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def starting(text: str) -> re.Pattern[str]:
    return re.compile(f"^{re.escape(text)}")


def fleet() -> list[bytes]:
    """Return the events of VMs in every state, and of events of every type."""
    web, db = [FleetVm(f"web-{number}") for number in range(4)], FleetVm("db-0", group="data", zone="2")
    long = FleetVm("a-name-of-sixty-four-characters-that-windows-would-never-accept-0")
    heartbeats = [vm.heartbeat(NOW, backlog=2) for vm in (*web, db, long)]
    silent = FleetVm("silent-0").heartbeat(NOW - timedelta(hours=3))
    stopped = FleetVm("stopped-0").heartbeat(NOW, reason="Stopping")
    unreachable = FleetVm("unreachable-0").unreachable(NOW, since=NOW - timedelta(minutes=4))
    reboot = event("reboot", at=NOW, vms=["web-0", "web-1"])
    freeze = event("freeze", at=NOW, vms=["db-0"], type="Freeze", minutes=90, DurationInSeconds=9)
    redeploy = event("redeploy", at=NOW, vms=[long.name, "never-seen"], type="Redeploy", minutes=3000)
    preempt = event("preempt", at=NOW, vms=["web-2"], type="Preempt", EventStatus="Started", NotBefore="")
    gone = event("gone", at=NOW - timedelta(minutes=20), vms=["web-3"], type="Terminate")
    return [
        *(*heartbeats, silent, stopped, unreachable, web[0].loss(NOW)),
        web[0].change("scheduled", reboot, NOW),
        web[0].receipt(reboot, NOW, outcome="rejected", reason="PolicyDenied"),
        db.change("scheduled", freeze, NOW),
        web[0].change("scheduled", redeploy, NOW),
        web[2].change("started", preempt, NOW),
        web[3].change("scheduled", gone, NOW - timedelta(minutes=20)),
        web[3].change("canceled", gone, NOW - timedelta(minutes=10), previous=gone),
    ]


def test_an_empty_console_says_how_to_connect_vms(browser: Browser, tmp_path: Path) -> None:
    with running_console(tmp_path) as running, opened(browser, running.url) as page:
        page.goto("/fleet")
        page.get_by_role("link", name="How to connect VMs").click()
        expect(page.locator("h1")).to_have_text("No VM has reported yet")
        expect(page.locator("pre")).to_contain_text(f'url = "{running.url}/ingest"')
        assert axe_faults(page) == []
        running.send(FleetVm("first-0").heartbeat(NOW))
        expect(page.locator("h1")).to_have_text("Nothing is scheduled")
        expect(page.locator("main")).not_to_contain_text("Connect your VMs")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_any_page(browser: Browser, console: RunningConsole, scheme: str) -> None:
    with opened(browser, console.url, color_scheme=scheme) as page:
        for path in PAGES:
            page.goto(path)
            assert axe_faults(page) == [], path


def test_no_page_scrolls_sideways_on_a_phone(browser: Browser, console: RunningConsole) -> None:
    with opened(browser, console.url, viewport=PHONE, is_mobile=True) as page:
        for path in PAGES:
            page.goto(path)
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= PHONE["width"], path
        assert axe_faults(page) == []


def test_pages_are_dark_at_night_and_light_by_day(browser: Browser, console: RunningConsole) -> None:
    seen = set()
    for scheme in ("light", "dark"):
        with opened(browser, console.url, color_scheme=scheme) as page:
            page.goto("/")
            seen.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2


def test_now_shows_the_timeline_and_the_table_with_local_times(page: Page) -> None:
    page.goto("/")
    expect(page.locator(".timeline .name", has_text="web-0, web-1")).to_be_visible()
    row = page.locator("tr", has_text="web-0, web-1")
    expect(row).to_contain_text("Scheduled")
    expect(row).to_contain_text("rejected")
    expect(row.locator("time[data-relative]")).to_have_text(starting("in 1"))
    expect(page.locator("#zone")).to_have_text("Times are Europe/Berlin.")
    expect(page.locator("#live")).to_have_text("Live")
    countdown = row.locator("time[data-relative]")
    before = countdown.inner_text()
    expect(countdown).not_to_have_text(before)


def test_filters_are_in_the_address(page: Page) -> None:
    page.goto("/")
    page.get_by_label("Type", exact=True).select_option("Freeze")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/?*type=Freeze*")
    expect(page.locator("table").first).to_contain_text("db-0")
    expect(page.locator("table").first).not_to_contain_text("web-0")
    page.reload()
    expect(page.get_by_label("Type", exact=True)).to_have_value("Freeze")
    page.get_by_role("link", name="Show all").click()
    expect(page.locator("table").first).to_contain_text("web-0")


def test_the_fleet_shows_every_state_and_a_tile_leads_to_its_vms(page: Page) -> None:
    page.goto("/fleet")
    for name, state in (
        ("silent-0", "silent 3 h"),
        ("stopped-0", "stopped"),
        ("unreachable-0", "no IMDS"),
        ("never-seen", "never reported"),
        ("web-2", "Preempt now"),
        ("web-3", "quiet"),
    ):
        expect(page.locator(".cell", has_text=name)).to_contain_text(state)
    page.goto("/")
    page.locator(".tile", has_text="not watched").click()
    expect(page.locator(".cell")).to_have_text(
        [starting("never-seen"), starting("silent-0"), starting("unreachable-0")]
    )
    page.locator(".cell", has_text="never-seen").click()
    expect(page.locator("h1")).to_contain_text("never-seen")


def test_an_event_has_its_story_its_cloudevents_and_a_download(page: Page) -> None:
    page.goto("/")
    page.locator("table").get_by_role("link", name="web-0, web-1").click()
    expect(page.locator(".story")).to_contain_text("Approval rejected")
    page.locator("summary", has_text="scheduledevent.scheduled").click()
    expect(page.locator("pre").first).to_contain_text('"specversion": "1.0"')
    with page.expect_download() as download:
        page.get_by_role("link", name="Download as JSONL").click()
    assert len(download.value.path().read_text().splitlines()) == 2


def test_an_event_of_300_vms_shows_those_that_did_not_see_it_and_folds_the_others(
    page: Page, console: RunningConsole
) -> None:
    vms = [FleetVm(f"node-{number}", group="hpc") for number in range(300)]
    large = event("large", at=NOW, vms=[vm.name for vm in vms])
    console.send(*(vm.change("scheduled", large, NOW) for vm in vms[:-1]))
    page.goto(f"/event/{event_id('large').lower()}")
    expect(page.locator("#part-seen")).to_contain_text("Seen by 299 of 300 VMs that it names")
    expect(page.locator("#part-seen tbody tr").first).to_contain_text("node-299")
    expect(page.locator("#part-seen tr:visible")).to_have_count(1 + 12)
    page.locator("summary", has_text="288 more VMs").click()
    expect(page.locator("#part-seen tr:visible")).to_have_count(1 + 300 + 1)


def test_an_event_says_what_an_approval_would_do_where_the_console_sends_none(page: Page) -> None:
    page.goto(f"/event/{event_id('reboot').lower()}")
    expect(page.locator(".approve")).to_contain_text("lets the reboot start at once")
    expect(page.locator(".approve")).to_contain_text("all 2 VMs: web-0, web-1")
    expect(page.locator(".approve")).to_contain_text(f"imds-bridge approve {event_id('reboot')}")
    expect(page.locator(".approve form")).to_have_count(0)


def test_history_shows_events_and_links_the_csv(page: Page) -> None:
    page.goto("/history")
    expect(page.locator("tr", has_text="Terminate").first).to_contain_text("1")
    page.get_by_role("link", name="90 days").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("The last 90 days")
    with page.expect_download():
        page.get_by_role("link", name="CSV").click()


def test_history_finds_the_past_events_of_a_vm_and_of_a_type(page: Page) -> None:
    page.goto("/history")
    page.get_by_label("VM or EventId").fill("WEB-3")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/history?*vm=WEB-3*")
    events = page.get_by_role("table", name="Events", exact=True)
    expect(events.locator("tbody tr")).to_have_count(1)
    expect(page.get_by_role("table", name="By type and end").locator("tbody tr")).to_have_count(1)
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    assert len(download.value.path().read_text().splitlines()) == 2
    page.goto("/history")
    row = page.get_by_role("table", name="By type and end").locator("tr", has_text="Terminate")
    row.get_by_role("link").first.click()
    expect(page.get_by_label("End", exact=True)).to_have_value("Canceled")
    events.get_by_role("link", name="web-3").click()
    expect(page.locator(".story")).to_contain_text("Canceled")


def test_a_committed_event_appears_without_a_reload_and_keeps_focus_and_open_parts(
    page: Page, console: RunningConsole
) -> None:
    vm = FleetVm("live-0", group="live")
    seen = event("live", at=NOW, vms=["live-0"])
    console.send(vm.change("scheduled", seen, NOW))
    page.goto(f"/event/{event_id('live').lower()}")
    page.locator("summary", has_text="scheduledevent.scheduled").click()
    page.get_by_role("link", name="Download as JSONL").focus()
    expect(page.locator("#live")).to_have_text("Live")
    page.evaluate("window.isSame = true")
    started = event("live", at=NOW, vms=["live-0"], EventStatus="Started", NotBefore="")
    console.send(vm.change("started", started, NOW, previous=seen))
    expect(page.locator("#part-head")).to_contain_text("Started")
    expect(page.locator("details[open] > summary")).to_contain_text("scheduledevent.scheduled")
    assert page.evaluate("document.activeElement.textContent") == "Download as JSONL"
    assert page.evaluate("window.isSame")


def test_a_page_is_fetched_once_for_a_message_that_is_older_than_the_page(
    page: Page, console: RunningConsole
) -> None:
    page.clock.install()
    page.add_init_script(OTHER_STREAM)
    fetches: list[str] = []
    page.on("request", lambda one: fetches.append(one.url) if one.resource_type == "fetch" else None)
    page.goto("/history")
    with page.expect_request_finished(lambda one: one.resource_type == "fetch"):
        page.evaluate("streams[0].say('0')")
    page.clock.run_for(10_000)
    assert fetches == [f"{console.url}/history"]


def test_forced_colours_show_the_dots_of_the_story(page: Page) -> None:
    page.emulate_media(forced_colors="active")
    page.goto(f"/event/{event_id('reboot').lower()}")
    dot = "one => getComputedStyle(one, '::before').backgroundColor"
    color = page.locator(".story li").first.evaluate(dot)
    assert color == page.locator("body").evaluate("one => getComputedStyle(one).color")
    assert page.locator(".story .waiting").first.evaluate(dot) != color


# --- what a page says while it cannot follow the store ---


def test_a_page_is_not_live_while_the_console_is_away_and_live_again_without_a_reload(
    browser: Browser, tmp_path: Path
) -> None:
    address = free_address()
    with opened(browser, f"http://{address}") as page:
        with running_console(tmp_path, listen=address):
            page.goto("/")
            expect(page.locator("#live")).to_have_text("Live")
            page.evaluate("window.isSame = true")
        expect(page.locator("#live")).to_have_text(starting("Not live"))
        expect(page.locator("#age")).to_have_text(starting("The page is "))
        expect(page).to_have_title(starting("Not live: "))
        assert page.evaluate("getComputedStyle(document.querySelector('header')).position") == "sticky"
        assert axe_faults(page) == []
        with running_console(tmp_path, listen=address) as again:
            again.send(FleetVm("back-0").heartbeat(NOW))
            page.wait_for_event("response", lambda one: one.url.endswith("/live"))
            expect(page.locator("#live")).to_have_text("Live")
            expect(page.locator("main")).to_contain_text("1 VM has reported")
            expect(page.locator("#age")).to_be_empty()
            assert page.evaluate("window.isSame")


def test_the_page_of_an_event_that_has_not_arrived_shows_it_when_it_comes(
    browser: Browser, tmp_path: Path
) -> None:
    address = free_address()
    with opened(browser, f"http://{address}") as page, running_console(tmp_path, listen=address) as console:
        page.goto(f"/event/{event_id('from-a-chat')}")
        expect(page.locator("main")).to_contain_text("this page shows it as soon as it arrives")
        expect(page.locator("#live")).to_have_text("Live")
        console.send(FleetVm("web-0").change("scheduled", event("from-a-chat", at=NOW), NOW))
        expect(page.locator("h1")).to_contain_text("web-0")
        expect(page.locator("#part-story")).to_contain_text("Announced")


def test_a_page_knows_that_it_is_old_after_the_machine_slept(page: Page) -> None:
    page.add_init_script(
        "const streams = []; window.EventSource = class extends EventSource {"
        " constructor(url) { super(url); streams.push(this); } }; window.streams = streams;"
    )
    page.clock.install()
    page.goto("/")
    expect(page.locator("#live")).to_have_text("Live")
    page.context.set_offline(True)
    # Going offline does not end a stream, whose next message would confirm the page.
    page.evaluate("streams.forEach((one) => one.close())")
    page.clock.fast_forward("01:00:00")
    expect(page.locator("#live")).to_have_text(starting("Not live"))
    expect(page.locator("#age")).to_have_text(starting("The page is 1 h"))
    page.context.set_offline(False)
    expect(page.locator("#live")).to_have_text("Live")


def test_a_page_is_not_live_if_its_stream_hangs_and_the_console_does_not_answer(page: Page) -> None:
    page.add_init_script(OTHER_STREAM)
    page.clock.install()
    page.goto("/")
    page.route("**/", lambda _: None)
    page.clock.fast_forward("00:13")
    expect(page.locator("#live")).to_have_text(
        starting("Not live"), timeout=5000
    )  # before the fetch times out


def test_a_page_retries_less_and_less_often(page: Page) -> None:
    page.clock.install()
    page.add_init_script(OTHER_STREAM)
    page.goto("/")
    tries: list[str] = []
    page.on("request", lambda one: tries.append(one.url) if one.resource_type == "fetch" else None)
    page.route("**/", lambda route: route.abort())
    page.clock.fast_forward("00:13")
    expect(page.locator("#live")).to_have_text(starting("Not live"))
    for _ in range(60):
        page.clock.run_for(1000)
    assert 4 <= len(tries) <= 10  # 1, 2, 4, 8, 16 and 30 s apart, or half of that


@pytest.mark.parametrize("stream", ["refused", "silent"])
def test_a_page_polls_where_a_proxy_lets_no_stream_through(
    page: Page, console: RunningConsole, stream: str
) -> None:
    page.clock.install()
    if stream == "refused":
        page.route("**/live", lambda route: route.fulfill(status=503))
    else:
        page.add_init_script(OTHER_STREAM)
    page.goto("/fleet")
    page.clock.fast_forward("00:13")
    expect(page.locator("#live")).to_have_text("Updated every 10 s")
    console.send(FleetVm(f"{stream}-0", group="polled").heartbeat(NOW))
    page.clock.fast_forward("00:11")
    expect(page.locator("main")).to_contain_text(f"{stream}-0")
    expect(page.locator("#live")).to_have_text("Updated every 10 s")


def test_a_redirect_to_a_sign_in_is_an_expired_session(page: Page) -> None:
    page.add_init_script(OTHER_STREAM)
    page.goto("/")
    page.route("**/", lambda route: route.fulfill(status=302, headers={"location": "/oauth2/sign_in"}))
    page.evaluate("streams[0].say('another')")
    expect(page.locator("#live")).to_contain_text("session has expired")


def test_an_update_keeps_what_did_not_change(page: Page, console: RunningConsole) -> None:
    page.goto("/")
    page.evaluate("document.querySelector('.timeline .name').isSame = true")
    page.evaluate("document.querySelector('.timeline .name').focus()")
    console.send(FleetVm("another-0", group="another").heartbeat(NOW))
    expect(page.locator("#part-summary")).to_contain_text(
        f"{console.page('/').partition(' VMs have reported')[0].rpartition('>')[2]} VMs"
    )
    assert page.evaluate("document.activeElement.isSame")


def test_countdowns_follow_the_consoles_clock(browser: Browser, console: RunningConsole) -> None:
    with opened(browser, console.url) as page:
        page.clock.set_system_time(NOW + timedelta(days=2))
        page.goto("/")
        countdown = page.locator("tr", has_text="web-0, web-1").locator("time[data-relative]")
        expect(countdown).to_have_text(starting("in 1"))


def test_hostile_text_runs_no_script_and_becomes_no_link(page: Page, console: RunningConsole) -> None:
    vm = FleetVm("hostile-0", group="hostile")
    bad = event("bad", at=NOW, vms=[HOSTILE, "hostile-0"], type=HOSTILE, Description=HOSTILE)
    console.send(vm.change("scheduled", bad, NOW), vm.receipt(bad, NOW, reason=HOSTILE))
    for path in ("/", f"/event/{event_id('bad').lower()}", "/fleet", "/fleet?view=table", "/history"):
        page.goto(path)
        expect(page.locator("main")).to_contain_text("<img src=x onerror=alert(1)>")
        assert (
            page.locator(
                "main img, main a[href^='javascript'], main a[href^='http']:not([href^='https://portal.azure.com/#resource/'])"
            ).count()
            == 0
        )
        assert "\u202e" not in page.locator("main").inner_text()
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path


def test_everything_is_reached_with_the_keyboard(page: Page) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.timeline .name')"):
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url("**/event/*")
    page.locator("summary").last.focus()
    page.keyboard.press("Enter")
    expect(page.locator("details[open] pre")).to_be_visible()


def test_every_page_works_without_script(browser: Browser, console: RunningConsole) -> None:
    with opened(browser, console.url, java_script_enabled=False) as page:
        page.goto("/")
        page.get_by_label("Type", exact=True).select_option("Freeze")
        page.get_by_role("button", name="Show").click()
        page.locator("table").get_by_role("link", name="db-0").click()
        expect(page.locator("h1")).to_contain_text("db-0")
        expect(page.locator(".facts")).to_contain_text("UTC")
        page.locator("summary").last.click()
        expect(page.locator("details[open] pre")).to_be_visible()
        page.get_by_role("link", name="Fleet").click()
        expect(page.locator(".cell", has_text="web-0")).to_be_visible()
        page.get_by_role("link", name="History").click()
        expect(page.locator("h1")).to_have_text("The last 30 days")


# --- approvals ---


@pytest.fixture
def guarded(tmp_path: Path, bus: ServiceBusLab) -> Iterator[RunningConsole]:
    """Return a console behind a proxy, with approvals and an event of two VMs."""
    address = free_address()
    with approval_console(
        tmp_path, bus.connection_string, listen=address, public_url=f"http://{address}"
    ) as running:
        yield running


def test_an_approval_is_refused_without_the_eventid_or_the_session_and_sent_with_them_and_its_receipt_appears(
    browser: Browser, guarded: RunningConsole, bus: ServiceBusLab
) -> None:
    with opened(browser, guarded.url, extra_http_headers=ANA) as page:
        page.goto(f"/event/{event_id('approve').lower()}")
        expect(page.locator(".approve")).to_contain_text("all 2 VMs")
        assert axe_faults(page) == []
        approve(page, "0000")
        expect(page.locator("main")).to_contain_text("not the last 4 characters")
        assert bus.entity(QUEUE).messages == ()
        page.goto(f"/event/{event_id('approve').lower()}")
        page.context.clear_cookies()
        approve(page, event_id("approve")[-4:])
        expect(page.locator("main")).to_contain_text("session has expired")
        assert bus.entity(QUEUE).messages == ()
        page.goto(f"/event/{event_id('approve').lower()}")
        approve(page, event_id("approve")[-4:])
        expect(page.locator("#part-sent")).to_contain_text("Waiting for its receipt")
        command_id = page.url.partition("sent=")[2]
        receipt = FleetVm("web-0").receipt(approvable(NOW), NOW).replace(b"order-17", command_id.encode())
        guarded.send(receipt)
        expect(page.locator("#part-sent")).to_contain_text("has arrived")
        expect(page.locator(".story")).to_contain_text("Approval accepted")


def test_a_form_keeps_what_was_typed_until_the_event_changes(
    browser: Browser, guarded: RunningConsole
) -> None:
    with opened(browser, guarded.url, extra_http_headers=ANA) as page:
        page.goto(f"/event/{event_id('approve').lower()}")
        page.get_by_label("Reason").fill("drained")
        seen = approvable(NOW)
        guarded.send(FleetVm("web-0").receipt(seen, NOW, outcome="rejected", reason="denied"))
        expect(page.locator(".story")).to_contain_text("Approval rejected")
        expect(page.get_by_label("Reason")).to_have_value("drained")
        started = event("approve", at=NOW, vms=["web-0", "web-1"], EventStatus="Started", NotBefore="")
        guarded.send(FleetVm("web-0").change("started", started, datetime.now(UTC), previous=seen))
        expect(page.locator("#part-head")).to_contain_text("Started")
        expect(page.get_by_role("button", name="Approve")).to_have_count(0)


def test_a_form_is_to_be_filled_in_again_once_its_event_has_changed(
    browser: Browser, guarded: RunningConsole
) -> None:
    with opened(browser, guarded.url, extra_http_headers=ANA) as page:
        page.goto(f"/event/{event_id('approve').lower()}")
        page.get_by_label("The last 4 characters").fill(event_id("approve")[-4:])
        more = event("approve", at=NOW, vms=["web-0", "web-1", "web-2"])
        guarded.send(FleetVm("web-0").change("updated", more, datetime.now(UTC), previous=approvable(NOW)))
        expect(page.locator(".approve")).to_contain_text("all 3 VMs")
        expect(page.get_by_label("The last 4 characters")).to_have_value("")


def test_an_approval_of_an_event_whose_impact_has_grown_is_refused(
    browser: Browser, guarded: RunningConsole, bus: ServiceBusLab
) -> None:
    now, vm = datetime.now(UTC), FleetVm("web-0")
    seen, longer = (
        event("approve", at=now, vms=["web-0", "web-1"], DurationInSeconds=seconds) for seconds in (9, 3600)
    )
    guarded.send(vm.change("updated", seen, now))
    # Without script, the page does not follow the store.
    with opened(browser, guarded.url, extra_http_headers=ANA, java_script_enabled=False) as page:
        page.goto(f"/event/{event_id('approve').lower()}")
        expect(page.locator(".approve")).to_contain_text("The expected impact is 9 s")
        guarded.send(vm.change("updated", longer, now + timedelta(seconds=5), previous=seen))
        approve(page, event_id("approve")[-4:])
        expect(page.locator("main")).to_contain_text("has changed since the page was shown")
        assert bus.entity(QUEUE).messages == ()
        page.goto(f"/event/{event_id('approve').lower()}")
        expect(page.locator(".approve")).to_contain_text("The expected impact is 1 h")
        approve(page, event_id("approve")[-4:])
        expect(page.locator("#part-sent")).to_contain_text("Waiting for its receipt")


def approve(page: Page, confirm: str) -> None:
    page.get_by_label("Reason").fill("drained")
    page.get_by_label("The last 4 characters").fill(confirm)
    page.get_by_role("button", name="Approve").click()


def test_an_expired_session_is_reported_instead_of_a_page_that_stands_still(
    browser: Browser, guarded: RunningConsole
) -> None:
    with opened(browser, guarded.url, extra_http_headers=ANA) as page:
        page.goto("/")
        expect(page.locator("#live")).to_have_text("Live")
        page.context.set_extra_http_headers({})
        guarded.send(FleetVm("web-1").heartbeat(NOW))
        expect(page.locator("#live")).to_contain_text("session has expired")


def test_an_approver_forgets_the_vms_of_a_filter(browser: Browser, tmp_path: Path) -> None:
    address = free_address()
    settings = behind_proxy(approver_groups=["ops"], listen=address, public_url=f"http://{address}")
    with running_console(tmp_path, **settings) as running:
        running.send(*(FleetVm(f"{name}-0").heartbeat(NOW - timedelta(hours=3)) for name in ("old", "late")))
        with opened(browser, running.url, extra_http_headers=ANA) as page:
            page.goto("/")
            expect(page.locator("h1")).to_contain_text("2 of 2 VMs are not watched")
            page.goto("/fleet?vm=old")
            page.locator("summary", has_text="Forget 1 VM").click()
            assert axe_faults(page) == []
            page.get_by_label("Their number").fill("1")
            page.get_by_role("button", name="Forget 1 VM").click()
            expect(page.locator(".calm")).to_contain_text("No VM matches")
            page.goto("/")
            expect(page.locator("h1")).to_contain_text("1 of 1 VM is not watched")
            page.goto("/history")
            expect(page.get_by_role("table", name="forgotten VMs")).to_contain_text("old-0")
            expect(page.get_by_role("table", name="forgotten VMs")).to_contain_text(
                "Forgotten by ana@contoso.example"
            )
            running.send(FleetVm("old-0").heartbeat(NOW))
            page.goto("/fleet")
            expect(page.locator(".cell")).to_have_count(2)
            assert axe_faults(page) == []
