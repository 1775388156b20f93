"""The demo: a story on the simulators, with the real processes."""
