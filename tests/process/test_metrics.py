"""The metrics of the real process, as Prometheus scrapes them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from urllib.request import urlopen

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.support.console import STRUCTURED, TOKEN, ConsoleProcess, FleetVm, behind_proxy
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import Forward, wait_until


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return every sample by its name and the values of its labels."""
    return {
        (
            sample.name.removeprefix("imds_bridge_"),
            tuple(sample.labels[name] for name in sorted(sample.labels)),
        ): (sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def served_port(forward: Forward) -> int | None:
    """Return the port that the process names in its log, None if it does not yet."""
    lines = map(json.loads, forward.log.read_text().splitlines())
    return next((line["port"] for line in lines if "port" in line), None)


def test_a_change_is_counted_from_imds_to_the_receiver(lab: ImdsLab, inbox: Inbox, tmp_path: Path) -> None:
    settings = {
        "metrics": {"listen": "127.0.0.1:0"},
        "imds": {"endpoint": lab.url("web-0"), "poll_seconds": 0.2},
        "sinks": {"ops": {"kind": "webhook", "url": inbox.url}},
    }
    with Forward(tmp_path, settings) as forward:
        port = wait_until(lambda: served_port(forward))

        def scrape() -> str:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())

        lab.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=890)
        wait_until(lambda: samples(scrape())["deliveries_total", ("delivered", "ops")] >= 3)
        text = scrape()
    found = samples(text)
    assert found["polls_total", ("answered",)] >= 1
    assert found["changes_total", ("scheduled",)] == 1
    assert found["scheduled_events", ("Scheduled", "Reboot")] == 1
    assert found["notice_seconds_bucket", ("900.0", "Reboot")] == 1
    assert found["notice_seconds_bucket", ("600.0", "Reboot")] == 0
    assert found["delivery_seconds_count", ("ops",)] >= 3
    assert found["loop_progress_age_seconds", ("poll",)] < 60
    assert found["outbox_bytes", ()] > 0
    assert found["storage_errors_total", ()] == 0
    assert "web-0" not in text
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, of Debian's package prometheus, is not installed")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=30
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_console_serves_the_same_port_as_the_others(tmp_path: Path) -> None:
    with ConsoleProcess(tmp_path, metrics="127.0.0.1:0", **behind_proxy()) as console:
        port = wait_until(lambda: served_port(console))
        authorization = {"Authorization": f"Bearer {TOKEN}"}
        requests.post(
            f"{console.url}/ingest",
            FleetVm("web-0").heartbeat(),
            headers={**STRUCTURED, **authorization},
            timeout=10,
        )
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            found = samples(answer.read().decode())
        assert found["console_received_total", ()] == 1
        assert found["storage_available", ()] == 1
        assert found["loop_progress_age_seconds", ("write",)] < 60
        own = requests.get(f"{console.url}/metrics", headers=authorization, timeout=10).text
        assert samples(own).keys() == found.keys()
        for path in ("livez", "readyz"):
            with urlopen(f"http://127.0.0.1:{port}/{path}") as answer:
                assert json.load(answer) == {"ok": True, "role": "console", "reasons": []}
