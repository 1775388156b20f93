"""Write the tables of docs/architecture.md, "10,000 VMs", in about half a minute: `python -m tools.scale`."""

import re

from tests.support.paths import ROOT
from tools.scale.tables import tables

page = ROOT / "docs" / "architecture.md"
text = page.read_text(encoding="utf-8")
for table in tables():
    head = table.partition("\n")[0]
    before = re.findall(rf"{re.escape(head)}\n(?:\|.*\n)*", text)
    if len(before) != 1:
        raise SystemExit(f"{page}: given {len(before)} tables that begin with {head}, expected 1")
    text = text.replace(before[0], f"{table}\n")
page.write_text(text, encoding="utf-8")
