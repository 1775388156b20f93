"""Fixtures for every test in this folder."""

from tests.support.labs import bus, imds, inbox

__all__ = ["bus", "imds", "inbox"]
