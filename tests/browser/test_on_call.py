"""What a person who is on call asks the console, in a browser, of a fleet with more than forty events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.browser import chromium, opened
from tests.support.console import (
    ANA,
    FleetVm,
    RunningConsole,
    approval_console,
    event,
    event_id,
    running_console,
)
from tests.support.servicebus import ServiceBusLab

NOW = datetime.now(UTC)
OTHER = "2" * 36
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # Playwright's driver leaves its pipes open


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console with 43 events, two subscriptions, and VMs that nobody watches."""
    with running_console(tmp_path_factory.mktemp("console")) as running:
        running.send(*fleet())
        yield running


@pytest.fixture
def page(browser: Browser, console: RunningConsole) -> Iterator[Page]:
    with opened(browser, console.url) as one:
        one.goto("/")
        yield one


def ago(hours: float) -> datetime:
    return NOW - timedelta(hours=hours)


def fleet() -> list[bytes]:
    """Return what the VMs publish: 40 events within three hours, one that never ended, one overdue, one gone."""
    nodes = [FleetVm(f"node-{number}", group=f"batch-{number % 4}") for number in range(40)]
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
    expect(page.locator("h1")).to_have_text("1 in progress, 15 within the hour (16 VMs), 1 overdue")
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


def test_not_watched_stands_above_the_table_and_says_how_many_have_an_event(page: Page) -> None:
    expect(tile(page, "not watched")).to_contain_text("of which 2 have an event")
    expect(tile(page, "known VMs")).to_contain_text("44 with events")
    listed, table = page.locator(".unwatched"), page.get_by_role("table", name="Open events")
    expect(listed).to_contain_text("pay-1")
    expect(listed).to_contain_text("silent 2 h")
    above, below = listed.bounding_box(), table.bounding_box()
    assert above
    assert below
    assert above["y"] < below["y"] < page.viewport_size["height"]  # type: ignore[index] # it has one
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
    expect(page.locator("h1")).to_have_text("1 within the hour (2 VMs)")
    expect(tile(page, "known VMs").locator("strong")).to_have_text("2")
    page.goto("/")
    for group in ("batch-0", "batch-1"):
        page.get_by_label("Group", exact=True).select_option(group)
        page.get_by_role("button", name="Show").click()
        expect(page.locator(".chips")).to_contain_text(group)
    assert page.url.endswith("group=batch-0&group=batch-1") or "group=batch-0" in page.url
    expect(page.get_by_role("table", name="Open events").locator("tbody tr")).to_have_count(20)


def test_above_forty_events_the_timeline_has_a_row_for_each_group_that_opens(page: Page) -> None:
    row = page.locator("details.group", has_text="batch-0")
    expect(row.locator("summary")).to_contain_text(
        re.compile(r"batch-0 \(8d10da13\), 10 events, 10 VMs, first in \d")
    )
    row.locator("summary").click()
    expect(row.locator(".line").first).to_be_visible()
    expect(row.locator(".line .name").first).to_contain_text("node-0")


def test_a_standalone_vm_is_seen_by_all_that_azure_tells(page: Page) -> None:
    page.goto("/?vm=node-3")
    expect(page.locator("tr", has_text="node-3 ").first).to_contain_text("1 of 1")
    page.goto(f"/event/{event_id('mine').lower()}")
    expect(page.locator("#part-seen")).to_contain_text("Seen by 1 of 2 VMs that Azure tells")
    expect(page.locator("#part-raw")).to_contain_text("1 CloudEvent,")


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
