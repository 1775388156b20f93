"""The API, its document, health and metrics."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bridge.config.console import ConsoleSettings
from bridge.config.models import Config, MetricsSettings
from bridge.console import base
from bridge.console.api import DOCUMENT
from bridge.console.process import Console, listen_on
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.threads import Signals
from tests.support.console import TOKEN, FleetVm, RunningConsole, Shown, console_at, event, running_console
from tests.support.status import write_raw
from tools.contract.console_api import document

PARAMETERS = json.loads(DOCUMENT)["paths"]["/api/v1/events/{event_id}"]["get"]["parameters"]
EXAMPLE = PARAMETERS[0]["schema"]["examples"][0]


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console that knows an event of three VMs, one of which has never reported."""
    with console_at(tmp_path_factory.mktemp("console")) as running:
        vms = [FleetVm("api-0"), FleetVm("api-1")]
        reboot = event(vms=["api-0", "api-2"], EventId=EXAMPLE)
        running.send(*(body for vm in vms for body in (vm.heartbeat(), vm.change("scheduled", reboot))))
        running.send(vms[0].receipt(reboot))
        yield running


def pages(get: Callable[[str], Any], path: str, rows: str) -> Iterator[list[Any]]:
    """Yield the rows of an answer, and of each that it leads to."""
    while path:
        answer = get(path)
        assert len(answer[rows]) <= base.PAGE_CELLS
        yield answer[rows]
        path = answer["next"]


def test_the_document_is_written_from_the_models() -> None:
    assert document() == DOCUMENT.decode(), "python -m tools.contract.console_api"


@pytest.mark.timeout(300)
def test_every_answer_is_as_the_document_describes(console: RunningConsole, tmp_path: Path) -> None:
    """Let schemathesis send what the document allows and what it does not; the same at each run."""
    document = f"{console.url}/api/v1/openapi.json"
    phases = ["--phases", "examples,coverage,fuzzing", "--max-examples", "3"]
    options = ["--checks", "all", *phases, "--generation-deterministic", "--no-color"]
    done = subprocess.run(
        [Path(sys.executable).with_name("schemathesis"), "run", document, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert console.send_json("PUT", "/api/v1/expected", []).status_code == 204
    assert done.returncode == 0, done.stdout
    for line in ("Tested: 6", "✅ Examples", "✅ Coverage", "✅ Fuzzing"):
        assert line in done.stdout


def test_the_body_of_an_answer_does_not_wait_until_its_head_is_acknowledged() -> None:
    """They are sent apart, and a client that keeps its connection acknowledges 40 ms later."""
    with listen_on("127.0.0.1:0") as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        (
            "events?typ=Reboot",
            400,
            "typ: unknown; expected type, status, due, source, vm, subscription, group, tag, page, after",
        ),
        ("events?type=Reboot&type=Freeze", 400, "type: given too often"),
        ("history?days=31", 422, "days: expected 30 or 90"),
        ("events?due=1x", 422, "due: expected overdue or started or 1h or later or gone or ended"),
        (f"events/{EXAMPLE}?after=x", 400, "after: expected the address that the page before names"),
        ("vms?page=0", 400, "page: expected a number from 1 to 999999"),
        (f"vms?vm={'x' * 201}", 400, "vm: expected at most 200 characters"),
    ],
)
def test_a_query_that_is_not_as_described_is_refused(
    console: RunningConsole, path: str, status: int, error: str
) -> None:
    response = console.get(f"/api/v1/{path}")
    assert (response.status_code, response.json()) == (status, {"error": error})


def test_the_api_shows_what_the_pages_show(console: RunningConsole) -> None:
    details = console.get(f"/api/v1/events/{EXAMPLE.lower()}").json()
    assert details["event"]["approval"] == "accepted"
    assert [one["vm"] for one in details["reports"][0]["seen_by"]] == ["api-0", "api-1"]
    assert details["reports"][0]["cloudevent"]["data"]["EventId"] == EXAMPLE
    vms = {vm["name"]: (vm["watch"], vm["event_id"]) for vm in console.get("/api/v1/vms").json()["vms"]}
    assert vms == {"api-0": ("watched", EXAMPLE), "api-1": ("watched", None), "api-2": ("unknown", EXAMPLE)}
    assert console.get("/api/v1/events?vm=nothing").json() == {"events": [], "put_away": 0, "next": None}
    assert console.get("/api/v1/openapi.json").json()["openapi"] == "3.1.0"


@pytest.mark.parametrize(
    ("path", "rows", "key"),
    [
        ("vms", "vms", "name"),
        ("vms?group=shop&group=other", "vms", "name"),
        ("vms?after=", "vms", "name"),
        ("vms?after=&group=shop", "vms", "name"),
        ("events", "events", "event_id"),
        ("events?after=", "events", "event_id"),
        (f"events/{EXAMPLE}", "reports", "cloudevent"),
        (f"events/{EXAMPLE}?after=", "reports", "cloudevent"),
    ],
)
def test_an_answer_names_the_next_page_until_everything_was_sent(
    console: RunningConsole, monkeypatch: pytest.MonkeyPatch, path: str, rows: str, key: str
) -> None:
    def read() -> list[str]:
        def get(path: str) -> Any:
            return console.get(path).json()

        return [json.dumps(row[key]) for page in pages(get, f"/api/v1/{path}", rows) for row in page]

    everything = read()
    monkeypatch.setattr(base, "PAGE_CELLS", 1)
    assert read() == everything != []


@pytest.mark.parametrize(("path", "rows", "key"), [("events", "events", "event_id"), ("vms", "vms", "name")])
def test_rows_that_come_and_go_between_two_pages_repeat_and_hide_no_other(
    seen: Shown, monkeypatch: pytest.MonkeyPatch, path: str, rows: str, key: str
) -> None:
    def get(path: str) -> Any:
        return seen.ask(path)[0].json()

    vms = [FleetVm(f"job-{number}") for number in range(4)]
    reboots = [event(vm.name, vms=[vm.name]) for vm in vms]
    seen.add(*(vm.change("scheduled", one) for vm, one in zip(vms, reboots, strict=True)))
    before = {row[key] for row in get(f"/api/v1/{path}")[rows]}
    monkeypatch.setattr(base, "PAGE_CELLS", 1)
    found: list[str] = []
    for page in pages(get, f"/api/v1/{path}?after=", rows):
        found += [row[key] for row in page]
        if len(found) == 2:  # one of those already read ends, and a new VM has one
            new = FleetVm("job-9").change("scheduled", event("job-9", vms=["job-9"]))
            seen.add(vms[0].change("canceled", reboots[0]), new)
    assert len(found) == len(set(found))
    assert set(found) >= before - {reboots[0].event_id}


def test_health_and_metrics_say_how_it_is(console: RunningConsole) -> None:
    assert console.get("/livez").json() == {"ok": True, "role": "console"}
    assert console.get("/readyz").status_code == 200
    families = text_string_to_metric_families(console.get("/metrics").text)
    samples = {family.name.removeprefix("imds_bridge_console_"): family.samples for family in families}
    vms = {sample.labels["state"]: sample.value for sample in samples["vms"]}
    assert (vms["watched"], vms["silent"], vms["unknown"]) == (2, 0, 1)
    assert (samples["received"][0].value, samples["repeated"][0].value) == (4, 1)


@pytest.mark.parametrize("running", [None, True, False])
def test_the_metrics_say_whether_the_run_before_was_stopped(tmp_path: Path, running: bool | None) -> None:
    if running is not None:
        (tmp_path / "console").mkdir()
        write_raw(StateFolder(tmp_path / "console"), {"role": "console", "running": running})
    with running_console(tmp_path) as console:
        found = console.get("/metrics").text
    assert f"\nimds_bridge_previous_run_stopped {float(running is False)}\n" in found


def test_a_console_whose_probe_asks_its_port_takes_no_other(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        metrics = MetricsSettings(listen=address, next_port=False)
        section = ConsoleSettings(listen="127.0.0.1:0")
        console = Console(Config(state_dir=tmp_path, console=section, metrics=metrics))
        assert console.run(cast(Signals, SimpleNamespace(wait=lambda _: "SIGTERM"))) == 0
    found = console.status()
    assert (found.metrics, address in (found.metrics_error or "")) == ("", True)


def test_a_scraper_shows_the_token_where_people_sign_in(guarded: RunningConsole) -> None:
    tokens = ("", "Bearer wrong", f"Bearer {TOKEN}")
    given = [{"Authorization": token} if token else {} for token in tokens]
    assert [guarded.get("/metrics", headers).status_code for headers in given] == [401, 401, 200]
    assert guarded.get("/livez").status_code == 200
    assert guarded.get("/api/v1/events").json() == {"error": "You are not signed in; reload the page."}
