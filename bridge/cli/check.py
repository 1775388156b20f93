"""The command `check`: what works, what does not, and how to fix it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from bridge.cli.common import add_config, add_json, json_lines, load_config
from bridge.cli.exit_codes import FAILED, OK
from bridge.cli.probes import Finding, check, config_findings
from bridge.errors import ConfigError
from bridge.formats.table import table
from bridge.runtime.text import show

_EPILOG = """\
Publishes nothing without --send. Exits 3 if something does not work.

examples:
  imds-bridge check --config config.toml
  imds-bridge check --send                 send a test message to each sink
  imds-bridge check --json | jq '.[] | select(.result == "FAIL")'
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `check`."""
    command.epilog = _EPILOG
    add_config(command)
    command.add_argument(
        "--send", action="store_true", help="send one message, marked as a test, to each sink"
    )
    add_json(command)
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        config = load_config(arguments)
        show("asking IMDS (its very first answer may take two minutes) and each sink ...", stream=sys.stderr)
        findings = check(config, send=arguments.send)
    except ConfigError as error:
        if arguments.json:
            show(*json_lines([asdict(finding) for finding in config_findings(error)]))
        raise
    show(*(json_lines([asdict(finding) for finding in findings]) if arguments.json else _render(findings)))
    return FAILED if any(finding.result == "FAIL" for finding in findings) else OK


def _render(findings: Sequence[Finding]) -> list[str]:
    """Write the table, each remedy below its finding."""
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((finding.check, finding.result, finding.message))
        if finding.remedy:
            rows.append(("", "", f"-> {finding.remedy}"))
    return table(("CHECK", "RESULT", "MESSAGE"), rows)
