"""Damage to the state of the real command: it starts, reports the loss, and publishes again what IMDS shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.imds_lab import ImdsLab
from tests.support.process import Forward, wait_until


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"nonsense" * 5000),
        lambda file: os.truncate(file, file.stat().st_size // 2 // 512 * 512),
    ],
    ids=["nonsense", "half of it"],
)
def test_a_damaged_state_is_a_loss_and_a_live_notice_is_published_again(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    with ImdsLab(rate_limit=None) as lab:
        forward = Forward(tmp_path, {"imds": {"endpoint": lab.url("web-0"), "poll_seconds": 0.2}})
        event_id = lab.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)

        def losses() -> list[str]:
            return [one["data"]["Reason"] for one in forward.printed() if "bridge.loss" in one["type"]]

        def notices() -> int:
            return sum(one["subject"] == event_id for one in forward.printed())

        with forward:
            wait_until(lambda: notices() == 1, describe=lambda: forward)
            assert forward.stop() == 0, forward
        damage(forward.state / "outbox.db")
        with forward:
            wait_until(lambda: notices() > 1 and losses(), describe=lambda: forward)
            assert losses() == ["Damage"]
            assert forward.stop() == 0, forward
