"""What a person who is on call asks the console, in a browser, of a fleet with more than forty events."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.browser import chromium, opened
from tests.support.bus import bus_config
from tests.support.console import (
    ANA,
    FleetVm,
    RunningConsole,
    approval_console,
    event,
    event_id,
    maintenance,
    running_console,
)
from tests.support.servicebus import ServiceBusLab

NOW = datetime.now(UTC)
OTHER = "2" * 36
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
    """Return a console with 43 events, two subscriptions, and VMs that nobody watches."""
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
        one.goto("/")
        yield one


@pytest.fixture(scope="module")
def on_call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return such a console with approvals, two events that take turns, and one that ended weeks ago."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folder, settings = (
        tmp_path_factory.mktemp("on-call"),
        {"listen": address, "public_url": f"http://{address}"},
    )
    with (
        ServiceBusLab(bus_config()) as bus,
        approval_console(folder, bus.connection_string, **settings) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys.modules[__name__], "NOW", datetime.now(UTC))  # as `this_moment`
        mine, old = FleetVm("pay-0", group="payments", epoch="2", tags={"team": "Payments"}), FleetVm("old-0")
        first, second, ended = (
            event("first", at=NOW, vms=["pay-0", "pay-1"], minutes=20),
            event("mine", at=NOW, vms=["pay-0", "pay-1"], minutes=30, EventSource="User"),
            event("ended", at=ago(480), vms=["old-0"], type="Redeploy"),
        )
        running.send(
            *(
                old.change("scheduled", ended, ago(480)),
                old.change("completed", ended, ago(479), previous=ended),
            ),
            *(old.heartbeat(NOW), *fleet()),
            *(mine.change("scheduled", first, NOW), mine.prepared(first, NOW), mine.prepared(second, NOW)),
        )
        yield running


def ago(hours: float) -> datetime:
    return NOW - timedelta(hours=hours)


def fleet() -> list[bytes]:
    """Return what the VMs publish: 40 events within three hours, one that never ended, one overdue, one gone."""
    nodes = [FleetVm(f"node-{n}", group=f"batch-{n % 4}", scale_set=f"s{n}") for n in range(40)]  # no waves
    mine = FleetVm("pay-0", group="payments", tags={"team": "Payments"})
    silent = FleetVm("pay-1", group="payments", tags={"team": "Payments"})
    there = FleetVm("pay-0", group="payments", subscription=OTHER)
    lost, started = (
        FleetVm("lost-0"),
        event("lost", at=ago(25), vms=["lost-0"], type="Redeploy", EventStatus="Started"),
    )
    late = FleetVm("late-0")
    return [
        *(
            vm.change(
                "scheduled",
                event(f"n{at}", at=NOW, vms=[vm.name], minutes=10 + at if at < 14 else 99 + at),
                NOW,
            )
            for at, vm in enumerate(nodes)
        ),
        *(mine.heartbeat(NOW), silent.heartbeat(ago(2)), there.heartbeat(NOW)),
        mine.change(
            "scheduled", event("mine", at=NOW, vms=["pay-0", "pay-1"], minutes=30, EventSource="User"), NOW
        ),
        *(lost.heartbeat(ago(25)), lost.change("started", started, ago(25))),
        late.change("scheduled", event("late", at=ago(6), vms=["late-0"], minutes=60), ago(6)),
        late.heartbeat(NOW),
    ]


def tile(page: Page, text: str) -> Locator:
    return page.locator(".tile", has_text=text)


def test_the_headline_names_what_is_urgent_and_each_tile_links_to_what_it_counts(page: Page) -> None:
    expect(page.locator("h1")).to_have_text(
        "1 in progress, 15 within the hour (16 VMs), 1 overdue; 2 of 45 VMs are not watched"
    )
    for text, number in (("due within 1 h", 15), ("overdue", 1), ("due later", 26), ("in progress", 1)):
        page.goto("/")
        expect(tile(page, text).locator("strong")).to_have_text(str(number))
        tile(page, text).click()
        rows = page.get_by_role("table", name="Open events").locator("tbody tr")
        expect(rows).to_have_count(number)
        expect(page.locator(".chips")).to_contain_text("Due")
    page.locator(".chips a").first.click()
    expect(page.locator(".chips")).to_have_count(0)


def test_overdue_is_first_and_an_event_that_never_ended_stays(page: Page) -> None:
    rows = page.get_by_role("table", name="Open events").locator("tbody tr")
    expect(rows.nth(0)).to_contain_text(re.compile("overdue due 5 h .*ago"))
    expect(rows.nth(1)).to_contain_text("lost-0")
    rows.nth(1).get_by_role("link").click()
    expect(page.locator(".story")).to_contain_text(
        re.compile("Started 1 d 1 h .*, no end reported, the VM is silent")
    )


def test_what_is_due_stands_above_what_is_not_watched(page: Page) -> None:
    expect(tile(page, "not watched")).to_contain_text("of which 2 have an event")
    expect(tile(page, "known VMs")).to_contain_text("44 with events")
    listed, table = page.locator(".unwatched"), page.get_by_role("table", name="Open events")
    expect(listed).to_contain_text("pay-1")
    expect(listed).to_contain_text("silent 2 h")
    above, below = table.bounding_box(), listed.bounding_box()
    assert above
    assert below
    assert above["y"] < below["y"]
    assert above["y"] < page.viewport_size["height"]  # type: ignore[index] # it has one
    tile(page, "not watched").click()
    expect(page.locator(".cell")).to_have_count(2)


def test_two_subscriptions_with_groups_of_the_same_name_are_told_apart(page: Page) -> None:
    page.goto("/fleet?view=table&group=payments")
    expect(page.locator("tr", has_text=f"({OTHER[:8]})")).to_have_count(1)
    expect(page.locator("tr", has_text="(8d10da13)")).to_have_count(2)
    page.get_by_label("Subscription").select_option(OTHER)
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tbody tr")).to_have_count(1)


def test_my_vms_are_an_address(page: Page) -> None:
    page.get_by_label("Tag of a VM, name=value").fill("Team=payments")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("h1")).to_have_text("1 within the hour (2 VMs); 1 of 2 VMs is not watched")
    expect(tile(page, "known VMs").locator("strong")).to_have_text("2")
    page.goto("/")
    for group in ("batch-0", "batch-1"):
        page.get_by_label("Group", exact=True).select_option(group)
        page.get_by_role("button", name="Show").click()
        expect(page.locator(".chips")).to_contain_text(group)
    assert page.url.endswith("group=batch-0&group=batch-1") or "group=batch-0" in page.url
    expect(page.get_by_role("table", name="Open events").locator("tbody tr")).to_have_count(20)


def test_my_vms_stay_mine_on_every_page(page: Page) -> None:
    page.goto("/?tag=team%3DPayments")
    expect(page.locator(".wide", has_text="pay-0, pay-1")).to_contain_text("2 VMs")
    pages = page.get_by_role("navigation", name="Pages")
    for name in ("Fleet", "History", "Now"):
        pages.get_by_role("link", name=name).click()
        expect(page.locator(".chips")).to_contain_text("team=Payments")
    page.get_by_role("table", name="Open events").get_by_role("link", name="pay-0").click()
    expect(page.locator(".story")).to_be_visible()
    pages.get_by_role("link", name="Fleet").click()
    expect(page.locator(".cell")).to_have_count(2)
    page.locator(".legend").get_by_role("link", name="scheduled").click()
    expect(page.locator(".chips")).to_contain_text("team=Payments")


def test_the_page_of_an_event_names_and_counts_my_vms_first(browser: Browser, tmp_path: Path) -> None:
    with running_console(tmp_path) as running, opened(browser, running.url) as page:
        mine = FleetVm("zeta-0", tags={"team": "zeta"})
        shared = event("E", at=NOW, vms=[*(f"app-{number}" for number in range(19)), "zeta-0"])
        running.send(mine.heartbeat(NOW), mine.change("scheduled", shared, NOW))
        page.goto("/?tag=team%3Dzeta")
        page.get_by_role("table", name="Open events").get_by_role("link", name="zeta-0").click()
        expect(page.locator("h1")).to_contain_text("zeta-0, app-0")
        expect(page.locator("#part-head")).to_contain_text("1 of 20 VMs")
        expect(page.locator("#part-seen")).to_contain_text("1 of them is of your filter")
        expect(page.locator("#part-seen tbody tr").first).to_contain_text("zeta-0")


def test_an_expected_vm_that_never_reported_is_not_watched(browser: Browser, tmp_path: Path) -> None:
    with running_console(tmp_path) as running, opened(browser, running.url) as page:
        running.send(FleetVm("web-0").heartbeat(NOW))
        place = "/subscriptions/s/resourceGroups/shop/providers/Microsoft.Compute/virtualMachines"
        vms = [{"Name": name, "ResourceId": f"{place}/{name}"} for name in ("web-1", "web-2")]
        assert page.request.put("/api/v1/expected", data=vms).status == 204
        page.goto("/")
        expect(page.locator("h1")).to_have_text("Nothing is scheduled; 2 of 3 VMs are not watched")
        tile(page, "not watched").click()
        expect(page.locator(".cell")).to_have_text([re.compile("web-1.*never heard"), re.compile("web-2")])


def test_a_filter_that_matches_no_vm_says_so_with_the_nearest_value(page: Page) -> None:
    page.goto("/?tag=team%3DPayment")
    expect(page.locator("h1")).to_have_text("No VM matches the filter")
    expect(page.locator("main")).not_to_contain_text("No open event")
    page.locator("#part-unmatched").get_by_role("link", name="team=payments").click()
    expect(page.locator("h1")).to_contain_text("1 within the hour (2 VMs)")
    page.goto("/fleet?group=paymnts")
    page.locator("#part-unmatched").get_by_role("link", name="payments").click()
    expect(page.locator(".cell")).to_have_count(3)


def test_above_forty_events_the_timeline_shows_the_first_ones_and_opens_the_others(page: Page) -> None:
    bars = page.locator("#bars")
    expect(page.locator(".timeline > .line:visible")).to_have_count(6)
    bars.locator("summary").click()
    expect(bars.locator(".line").first).to_be_visible()
    expect(bars.locator(".line .name").last).to_contain_text("node-")


@pytest.mark.parametrize("with_script", [True, False])
def test_300_vms_under_maintenance_are_on_one_screen_and_each_is_two_keys_away(
    browser: Browser, tmp_path: Path, *, with_script: bool
) -> None:
    more = {"viewport": {"width": 1440, "height": 900}, "forced_colors": "active"}
    with (
        running_console(tmp_path) as running,
        opened(browser, running.url, java_script_enabled=with_script, **more) as page,
    ):
        running.send(*maintenance(NOW))
        page.goto("/")
        table = page.get_by_role("table", name="Open events")
        expect(table.locator("tbody tr")).to_have_count(3)
        box = table.bounding_box()
        assert box
        assert box["y"] + box["height"] <= 900
        wave = table.get_by_role(
            "link", name=re.compile("100 Reboots of shop-web, 100 VMs, until .*; 60 prepared")
        )
        expect(page.locator(".timeline .bar.wave")).to_have_count(3)
        column = page.locator(".timeline .bar:not(.wave)").first
        assert column.evaluate("one => getComputedStyle(one).opacity") == "1"
        wave.focus()
        page.keyboard.press("Enter")
        expect(table.locator("tbody tr")).to_have_count(100)
        expect(table.get_by_role("link", name="shop-web-0", exact=True)).to_be_visible()
        expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
        page.get_by_role("link", name="Close the wave").focus()
        page.keyboard.press("Enter")
        expect(table.locator("tbody tr")).to_have_count(3)


def test_a_standalone_vm_is_seen_by_all_that_its_event_names(page: Page) -> None:
    page.goto("/?vm=node-3")
    expect(page.locator("tr", has_text="node-3 ").first).to_contain_text("1 of 1")
    page.goto(f"/event/{event_id('mine').lower()}")
    expect(page.locator("#part-seen")).to_contain_text("Seen by 1 of 2 VMs that it names")
    expect(page.locator("#part-raw")).to_contain_text("1 CloudEvent,")


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_the_first_event_that_is_due_is_on_the_first_screen(
    browser: Browser, console: RunningConsole, size: tuple[int, int]
) -> None:
    with opened(browser, console.url, viewport={"width": size[0], "height": size[1]}) as page:
        for path in ("/", "/?tag=team%3DPayments"):
            page.goto(path)
            row = page.get_by_role("table", name="Open events").locator("tbody tr").first.bounding_box()
            assert row
            assert row["y"] + min(row["height"], 60) <= size[1], path


MINE = f"/event/{event_id('mine').lower()}"
QUESTIONS: dict[str, tuple[str, dict[str, str | re.Pattern[str]]]] = {
    "what comes in the next hour?": (
        "/",
        {"h1": "17 within the hour", "td.lead >> nth=2": re.compile(r"in \d+ min")},
    ),
    "which are mine?": (
        "/?tag=team%3DPayments",
        {"h1": "2 within the hour (2 VMs)", "td.wide >> nth=0": "pay-0, pay-1"},
    ),
    "who caused it, and may I approve?": (
        MINE,
        {"#part-head": "caused by a user", ".approve button": "Approve the reboot"},
    ),
    "what is not watched?": ("/", {".unwatched": "pay-1", ".tile:has-text('not watched')": "3"}),
    "what was there last month?": (
        "/history",
        {"table[aria-labelledby=ends]": "Redeploy", "table[aria-labelledby=events]": "old-0"},
    ),
    "what is overdue?": ("/?due=overdue", {"h1": "1 overdue", "td.lead": "overdue"}),
    "who is prepared?": (
        MINE,
        {
            "#part-head": "1 of 2",
            "[data-label=Preparation] >> nth=0": "not prepared yet, place 2",
            ".approve": "1 of 2 VMs would be released unprepared: pay-1.",
        },
    ),
    "will my turn come in time?": (
        MINE,
        {"dl.facts": "place 2, after 1 event on 2 VMs", "h1 .num": re.compile(r"in \d+ min")},
    ),
}


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["desktop", "phone"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_each_question_of_a_person_on_call_is_answered_within_the_width_of_the_screen(
    browser: Browser, on_call: RunningConsole, question: str, size: tuple[int, int]
) -> None:
    path, answers = QUESTIONS[question]
    screen = {"width": size[0], "height": size[1]}
    with opened(browser, on_call.url, viewport=screen, extra_http_headers=ANA) as page:
        page.goto(path)
        for place, text in answers.items():
            expect(page.locator(place)).to_contain_text(text)
            box = page.locator(place).bounding_box()
            assert box
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= size[0], place


@pytest.mark.parametrize("width", [1280, 390])
def test_names_in_the_timeline_are_not_cut(browser: Browser, console: RunningConsole, width: int) -> None:
    names = [f"application-server-of-the-shop-{number}" for number in range(2)]
    console.send(FleetVm(names[0]).change("scheduled", event("long", at=NOW, vms=names, minutes=45), NOW))
    with opened(browser, console.url, viewport={"width": width, "height": 844}) as page:
        page.goto("/?vm=application-server")
        shown = page.locator(".timeline .name")
        expect(shown).to_contain_text(", ".join(names))
        assert shown.evaluate(
            "one => one.scrollWidth <= one.clientWidth && one.scrollHeight <= one.clientHeight"
        )
        assert shown.evaluate("one => getComputedStyle(one).textOverflow") == "clip"


def test_headline_and_title_say_that_the_page_is_blind(browser: Browser, tmp_path: Path) -> None:
    with running_console(tmp_path) as running, opened(browser, running.url) as page:
        running.send(FleetVm("web-0").heartbeat(NOW), FleetVm("web-1").heartbeat(ago(2)))
        text = "Nothing is scheduled; 1 of 2 VMs is not watched"
        page.goto("/")
        expect(page.locator("h1")).to_have_text(text)
        expect(page).to_have_title(f"{text} - imds-bridge")
        page.get_by_role("link", name="Fleet").click()
        expect(page).to_have_title("2 VMs; 1 of 2 VMs is not watched - imds-bridge")
        running.send(FleetVm("web-1").heartbeat(NOW))
        page.get_by_role("link", name="Now").click()
        expect(page).to_have_title("Nothing is scheduled - imds-bridge")


def test_a_vm_that_was_deleted_is_probably_gone_and_one_that_was_stopped_is_counted_apart(
    browser: Browser, tmp_path: Path
) -> None:
    with running_console(tmp_path) as running, opened(browser, running.url) as page:
        spot, old = FleetVm("spot-0"), FleetVm("spot-1")
        running.send(
            *(FleetVm("web-0").heartbeat(NOW), FleetVm("web-1").heartbeat(NOW, reason="Stopping")),
            spot.change(
                "scheduled", event("gone", at=ago(2), vms=["spot-0"], type="Preempt", minutes=1), ago(2)
            ),
            old.change(
                "scheduled", event("old", at=ago(25), vms=["spot-1"], type="Preempt", minutes=1), ago(25)
            ),
        )
        page.goto("/")
        expect(page.locator("h1")).to_have_text("Nothing is scheduled")
        expect(tile(page, "not watched").locator("strong")).to_have_text("0")
        expect(tile(page, "overdue").locator("strong")).to_have_text("0")
        rows = page.get_by_role("table", name="Open events").locator("tbody tr")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("probably gone")
        page.get_by_role("link", name="1 stopped").click()
        expect(page.locator(".cell")).to_contain_text("web-1")
        page.goto("/")
        page.get_by_role("link", name="1 probably gone").click()
        expect(page.locator(".cell")).to_contain_text("spot-0")
        page.get_by_role("link", name="Fleet").click()
        expect(page.locator(".cell")).to_have_count(3)


def test_now_and_event_agree_on_who_has_seen_an_event(browser: Browser, tmp_path: Path) -> None:
    with running_console(tmp_path) as running, opened(browser, running.url) as page:
        nodes = [FleetVm(f"node-{number}", scale_set="nodes") for number in range(10)]
        reboot = event("reboot", at=NOW, vms=[f"node-{number}" for number in (9, 10, 11, 12)])
        running.send(*(vm.change("scheduled", reboot, NOW) for vm in nodes))
        page.goto("/")
        row = page.get_by_role("table", name="Open events").locator("tbody tr")
        expect(row).to_contain_text("1 of 4 and 9")
        expect(tile(page, "not watched").locator("strong")).to_have_text("3")
        row.get_by_role("link").click()
        expect(page.locator("#part-seen")).to_contain_text("Seen by 1 of 4 VMs that it names")
        expect(page.locator("#part-seen")).to_contain_text("Also seen by 9 of 9 other VMs")
        expect(page.locator("#part-seen")).to_contain_text("up to an hour later")


def test_a_notice_that_a_forwarder_saw_at_its_start_is_not_azures(browser: Browser, tmp_path: Path) -> None:
    with running_console(tmp_path) as running, opened(browser, running.url) as page:
        new, old = FleetVm("new-0"), FleetVm("old-0")
        running.send(
            *(new.heartbeat(NOW, reason="Started"), old.heartbeat(ago(0.5))),
            *(
                vm.change("scheduled", event(vm.name, at=NOW, vms=[vm.name], minutes=5), NOW)
                for vm in (new, old)
            ),
        )
        page.goto("/history")
        expect(page.locator(".notices")).to_contain_text("1 of 1 had less than Microsoft's minimum")
        page.get_by_role("link", name="new-0").click()
        expect(page.locator(".facts")).to_contain_text("5 min or more: the VM started to watch only then")
        page.goto(f"/event/{event_id('old-0').lower()}")
        expect(page.locator(".facts")).to_contain_text("5 min notice, less than Microsoft's minimum")


def test_names_have_a_line_of_their_own_on_a_phone(browser: Browser, console: RunningConsole) -> None:
    with opened(browser, console.url, viewport={"width": 360, "height": 740}) as page:
        page.goto("/?vm=node-10")
        cell, row = (
            page.locator("td.wide").first.bounding_box(),
            page.locator("tbody tr").first.bounding_box(),
        )
        assert cell
        assert row
        assert cell["width"] > 0.9 * row["width"]


def test_the_cookie_of_another_application_does_not_keep_anybody_from_approving(
    tmp_path: Path, bus: ServiceBusLab
) -> None:
    with approval_console(tmp_path, bus.connection_string) as running:
        host = running.url.removeprefix("http://")
        cookies = ("other=a b; list=[1]; name=\u00e9").encode()
        found = running.get(f"/event/{event_id('approve').lower()}", {**ANA, "Cookie": cookies})  # type: ignore[dict-item] # bytes
        assert "1 of 2 VMs" in found.text
        own = found.headers["Set-Cookie"].partition(";")[0].encode()
        both = {**ANA, "Cookie": cookies + b"; " + own, "Host": host}
        again = running.get(f"/event/{event_id('approve').lower()}", both)  # type: ignore[arg-type] # bytes
    assert "Set-Cookie" not in again.headers
