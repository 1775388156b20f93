"""Write the tables of docs/architecture.md, "10,000 VMs", in about half a minute: `python -m tools.scale`."""

import re

from tests.support.paths import ROOT
from tools.scale.tables import tables

page = ROOT / "docs" / "architecture.md"
text = page.read_text(encoding="utf-8")
for table in tables():
    head = table.partition("\n")[0]
    text, replaced = re.subn(rf"{re.escape(head)}\n(?:\|.*\n)*", lambda _, new=table: f"{new}\n", text)
    if replaced != 1:
        raise SystemExit(f"{page}: given {replaced} tables that begin with {head}, expected 1")
page.write_text(text, encoding="utf-8")
