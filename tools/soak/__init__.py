"""The soak test: everything at once, under random changes and faults, checked at the end; see README.md."""
