"""The pages that people read: links lead somewhere, examples work, and the README stays short."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.cli import main
from bridge.cli.config import check_parts
from bridge.config.loader import load
from bridge.contract.types import EVENT_NAMES, EVENT_TYPES
from bridge.formats import pagerduty
from infra.monitoring.generate import read_rules
from tests.support.only import only
from tests.support.pages import (
    PAGES,
    Block,
    blocks,
    commands,
    configurations,
    prose,
    section,
    shell_lines,
    with_secrets,
)
from tests.support.paths import ROOT
from tests.support.process import completed, toml
from tests.support.programs import tool
from tests.support.size import prose_words

EVERY = [block for page in PAGES for block in blocks(page)]
RUNBOOK = "docs/operations.md"
LANGUAGES = {"toml", "json", "sh", "console", "text", "mermaid"}
# Read by tests of their own, or by none.
OTHER_LANGUAGES = {"python", "javascript", "go", "csharp", "sql", "kusto", "ini", "yaml", "powershell"}
CALLS = sorted({(str(page.relative_to(ROOT)), call) for page in PAGES for call in commands(page)})


def of(*languages: str) -> list[object]:
    return [pytest.param(block, id=block.name) for block in EVERY if block.language in languages]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    names = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in re.findall(r"(?:\]\(|src=\")([^)\"\s]+)", prose(page)):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("https://"):
            assert target.exists(), link
            assert not heading or heading in headings(target), link


def test_the_readme_is_short_and_links_every_page_of_docs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.encode()) <= 8192
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name}" not in readme] == []


def test_the_readme_shows_the_columns_that_the_command_prints() -> None:
    code = "".join((ROOT / "bridge" / name).read_text() for name in ("process/status.py", "cli/check.py"))
    shown = "".join(block.text for block in blocks(ROOT / "README.md") if block.language == "console")
    columns = re.findall(r"\b[A-Z]{2,}(?: [A-Z]{2,})*(?=  |$)", shown, re.MULTILINE)
    assert {"EVENT", "NEXT RETRY", "RESULT"} <= set(columns)
    assert [column for column in columns if f'"{column}"' not in code and f"{column}  " not in code] == []


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    numbers = re.findall(r"\d[\d.,]*\d", section("README.md", "Figures").partition("\n| --- ")[2])
    assert len(numbers) > 8
    measured = re.findall(r"\d[\d.,]*\d", (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8"))
    assert {*numbers} <= {*measured}


def test_the_readme_lists_every_type_that_is_published() -> None:
    listed = re.findall(r"`([a-z]+\.[a-z]+\.v1)`", section("README.md", "What is published"))
    published = set(EVENT_TYPES) - {"io.imdsbridge.command.approve.v1"}
    assert {f"io.imdsbridge.{name}" for name in listed} == published


def test_the_page_of_events_says_what_pagerduty_and_the_alerts_do() -> None:
    text = (ROOT / "docs/events.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    severities = {row[0].lower(): row[4] for row in rows if len(row) == 6}
    assert {name: severities[name] for name in pagerduty._SEVERITIES} == pagerduty._SEVERITIES
    said = {row[0]: row[2] for row in rows if len(row) == 4}
    for name in set(EVENT_NAMES) - {"command.approve"}:
        family, _, kind = name.partition(".")
        action, _ = pagerduty.ACTIONS.get(name, ("nothing", ""))
        what = only(what for types, what in said.items() if f"`{family}." in types and f".{kind}.v1" in types)
        assert action in what, name
    known = {rule["alert"] for rule in read_rules()}
    assert set(re.findall(r"ImdsBridge\w+", text)) <= known


def test_every_sentence_about_what_was_not_tried_on_azure_leads_to_the_trial() -> None:
    not_tried = (
        r"(?i)\b(?:not|none|nothing|never|nobody)\b[^.|:]{0,60}\b(?:on|in|to|with) Azure\b(?! Monitor)"
    )
    found = []
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        paragraphs = re.split(r"\n(?:\n|- |\| )", page.read_text(encoding="utf-8"))
        if page.parent.name != "azure-trial":
            found += [
                (page.name, text) for text in paragraphs if re.search(not_tried, " ".join(text.split()))
            ]
    assert len(found) >= 8
    assert [one for one in found if "azure-trial" not in one[1]] == []


def test_what_is_read_at_night_is_one_short_page() -> None:
    assert prose_words((ROOT / RUNBOOK).read_text(encoding="utf-8")) <= 2500


def test_each_state_of_a_process_has_a_row() -> None:
    rows = section(RUNBOOK, "States of a process")
    code = (ROOT / "bridge/process/status.py").read_text(encoding="utf-8")
    capitals = set(re.findall(r"[A-Z]{3,}(?: [A-Z]{3,})+", code.partition("def headline")[0]))
    header = {"LAST SUCCESS", "NEXT RETRY", "LAST ERROR", "AUTO RULES"}
    assert {"NOT RESPONDING", "NOT RECEIVING", "STATE STORE UNAVAILABLE"} <= capitals
    assert {text for text in capitals - header if text not in rows} == set()
    for reason in ("has never run", "cannot write there", "may not read it", "it cannot be read"):
        assert reason in code
        assert reason in rows


def test_each_state_of_a_sink_has_a_row() -> None:
    health = (ROOT / "bridge/delivery/dispatcher.py").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+)`", section(RUNBOOK, "States of a sink"), re.MULTILINE)
    for state in rows:
        assert f'"{state}"' in health, state
    assert {*re.findall(r'state = "([a-z]+)"', health)} - {"ok"} <= {*rows}


def test_the_queries_look_for_texts_that_are_logged() -> None:
    page = ROOT / "docs/metrics.md"
    queries = "".join(block.text for block in blocks(page) if block.language == "kusto")
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "bridge").rglob("*.py"))
    texts = re.findall(r'message (?:has|contains|startswith|==|!=) "(.+?)"', queries)
    assert len(texts) > 10
    assert [text for text in texts if text not in code] == []


def test_the_pages_say_after_how_many_seconds_systemd_starts_a_unit_again() -> None:
    units = "".join(path.read_text() for path in (ROOT / "infra/systemd").glob("*.service"))
    seconds = only(set(re.findall(r"^RestartSec=(\d+)$", units, re.MULTILINE)))
    assert re.findall(
        r"systemd starts it again after (\d+) s", (ROOT / RUNBOOK).read_text(encoding="utf-8")
    ) == [seconds]
    page = (ROOT / "infra/systemd/README.md").read_text(encoding="utf-8")
    assert re.findall(r"\*\*Restart\*\*: always, after (\d+) seconds", page) == [seconds]


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    groups += project["dependency-groups"].values()
    named = {re.split(r"[^\w-]", one)[0] for group in groups for one in group if isinstance(one, str)}
    reasons = section("docs/architecture.md", "Dependencies")
    assert sorted(name for name in named if not re.search(rf"[| ]{name}[ ,]", reasons)) == []


def test_every_block_is_fenced_and_of_a_language_that_is_known() -> None:
    assert [page for page in PAGES if re.search(r"\n\n(    .+)", prose(page))] == []
    assert {block.language for block in EVERY} <= LANGUAGES | OTHER_LANGUAGES


@pytest.mark.parametrize("block", of("json", "sh", "console"))
def test_json_and_shell_examples_can_be_parsed(block: Block) -> None:
    if block.language == "json":
        json.loads(block.text)
        return
    assert completed(tool("bash"), "-n", given="\n".join(shell_lines(block))).stderr == ""


@pytest.mark.parametrize("name", configurations())
def test_configurations_can_be_loaded_and_their_sinks_can_render(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("infra/windows/"):  # its programs are of Windows
        monkeypatch.setattr("bridge.config.sinks.sys", SimpleNamespace(platform="win32"))
    file = tmp_path / "config.toml"
    file.write_text(toml(with_secrets(tomllib.loads(configurations()[name]), tmp_path)))
    config = load(file, {})
    check_parts(config)
    for sink in config.sinks:
        assert main.main(["render", "--config", str(file), "--sink", sink]) == 0


def test_the_example_of_environment_variables_is_a_configuration(tmp_path: Path) -> None:
    block = only(block for block in blocks(ROOT / "docs/configuration.md") if block.language == "sh")
    variables = dict(word.split("=", 1) for word in shlex.split(block.text) if word != "export")
    (tmp_path / "url").write_text("https://example.org/hook")
    variables = {
        name: value.replace("/run/secrets/ops-url", f"{tmp_path}/url") for name, value in variables.items()
    }
    config = load(None, variables)
    assert config.sinks["ops"].types == ("io.imdsbridge.scheduledevent.*",)
    assert config.approvals
    assert config.approvals.auto[0].event_source == ("User",)


@pytest.mark.parametrize(("page", "call"), CALLS)
def test_calls_of_the_command_have_arguments_that_exist(
    page: str, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(call)
    try:
        main.parse(words)
    except SystemExit as end:
        if end.code:
            pytest.fail(f"{page}: {capsys.readouterr().err}")
