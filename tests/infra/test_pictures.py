"""The pictures of the README are small, and the recording of the demo shows what was printed."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

from tests.support.paths import ROOT
from tools.pictures.record import COLUMNS, record, svg

PICTURES = ROOT / "tools" / "pictures"
COLOURFUL = """
import sys
print("\\033[33mIMDS\\033[0m a < b" if sys.stdout.isatty() else "no terminal")
print("end")
"""


def rows(drawing: str) -> list[str]:
    """Return the lines of text that are drawn."""
    found = ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")  # noqa: S314 - ours
    return ["".join(one.itertext()) for one in found]


def test_a_recording_has_the_lines_and_colours_of_a_terminal() -> None:
    drawing = svg("two lines", [*record([sys.executable, "-c", COLOURFUL])])
    assert rows(drawing) == ["IMDS a < b", "end"]
    assert '<tspan class="s33">IMDS</tspan>' in drawing


def test_the_pictures_are_small_and_the_recording_shows_a_whole_demo_in_80_columns() -> None:
    shown = rows((PICTURES / "demo.svg").read_text())
    assert shown[0] == "$ imds-bridge demo"
    assert any(row.startswith("demo: ok, ") for row in shown)
    assert [row for row in shown if len(row) > COLUMNS] == []
    assert sum(file.stat().st_size for file in PICTURES.iterdir() if file.suffix != ".py") <= 1_000_000
