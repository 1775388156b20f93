"""The runbook: it has what the code prints, and its queries look for log lines that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.only import only
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
STATUS = (ROOT / "bridge/service/status.py").read_text(encoding="utf-8")
CODE = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(ROOT, "bridge").rglob("*.py")))


def section(title: str) -> str:
    """Return the text below a heading of the page."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_each_state_of_a_process_has_a_row() -> None:
    rows = section("States of a process")
    capitals = set(re.findall(r"[A-Z]{3,}(?: [A-Z]{3,})+", STATUS.partition("def headline")[0]))
    header = {"LAST SUCCESS", "NEXT RETRY", "LAST ERROR", "AUTO RULES"}
    assert {"NOT RESPONDING", "NOT RECEIVING", "STATE STORE UNAVAILABLE"} <= capitals
    assert {text for text in capitals - header if text not in rows} == set()
    for reason in ("has never run", "cannot write there", "may not read it", "it cannot be read"):
        assert reason in STATUS
        assert reason in rows


def test_each_state_of_a_sink_has_a_row() -> None:
    health = (ROOT / "bridge/service/dispatcher.py").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+)`", section("States of a sink"), re.MULTILINE)
    for state in rows:
        assert f'"{state}"' in health, state
    assert {*re.findall(r'state = "([a-z]+)"', health)} - {"ok"} <= {*rows}


def test_the_queries_look_for_texts_that_are_logged() -> None:
    queries = "".join(re.findall(r"```kusto\n(.*?)```", PAGE, re.DOTALL))
    texts = re.findall(r'message (?:has|contains|startswith|==|!=) "(.+?)"', queries)
    assert len(texts) > 10
    assert [text for text in texts if text not in CODE] == []


def test_the_pages_say_after_how_many_seconds_systemd_starts_a_unit_again() -> None:
    units = "".join(path.read_text() for path in (ROOT / "infra/systemd").glob("*.service"))
    seconds = only(set(re.findall(r"^RestartSec=(\d+)$", units, re.MULTILINE)))
    assert re.findall(r"systemd starts it again after (\d+) s", PAGE) == [seconds]
    page = (ROOT / "infra/systemd/README.md").read_text(encoding="utf-8")
    assert re.findall(r"\*\*Restart\*\*: always, after (\d+) seconds", page) == [seconds]
