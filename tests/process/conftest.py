"""Fixtures for every test in this folder."""

from __future__ import annotations

import pytest

from tests.support.labs import bus, imds, inbox, lab

__all__ = ["bus", "imds", "inbox", "lab"]


@pytest.fixture
def without_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes that are not measured: one that is killed with SIGKILL saves no measurement anyway."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    monkeypatch.delenv("COVERAGE_PROCESS_START", raising=False)
