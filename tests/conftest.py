"""What holds for every test."""

from __future__ import annotations

import pytest

from bridge.runtime import redaction


@pytest.fixture(autouse=True)
def forget_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test hide texts from the next: what is redacted is searched for each of them."""
    monkeypatch.setattr(redaction, "_secrets", set(redaction._secrets))
