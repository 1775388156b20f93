"""Simulators of everything that imds-bridge talks to, for trying, learning and testing."""
