"""The benchmark: one table, each row measured against its limit. `python -m tools.bench --help` says more."""
