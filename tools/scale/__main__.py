"""Print the tables of docs/architecture.md, "10,000 VMs": `python -m tools.scale`."""

from tools.scale.tables import tables

print("\n\n".join(tables()))
