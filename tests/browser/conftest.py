"""Fixtures for every test in this folder."""

from __future__ import annotations

from tests.support.labs import bus

__all__ = ["bus"]
