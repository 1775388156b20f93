"""Damage to the state of the real command: it starts, reports the loss, and publishes again what IMDS shows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.imds_lab import ImdsLab
from tests.support.process import Forward, wait_until

DAMAGES: dict[str, Callable[[Path], object]] = {
    "nonsense": lambda file: file.write_bytes(b"nonsense" * 5000),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "half of it": lambda file: os.truncate(file, file.stat().st_size // 2 // 512 * 512),
    "without its first sector": lambda file: file.write_bytes(bytes(512) + file.read_bytes()[512:]),
}


def published(forward: Forward) -> list[dict[str, Any]]:
    lines = forward.output.read_text().splitlines() if forward.output.exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_state_is_a_loss_and_a_live_notice_is_published_again(tmp_path: Path, name: str) -> None:
    with ImdsLab(rate_limit=None) as lab:
        forward = Forward(tmp_path, {"imds": {"endpoint": lab.url("web-0"), "poll_seconds": 0.2}})
        event_id = lab.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)

        def notices() -> int:
            return sum(one["subject"] == event_id for one in published(forward))

        def losses() -> list[str]:
            found = [one for one in published(forward) if one["type"].endswith("bridge.loss.v1")]
            return [one["data"]["Reason"] for one in found]

        with forward:
            wait_until(lambda: notices() == 1, describe=lambda: forward)
            assert forward.stop() == 0, forward
        DAMAGES[name](forward.state / "outbox.db")
        with forward:
            wait_until(lambda: notices() > 1 and losses(), describe=lambda: forward)
            assert losses() == ["Damage"]
            assert forward.stop() == 0, forward
