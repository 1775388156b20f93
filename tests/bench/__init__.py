"""The benchmark: one table, each row measured against its limit. `python -m tests.bench --help` says more."""
