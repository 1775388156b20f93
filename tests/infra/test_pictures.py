"""The pictures of the README are small, and the recording of the demo shows what was printed."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET

import pytest

from infra.pictures.record import COLUMNS, Line, record, svg
from tests.support.paths import ROOT

PICTURES = ROOT / "infra" / "pictures"
MAX_BYTES, MAX_RECORDING_BYTES = 1_000_000, 200_000
NAMESPACE = "{http://www.w3.org/2000/svg}"
COLOURFUL = """
import sys
print("\\033[33mIMDS\\033[0m a < b" if sys.stdout.isatty() else "no terminal")
print("end")
"""


def rows(drawing: str) -> list[str]:
    """Return the lines of text that are drawn."""
    return ["".join(one.itertext()) for one in ET.fromstring(drawing).iter(f"{NAMESPACE}text")]  # noqa: S314 - ours


def test_a_recording_has_the_lines_and_colours_of_a_terminal() -> None:
    lines = [*record([sys.executable, "-c", COLOURFUL])]
    drawing = svg("two lines", lines)
    assert rows(drawing) == ["IMDS a < b", "end"]
    assert '<tspan class="s33">IMDS</tspan>' in drawing
    assert 0 < lines[0].at <= lines[1].at


def test_each_line_appears_at_its_time() -> None:
    drawing = svg("", [Line(at=0.0, text="a"), Line(at=1.0, text="b"), Line(at=2.0, text="c")])
    frames = re.findall(r"([\d.]+)%\{transform:translateY\((\d+)px\)\}", drawing)
    assert [share for share, _ in frames] == ["0", "0.00", "10.00", "20.00", "100"]
    offsets = [int(offset) for _, offset in frames]
    assert offsets == [offsets[0] - 19 * count for count in (0, 1, 2, 3, 3)]


def test_a_command_that_fails_makes_no_recording() -> None:
    with pytest.raises(RuntimeError, match="exit code 3"):
        list(record([sys.executable, "-c", "raise SystemExit(3)"]))


def test_the_recording_shows_a_whole_demo_in_80_columns() -> None:
    file = PICTURES / "demo.svg"
    shown = rows(file.read_text())
    assert shown[0] == "$ imds-bridge demo"
    assert any(row.startswith("demo: ok, ") for row in shown)
    assert [row for row in shown if len(row) > COLUMNS] == []
    assert file.stat().st_size <= MAX_RECORDING_BYTES


def test_the_pictures_are_small() -> None:
    assert sum(file.stat().st_size for file in PICTURES.iterdir()) <= MAX_BYTES
