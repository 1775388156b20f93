"""What holds for every test."""

from __future__ import annotations

import pytest

from bridge.runtime import text


@pytest.fixture(autouse=True)
def forget_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test hide texts from the next: what is redacted is searched for each of them."""
    monkeypatch.setattr(text, "_secrets", set(text._secrets))
