"""The alerts: Prometheus reads them, each fires on its cause, and Azure Monitor gets the same ones."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml
from prometheus_client import CollectorRegistry
from pycep import BicepParser

from bridge.service.metrics import Meter, StatusCollector
from tests.support.clock import MovedClock
from tests.support.monitoring import BICEP, FOLDER, bicep, read_rules
from tests.support.paths import ROOT

RULES = read_rules()
NAMES = [rule["alert"] for rule in RULES]


def promtool(*arguments: str) -> None:
    """Run promtool in the folder of the rules; fail with what it prints."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool, of Debian's package prometheus, is not installed")
    done = subprocess.run(
        [program, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_the_rules() -> None:
    promtool("check", "rules", "rules.yaml")


def test_each_alert_fires_on_its_cause_and_stays_quiet_without_it() -> None:
    promtool("test", "rules", "rules.test.yaml")


def test_each_alert_has_both_tests() -> None:
    tests = yaml.safe_load((FOLDER / "rules.test.yaml").read_text())["tests"]
    found = sorted(
        (re.findall(r'alertname="(\w+)"', check["expr"])[0], check["exp_samples"][0]["value"])
        for test in tests
        for check in test["promql_expr_test"]
    )
    assert found == sorted((name, value) for name in NAMES for value in (0, 1))


def test_the_rules_name_metrics_and_labels_that_exist() -> None:
    registry = CollectorRegistry()
    Meter(registry, ["ops"])
    status = {
        "role": "forward",
        "storage_error": None,
        "outbox_bytes": 0,
        "last_good_at": "2026-11-22T09:00:00.000Z",
        "commands": {"last_error": None},
        "sinks": {
            "ops": {
                "state": "ok",
                "backlog": 0,
                "oldest_waits_seconds": None,
                "next_retry_at": None,
                "dead_letters": 0,
            }
        },
    }
    registry.register(StatusCollector(lambda: status, MovedClock()))
    known = {"up", "loop", "imds_bridge_loop_progress_age_seconds"}
    for family in registry.collect():
        known.add(family.name)
        for sample in family.samples:
            known |= {sample.name, *sample.labels, *sample.labels.values()}
    for rule in RULES:
        for name in re.findall(r"\b(?:imds_bridge|process)_\w+", rule["expr"]):
            assert name in known, f"{rule['alert']}: {name}"
        for label, value in re.findall(r'(\w+)="([^"]+)"', rule["expr"]):
            assert {label, value} <= known, f"{rule['alert']}: {label}={value}"


def test_azure_monitor_gets_the_same_alerts() -> None:
    text = BICEP.read_text()
    assert text == bicep(), "run python -m tests.support.monitoring"
    assert "alerts" in BicepParser().parse(text=text)["resources"]
    assert re.findall(r"alert: '(\w+)'", text) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_alert_has_a_section_in_the_runbook(name: str) -> None:
    assert f"### {name}\n" in (ROOT / "docs" / "operations.md").read_text()
