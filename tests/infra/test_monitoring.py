"""The alerts: Prometheus reads them, each fires on its cause, and Azure Monitor gets the same ones."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from prometheus_client import CollectorRegistry
from pycep import BicepParser

from bridge.process.metrics import Meter, StatusCollector
from infra.monitoring.generate import BICEP, COPY, DASHBOARD, FOLDER, bicep, copy, group, panels, read_rules
from tests.support.clock import MovedClock
from tests.support.only import only
from tests.support.paths import ROOT
from tests.support.process import completed
from tests.support.programs import build, run_program, tool
from tests.support.status import bus_status, process_status, sink_status

RULES = read_rules()
NAMES = [rule["alert"] for rule in RULES]


def promtool(*arguments: str, name: str = "promtool") -> None:
    """Run promtool, or another tool, in the folder of the rules; fail with what it prints."""
    done = completed(tool(name), *arguments, cwd=FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_the_rules_and_each_alert_fires_on_its_cause_and_stays_quiet_without_it() -> None:
    promtool("check", "rules", "rules.yaml")
    promtool("test", "rules", "rules.test.yaml")


def test_prometheus_reads_the_agents_configurations_of_the_page_which_name_the_vm(tmp_path: Path) -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    own, aks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    of_node = yaml.safe_load(aks)["data"]["prometheus-config"]
    for text, expected in (
        (own, ["web-0:9464", "web-0:9465"]),
        (of_node.replace("$NODE_IP", "10.0.0.4").replace("$NODE_NAME", "aks-1"), ["aks-1:9464"]),
    ):
        (tmp_path / "prometheus.yml").write_text(text)
        promtool("check", "config", "--agent", str(tmp_path / "prometheus.yml"))
        job = only(yaml.safe_load(text)["scrape_configs"])
        assert job["job_name"].startswith("imds-bridge")
        rule, targets = only(job["relabel_configs"]), only(job["static_configs"])["targets"]
        assert (rule["source_labels"], rule["target_label"]) == (["__address__"], "instance")
        template = rule["replacement"].replace("$", "\\")
        assert [re.sub(f"^{rule['regex']}$", template, target) for target in targets] == expected


def test_alertmanager_reads_its_example_and_sends_each_alert_to_who_is_meant() -> None:
    promtool("check-config", "alertmanager.yaml", name="amtool")
    for rule in RULES:
        receiver = {"critical": "on-call", "warning": "team"}[rule["labels"]["severity"]]
        labels = [f"alertname={rule['alert']}", f"severity={rule['labels']['severity']}"]
        route = ["config", "routes", "test", "--config.file=alertmanager.yaml"]
        promtool(*route, f"--verify.receivers={receiver}", *labels, name="amtool")


def test_the_example_of_alertmanager_inhibits_alerts_that_exist() -> None:
    config = yaml.safe_load((FOLDER / "alertmanager.yaml").read_text())
    for rule in config["inhibit_rules"]:
        for matchers in (rule["source_matchers"], rule["target_matchers"]):
            matcher = only(matchers)
            pattern = re.fullmatch(r'alertname=~?"(.+)"', matcher)
            assert pattern, matcher
            matched = [name for name in NAMES if re.fullmatch(pattern[1], name)]
            assert len(matched) == len(pattern[1].split("|")), matcher


def test_each_alert_has_both_tests() -> None:
    tests = yaml.safe_load((FOLDER / "rules.test.yaml").read_text())["tests"]
    found = {
        (re.findall(r'alertname="(\w+)"', check["expr"])[0], check["exp_samples"][0]["value"])
        for test in tests
        for check in test["promql_expr_test"]
    }
    assert {(name, min(value, 1)) for name, value in found} == {
        (name, value) for name in NAMES for value in (0, 1)
    }


def known_names() -> set[str]:
    """Return every metric, label and value of a label that exists."""
    registry = CollectorRegistry()
    Meter(registry, ["ops"])
    now, clock = "2026-11-22T09:00:00.000Z", MovedClock()
    changes: dict[str, dict[str, Any]] = {
        "forward": {
            "last_good_at": now,
            "document": {"DocumentIncarnation": 1, "Events": []},
            "sinks": {"ops": sink_status(notice_until=now)},
        },
        "listen": {"commands": bus_status(looked_at=now)},
    }
    outbox = Mock(storage_errors=0, **{"size_bytes.return_value": 0})
    # The console's are shown to exist by its own tests.
    known = {"up", "job", "loop", "instance", "imds_bridge_loop_progress_age_seconds"}
    known |= {"imds_bridge_console_vms", "state", "unheard"}
    families = [*registry.collect()]
    for role, changed in changes.items():
        status = process_status(clock.now(), role, **changed)
        families += StatusCollector(lambda shown=status: shown, outbox, clock).collect()  # type: ignore[misc]
    for family in families:
        known.add(family.name)
        for sample in family.samples:
            known |= {sample.name, *sample.labels, *sample.labels.values()}
    return known


EXPRESSIONS = {
    **{rule["alert"]: rule["expr"] for rule in RULES},
    **{panel.title: panel.expr for panel in panels() if panel.expr},
}


def test_the_rules_and_panels_name_metrics_and_labels_that_exist() -> None:
    known = known_names()
    for title, expr in EXPRESSIONS.items():
        for name in re.findall(r"\b(?:imds_bridge|process)_\w+", expr):
            assert name in known, f"{title}: {name}"
        for label, value in re.findall(r'(\w+)="([^"]+)"', expr):
            assert {label, value} <= known, f"{title}: {label}={value}"
    for panel in panels():
        grouped = re.findall(r"by \(([^)]*)\)", panel.expr)
        labels = {label for by in grouped for label in by.split(", ") if label}
        assert labels <= known | {"le"}, panel.title
        for _, legend in panel.queries:
            assert {*re.findall(r"{{(\w+)}}", legend)} <= known, panel.title


def test_azure_monitor_gets_the_same_alerts() -> None:
    assert BICEP.read_text() == bicep(RULES), "run python -m infra.monitoring.generate"
    assert COPY.read_text() == copy(), "run python -m infra.monitoring.generate"


@pytest.mark.parametrize("count", [len(RULES), 20, 21, 60])
def test_no_group_has_more_rules_than_azure_takes(count: int) -> None:
    rules = (RULES * 3)[:count]
    groups = BicepParser().parse(text=bicep(rules))["resources"].values()
    given = [[rule["alert"] for rule in one["config"]["properties"]["rules"]] for one in groups]
    assert [name for names in given for name in names] == [rule["alert"] for rule in rules]
    assert max(map(len, given)) <= 20  # which Azure does not raise
    names = [one["config"]["name"] for one in groups]
    assert len(names) == len({*names}) == -(-count // 20)
    assert names[0] == "imds-bridge"
    with pytest.raises(ValueError, match="given 21 rules in a group, expected at most 20"):
        group(1, (RULES * 3)[:21])


def test_each_alert_has_a_section_in_the_runbook() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert [name for name in NAMES if f"### {name}\n" not in page] == []
    links = [rule["annotations"]["runbook_url"] for rule in RULES]
    assert links == [f"docs/operations.md#{name.lower()}" for name in NAMES]


# --- the dashboard ---


def test_prometheus_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel_{number}", "expr": panel.expr.replace("$__rate_interval", "5m")}
        for number, panel in enumerate(panels())
        if panel.expr
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_every_metric_of_the_page_is_in_the_dashboard() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    table = only(re.findall(r"\| metric: .*?\n\n", page, re.DOTALL))
    cells = [line.split("|")[1] for line in table.strip().splitlines()[2:]]
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    drawn = " ".join(panel.expr for panel in panels())
    # The lost events are drawn in place of the losses.
    missing = {name for name in listed if f"imds_bridge_{name}" not in drawn}
    assert missing == {"losses_total", "clock_jumps_total", "previous_run_stopped"}


def test_every_panel_has_a_title_of_its_own_and_chooses_the_instances() -> None:
    assert [one.title for one in panels() if one.expr and 'instance=~"$instance"' not in one.expr] == []
    assert len({panel.title for panel in panels()}) == len(panels())


def test_grafanas_own_model_has_every_key_of_the_dashboard() -> None:
    package = "grafana-foundation-sdk==1769699998!10.1.0"

    def install(place: Path) -> list[list[str]]:
        return [[sys.executable, "-m", "pip", "install", "--quiet", "--target", str(place / "lib"), package]]

    modules = build("python", "grafana-foundation-sdk-10.1.0", install) / "lib"
    script = ROOT / "tests" / "support" / "grafana_roundtrip.py"

    def lost(model: object) -> object:
        return run_program([sys.executable, str(script)], given=model, PYTHONPATH=str(modules))

    model = json.loads(DASHBOARD.read_text())
    assert lost(model) == []
    model["panels"][1]["titel"] = "a mistake"
    assert lost(model) == ["dashboard.panels[1].titel"]
