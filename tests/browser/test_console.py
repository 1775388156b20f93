"""The console's pages in a browser: what people see, with and without script, and what hostile events cannot do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.support.browser import axe_faults, opened
from tests.support.bus import QUEUE, bus_config
from tests.support.console import (
    ANA,
    APPROVABLE,
    NOW,
    FleetVm,
    FormOf,
    RunningConsole,
    approval_console,
    console_at,
    event,
    event_id,
)
from tests.support.ports import free_address
from tests.support.servicebus import ServiceBusLab

PHONE: ViewportSize = {"width": 320, "height": 640}  # also a desktop of 1280 pixels at 400%: WCAG 1.4.10
HOSTILE = f"<img src=x onerror=alert(1)><a href=javascript:alert(2)>http://evil.example\u202e{'x' * 300}"


def page_of(name: str) -> str:
    return f"/event/{event_id(name).lower()}"


WAVE = f"/?wave={event_id('reboot').lower()}"
PAGES = (
    "/",
    "/?type=Reboot&vm=web&window=7d",
    "/fleet",
    "/fleet?view=table",
    "/history",
    "/away",
    page_of("reboot"),
    page_of("not-seen"),
    WAVE,
    "/no-such-page",
)
WIDTHS = (1440, 720, 360)  # of a screen of 1440 pixels at 100, 200 and 400 %
OF_COLORS = ("color-contrast", "link-in-text-block")
LOOKS: tuple[tuple[Literal["light", "dark"], Literal["none", "active"], tuple[str, ...]], ...] = (
    ("light", "none", ()),
    ("dark", "none", OF_COLORS),
    ("light", "active", OF_COLORS),
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

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # Playwright's driver leaves its pipes open


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console with a small fleet; tests that add to it use names of their own."""
    with console_at(tmp_path_factory.mktemp("console")) as running:
        running.send(*fleet())
        yield running


def starting(text: str) -> re.Pattern[str]:
    return re.compile(f"^{re.escape(text)}")


def fleet() -> list[bytes]:
    """Return the events of VMs in every state, and of events of every type."""
    web, db = [FleetVm(f"web-{number}") for number in range(4)], FleetVm("db-0", group="data", zone="2")
    long = FleetVm("a-name-of-sixty-four-characters-that-windows-would-never-accept-0")
    reboot, earlier = event("reboot", vms=["web-0", "web-1"]), NOW - timedelta(minutes=20)
    freeze = event("freeze", vms=["db-0"], type="Freeze", minutes=90, DurationInSeconds=9)
    redeploy = event("redeploy", vms=[long.name, "never-seen"], type="Redeploy", minutes=3000)
    preempt = event("preempt", vms=["web-2"], type="Preempt", EventStatus="Started", NotBefore="")
    gone = event("gone", at=earlier, vms=["web-3"], type="Terminate")
    return [
        *(vm.heartbeat(backlog=2) for vm in (*web, db, long)),
        FleetVm("silent-0").heartbeat(NOW - timedelta(hours=3)),
        FleetVm("stopped-0").heartbeat(reason="Stopping"),
        FleetVm("unreachable-0").unreachable(since=NOW - timedelta(minutes=4)),
        web[0].loss(),
        web[0].change("scheduled", reboot),
        web[0].receipt(reboot, outcome="rejected", reason="PolicyDenied"),
        db.change("scheduled", freeze),
        web[0].change("scheduled", redeploy),
        web[2].change("started", preempt),
        web[3].change("scheduled", gone, earlier),
        web[3].change("canceled", gone, earlier + timedelta(minutes=10), previous=gone),
    ]


# --- what people see ---


def test_an_empty_console_says_how_to_connect_vms(browser: Browser, tmp_path: Path) -> None:
    with console_at(tmp_path) as running, opened(browser, running.url) as page:
        page.goto("/fleet")
        page.get_by_role("link", name="How to connect VMs").click()
        expect(page.locator("h1")).to_have_text("No VM has reported yet")
        expect(page.locator("pre")).to_contain_text(f'url = "{running.url}/ingest"')
        assert axe_faults(page) == []
        running.send(FleetVm("first-0").heartbeat())
        expect(page.locator("h1")).to_have_text("Nothing is scheduled")
        expect(page.locator("main")).not_to_contain_text("Connect your VMs")
        expect(page.get_by_role("search")).to_be_visible()


def faults_in_every_look(page: Page) -> list[object]:
    """Return what axe-core finds wrong on a page with all its parts open, at every size and in all colours."""
    found: list[object] = []
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    for width, (scheme, forced, rules) in product(WIDTHS, LOOKS):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme, forced_colors=forced)
        found += [(width, scheme, forced, fault) for fault in axe_faults(page, *rules)]
    return found


@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing_on_any_page_in_any_colours_and_size(ana: Page, path: str) -> None:
    ana.goto(path)
    assert faults_in_every_look(ana) == []


def test_a_page_is_dark_at_night_and_light_by_day(page: Page) -> None:
    page.goto("/")
    colors = []
    for scheme, _, _ in LOOKS[:2]:
        page.emulate_media(color_scheme=scheme)
        colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colors[0] != colors[1]


def test_no_page_scrolls_sideways_on_a_phone(browser: Browser, console: RunningConsole) -> None:
    with opened(browser, console.url, viewport=PHONE, is_mobile=True) as page:
        for path in PAGES:
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path


def test_now_shows_the_timeline_and_the_table_with_local_times_that_follow_the_consoles_clock(
    page: Page,
) -> None:
    page.clock.set_system_time(NOW + timedelta(days=2))
    page.goto("/")
    row = page.locator("tr", has_text="web-0 +1")
    expect(row.locator(".track .bar")).to_be_visible()
    expect(row).to_contain_text("seen by 1 of 2")
    expect(row).to_contain_text("rejected")
    countdown = row.locator("time[data-relative]").first
    expect(countdown).to_have_text(starting("in 1"))
    expect(page.locator("#zone")).to_have_text("Times are Europe/Berlin.")
    expect(page.locator("#live")).to_have_text("Live")
    before = countdown.inner_text()
    expect(countdown).not_to_have_text(before)


def test_an_event_has_its_story_its_cloudevents_and_a_download(page: Page) -> None:
    page.goto("/")
    page.locator("table").get_by_role("link", name="web-0 +1").click()
    expect(page.locator(".story")).to_contain_text("Approval rejected")
    page.locator("summary", has_text="scheduledevent.scheduled").click()
    expect(page.locator("pre").first).to_contain_text('"specversion": "1.0"')
    with page.expect_download() as download:
        page.get_by_role("link", name="Download as JSONL").click()
    assert len(download.value.path().read_text().splitlines()) == 2


def test_forced_colours_show_the_dots_of_the_story(page: Page) -> None:
    page.emulate_media(forced_colors="active")
    page.goto(page_of("reboot"))
    dot = "one => getComputedStyle(one, '::before').backgroundColor"
    color = page.locator(".story li").first.evaluate(dot)
    assert color == page.locator("body").evaluate("one => getComputedStyle(one).color")
    assert page.locator(".story .waiting").first.evaluate(dot) != color


def test_hostile_text_runs_no_script_and_becomes_no_link(page: Page, console: RunningConsole) -> None:
    vm = FleetVm("hostile-0", group="hostile")
    bad = event("bad", vms=[HOSTILE, "hostile-0"], type=HOSTILE, Description=HOSTILE)
    console.send(vm.change("scheduled", bad), vm.receipt(bad, reason=HOSTILE))
    foreign = "main a[href^='http']:not([href^='https://portal.azure.com/#resource/'])"
    page.set_viewport_size(PHONE)
    for path in ("/", page_of("bad"), "/fleet", "/fleet?view=table", "/history"):
        page.goto(path)
        expect(page.locator("main")).to_contain_text("<img src=x onerror=alert(1)>")
        assert page.locator(f"main img, main a[href^='javascript'], {foreign}").count() == 0
        assert "\u202e" not in page.locator("main").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path


def test_everything_is_reached_with_the_keyboard(page: Page) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.what a')"):
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
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
        page.wait_for_url("**/?*type=Freeze*")
        expect(page.get_by_label("Type", exact=True)).to_have_value("Freeze")
        expect(page.locator("table").first).not_to_contain_text("web-0")
        page.locator("table").get_by_role("link", name="db-0").click()
        expect(page.locator("h1")).to_contain_text("db-0")
        expect(page.locator(".facts")).to_contain_text("UTC")
        page.locator("summary").last.click()
        expect(page.locator("details[open] pre")).to_be_visible()
        page.get_by_role("link", name="Fleet").click()
        expect(page.locator(".cell", has_text="web-0")).to_be_visible()
        page.get_by_role("link", name="History").click()
        expect(page.locator("h1")).to_have_text("The last 30 days")


# --- a page follows the store ---


def test_a_committed_event_appears_without_a_reload_and_keeps_focus_and_open_parts(
    page: Page, console: RunningConsole
) -> None:
    vm = FleetVm("live-0", group="live")
    seen = event("live", vms=["live-0"])
    console.send(vm.change("scheduled", seen))
    page.goto(page_of("live"))
    page.locator("summary", has_text="scheduledevent.scheduled").click()
    page.get_by_role("link", name="Download as JSONL").focus()
    expect(page.locator("#live")).to_have_text("Live")
    page.evaluate("window.isSame = true")
    started = event("live", vms=["live-0"], EventStatus="Started", NotBefore="")
    console.send(vm.change("started", started, previous=seen))
    expect(page.locator("#part-head")).to_contain_text("Started")
    expect(page.locator("details[open] > summary")).to_contain_text("scheduledevent.scheduled")
    assert page.evaluate("document.activeElement.textContent") == "Download as JSONL"
    assert page.evaluate("window.isSame")


def test_an_update_keeps_what_did_not_change(page: Page, console: RunningConsole) -> None:
    page.goto("/")
    page.evaluate("document.querySelector('.what a').isSame = true")
    page.evaluate("document.querySelector('.what a').focus()")
    console.send(FleetVm("another-0", group="another").heartbeat())
    reported = re.findall(r"\d+ VMs have reported", console.page("/"))
    expect(page.locator("#part-summary")).to_contain_text(reported[0])
    assert page.evaluate("document.activeElement.isSame")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/?group={0}",
        "/?wave={1}",
        "/?wave={2}",
        "/fleet",
        "/fleet?view=table&group={0}",
        "/history",
        "/event/{1}",
    ],
)
def test_an_open_page_becomes_what_a_fresh_one_is(page: Page, console: RunningConsole, path: str) -> None:
    group = f"open-{event_id(path)[:4]}"
    vms = [FleetVm(f"{group}-{number}", group=group) for number in range(4)]
    ones = [event(vm.name, vms=[vm.name], minutes=30 + at) for at, vm in enumerate(vms)]
    console.send(*(vm.change("scheduled", one) for vm, one in zip(vms[:3], ones, strict=False)))
    content = "document.title + document.querySelector('main').outerHTML"
    fresh = page.context.new_page()
    for one in (page, fresh):
        one.clock.set_fixed_time(NOW)
        one.goto(path.format(group, *(seen.event_id.lower() for seen in (ones[0], ones[2]))))
    before = page.evaluate(content)
    assert before == fresh.evaluate(content)
    started = event(ones[0].resources[0], vms=ones[0].resources, EventStatus="Started", NotBefore="")
    console.send(
        vms[0].change("started", started, previous=ones[0]),
        vms[1].change("canceled", ones[1], previous=ones[1]),
        *(vms[2].prepared(ones[2]), vms[2].heartbeat(backlog=3)),
        vms[3].change("scheduled", ones[3]),
        vms[0].receipt(ones[0]),
    )
    fresh.reload()
    after = fresh.evaluate(content)
    assert after != before
    page.wait_for_function(f"after => {content} === after", arg=after)


def test_the_page_of_an_event_that_has_not_arrived_shows_it_when_it_comes(
    page: Page, console: RunningConsole
) -> None:
    page.goto(page_of("from a chat"))
    expect(page.locator("main")).to_contain_text("this page shows it as soon as it arrives")
    expect(page.locator("#live")).to_have_text("Live")
    console.send(FleetVm("chat-0", "chat").change("scheduled", event("from a chat", vms=["chat-0"])))
    expect(page.locator("h1")).to_contain_text("chat-0")
    expect(page.locator("#part-story")).to_contain_text("Announced")


def test_a_page_is_fetched_once_for_a_message_that_is_older_than_the_page(
    page: Page, console: RunningConsole
) -> None:
    page.clock.install()
    page.add_init_script(OTHER_STREAM)
    page.goto("/history")
    fetches = fetches_of(page)
    with page.expect_request_finished(lambda one: one.resource_type == "fetch"):
        page.evaluate("streams[0].say('0')")
    page.clock.run_for(10_000)
    assert fetches == [f"{console.url}/history"]


def fetches_of(page: Page) -> list[str]:
    """Return the addresses that the page's script fetches from now on."""
    found: list[str] = []
    page.on("request", lambda one: found.append(one.url) if one.resource_type == "fetch" else None)
    return found


# --- what a page says while it cannot follow the store ---


def test_a_page_is_not_live_while_the_console_is_away_and_live_again_without_a_reload(
    browser: Browser, tmp_path: Path
) -> None:
    address = free_address()
    with opened(browser, f"http://{address}") as page:
        with console_at(tmp_path, listen=address):
            page.goto("/")
            expect(page.locator("#live")).to_have_text("Live")
            page.evaluate("window.isSame = true")
        expect(page.locator("#live")).to_have_text(starting("Not live"))
        expect(page.locator("#age")).to_have_text(starting("The page is "))
        expect(page).to_have_title(starting("Not live: "))
        assert page.evaluate("getComputedStyle(document.querySelector('header')).position") == "sticky"
        assert faults_in_every_look(page) == []
        with console_at(tmp_path, listen=address) as again:
            again.send(FleetVm("back-0").heartbeat())
            page.wait_for_event("response", lambda one: one.url.endswith("/live"))
            expect(page.locator("#live")).to_have_text("Live")
            expect(page.locator("main")).to_contain_text("1 VM has reported")
            expect(page.locator("#age")).to_be_empty()
            assert page.evaluate("window.isSame")


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
    before_the_fetch_times_out = 5000
    expect(page.locator("#live")).to_have_text(starting("Not live"), timeout=before_the_fetch_times_out)


def test_a_page_retries_less_and_less_often(page: Page) -> None:
    page.clock.install()
    page.add_init_script(OTHER_STREAM)
    page.goto("/")
    tries = fetches_of(page)
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
    console.send(FleetVm(f"{stream}-0", group="polled").heartbeat())
    page.clock.fast_forward("00:11")
    expect(page.locator("main")).to_contain_text(f"{stream}-0")
    expect(page.locator("#live")).to_have_text("Updated every 10 s")


@pytest.mark.parametrize(
    ("status", "headers"), [(401, {}), (403, {}), (302, {"location": "/oauth2/sign_in"})]
)
def test_an_expired_session_is_reported_instead_of_a_page_that_stands_still(
    page: Page, status: int, headers: dict[str, str]
) -> None:
    page.clock.install()
    page.add_init_script(OTHER_STREAM)
    page.goto("/")
    page.route("**/", lambda route: route.fulfill(status=status, headers=headers))
    page.evaluate("streams[0].say('another')")
    expect(page.locator("#live")).to_contain_text("session has expired")
    page.unroute("**/")
    page.clock.fast_forward("00:05:01")
    expect(page.locator("#live")).not_to_contain_text("session has expired")


# --- forms ---


@pytest.fixture(scope="module")
def bus() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(bus_config()) as started:
        yield started
        assert started.failures == ()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, bus: ServiceBusLab) -> Iterator[RunningConsole]:
    """Return a console behind a proxy, with approvals."""
    address, folder = free_address(), tmp_path_factory.mktemp("guarded")
    settings = {"listen": address, "public_url": f"http://{address}"}
    with approval_console(folder, bus.connection_string, **settings) as running:
        running.send(*fleet())
        form = FormOf(running, page_of("freeze"), "dismiss")
        assert form.post({"Origin": running.url}, reason="known", hours="24").status_code == 303
        yield running


@pytest.fixture
def ana(browser: Browser, guarded: RunningConsole) -> Iterator[Page]:
    """Return a page of somebody who may approve."""
    with opened(browser, guarded.url, extra_http_headers=ANA) as one:
        yield one


def approve(page: Page, confirm: str) -> None:
    page.get_by_label("Reason").fill("drained")
    page.get_by_label("The last 4 characters").fill(confirm)
    page.get_by_role("button", name="Approve").click()


def test_an_approval_is_refused_without_the_eventid_or_the_session_and_sent_with_them_and_its_receipt_appears(
    ana: Page, guarded: RunningConsole, bus: ServiceBusLab
) -> None:
    end = event_id("approve")[-4:]
    ana.goto(page_of("approve"))
    expect(ana.locator(".approve")).to_contain_text("all 2 VMs")
    assert axe_faults(ana) == []
    approve(ana, "0000")
    expect(ana.locator("main")).to_contain_text("not the last 4 characters")
    ana.goto(page_of("approve"))
    ana.context.clear_cookies()
    approve(ana, end)
    expect(ana.locator("main")).to_contain_text("session has expired")
    assert bus.entity(QUEUE).messages == ()
    ana.goto(page_of("approve"))
    approve(ana, end)
    expect(ana.locator("#part-sent")).to_contain_text("Waiting for its receipt")
    command_id = ana.url.partition("sent=")[2]
    guarded.send(FleetVm("web-0").receipt(APPROVABLE, command_id=command_id))
    expect(ana.locator("#part-sent")).to_contain_text("has arrived")
    expect(ana.locator(".story")).to_contain_text("Approval accepted")


def test_a_form_keeps_what_was_typed_until_the_event_changes(ana: Page, guarded: RunningConsole) -> None:
    vm = FleetVm("typed-0")
    seen, more = (event("typed", vms=vms) for vms in (["typed-0"], ["typed-0", "typed-1"]))
    guarded.send(vm.change("scheduled", seen))
    ana.goto(page_of("typed"))
    reason, confirm = ana.get_by_label("Reason"), ana.get_by_label("The last 4 characters")
    reason.fill("drained")
    confirm.fill("1234")
    guarded.send(vm.receipt(seen, outcome="rejected", reason="denied"))
    expect(ana.locator(".story")).to_contain_text("Approval rejected")
    expect(reason).to_have_value("drained")
    guarded.send(vm.change("updated", more, NOW + timedelta(seconds=1), previous=seen))
    expect(ana.locator(".approve")).to_contain_text("all 2 VMs")
    expect(confirm).to_have_value("")
    started = event("typed", vms=more.resources, EventStatus="Started", NotBefore="")
    guarded.send(vm.change("started", started, NOW + timedelta(seconds=2), previous=more))
    expect(ana.locator("#part-head")).to_contain_text("Started")
    expect(ana.get_by_role("button", name="Approve")).to_have_count(0)


@pytest.mark.parametrize("with_script", [True, False])
@pytest.mark.parametrize("what", ["event", "wave", "VMs"])
def test_what_is_put_away_is_refused_in_another_page_and_brought_back_once(
    browser: Browser, guarded: RunningConsole, what: str, *, with_script: bool
) -> None:
    name = f"{what}-{with_script}".lower()
    vms = [FleetVm(f"{name}-{number}", group=name) for number in range(1 if what == "event" else 3)]
    if what == "VMs":
        guarded.send(*(vm.heartbeat(NOW - timedelta(hours=3)) for vm in vms))
        guarded.advance(1)
    else:
        guarded.send(*(vm.change("scheduled", event(vm.name, vms=[vm.name], minutes=90)) for vm in vms))
    wave = f"/?group={name}&wave={event_id(f'{name}-0').lower()}"
    path = {"event": page_of(f"{name}-0"), "wave": wave, "VMs": f"/fleet?group={name}"}[what]
    with opened(browser, guarded.url, extra_http_headers=ANA, java_script_enabled=with_script) as page:
        other = page.context.new_page()
        for one in (other, page):
            one.goto(path)
            one.locator("main summary", has_text=re.compile("away|Forget")).click()
            one.get_by_label("Comment").fill("known")
            if what != "event":
                one.get_by_label("Their number").fill("3")
            if what != "VMs":
                one.get_by_label("For at most").select_option(label="4 h")
        page.locator("details[open] button").click()
        if what != "VMs":
            page.goto("/")
            expect(page.locator("h1")).to_contain_text("put away, still to come")
        refuse(other, "details[open] button", "" if with_script else "Nothing was put away")
        for one in (other, page):
            one.goto("/away")
            expect(one.locator("tr", has_text=name)).to_contain_text("known")
        page.locator("tr", has_text=name).get_by_role("button", name="Undo").click()
        expect(page.locator("tr", has_text=name)).to_have_count(0)
        refuse(other, f"tr:has-text('{name}') button", "" if with_script else "It is back already")
        page.goto("/fleet" if what == "VMs" else "/")
        expect(page.locator("main")).to_contain_text(name)
        if what == "event":
            page.goto(path)
            expect(page.locator(".story")).to_contain_text("Brought back")


def refuse(page: Page, button: str, refusal: str) -> None:
    """Expect a form that another page was faster with to be refused, or, with scripts, to be gone."""
    if refusal:
        page.locator(button).click()
        expect(page.locator("main")).to_contain_text(refusal)
    expect(page.locator(button)).to_have_count(0)


@pytest.mark.parametrize("path", [page_of("reboot"), WAVE, "/fleet?status=silent", "/away"])
def test_a_viewer_has_no_form_that_puts_away_or_brings_back(
    browser: Browser, guarded: RunningConsole, path: str
) -> None:
    for group in ("ops", "viewers"):
        headers = {**ANA, "X-Forwarded-Groups": group}
        with opened(browser, guarded.url, extra_http_headers=headers) as page:
            page.goto(path)
            expect(page.locator("h1")).to_be_visible()
            assert (page.locator("main form[method=post]").count() > 0) == (group == "ops")


@pytest.mark.parametrize("path", ["/", "/fleet", "/away", page_of("approve")])
def test_a_printed_page_says_when_it_was_right_and_has_no_forms(ana: Page, path: str) -> None:
    ana.goto(path)
    expect(ana.locator("#live")).to_have_text("Live")
    ana.evaluate("dispatchEvent(new Event('beforeprint'))")
    expect(ana.locator("#live")).to_have_text(starting("As of"))
    ana.emulate_media(media="print")
    for place in ("nav", ".filters", ".ask", "footer", "main button"):
        assert not any(one.is_visible() for one in ana.locator(place).all()), place


@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_moves_while_times_count_and_heartbeats_arrive(
    page: Page, console: RunningConsole, width: int
) -> None:
    page.add_init_script(
        "window.moved = 0; new PerformanceObserver((list) => {"
        " for (const one of list.getEntries()) moved += one.value; })"
        ".observe({ type: 'layout-shift', buffered: true });"
    )
    page.set_viewport_size({"width": width, "height": 900})
    page.goto("/")
    expect(page.locator("#live")).to_have_text("Live")
    countdown = page.locator("td.when time[data-relative]").first
    for number in range(3):
        before = countdown.inner_text()
        console.send(FleetVm("web-0").heartbeat(NOW + timedelta(seconds=number)))
        expect(countdown).not_to_have_text(before)
    assert page.evaluate("moved") < 0.01
