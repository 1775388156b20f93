"""What a person who is on call asks the console, in a browser, of a fleet with more than forty events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
from playwright.sync_api import Browser, FloatRect, Locator, Page, ViewportSize, expect

from tests.support.browser import opened
from tests.support.bus import bus_config
from tests.support.console import (
    ANA,
    NOW,
    FleetVm,
    RunningConsole,
    approval_console,
    console_at,
    event,
    event_id,
    maintenance,
)
from tests.support.ports import free_address
from tests.support.servicebus import ServiceBusLab

DESKTOP: ViewportSize = {"width": 1280, "height": 800}
LARGE: ViewportSize = {"width": 1440, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
MINE = f"/event/{event_id('mine').lower()}"
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # Playwright's driver leaves its pipes open


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console with 43 events, two subscriptions, and VMs that nobody watches."""
    with console_at(tmp_path_factory.mktemp("console")) as running:
        running.send(*fleet())
        yield running


@pytest.fixture(scope="module")
def on_call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console with approvals, 300 VMs under maintenance, trouble, turns, and an event of weeks ago."""
    address, folder = free_address(), tmp_path_factory.mktemp("on-call")
    settings = {"listen": address, "public_url": f"http://{address}"}
    mine, old = FleetVm("pay-0", group="payments", epoch="2", tags={"team": "Payments"}), FleetVm("old-0")
    first, second = (
        event(name, vms=["pay-0", "pay-1"], minutes=minutes, EventSource=source)
        for name, minutes, source in (("first", 20, "Platform"), ("mine", 30, "User"))
    )
    ended = event("ended", at=ago(480), vms=["old-0"], type="Redeploy")
    with (
        ServiceBusLab(bus_config()) as bus,
        approval_console(folder, bus.connection_string, **settings) as running,
    ):
        running.send(
            old.change("scheduled", ended, ago(480)),
            old.change("completed", ended, ago(479), previous=ended),
            old.heartbeat(),
            *trouble(),
            *maintenance(),
            mine.change("scheduled", first),
            mine.prepared(first),
            mine.prepared(second),
        )
        yield running


def ago(hours: float) -> datetime:
    return NOW - timedelta(hours=hours)


def fleet() -> list[bytes]:
    """Return what the VMs publish: 40 events within three hours, and trouble."""
    nodes = [FleetVm(f"node-{n}", group=f"batch-{n % 4}", scale_set=f"s{n}") for n in range(40)]  # no waves
    minutes = [10 + at if at < 14 else 99 + at for at in range(40)]
    changes = [
        vm.change("scheduled", event(f"n{at}", vms=[vm.name], minutes=minutes[at]))
        for at, vm in enumerate(nodes)
    ]
    return changes + trouble()


def trouble() -> list[bytes]:
    """Return what VMs publish of an event by a user, one that never ended and one overdue; two are silent."""
    mine, silent = (FleetVm(f"pay-{n}", group="payments", tags={"team": "Payments"}) for n in (0, 1))
    there = FleetVm("pay-0", group="payments", subscription="2" * 36)
    lost, late = FleetVm("lost-0"), FleetVm("late-0")
    started = event("lost", at=ago(25), vms=["lost-0"], type="Redeploy", EventStatus="Started")
    return [
        *(mine.heartbeat(), silent.heartbeat(ago(2)), there.heartbeat()),
        mine.change("scheduled", event("mine", vms=["pay-0", "pay-1"], minutes=30, EventSource="User")),
        *(lost.heartbeat(ago(25)), lost.change("started", started, ago(25))),
        late.change("scheduled", event("late", at=ago(6), vms=["late-0"], minutes=60), ago(6)),
        late.heartbeat(),
    ]


def tile(page: Page, text: str) -> Locator:
    return page.locator(".tiles a", has_text=text)


def box_of(one: Locator) -> FloatRect:
    """Return where something is on the page, in pixels."""
    box = one.bounding_box()
    assert box, f"{one} is not shown"
    return box


def test_what_is_due_stands_above_what_is_not_watched(page: Page) -> None:
    page.set_viewport_size(DESKTOP)
    page.goto("/")
    expect(tile(page, "not watched")).to_contain_text("2 with an event")
    expect(tile(page, "with events")).to_contain_text("44 with events")
    listed, table = page.locator(".unwatched"), page.get_by_role("table", name="Open events")
    expect(listed).to_contain_text("pay-1")
    expect(listed).to_contain_text("silent 2 h")
    assert box_of(table)["y"] < min(box_of(listed)["y"], DESKTOP["height"])
    tile(page, "not watched").click()
    expect(page.locator(".cell")).to_have_count(2)


def test_my_vms_are_an_address(page: Page) -> None:
    page.goto("/")
    page.get_by_label("Tag of a VM, name=value").fill("Team=payments")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("h1")).to_have_text("1 within the hour; 1 VM not watched")
    expect(tile(page, "with events").locator("strong")).to_have_text("2")
    page.get_by_role("link", name="Show all").click()
    expect(page.locator(".chips")).to_have_count(0)
    for group in ("batch-0", "batch-1"):
        page.get_by_label("Group", exact=True).select_option(group)
        page.get_by_role("button", name="Show").click()
        expect(page.locator(".chips")).to_contain_text(group)
    assert "group=batch-0" in page.url
    expect(page.get_by_role("table", name="Open events").locator("tbody tr")).to_have_count(20)


@pytest.fixture(scope="module")
def in_maintenance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console of 300 VMs that reboot one after another."""
    with console_at(tmp_path_factory.mktemp("maintenance")) as running:
        running.send(*maintenance())
        yield running


@pytest.mark.parametrize("with_script", [True, False])
def test_300_vms_under_maintenance_are_on_one_screen_and_each_is_two_keys_away(
    browser: Browser, in_maintenance: RunningConsole, *, with_script: bool
) -> None:
    more = {"viewport": {"width": 1440, "height": 900}, "forced_colors": "active"}
    with opened(browser, in_maintenance.url, java_script_enabled=with_script, **more) as page:
        page.goto("/")
        table = page.get_by_role("table", name="Open events")
        expect(table.locator("tbody tr")).to_have_count(3)
        box = box_of(table)
        assert box["y"] + box["height"] <= 900
        row = table.get_by_role("row", name=re.compile("100 Reboots shop-web 100 VMs: .* 60 of 100 VMs"))
        expect(page.locator(".track .bar.wave")).to_have_count(3)
        column = page.locator(".track .bar:not(.wave)").first
        assert column.evaluate("one => getComputedStyle(one).opacity") == "1"
        row.get_by_role("link").focus()
        page.keyboard.press("Enter")
        opened_wave = page.get_by_role("table", name="Events of the wave")
        expect(opened_wave.locator("tbody tr")).to_have_count(100)
        expect(opened_wave.get_by_role("link", name="shop-web-0", exact=True)).to_be_visible()
        expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
        page.get_by_role("link", name="All open events").focus()
        page.keyboard.press("Enter")
        expect(table.locator("tbody tr")).to_have_count(3)


@pytest.mark.parametrize(("screen", "rows"), [(LARGE, 12), (PHONE, 6)], ids=["desktop", "phone"])
def test_the_first_screen_has_enough_rows_and_the_first_cells(
    page: Page, screen: ViewportSize, rows: int
) -> None:
    page.set_viewport_size(screen)
    page.goto("/")
    row = box_of(page.get_by_role("table", name="Open events").locator("tbody tr").nth(rows - 1))
    assert row["y"] + row["height"] <= screen["height"]
    page.goto("/fleet")
    assert box_of(page.locator(".cell").first)["y"] < 350


def test_a_printed_page_has_ten_lines(page: Page) -> None:
    page.set_viewport_size({"width": 703, "height": 1031})  # A4 without margins
    page.emulate_media(media="print")
    page.goto("/")
    row = box_of(page.get_by_role("table", name="Open events").locator("tbody tr").nth(9))
    assert row["y"] + row["height"] <= 1031


OF_MINE = "/?tag=team%3DPayments"
ENDS = "[aria-labelledby=ends] tr"
QUESTIONS: dict[str, tuple[str, dict[str, str | re.Pattern[str]]]] = {
    "what comes in the next hour?": (
        "/",
        {"h1": "243 within the hour", "tr:has-text('100 Reboots') .when >> nth=0": "next in 20 min"},
    ),
    "which are mine?": (
        OF_MINE,
        {"h1": "2 within the hour", ".what a >> nth=0": "pay-0 +1", ".when >> nth=1": "in 30 min"},
    ),
    "who caused it, may I approve, and what is released?": (
        MINE,
        {
            ".facts div:has-text('Caused by')": "a user",
            ".facts a": "you may approve",
            ".approve button": "Approve the reboot",
            ".approve p >> nth=0": "instead of waiting until 14:30, on all 2 VMs: pay-0, pay-1.",
        },
    ),
    "is any VM not watched?": ("/", {"h1": "3 VMs not watched", ".tiles a:has-text('not watched')": "3"}),
    "what is not watched?": (
        "/fleet?status=unwatched",
        {
            ".cell:has-text('pay-1')": "silent 2 h",
            ".cell:has-text('lost-0')": "silent 1 d 1 h",
            ".cell:has-text('web-1')": "never reported",
        },
    ),
    "what was there last month, and how much notice?": (
        "/history",
        {
            f"{ENDS}:has-text('Redeploy') td >> nth=0": "1",
            f"{ENDS}:has-text('Redeploy')": re.compile("0 of 2$"),
            f"{ENDS}:has-text('Reboot')": re.compile("0 of 304$"),
        },
    ),
    "what is overdue?": ("/?due=overdue", {"h1": "1 overdue", ".when": "overdue", ".what a": "late-0"}),
    "who is prepared?": (
        MINE,
        {
            "#part-head": "1 of 2 VMs",
            ".approve": "1 of 2 VMs would be released unprepared: pay-1.",
        },
    ),
    "who of all is prepared?": ("/", {"tr:has-text('shop-web') .fact >> nth=0": "60 of 100 VMs"}),
    "will my turn come in time?": (
        MINE,
        {
            "dl.facts": re.compile("about 14:20, 10 min before the start.*place 2, after 1 event on 2 VMs"),
            "h1 .num": re.compile(r"in \d+ min"),
        },
    ),
    "when is my turn?": (OF_MINE, {".fact small:has-text('turn')": "turn about 14:20"}),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_question_of_a_person_on_call_is_answered_on_the_first_screen(
    browser: Browser, on_call: RunningConsole, question: str
) -> None:
    path, answers = QUESTIONS[question]
    with opened(browser, on_call.url, extra_http_headers=ANA) as page:
        page.goto(path)
        for screen in (LARGE, PHONE):
            page.set_viewport_size(screen)
            for place, text in answers.items():
                expect(page.locator(place)).to_contain_text(text)
                box = box_of(page.locator(place))
                assert 0 <= box["x"] <= box["x"] + box["width"] <= screen["width"], (place, screen)
                assert box["y"] + min(box["height"], 20) <= screen["height"], (place, screen)


def test_a_long_name_moves_no_column(page: Page, console: RunningConsole) -> None:
    names = [f"application-server-of-the-shop-{'x' * 30}-{number}" for number in range(2)]
    console.send(FleetVm(names[0]).change("scheduled", event("long", vms=names, minutes=45)))
    page.set_viewport_size(DESKTOP)
    places = []
    for path in ("/", "/?vm=application-server"):
        page.goto(path)
        places.append([box_of(one)["x"] for one in page.locator("[aria-labelledby=open] th").all()])
    assert places[0] == places[1]


def test_names_have_a_line_of_their_own_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto("/?vm=node-10")
    name, names = (page.locator(f".what {place}").first for place in ("a", "small"))
    assert box_of(name)["y"] + box_of(name)["height"] <= box_of(names)["y"] + 1
    assert box_of(page.locator(".when").first)["x"] > box_of(name)["x"] + 30
