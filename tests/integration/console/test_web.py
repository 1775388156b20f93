"""The console over HTTP: what it takes in, what its pages show, and who may look."""

from __future__ import annotations

import asyncio
import html
import itertools
import json
import re
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import requests

from bridge.console import base, live
from bridge.console.rows import DAY
from bridge.formats.cloudevents import binary
from bridge.http.signing import sign
from tests.support.console import (
    ANA,
    BATCH,
    NOW,
    PROXY_SECRET,
    STRUCTURED,
    TOKEN,
    FleetVm,
    RunningConsole,
    Shown,
    ask,
    batch,
    behind_proxy,
    break_readers,
    console_at,
    event,
    event_id,
    received,
    text_of,
    web_of,
)
from tests.support.only import only

SIGNING = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}\u202e"
PAGES = ("/", "/fleet", "/fleet?view=table", "/history", "/?type=Reboot&window=7d", "/fleet?status=silent")


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def page_of(name: str) -> str:
    return f"/event/{event_id(name)}"


# --- ingest ---


def test_events_are_taken_in_all_three_modes_and_those_of_others_are_ignored(console: RunningConsole) -> None:
    headers, body = binary(json.loads(FleetVm("mode-binary").heartbeat()))
    two = batch([FleetVm("mode-batch-0").heartbeat(), FleetVm("mode-batch-1").heartbeat()])
    other = {"specversion": "1.0", "id": "1", "source": "/x", "type": "com.example.other"}
    answers = [
        console.post(FleetVm("mode-structured").heartbeat()),
        console.post(body, headers),
        console.post(two, BATCH),
        console.post(json.dumps(other).encode()),
    ]
    counts = [(1, 0), (1, 0), (2, 0), (0, 1)]
    assert [one.json() for one in answers] == [{"accepted": a, "ignored": i} for a, i in counts]
    page = console.page("/fleet?vm=mode-")
    assert all(f"mode-{name}" in page for name in ("binary", "structured", "batch-0", "batch-1"))


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
    good = [FleetVm(f"bad-batch-{number}").heartbeat() for number in (0, 2)]
    response = console.post(batch([good[0], b"{}", good[1]]), BATCH)
    assert response.status_code == 400
    error = "event 1 of the batch: the attribute specversion is missing; 2 others"
    assert response.json()["error"].startswith(error)
    page = console.page("/fleet?vm=bad-batch")
    assert all(name in page for name in ("bad-batch-0", "bad-batch-2"))


def test_the_handshakes_of_cloudevents_and_event_grid_are_answered(guarded: RunningConsole) -> None:
    asking = {"WebHook-Request-Origin": "eventgrid.azure.net"}
    asked = requests.options(f"{guarded.url}/ingest", headers=asking, timeout=10)
    assert asked.headers["WebHook-Allowed-Origin"] == "eventgrid.azure.net"

    def validate(code: str) -> requests.Response:
        body = json.dumps([{"data": {"validationCode": code}}]).encode()
        return guarded.post(body, {"aeg-event-type": "SubscriptionValidation"})

    code = "512d38b6-c7b8-40c8"
    assert validate(code).json() == {"validationResponse": code}
    assert validate("<script>").status_code == 400


def test_only_senders_that_authenticate_are_heard(tmp_path: Path) -> None:
    body = FleetVm("sender").heartbeat()
    forged, signed = (sign([secret], "id", NOW, body) for secret in ("whsec_" + "A" * 32, SIGNING))
    wrong, right = ({"Authorization": f"Bearer {token}"} for token in ("wrong", TOKEN))
    both = behind_proxy(ingest={"bearer_token": TOKEN, "signing_secret": SIGNING})
    with console_at(tmp_path, **both) as console:
        answers = [console.post(body, {**STRUCTURED, **one}) for one in ({}, wrong, forged, right, signed)]
    assert [one.status_code for one in answers] == [401, 401, 401, 200, 200]


def test_many_senders_at_once_are_all_heard_once(console: RunningConsole) -> None:
    bodies = [FleetVm(f"many-{number}").change("scheduled", event("many")) for number in range(20)] * 3
    with ThreadPoolExecutor(8) as pool:
        assert {response.status_code for response in pool.map(console.post, bodies)} == {200}
    assert "seen by 20 VMs" in console.page(page_of("many"))
    kept = only(console.get(f"{page_of('many')}/events.jsonl").text.splitlines())
    assert json.loads(kept)["data"]["EventId"] == event_id("many")


# --- HTTP ---


@pytest.mark.parametrize("path", [*PAGES, "/nowhere", "/event/unknown", "/ingest", "/live-not"])
def test_every_answer_has_the_headers_that_protect_it(console: RunningConsole, path: str) -> None:
    headers = console.get(path).headers
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert (headers["X-Frame-Options"], headers["X-Content-Type-Options"]) == ("DENY", "nosniff")
    assert "server" not in headers


def test_a_page_is_compressed_and_the_stream_is_not(console: RunningConsole) -> None:
    assert console.get("/").headers["Content-Encoding"] == "gzip"
    with requests.get(f"{console.url}/live", stream=True, timeout=9) as stream:
        assert "Content-Encoding" not in stream.headers


def test_open_pages_hear_of_a_change_and_again_and_again_that_there_is_none(
    console: RunningConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "REPEAT_SECONDS", 0.01)
    with requests.get(f"{console.url}/live", stream=True, timeout=30) as stream:
        lines = stream.iter_lines(chunk_size=1, decode_unicode=True)
        versions = (int(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
        first = set(itertools.islice(versions, 4))
        console.send(FleetVm("live").heartbeat())
        assert next(version for version in versions if version not in first) > only(first)


@pytest.mark.parametrize("path", ["/", "/fleet", "/history", page_of("known"), page_of("not yet known")])
def test_a_page_does_not_claim_to_show_what_is_committed_while_it_is_made(
    seen: Shown, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    seen.add(FleetVm("web-0").change("scheduled", event("known")))
    web = web_of(seen.store, seen.clock)
    reading = seen.store.reading

    @contextmanager
    def commit_after_reading() -> Iterator[sqlite3.Connection]:
        try:
            with reading() as connection:
                yield connection
        finally:
            web.ingest.writer.version += 1

    monkeypatch.setattr(seen.store, "reading", commit_after_reading)
    page = asyncio.run(ask(web, [path]))[path].text
    assert web.ingest.writer.version > 0
    assert 'data-version="0"' in page


def test_who_hears_of_a_commit_finds_its_version(seen: Shown) -> None:
    writer = seen.writer()
    versions: list[int] = []
    future = writer.submit(received(FleetVm("web-0").heartbeat()))
    future.add_done_callback(lambda _: versions.append(writer.version))
    writer.run_once(0)
    assert versions == [1]


@pytest.mark.parametrize(("pages", "apart"), [(1, live.APART_SECONDS), (20, 2.0), (200, live.REPEAT_SECONDS)])
def test_open_pages_are_notified_at_once_and_then_the_rarer_the_more_they_are(
    pages: int, apart: float
) -> None:
    async def run() -> None:
        streams = live.Live(lambda: 7)
        streams.start()
        with ExitStack() as stack:
            opened = [streams.stream(stack.enter_context(streams.place())) for _ in range(pages)]
            assert streams.is_full == (pages == live.MAX_STREAMS)  # before any of them is answered
            for stream in opened:
                assert "data: 7" in await anext(stream)
            streams.notify()
            async with asyncio.timeout(30):
                for stream in opened:
                    assert "event: version" in await anext(stream)
            assert streams.apart_seconds() == pytest.approx(apart)
        assert not streams.is_full

    asyncio.run(run())


@pytest.mark.parametrize(
    ("page", "form"),
    [(page_of("A"), "approve"), (page_of("A"), "dismiss"), ("/fleet", "forget")],
)
def test_a_form_that_comes_back_as_get_after_a_sign_in_leads_to_its_page_which_says_that_nothing_was_sent(
    seen: Shown, page: str, form: str
) -> None:
    seen.add(FleetVm("web-0").change("scheduled", event("A")))
    answer = only(seen.ask(f"{page}/{form}?tag=a%3Db"))
    assert (answer.status_code, answer.headers["Location"]) == (303, f"{page}?tag=a%3Db&unsent=1")
    assert "Nothing was sent" in seen.page(answer.headers["Location"])
    assert "Nothing was sent" not in seen.page(f"{page}?tag=a%3Db")


def test_readers_that_fail_are_an_answer_and_the_metrics_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with console_at(tmp_path) as console:
        break_readers(monkeypatch)
        page, metrics = console.get("/"), console.get("/metrics")
    assert (page.status_code, "senders retry" in page.text) == (503, True)
    assert (metrics.status_code, "imds_bridge_console_vms" in metrics.text) == (200, False)
    assert "\nimds_bridge_storage_available 0.0\n" in metrics.text


# --- pages ---


def test_a_new_store_says_since_when_it_has_events(seen: Shown) -> None:
    seen.add(FleetVm("web-0").heartbeat())
    assert "New store since" in seen.page("/fleet")
    seen.clock.advance(DAY)
    assert "New store since" not in seen.page("/fleet")


def test_text_from_events_is_only_ever_text(seen: Shown) -> None:
    vm = FleetVm("hostile")
    hostile = event("hostile", vms=["hostile", HOSTILE], type=HOSTILE, Description=HOSTILE)
    seen.add(vm.change("scheduled", hostile), vm.heartbeat(version=HOSTILE), vm.receipt(hostile))
    for answer in seen.ask(*PAGES, page_of("hostile")):
        page = answer.text
        assert "<img" not in page, answer.url
        assert "\u202e" not in re.sub(r' value="[^"]*"', "", page)  # a value is not shown
        assert "{{7*7}}" in page or "hostile" not in page
        assert not re.search(r"<script(?! src=\"/static/)|\son\w+=\"|\sstyle=|javascript:", page)


def test_what_does_not_exist_is_not_found(seen: Shown) -> None:
    unknown = "/event/unknown"
    paths = (f"{unknown}/events.jsonl", "/static/../../config.toml", "/event/%2e%2e%2f%00", unknown)
    answers = seen.ask(*paths)
    assert [one.status_code for one in answers] == [404] * 4
    assert "<h1>404 Not Found</h1>" in answers[-1].text


def test_the_story_of_an_event_is_complete_in_any_order_of_arrival(seen: Shown) -> None:
    first, second = FleetVm("story-0"), FleetVm("story-1")
    before, later = (event("story", vms=["story-0"], minutes=minutes) for minutes in (15, 10))
    started = event("story", vms=["story-0"], EventStatus="Started", NotBefore="")
    seen.add(
        first.change("completed", started, after(40), previous=started),
        second.change("scheduled", before, after(1)),
        first.receipt(before, after(20), outcome="rejected", reason="denied"),
        first.change("scheduled", before),
        second.change("updated", later, after(10), previous=before, changed=["NotBefore"]),
        first.change("started", started, after(30), previous=later, changed=["EventStatus"]),
    )
    page = seen.page(page_of("story"))
    titles = re.findall(r"<b>(.*?)</b>", page)
    assert titles == ["Announced", "Updated", "Approval rejected", "Started", "Completed"]
    assert "seen by 2 VMs within 1.0 s" in page
    assert "Requested by ana@contoso.example: drained" in page


def test_an_event_says_which_vms_are_prepared_and_the_history_counts_those_before_the_start(
    seen: Shown,
) -> None:
    names = ["p-0", "p-1", "p-2"]
    vms = {name: FleetVm(name) for name in names}
    prepares = event("prepares", vms=names, minutes=14)
    seen.add(
        *(vm.change("scheduled", prepares) for vm in vms.values()),
        vms["p-0"].prepared(prepares, after(30)),
        vms["p-1"].receipt(prepares, after(31), outcome="rejected", reason="not_prepared"),
    )
    page = seen.page(page_of("prepares"))
    assert "The program took 12 s" in page
    assert "2 of 3 VMs would be released unprepared: p-1, p-2." in page
    row = r'class="wide">(?:<a [^>]*>)?(p-\d).*?data-label="Prepared"><span[^>]*>([^<]*)'
    assert dict(re.findall(row, page, re.DOTALL)) == {
        "p-0": "prepared: 12 s",
        "p-1": "not prepared: not_prepared",
        "p-2": "not yet",
    }
    front, found = seen.ask("/", "/api/v1/vms?status=unprepared")
    assert 'data-label="Prepared"><span class="badtext">1 of 3 VMs</span>' in front.text
    assert ">2</strong> unprepared" in front.text
    assert [(vm["name"], vm["preparation"]) for vm in found.json()["vms"]] == [
        ("p-1", "unprepared"),
        ("p-2", "unprepared"),
    ]
    started = event("prepares", vms=names, EventStatus="Started", NotBefore="")
    seen.add(vms["p-0"].change("started", started, after(60), previous=prepares))
    seen.add(vms["p-2"].prepared(prepares, after(70)))
    for answer in seen.ask("/history?days=30", "/history?days=90"):
        assert "Prepared before the start: 1 of 3 VMs of started events." in answer.text


def test_an_event_says_what_comes_before_it_in_the_order_of_turns(seen: Shown) -> None:
    """Before it: one that has started, and an earlier one; not a Terminate, a later one, or one of other VMs."""
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
        one = event(name, vms=["web-0", f"{name}-1"], minutes=minutes, type=kind)
        seen.add(reporter.change("scheduled", one), reporter.prepared(one))
        if name == "started":
            begun = event(name, vms=one.resources, type=kind, EventStatus="Started", NotBefore="")
            seen.add(reporter.change("started", begun, previous=one))
    page = seen.page(page_of("own"))
    turn = "Turn to prepareabout 13:20 UTC, 10 min before the startplace 3, after 2 events on 4 VMs"
    assert turn in text_of(page)
    assert "Turn to prepare" not in seen.page(page_of("deleted"))


def test_each_list_that_is_cut_says_how_many_more_there_are(seen: Shown) -> None:
    """60 VMs ended an event, lost events and miss one; 60 others have an event and are not watched."""
    bodies = []
    for number in range(60):
        vm = FleetVm(f"cut-{number}", tags={f"n{one}": str(number) for one in range(4)})
        ended = event(f"ended-{number}", vms=[vm.name])
        bodies += [vm.change("scheduled", ended), vm.loss()]
        vm.next()  # does not arrive
        bodies += [vm.change("canceled", ended, after(240), previous=ended), vm.heartbeat(after(300))]
        open_one = event(f"open-{number}", vms=[f"open-{number}"], minutes=600)
        bodies.append(FleetVm(f"other-{number}", group=f"o-{number}").change("scheduled", open_one))
    web = FleetVm("web-0")
    for number in range(560):
        bodies.append(web.change("updated", event("changes", minutes=15 + number), after(number / 2)))
    seen.clock.advance(300)
    seen.add(*bodies, at=after(300))
    answers = seen.ask("/", "/fleet", "/history", page_of("changes"))
    assert [set(re.findall(r"\d+ more [A-Za-z]+", one.text)) for one in answers] == [
        {"10 more events", "50 more VMs", "40 more tags"},
        {"40 more tags"},
        {"10 more VMs", "10 more reports", "40 more tags"},
        {"60 more reports", "510 more CloudEvents"},
    ]
    assert "1 to 100 of 121 events" in answers[2].text
    assert answers[2].text.partition('id="losses"')[2].count("published event missing") == 50


@pytest.mark.parametrize("path", ["/", "/fleet", "/history", page_of("parts"), "/no-such-page"])
def test_an_open_page_gets_only_the_parts_that_have_changed(seen: Shown, path: str) -> None:
    def changed(page: str) -> set[str]:
        return set(re.findall('id="(part-[a-z]+)" data-hash', page))

    seen.add(FleetVm("web-0").change("scheduled", event("parts", minutes=120)))
    whole = seen.page(path)
    hashes = ",".join(re.findall('data-hash="([^"]+)"', whole))
    seen.clock.advance(4)
    assert changed(seen.page(path, shown=hashes)) <= {"part-timeline"}
    seen.add(FleetVm("web-1").heartbeat())
    again = seen.page(path, shown=hashes)
    expected = {"/": {"part-summary"}, "/fleet": {"part-summary", "part-fleet"}}
    assert changed(again) - {"part-timeline"} == expected.get(path, set())
    assert set(re.findall('id="(part-[a-z]+)" data-', again)) == changed(whole)
    assert ("<form" in again, "data-version=" in again) == (False, True)


def test_the_page_of_an_event_that_has_not_arrived_waits_for_it(seen: Shown) -> None:
    waiting = only(seen.ask(page_of("E")))
    assert (waiting.status_code, "as soon as it arrives" in waiting.text) == (404, True)
    assert re.search(r'data-version="\d+"', waiting.text)
    seen.add(FleetVm("web-0").change("scheduled", event()))
    arrived = only(seen.ask(page_of("E")))
    assert (arrived.status_code, "1 CloudEvent," in arrived.text) == (200, True)


def test_filters_of_the_address_choose_what_is_shown(seen: Shown) -> None:
    kinds = ("Freeze", "Preempt")
    seen.add(*(FleetVm("web-0").change("scheduled", event(kind, type=kind)) for kind in kinds))
    table = seen.page("/?group=shop&type=Freeze").split("Open events")[1]
    assert [event_id(kind).lower() in table for kind in kinds] == [True, False]
    assert "No open event matches" in seen.page("/?group=shop&type=Reboot")


def test_an_event_of_many_vms_shows_those_that_did_not_see_it_first_and_folds_the_others(seen: Shown) -> None:
    vms = [FleetVm(f"node-{number}") for number in range(300)]
    large = event(vms=[vm.name for vm in vms])
    seen.add(*(vm.change("scheduled", large) for vm in vms[:-1]))
    part = seen.page(page_of("E")).partition('id="part-seen"')[2].partition("</section>")[0]
    assert "Seen by 299 of 300 VMs that it names" in part
    first, others = part.split("<summary>288 more VMs</summary>")
    assert [len(re.findall('<tr>\\s*<td class="wide"', rows)) for rows in (first, others)] == [12, 100]
    assert re.findall(r"node-\d+", first)[0] == "node-299"


def test_a_filter_that_matches_no_vm_says_so_with_the_nearest_value(seen: Shown) -> None:
    seen.add(FleetVm("pay-0", group="payments", tags={"team": "Payments"}).change("scheduled", event()))
    page = seen.page("/?tag=team%3DPayment")
    assert "<h1>No VM matches the filter</h1>" in page
    assert "No open event" not in page
    assert 'href="/?tag=team%3Dpayments"' in page.partition('id="part-unmatched"')[2]
    assert 'href="/fleet?group=payments"' in seen.page("/fleet?group=paymnts")


def test_the_page_of_an_event_of_700_vms_is_small(seen: Shown) -> None:
    names = [f"worker-{number}" for number in range(700)]
    vms = [FleetVm(name, scale_set="pool") for name in names]
    wide = event("wide", vms=names)
    seen.add(*(vm.change("scheduled", wide) for vm in vms))
    seen.add(
        *(vms[0].change("updated", event("wide", vms=names, minutes=20 + at), after(at)) for at in range(50))
    )
    seen.add(*(vm.prepared(wide, after(60)) for vm in vms))
    page = seen.page(page_of("wide"))
    assert "Prepared 13:01 UTC, the last of 479 more" in text_of(page)
    assert "588 more VMs: a filter by name brings its VMs first" in page
    assert re.search(r"\d+ more CloudEvents: earlier ones, all in the download", page)
    assert len(page.encode()) < 200_000


def test_a_filter_stays_on_the_way_to_every_page(seen: Shown) -> None:
    vm = FleetVm("pay-0", tags={"team": "Payments"})
    seen.add(vm.heartbeat(), vm.change("scheduled", event(vms=["pay-0"])))
    mine = "?tag=team%3DPayments"
    for answer in seen.ask(*(f"{path}{mine}" for path in ("/", "/fleet", "/history", page_of("E")))):
        links = answer.text.partition('aria-label="Pages"')[2].partition("</nav>")[0]
        assert re.findall('href="([^"]+)"', links) == [
            f"{page}{mine}" for page in ("/", "/fleet", "/history", "/away")
        ]
    front, fleet = seen.page(f"/{mine}"), seen.page(f"/fleet{mine}")
    assert f'href="{page_of("E").lower()}{mine}"' in front
    assert f'href="/fleet{mine}&amp;status=Scheduled"' in fleet


def test_two_subscriptions_with_groups_of_the_same_name_are_told_apart(seen: Shown) -> None:
    seen.add(*(FleetVm(name, subscription=f"{name}{'0' * 32}").heartbeat() for name in ("vm-a", "vm-b")))
    page = seen.page("/fleet?view=table")
    assert re.findall(r"shop <small [^>]*>\s*\((.*?)\)", page, re.DOTALL) == ["vm-a0000", "vm-b0000"]
    assert re.findall('<option value="(vm-.)0+"', page) == ["vm-a", "vm-b"]


def test_the_fleet_shows_who_watches_each_vm_and_leads_to_it(seen: Shown) -> None:
    one = event(type="Preempt", vms=["web-2", "never-seen"], EventStatus="Started", NotBefore="")
    seen.add(
        FleetVm("silent-0").heartbeat(after(-10_800)),
        FleetVm("stopped-0").heartbeat(reason="Stopping"),
        FleetVm("unreachable-0").unreachable(since=after(-240)),
        FleetVm("web-2").change("started", one),
        FleetVm("web-3").heartbeat(),
    )
    page = seen.page("/fleet")
    cells = dict(re.findall('class="cell [^>]*>([^<]+)<small>([^<]+)', page))
    assert cells == {
        "never-seen": "Preempt now, never reported",
        "silent-0": "silent 3 h",
        "stopped-0": "stopped 0 s",
        "unreachable-0": "no IMDS 4 min",
        "web-2": "Preempt now",
        "web-3": "no event",
    }
    assert page.count(f'href="{page_of("E").lower()}"') == 2


def test_an_event_says_what_an_approval_would_do_where_the_console_sends_none(seen: Shown) -> None:
    seen.add(FleetVm("web-0").change("scheduled", event(vms=["web-0", "web-1"])))
    page = seen.page(page_of("E"))
    assert "<form" not in page.partition('class="card approve"')[2]
    for words in (
        "lets the reboot start at once",
        "all 2 VMs: web-0, web-1",
        f"imds-bridge approve {event_id('E')}",
    ):
        assert words in text_of(page)


def test_the_vms_of_the_filter_come_first_also_on_the_page_of_an_event(seen: Shown) -> None:
    mine = FleetVm("zeta-0", tags={"team": "zeta"})
    shared = event(vms=[*(f"app-{number}" for number in range(19)), "zeta-0"])
    seen.add(mine.heartbeat(), mine.change("scheduled", shared))
    link = f"{page_of('E').lower()}?tag=team%3Dzeta"
    assert f'<a href="{link}" title="zeta-0, app-0' in seen.page("/?tag=team%3Dzeta")
    page = text_of(seen.page(link))
    assert all(words in page for words in ("zeta-0, app-0", "1 of 20 VMs", "1 of them is of your filter"))


def test_vms_that_are_gone_or_stopped_are_counted_apart_from_what_is_not_watched(seen: Shown) -> None:
    gone = event(type="Preempt", vms=["spot-0"], minutes=1)
    old = event("old", type="Preempt", vms=["spot-1"], minutes=1, at=after(-DAY))
    seen.add(
        FleetVm("spot-1").change("scheduled", old, after(-DAY)),
        FleetVm("spot-0").change("scheduled", gone),
        FleetVm("web-1").heartbeat(reason="Stopping"),
        FleetVm("web-0").heartbeat(after(7200)),
        at=after(7200),
    )
    seen.clock.advance(7200)
    page = seen.page("/")
    assert "<h1>Nothing is scheduled</h1>" in page
    assert re.findall(r"<strong>(\d+)</strong> (overdue|not watched)", page) == [
        ("0", "overdue"),
        ("0", "not watched"),
    ]
    assert re.findall(r'status=(\w+)">(\d+ [a-z ]+)<', page) == [
        ("stopped", "1 stopped"),
        ("gone", "1 probably gone"),
    ]
    assert page.count("<tr><td") == 1
    assert '<td class="when"><span class="dim">probably gone</span>' in page.replace("\n", "")


def test_headline_and_title_say_that_the_page_is_blind(seen: Shown) -> None:
    seen.add(FleetVm("web-0").heartbeat(), FleetVm("web-1").heartbeat(after(-7200)))
    text = "Nothing is scheduled; 1 VM not watched"
    assert [re.findall("<(?:h1|title)>(.*?)</", one.text) for one in seen.ask("/", "/fleet")] == [
        [f"{text} - imds-bridge", text],
        ["2 VMs; 1 VM not watched - imds-bridge", "2 VMs; 1 VM not watched"],
    ]


def test_a_notice_that_a_forwarder_saw_at_its_start_is_not_azures(seen: Shown) -> None:
    new, old = FleetVm("new-0"), FleetVm("old-0")
    short = {vm.name: event(vm.name, vms=[vm.name], minutes=5) for vm in (new, old)}
    seen.add(new.heartbeat(reason="Started"), old.heartbeat(after(-1800)))
    seen.add(*(vm.change("scheduled", short[vm.name]) for vm in (new, old)))
    pages = [text_of(one.text) for one in seen.ask("/history", page_of("new-0"), page_of("old-0"))]
    assert "1 of 1 had less than Microsoft's minimum" in pages[0]
    assert "5 min or morethe VM started to watch only then" in pages[1]
    assert "5 minless than Microsoft's 15 min" in pages[2]


def test_the_history_counts_and_is_there_as_csv(seen: Shown) -> None:
    vm = FleetVm("web-0")
    seen.add(vm.change("canceled", event(), previous=event()), vm.loss())
    page, csv = seen.ask("/history?days=90", "/history.csv?days=90")
    assert "20 event(s) lost: SizeLimit" in page.text
    assert csv.headers["Content-Type"].startswith("text/csv")
    line = only(csv.text.splitlines()[1:])
    assert (line.startswith(event_id("E")), ",Canceled," in line) == (True, True)


def test_the_history_of_a_vm_or_of_a_type_is_an_address(seen: Shown) -> None:
    for number, kind in enumerate(("Terminate", "Reboot")):
        vm, one = FleetVm(f"web-{number}"), event(kind, vms=[f"web-{number}"], type=kind)
        seen.add(vm.change("scheduled", one), vm.change("canceled", one, previous=one))
    everything, of_vm, csv = seen.ask("/history", "/history?vm=WEB-0", "/history.csv?vm=WEB-0")
    link = "/history?days=30&amp;type=Terminate&amp;status=Canceled"
    assert f'href="{link}"' in everything.text
    for page in (of_vm.text, seen.page(html.unescape(link))):
        assert re.findall('href="(/event/[^"?]+)', page) == [page_of("Terminate").lower()]
    assert '<option value="Canceled" selected>' in page
    assert len(csv.text.splitlines()) == 2


def test_a_table_of_more_than_a_hundred_has_pages(seen: Shown) -> None:
    for group in range(5):
        vms = [FleetVm(f"web-{number}", group=f"g{group}") for number in range(50)]
        apart = [
            event(f"{vm.group}/{vm.name}", vms=[vm.name], minutes=16 * number)  # no wave
            for number, vm in enumerate(vms, 1)
        ]
        seen.add(*(vm.change("scheduled", one) for vm, one in zip(vms, apart, strict=True)))
    front, fleet, history = (
        seen.page(path) for path in ("/?page=2", "/fleet?view=table&page=2", "/history?days=90&page=2")
    )
    for page in (front, fleet, history):
        assert "101 to 200 of 250" in page
        assert re.search(r'rel="next" href="/[a-z]*\?page=3["&]', page)
    assert front.count('<svg class="track"') == 100
    assert "201 to 250 of 250" in seen.page("/?page=99")
    assert "1 to 50 of 50 events" not in seen.page("/?group=g1")


def test_a_wave_is_a_line_that_opens_and_closes_and_pages_like_all_events(seen: Shown) -> None:
    vms = {name: FleetVm(name) for name in (f"web-{number}" for number in range(240))}
    reboots = {name: event(name, vms=[name], minutes=30) for name in vms}
    seen.add(*(vm.change("scheduled", reboots[name]) for name, vm in vms.items()))
    seen.add(FleetVm("db-0").change("scheduled", event("db", vms=["db-0"], type="Freeze")))
    front = seen.page("/?window=4h")
    assert re.search(r"240 Reboots shop240 VMs: web-\d+, web-\d+ and 238 more", text_of(front))
    assert front.count("<tr><td") == 2
    address = html.unescape(only(set(re.findall(r'href="(/\?window=4h&amp;wave=[^"]+)"', front))))
    opened = seen.page(address)
    assert ("1 to 100 of 240 lines" in opened, "db-0" in opened) == (True, False)
    assert len(re.findall('<td class="what">.* <a href="/event/', opened)) == 100
    more = html.unescape(only(re.findall('rel="next" href="([^"]+)', opened)))
    assert "101 to 200 of 240 lines" in seen.page(more)
    assert "This wave is over" in seen.page(f"/?wave={event_id('db')}")
    named = only(one for one in reboots.values() if one.key == address.rpartition("=")[2])
    seen.add(vms[named.resources[0]].change("canceled", named))
    left = seen.page(address)
    assert ("239 Reboots of shop" in left, "1 to 100 of 239 lines" in left) == (True, True)


def test_the_cells_of_a_large_fleet_have_pages(seen: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PAGE_CELLS", 3)
    seen.add(*(FleetVm(f"web-{number}", f"g{number // 2}").heartbeat(backlog=2) for number in range(5)))
    first, second = seen.page("/fleet"), seen.page("/fleet?page=2")
    assert [page.count('class="cell ') for page in (first, second)] == [3, 2]
    assert "1 VM on this page" in first
    assert 'rel="next" href="/fleet?page=2"' in first
    for page in (first, second):
        assert "<h1>5 VMs</h1>" in page
        assert "10 events waiting on VMs" in page


# --- who may look ---


def test_pages_are_only_for_those_whom_the_proxy_has_signed_in(guarded: RunningConsole) -> None:
    user, groups = {"X-Forwarded-User": "ana"}, {"X-Forwarded-Groups": "staff"}
    proved, guessed = ({"X-Proxy-Secret": secret} for secret in (PROXY_SECRET, "guess"))
    for path in (*PAGES, "/history.csv", "/live", "/event/x/events.jsonl"):
        given: list[dict[str, str]]
        given = [{}, {**user, **groups}, {**guessed, **user, **groups}, {**proved, **user}]
        assert [guarded.get(path, one).status_code for one in given] == [401, 401, 401, 403], path
    assert "ana" in guarded.page("/", {**proved, **user, **groups})


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"X-Proxy-Secret": "guess"}, "X-Proxy-Secret is not the secret of [console.proxy]"),
        ({"X-Proxy-Secret": PROXY_SECRET, "X-User": "ana"}, "X-Forwarded-User names nobody"),
        ({"Authorization": "Bearer wrong"}, "the token is wrong"),
    ],
)
def test_a_proxy_that_is_not_believed_is_logged_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, headers: dict[str, str], reason: str
) -> None:
    with console_at(tmp_path, **behind_proxy()) as console:
        for _ in range(3):
            assert console.get("/metrics", headers).status_code == 401
        assert [reason in message for message in caplog.messages if "401" in message] == [True]
        metrics = console.page("/metrics", {"Authorization": f"Bearer {TOKEN}"})
    assert "\nimds_bridge_console_unauthenticated_total 3.0\n" in metrics
    assert "guess" not in caplog.text


def test_a_secret_of_the_proxy_that_cannot_be_read_is_an_answer(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(PROXY_SECRET)
    secret.chmod(0o600)
    with console_at(tmp_path, **behind_proxy(proxy={"secret_file": str(secret)})) as console:
        assert console.get("/", ANA).status_code == 200
        secret.unlink()
        answer = console.get("/", ANA)
    assert (answer.status_code, answer.text) == (503, "a secret cannot be read at the moment\n")
    assert answer.headers["X-Frame-Options"] == "DENY"


def test_names_of_people_and_groups_are_utf_8(tmp_path: Path) -> None:
    with console_at(tmp_path, **behind_proxy(viewer_groups=["\u00c9quipe"])) as console:
        proved = {"X-Proxy-Secret": PROXY_SECRET, "X-Forwarded-User": "Jos\u00e9 M\u00fcller".encode()}
        answer = console.get("/", {**proved, "X-Forwarded-Groups": "\u00c9quipe".encode()})  # type: ignore[dict-item] # bytes
        assert "Jos\u00e9 M\u00fcller" in answer.text
        assert console.get("/", proved).status_code == 403  # type: ignore[arg-type] # bytes
