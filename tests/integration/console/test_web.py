"""The console over HTTP: what it takes in, what its pages show, and what protects them."""

from __future__ import annotations

import asyncio
import html
import itertools
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import requests

from bridge.console import app, ingest, live
from bridge.console.rows import DAY
from bridge.formats.cloudevents import binary
from bridge.http.signing import sign
from tests.support.console import (
    ANA,
    BATCH,
    PROXY_SECRET,
    STRUCTURED,
    TOKEN,
    FleetVm,
    RunningConsole,
    ask,
    batch,
    behind_proxy,
    break_readers,
    event,
    event_id,
    running_console,
    shown,
    web_of,
)

NOW = datetime.now(UTC)
pytestmark = pytest.mark.usefixtures("this_moment")
SIGNING = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}\u202e"
PAGES = ("/", "/fleet", "/fleet?view=table", "/history", "/?type=Reboot&window=7d", "/fleet?status=silent")


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console that nobody stops; tests use names of their own."""
    with running_console(tmp_path_factory.mktemp("console")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console behind a proxy, which takes events with a token or a signature."""
    ingest = {"bearer_token": TOKEN, "signing_secret": SIGNING}
    settings = behind_proxy(viewer_groups=["staff"], ingest=ingest)
    with running_console(tmp_path_factory.mktemp("guarded"), **settings) as running:
        yield running


def heartbeat(name: str) -> bytes:
    return FleetVm(name).heartbeat(NOW)


def test_a_new_store_says_since_when_it_has_events(tmp_path: Path) -> None:
    with shown(tmp_path, NOW) as seen:
        seen.add(heartbeat("web-0"), at=NOW)

        def is_new() -> bool:
            answers = asyncio.run(ask(web_of(seen.store, seen.clock), ["/fleet"]))
            return "New store, since" in answers["/fleet"].text

        assert is_new()
        seen.clock.advance(DAY)
        assert not is_new()


# --- ingest ---


def test_events_are_taken_in_all_three_modes(console: RunningConsole) -> None:
    headers, body = binary(json.loads(heartbeat("mode-binary")))
    assert console.post(heartbeat("mode-structured")).json() == {"accepted": 1, "ignored": 0}
    assert console.post(body, headers).json() == {"accepted": 1, "ignored": 0}
    two = batch([heartbeat("mode-batch-0"), heartbeat("mode-batch-1")])
    assert console.post(two, BATCH).json() == {"accepted": 2, "ignored": 0}
    page = console.page("/fleet?vm=mode-")
    assert all(name in page for name in ("mode-binary", "mode-structured", "mode-batch-0", "mode-batch-1"))


def test_events_of_others_are_acknowledged_and_not_kept(console: RunningConsole) -> None:
    other = {"specversion": "1.0", "id": "1", "source": "/x", "type": "com.example.other"}
    assert console.post(json.dumps(other).encode()).json() == {"accepted": 0, "ignored": 1}


@pytest.mark.parametrize(
    ("headers", "body", "status", "error"),
    [
        ({"Content-Type": "application/json"}, b"{}", 415, "expected CloudEvents"),
        (STRUCTURED, b"{", 400, "not JSON"),
        (STRUCTURED, b"\xff", 400, "not UTF-8"),
        (STRUCTURED, b"[]", 400, "not a JSON object"),
        (STRUCTURED, b'{"specversion":"1.0"}', 400, "the attribute id is missing"),
        (STRUCTURED, b"[" * 100_000, 400, "nested too deeply"),
        (BATCH, b'[{"specversion":"1.0"}]', 400, "event 0 of the batch: the attribute id"),
        (BATCH, b"[7]", 400, "event 0 of the batch: it is not an object"),
        (BATCH, b"[" + b"{}," * 5001 + b"{}]", 400, "at most 5000 events"),
        (BATCH, b"{}", 400, "expected a list"),
        ({"ce-specversion": "1.0", "Content-Type": "application/json"}, b"{", 400, "Expecting"),
        ({**STRUCTURED, "Origin": "https://evil.example"}, b"{}", 403, "browsers may not send events"),
        ({**STRUCTURED, "Host": "evil.example"}, b"{}", 421, ""),
    ],
)
@pytest.mark.usefixtures("without_collection")
def test_what_is_no_event_is_refused_with_the_reason(
    console: RunningConsole, headers: dict[str, str], body: bytes, status: int, error: str
) -> None:
    response = console.post(body, headers)
    assert response.status_code == status, response.text
    assert error in response.text


def test_the_valid_events_of_a_batch_are_kept_and_the_invalid_one_is_named(console: RunningConsole) -> None:
    response = console.post(batch([heartbeat("bad-batch-0"), b"{}", heartbeat("bad-batch-2")]), BATCH)
    assert response.status_code == 400
    assert response.json()["error"].startswith(
        "event 1 of the batch: the attribute specversion is missing; 2 others"
    )
    page = console.page("/fleet?vm=bad-batch")
    assert all(name in page for name in ("bad-batch-0", "bad-batch-2"))


def test_a_body_that_is_too_large_is_refused_before_it_is_read(console: RunningConsole) -> None:
    host, port = console.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as client:
        client.sendall(
            b"POST /ingest HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n"
            b"Content-Type: application/cloudevents+json\r\n\r\n"
        )
        assert b" 413 " in client.recv(200)


def test_a_body_without_a_length_is_read_up_to_the_limit(console: RunningConsole) -> None:
    chunks = (b" " * 65536 for _ in range(200))
    assert (
        requests.post(f"{console.url}/ingest", data=chunks, headers=STRUCTURED, timeout=30).status_code == 413
    )


def test_a_body_that_does_not_arrive_is_given_up(
    console: RunningConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "BODY_SECONDS", 0.05)
    host, port = console.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as client:
        client.sendall(b"POST /ingest HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert b" 408 " in client.recv(200)


def test_the_handshakes_of_cloudevents_and_event_grid_are_answered(guarded: RunningConsole) -> None:
    asked = requests.options(
        f"{guarded.url}/ingest", headers={"WebHook-Request-Origin": "eventgrid.azure.net"}, timeout=10
    )
    assert asked.headers["WebHook-Allowed-Origin"] == "eventgrid.azure.net"
    validation = json.dumps([{"data": {"validationCode": "512d38b6-c7b8-40c8"}}]).encode()
    answer = guarded.post(validation, {"aeg-event-type": "SubscriptionValidation"})
    assert answer.json() == {"validationResponse": "512d38b6-c7b8-40c8"}
    hostile = json.dumps([{"data": {"validationCode": "<script>"}}]).encode()
    assert guarded.post(hostile, {"aeg-event-type": "SubscriptionValidation"}).status_code == 400


def test_only_senders_that_authenticate_are_heard(guarded: RunningConsole) -> None:
    body = heartbeat("sender")
    signed = sign([SIGNING], "id", datetime.now(UTC), body)
    forged = sign(["whsec_" + "A" * 32], "id", datetime.now(UTC), body)
    statuses = [
        guarded.post(body, {**STRUCTURED, **headers}).status_code
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            forged,
            {"Authorization": f"Bearer {TOKEN}"},
            signed,
        )
    ]
    assert statuses == [401, 401, 401, 200, 200]


def test_many_senders_at_once_are_all_heard_once(console: RunningConsole) -> None:
    vms = [FleetVm(f"many-{number}") for number in range(20)]
    bodies = [vm.change("scheduled", event("many", at=NOW), NOW) for vm in vms] * 3
    with ThreadPoolExecutor(8) as pool:
        assert {response.status_code for response in pool.map(console.post, bodies)} == {200}
    page = console.page(f"/event/{event_id('many')}")
    assert "seen by 20 VMs" in page
    lines = console.get(f"/event/{event_id('many')}/events.jsonl").text.splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0])["data"]["EventId"] == event_id("many")


# --- pages ---


@pytest.mark.parametrize("path", PAGES)
def test_text_from_events_is_only_ever_text(console: RunningConsole, path: str) -> None:
    vm = FleetVm("hostile")
    hostile = event("hostile", at=NOW, vms=["hostile", HOSTILE], type=HOSTILE, Description=HOSTILE)
    console.send(
        vm.change("scheduled", hostile, NOW), vm.heartbeat(NOW, version=HOSTILE), vm.receipt(hostile, NOW)
    )
    for page in (console.page(path), console.page(f"/event/{event_id('hostile')}")):
        assert "<img" not in page
        assert "\u202e" not in re.sub(r' value="[^"]*"', "", page)  # a value is not shown
        assert "{{7*7}}" in page or "hostile" not in page
        assert not re.search(r"<script(?! src=\"/static/)|\son\w+=\"|\sstyle=|javascript:", page)


@pytest.mark.parametrize("path", [*PAGES, "/nowhere", "/event/unknown", "/ingest", "/live-not"])
def test_every_answer_has_the_headers_that_protect_it(console: RunningConsole, path: str) -> None:
    headers = console.get(path).headers
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "server" not in headers


def test_an_unknown_event_is_not_found(console: RunningConsole) -> None:
    assert console.get("/event/unknown").status_code == 404
    assert "<h1>404 Not Found</h1>" in console.get("/event/unknown").text
    assert console.get("/event/unknown/events.jsonl").status_code == 404
    assert console.get("/static/../../config.toml").status_code == 404
    assert console.get("/event/%2e%2e%2f%00").status_code == 404


def test_the_story_of_an_event_is_complete(console: RunningConsole) -> None:
    first, second = FleetVm("story-0"), FleetVm("story-1")
    before, after = (event("story", at=NOW, vms=["story-0"], minutes=minutes) for minutes in (15, 10))
    started = event("story", at=NOW, vms=["story-0"], EventStatus="Started", NotBefore="")

    def at(seconds: float) -> datetime:
        return NOW + timedelta(seconds=seconds)

    console.send(
        first.change("completed", started, at(40), previous=started),
        second.change("scheduled", before, at(1)),
        first.receipt(before, at(20), outcome="rejected", reason="denied"),
        first.change("scheduled", before, at(0)),
        second.change("updated", after, at(10), previous=before, changed=["NotBefore"]),
        first.change("started", started, at(30), previous=after, changed=["EventStatus"]),
    )
    page = console.page(f"/event/{event_id('story').lower()}")
    titles = re.findall(r"<b>(.*?)</b>", page)
    assert titles == ["Announced", "Updated", "Approval rejected", "Started", "Completed"]
    assert "seen by 2 VMs within 1.0 s" in page
    assert "Requested by ana@contoso.example: drained" in page


def test_an_event_says_which_vms_are_prepared_and_the_history_counts_those_before_the_start(
    console: RunningConsole,
) -> None:
    names = ["p-0", "p-1", "p-2"]
    vms = {name: FleetVm(name, group="preparing") for name in names}
    shown = event("prepares", at=NOW, vms=names)
    console.send(
        *(vm.change("scheduled", shown, NOW) for vm in vms.values()),
        vms["p-0"].prepared(shown, NOW + timedelta(seconds=30)),
        vms["p-1"].receipt(shown, NOW + timedelta(seconds=31), outcome="rejected", reason="not_prepared"),
    )
    page = console.page(f"/event/{event_id('prepares')}")
    assert "The program took 12 s" in page
    assert "2 of 3 VMs would be released unprepared: p-1, p-2." in page
    row = r'class="wide">(?:<a [^>]*>)?(p-\d).*?data-label="Preparation"[^>]*>([^<]*)'
    found = dict(re.findall(row, page, re.DOTALL))
    assert found == {
        "p-0": "prepared: 12 s",
        "p-1": "not prepared: not_prepared",
        "p-2": "not prepared yet, place 1 in the order of turns",
    }
    front = console.page("/?group=preparing")
    assert ('data-label="Prepared" class="num">1 of 3' in front, ">2</strong> unprepared" in front) == (
        True,
        True,
    )
    counted = console.get("/api/v1/vms?status=unprepared&group=preparing").json()["vms"]
    assert [(vm["name"], vm["preparation"]) for vm in counted] == [
        ("p-1", "unprepared"),
        ("p-2", "unprepared"),
    ]
    started = event("prepares", at=NOW, vms=names, EventStatus="Started", NotBefore="")
    console.send(vms["p-0"].change("started", started, NOW + timedelta(seconds=60), previous=shown))
    console.send(vms["p-2"].prepared(shown, NOW + timedelta(seconds=70)))
    for days in (30, 90):
        page = console.page(f"/history?days={days}&group=preparing")
        assert "Prepared before the start: 1 of 3 VMs of started events." in page


def test_an_event_says_what_comes_before_it_in_the_order_of_turns(tmp_path: Path) -> None:
    """Before it: one that has started, and an earlier one; not a Terminate, a later one, or one of other VMs."""
    with running_console(tmp_path) as console:
        vm, there = FleetVm("web-0"), FleetVm("web-0", group="other")
        given = {
            "started": (2, "Freeze", vm),
            "earlier": (20, "Reboot", vm),
            "own": (30, "Reboot", vm),
            "later": (31, "Reboot", vm),
            "deleted": (10, "Terminate", vm),
            "there": (11, "Reboot", there),
        }
        for name, (minutes, kind, reporter) in given.items():
            one = event(name, at=NOW, vms=["web-0", f"{name}-1"], minutes=minutes, type=kind)
            console.send(reporter.change("scheduled", one, NOW), reporter.prepared(one, NOW))
            if name == "started":
                begun = event(name, at=NOW, vms=one.resources, type=kind, EventStatus="Started", NotBefore="")
                console.send(reporter.change("started", begun, NOW, previous=one))
        page = console.page(f"/event/{event_id('own')}")
        assert "<dt>Order of turns</dt><dd>place 3, after 2 events on 4 VMs</dd>" in page
        assert "not prepared yet, place 3 in the order of turns" in page
        assert "Order of turns" not in console.page(f"/event/{event_id('deleted')}")


@pytest.mark.parametrize(
    ("path", "page"),
    [("/event/A-1/approve", "/event/A-1"), ("/event/A-1/dismiss", "/event/A-1"), ("/fleet/forget", "/fleet")],
)
def test_a_form_that_comes_back_as_get_after_a_sign_in_leads_to_its_page(
    console: RunningConsole, path: str, page: str
) -> None:
    answer = requests.get(f"{console.url}{path}?tag=a%3Db", timeout=9, allow_redirects=False)
    assert (answer.status_code, answer.headers["Location"]) == (303, f"{page}?tag=a%3Db")


def test_each_list_that_is_cut_says_how_many_more_there_are(tmp_path: Path) -> None:
    """60 VMs ended an event, lost events and miss one; 60 others have an event and are not watched."""
    with shown(tmp_path, NOW) as seen:
        for number in range(60):
            vm = FleetVm(f"cut-{number}", tags={f"n{one}": str(number) for one in range(4)})
            ended = event(f"ended-{number}", at=NOW, vms=[vm.name])
            bodies = [vm.change("scheduled", ended, NOW), vm.loss(NOW)]
            vm.next()
            seen.add(
                *bodies, vm.change("canceled", ended, NOW + timedelta(minutes=4), previous=ended), at=NOW
            )
            seen.add(vm.heartbeat(NOW + timedelta(minutes=5)), at=NOW + timedelta(minutes=5))
            open_one = event(f"open-{number}", at=NOW, vms=[f"open-{number}"], minutes=600)
            other = FleetVm(f"other-{number}", group=f"o-{number}")
            seen.add(other.change("scheduled", open_one, NOW), at=NOW)
        web = FleetVm("web-0")
        for number in range(560):
            at = NOW + timedelta(seconds=number / 2)
            seen.add(web.change("updated", event("changes", at=NOW, minutes=15 + number), at), at=at)
        seen.clock.advance(300)
        paths = ["/", "/fleet", "/history", f"/event/{event_id('changes')}"]
        found = asyncio.run(ask(web_of(seen.store, seen.clock), paths))
    texts = [set(re.findall("\\d+ more [A-Za-z]+", found[path].text)) for path in paths]
    assert texts == [
        {"10 more events", "55 more bars", "50 more VMs", "40 more tags"},
        {"40 more tags"},
        {"10 more VMs", "10 more reports", "40 more tags"},
        {"60 more reports", "510 more CloudEvents"},
    ]
    assert "1 to 100 of 121 events" in found["/history"].text


def test_a_page_is_compressed_and_the_stream_is_not(console: RunningConsole) -> None:
    assert console.get("/").headers["Content-Encoding"] == "gzip"
    with requests.get(f"{console.url}/live", stream=True, timeout=9) as stream:
        assert "Content-Encoding" not in stream.headers


@pytest.mark.parametrize("path", ["/", "/fleet", "/history", f"/event/{event_id('parts')}", "/no-such-page"])
def test_an_open_page_gets_only_the_parts_that_have_changed(tmp_path: Path, path: str) -> None:
    with shown(tmp_path, NOW) as seen:
        waiting = event("parts", at=NOW, vms=["web-0"], minutes=120)
        seen.add(FleetVm("web-0").change("scheduled", waiting, NOW), at=NOW)
        web = web_of(seen.store, seen.clock)
        whole = asyncio.run(ask(web, [path]))[path].text
        hashes = ",".join(re.findall('data-hash="([^"]+)"', whole))
        parts = set(re.findall('id="(part-[a-z]+)" data-', whole))
        seen.clock.advance(4)
        assert changed(asyncio.run(ask(web, [path], shown=hashes))[path].text) <= {"part-timeline"}
        seen.add(FleetVm("web-1").heartbeat(NOW), at=NOW)
        again = asyncio.run(ask(web, [path], shown=hashes))[path].text
    expected = {"/": {"part-summary"}, "/fleet": {"part-summary", "part-fleet"}}
    assert changed(again) - {"part-timeline"} == expected.get(path, set())
    assert set(re.findall('id="(part-[a-z]+)" data-', again)) == parts
    assert ("<form" in again, "data-version=" in again) == (False, True)


def changed(page: str) -> set[str]:
    """Return the parts of a page that are not left out."""
    return set(re.findall('id="(part-[a-z]+)" data-hash', page))


def test_the_page_of_an_event_that_has_not_arrived_waits_for_it(console: RunningConsole) -> None:
    path = f"/event/{event_id('not yet')}"
    answer = console.get(path)
    assert (answer.status_code, "as soon as it arrives" in answer.text) == (404, True)
    assert re.search(r'data-version="\d+"', answer.text)
    console.send(FleetVm("web-0").change("scheduled", event("not yet", at=NOW), NOW))
    assert console.get(path).ok


def test_filters_of_the_address_choose_what_is_shown(console: RunningConsole) -> None:
    vm = FleetVm("filtered", group="filters")
    console.send(
        *(
            vm.change("scheduled", event(f"filter-{kind}", at=NOW, vms=["filtered"], type=kind), NOW)
            for kind in ("Freeze", "Preempt")
        )
    )
    table = console.page("/?group=filters&type=Freeze").split("Open events")[1]
    assert event_id("filter-Freeze").lower() in table
    assert event_id("filter-Preempt").lower() not in table
    assert "No open event matches" in console.page("/?group=filters&type=Reboot")


def test_the_history_counts_and_is_there_as_csv(console: RunningConsole) -> None:
    vm = FleetVm("past")
    console.send(
        vm.change("canceled", event("past", at=NOW, vms=["past"]), NOW, previous=event("past", at=NOW)),
        vm.loss(NOW),
    )
    page = console.page("/history?days=90")
    assert "20 event(s) lost: SizeLimit" in page
    response = console.get("/history.csv?days=90")
    assert response.headers["Content-Type"].startswith("text/csv")
    assert any(
        line.startswith(event_id("past")) and ",Canceled," in line for line in response.text.splitlines()
    )


def test_open_pages_hear_of_a_change(console: RunningConsole) -> None:
    with requests.get(f"{console.url}/live", stream=True, timeout=30) as stream:
        lines = stream.iter_lines(chunk_size=1, decode_unicode=True)
        versions = (int(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
        first = next(versions)
        console.send(heartbeat("live"))
        assert next(version for version in versions if version != first) > first


def test_open_pages_hear_again_and_again_that_nothing_has_changed(
    console: RunningConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "REPEAT_SECONDS", 0.01)
    with requests.get(f"{console.url}/live", stream=True, timeout=30) as stream:
        lines = stream.iter_lines(chunk_size=1, decode_unicode=True)
        versions = [line for line in itertools.islice(lines, 12) if line.startswith("data: ")]
    assert len(versions) == 4
    assert len(set(versions)) == 1


def test_a_store_that_was_damaged_is_shown_as_such(tmp_path: Path) -> None:
    folder = tmp_path / "console"
    folder.mkdir()
    (folder / "console.db").write_bytes(b"x" * 9000)
    with running_console(tmp_path) as console:
        assert "and has started empty" in console.page("/")


def test_a_table_of_more_than_a_hundred_has_pages(tmp_path: Path) -> None:
    with running_console(tmp_path) as console:
        for group in range(5):
            vms = [FleetVm(f"web-{number}", group=f"g{group}") for number in range(50)]
            apart = [
                event(f"{vm.group}/{vm.name}", at=NOW, vms=[vm.name], minutes=16 * number)  # no wave
                for number, vm in enumerate(vms, 1)
            ]
            console.send(*(vm.change("scheduled", one, NOW) for vm, one in zip(vms, apart, strict=True)))
        for path in ("/?page=2", "/fleet?view=table&page=2", "/history?days=90&page=2"):
            page = console.page(path)
            assert "101 to 200 of 250" in page
            assert re.search(r'rel="next" href="/[a-z]*\?page=3["&]', page)
        assert "201 to 250 of 250" in console.page("/?page=99")
        assert "1 to 50 of 50 events" not in console.page("/?group=g1")
        page = console.page("/?page=2")
        assert "<summary>94 more bars</summary>" in page
        assert "It has the lines of this page: 101 to 200 of 250." in page


def test_a_wave_is_a_line_that_opens_and_closes_and_pages_like_all_events(tmp_path: Path) -> None:
    with running_console(tmp_path) as console:
        for start in range(0, 240, 60):
            vms = [FleetVm(f"web-{number}") for number in range(start, start + 60)]
            console.send(
                *(
                    vm.change("scheduled", event(vm.name, at=NOW, vms=[vm.name], minutes=30), NOW)
                    for vm in vms
                )
            )
        console.send(
            FleetVm("db-0").change("scheduled", event("db", at=NOW, vms=["db-0"], type="Freeze"), NOW)
        )
        front = console.page("/?window=4h")
        assert "240 Reboots of shop, 240 VMs, until" in front
        assert front.count("<tr><td>") == 1
        (address, *others) = set(re.findall(r'href="(/\?window=4h&amp;wave=[^"]+)"', front))
        assert not others
        opened = console.page(html.unescape(address))
        assert ("1 to 100 of 240 lines" in opened, "db-0" in opened) == (True, False)
        assert len(re.findall('<td class="wide"><a href="/event/', opened)) == 100
        (more,) = re.findall('rel="next" href="([^"]+)', opened)
        assert "101 to 200 of 240 lines" in console.page(html.unescape(more))
        assert "This wave is over" in console.page(f"/?wave={event_id('db')}")
        last = address.rpartition("=")[2]
        (name,) = (vm for number in range(240) if event_id(vm := f"web-{number}").lower() == last)
        named = event(name, at=NOW, vms=[name], minutes=30)
        console.send(FleetVm(name, epoch="2").change("canceled", named, NOW))
        left = console.page(html.unescape(address))
        assert ("239 Reboots of shop" in left, "1 to 100 of 239 lines" in left) == (True, True)


def test_the_cells_of_a_large_fleet_have_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "PAGE_CELLS", 3)
    with running_console(tmp_path) as console:
        vms = [FleetVm(f"web-{number}", f"g{number // 2}") for number in range(5)]
        console.send(*(vm.heartbeat(NOW, backlog=2) for vm in vms))
        first, second = console.page("/fleet"), console.page("/fleet?page=2")
    assert [page.count('class="cell ') for page in (first, second)] == [3, 2]
    assert "1 VM on this page" in first
    for page in (first, second):
        assert "<h1>5 VMs</h1>" in page
        assert "10 events waiting on VMs" in page
    assert 'rel="next" href="/fleet?page=2"' in first


def test_more_losses_than_the_page_shows_are_counted(tmp_path: Path) -> None:
    with running_console(tmp_path) as console:
        vms = [FleetVm(f"gap-{number}") for number in range(52)]
        console.send(*(vm.loss(NOW) for vm in vms))
        for vm in vms:
            vm.next()  # does not arrive
        console.send(*(vm.heartbeat(NOW) for vm in vms))
        page = console.page("/history").split('id="losses"')[1]
    assert "2 more reports" in page
    assert "2 more VMs: " in page
    assert page.count("published event missing") == 50


# --- who may look ---


def test_pages_are_only_for_those_whom_the_proxy_has_signed_in(guarded: RunningConsole) -> None:
    proved = {"X-Proxy-Secret": PROXY_SECRET, "X-Forwarded-User": "ana"}
    staff = {**proved, "X-Forwarded-Groups": "staff"}
    for path in (*PAGES, "/history.csv", "/live", "/event/x/events.jsonl"):
        assert guarded.get(path).status_code == 401
        assert (
            guarded.get(path, {"X-Forwarded-User": "ana", "X-Forwarded-Groups": "staff"}).status_code == 401
        )
        assert guarded.get(path, {**staff, "X-Proxy-Secret": "guess"}).status_code == 401
        assert guarded.get(path, proved).status_code == 403
    assert "ana" in guarded.get("/", staff).text


def test_a_secret_of_the_proxy_that_cannot_be_read_is_an_answer(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(PROXY_SECRET)
    secret.chmod(0o600)
    with running_console(tmp_path, **behind_proxy(proxy={"secret_file": str(secret)})) as console:
        assert console.get("/", ANA).status_code == 200
        secret.unlink()
        answer = console.get("/", ANA)
    assert (answer.status_code, answer.text) == (503, "a secret cannot be read at the moment\n")
    assert answer.headers["X-Frame-Options"] == "DENY"


def test_names_of_people_and_groups_are_utf_8(tmp_path: Path) -> None:
    with running_console(tmp_path, **behind_proxy(viewer_groups=["\u00c9quipe"])) as console:
        proved = {"X-Proxy-Secret": PROXY_SECRET, "X-Forwarded-User": "Jos\u00e9 M\u00fcller".encode()}
        answer = console.get("/", {**proved, "X-Forwarded-Groups": "\u00c9quipe".encode()})  # type: ignore[dict-item] # bytes
        assert "Jos\u00e9 M\u00fcller" in answer.text
        assert console.get("/", proved).status_code == 403  # type: ignore[arg-type] # bytes


def test_a_second_secret_header_does_not_smuggle_anything_past_the_proxy(guarded: RunningConsole) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    lines = [
        f"X-Proxy-Secret: {PROXY_SECRET}",
        "X-Forwarded-User: ana",
        "X-Forwarded-User: root",
        "X-Forwarded-Groups: staff",
    ]
    request = "GET / HTTP/1.1\r\nHost: x\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n"
    with socket.create_connection((host, int(port)), 10) as client:
        client.sendall(request.encode())
        assert b" 401 " in client.recv(200)


def test_readers_that_fail_are_an_answer_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_console(tmp_path) as console:
        break_readers(monkeypatch)
        response = console.get("/")
    assert response.status_code == 503
    assert "senders retry" in response.text
