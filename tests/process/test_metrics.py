"""The metrics of the real process, as Prometheus scrapes them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.support.console import STRUCTURED, TOKEN, ConsoleProcess, FleetVm, behind_proxy
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import Forward, wait_until
from tests.support.programs import tool


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return every sample by its name and the values of its labels."""
    return {
        (one.name.removeprefix("imds_bridge_"), *(one.labels[name] for name in sorted(one.labels))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def served(forward: Forward) -> str:
    """Return where the process serves metrics: it names the port in its log."""
    port = wait_until(lambda: next((line["port"] for line in forward.lines() if "port" in line), None))
    return f"http://127.0.0.1:{port}"


def scrape(url: str, **headers: str) -> str:
    return requests.get(f"{url}/metrics", headers=headers, timeout=30).text


def test_a_change_is_counted_from_imds_to_the_receiver(imds: ImdsLab, inbox: Inbox, tmp_path: Path) -> None:
    settings = {
        "metrics": {"listen": "127.0.0.1:0"},
        "imds": {"endpoint": imds.url("web-0"), "poll_seconds": 0.2},
        "sinks": {"ops": {"kind": "webhook", "url": inbox.url}},
    }
    with Forward(tmp_path, settings) as forward:
        url = served(forward)
        imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=890)
        wait_until(lambda: samples(scrape(url))["deliveries_total", "delivered", "ops"] >= 3)
        text = scrape(url)
    found = samples(text)
    assert found["polls_total", "answered"] >= 1
    assert found["changes_total", "scheduled"] == 1
    assert found["scheduled_events", "Scheduled", "Reboot"] == 1
    assert found["notice_seconds_bucket", "900.0", "Reboot"] == 1
    assert found["notice_seconds_bucket", "600.0", "Reboot"] == 0
    assert found["delivery_seconds_count", "ops"] >= 3
    assert ("loop_progress_age_seconds", "poll") in found
    assert found["outbox_bytes",] > 0
    assert found["storage_errors_total",] == 0
    assert "web-0" not in text
    command = [tool("promtool"), "check", "metrics"]
    checked = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=30)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_console_serves_the_same_port_as_the_others(tmp_path: Path) -> None:
    authorization = {"Authorization": f"Bearer {TOKEN}"}
    with ConsoleProcess(tmp_path, metrics="127.0.0.1:0", **behind_proxy()) as console:
        url, body = served(console), FleetVm("web-0").heartbeat()
        requests.post(f"{console.url}/ingest", body, headers={**STRUCTURED, **authorization}, timeout=30)
        found = samples(scrape(url))
        assert found["console_received_total",] == found["storage_available",] == 1
        assert ("loop_progress_age_seconds", "write") in found
        assert samples(scrape(console.url, **authorization)).keys() == found.keys()
        for path in ("livez", "readyz"):
            answer = requests.get(f"{url}/{path}", timeout=30).json()
            assert answer == {"ok": True, "role": "console", "reasons": []}
