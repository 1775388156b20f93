"""The rules and the dashboard as tests read them, and the alerts for Azure Monitor.

`python -m infra.monitoring.generate` writes the latter from the Prometheus rules, and the chart's copy of the rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
RULES = FOLDER / "rules.yaml"
BICEP = FOLDER / "alerts.bicep"
DASHBOARD = FOLDER / "dashboard.json"
COPY = FOLDER.parent / "kubernetes/rules.yaml"  # a chart reads no file beside its folder

# Azure Monitor's severities: 0 critical, 1 error, 2 warning.
SEVERITIES = {"critical": 1, "warning": 2}

# Azure's limit, which it does not raise: a larger group is refused as a whole.
RULES_IN_A_GROUP = 20

_HEAD = """\
// Generated from rules.yaml: python -m infra.monitoring.generate
metadata description = 'The alerts of imds-bridge for an Azure Monitor workspace that scrapes its metrics.'

@description('Resource id of the Azure Monitor workspace.')
param workspaceId string

@description('Resource ids of the action groups that are notified.')
param actionGroupIds string[] = []

@description('Where the page docs/operations.md is; each alert links to its section.')
param runbookUrl string = 'docs/operations.md'

param location string = resourceGroup().location
param tags object = {}

var actions = [for id in actionGroupIds: {
  actionGroupId: id
}]
"""
_GROUP = """\

resource alerts%d 'Microsoft.AlertsManagement/prometheusRuleGroups@2023-03-01' = {
  name: '%s'
  location: location
  tags: tags
  properties: {
    description: 'Alerts of imds-bridge'
    enabled: true
    interval: 'PT1M'
    scopes: [
      workspaceId
    ]
    rules: [
"""
_TAIL = """\
    ]
  }
}
"""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of the dashboard, or the heading of a row, which has no query."""

    title: str
    kind: str
    queries: tuple[tuple[str, str], ...]  # each expression, and the legend of its lines
    unit: str
    place: dict[str, int]

    @property
    def expr(self) -> str:
        """All that the panel asks for, as one expression; empty for a heading."""
        return " or ".join(expr for expr, _ in self.queries)


def panels() -> list[Panel]:
    """Return the panels of the dashboard and the headings between them."""
    return [
        Panel(
            title=one["title"],
            kind=one["type"],
            queries=tuple(
                (target["expr"], target.get("legendFormat", "")) for target in one.get("targets", ())
            ),
            unit=one.get("fieldConfig", {}).get("defaults", {}).get("unit", "short"),
            place=one["gridPos"],
        )
        for one in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    ]


def read_rules() -> list[dict[str, Any]]:
    """Return the Prometheus rules."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def bicep(rules: list[dict[str, Any]]) -> str:
    """Return the Bicep module with every rule, in as many groups as Azure needs."""
    starts = range(0, len(rules), RULES_IN_A_GROUP)
    groups = [rules[start : start + RULES_IN_A_GROUP] for start in starts]
    return _HEAD + "".join(group(number, each) for number, each in enumerate(groups, 1))


def copy() -> str:
    """Return the rules as a file of the chart."""
    return "# Generated: python -m infra.monitoring.generate\n" + RULES.read_text()


def group(number: int, rules: list[dict[str, Any]]) -> str:
    """Return one group of rules.

    Raises:
        ValueError: Azure would refuse it.
    """
    if len(rules) > RULES_IN_A_GROUP:
        raise ValueError(f"given {len(rules)} rules in a group, expected at most {RULES_IN_A_GROUP}")
    name = "imds-bridge" if number == 1 else f"imds-bridge-{number}"
    return _GROUP % (number, name) + "".join(line for rule in rules for line in _rule(rule)) + _TAIL


def _rule(rule: dict[str, Any]) -> Iterator[str]:
    severity = rule["labels"]["severity"]
    yield "      {\n"
    yield f"        alert: {_text(rule['alert'])}\n"
    yield f"        expression: {_text(rule['expr'])}\n"
    if "for" in rule:
        yield f"        for: {_text(_iso8601(rule['for']))}\n"
    yield f"        severity: {SEVERITIES[severity]}\n"
    yield "        labels: {\n"
    yield f"          severity: {_text(severity)}\n"
    yield "        }\n"
    yield "        annotations: {\n"
    for name, text in rule["annotations"].items():
        linked = _text(text).replace("docs/operations.md#", "${runbookUrl}#")
        yield f"          {name}: {linked}\n"
    yield "        }\n"
    yield "        resolveConfiguration: {\n"
    yield "          autoResolved: true\n"
    yield "          timeToResolve: 'PT10M'\n"
    yield "        }\n"
    yield "        actions: actions\n      }\n"


def _iso8601(duration: str) -> str:
    found = re.fullmatch(r"(\d+)m", duration)
    if not found:
        raise ValueError(f"{duration}: expected minutes")
    return f"PT{found[1]}M"


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")
    return f"'{escaped}'"


if __name__ == "__main__":
    BICEP.write_text(bicep(read_rules()))
    COPY.write_text(copy())
