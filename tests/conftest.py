"""What holds for every test."""

from __future__ import annotations

import time

import pytest

from bridge.runtime import redaction

SHORT_SLEEP_SECONDS = 0.02


@pytest.fixture(autouse=True)
def forget_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test hide texts from the next: what is redacted is searched for each of them."""
    monkeypatch.setattr(redaction, "_secrets", set(redaction._secrets))


@pytest.fixture
def quick_bus_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close clients of azure-servicebus in milliseconds: each waits for a thread that sleeps a whole second."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, SHORT_SLEEP_SECONDS)))
