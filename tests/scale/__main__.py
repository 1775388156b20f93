"""Print the tables of docs/architecture.md, "10,000 VMs": `python -m tests.scale`."""

from tests.scale.tables import tables

print("\n\n".join(tables()))
