"""The long-running processes: composition, loops and status."""
