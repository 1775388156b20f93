"""`check` compares the VM's clock with the `Date` of IMDS's answer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from bridge.cli.check import check
from bridge.config.models import Config, ImdsSettings
from tests.support.process import RawServer, answering


@pytest.mark.parametrize(
    ("ahead_seconds", "expected"), [(600, "600 s ahead of"), (-90, "90 s behind"), (0, ""), (None, "")]
)
def test_a_clock_that_is_more_than_30_s_off_is_a_warning(
    tmp_path: Path, ahead_seconds: float | None, expected: str
) -> None:
    date = ""
    if ahead_seconds is not None:
        sent = datetime.now(UTC) - timedelta(seconds=ahead_seconds)
        date = f"Date: {format_datetime(sent, usegmt=True)}\r\n"
    body = '{"DocumentIncarnation": 1, "Events": []}'
    answer = f"HTTP/1.1 200 OK\r\n{date}Content-Length: {len(body)}\r\n\r\n{body}"
    with RawServer(answering(answer.encode())) as imds:
        settings = ImdsSettings(endpoint=imds.url, vm_name="web-0")
        found = {one.check: one for one in check(Config(state_dir=tmp_path, imds=settings))}
    assert found["imds"].result == "ok"
    assert ("clock" in found) == bool(expected)
    if expected:
        finding = found["clock"]
        # a second may pass between the two clocks
        assert finding.message.split(" s ")[1] == f"{expected.split(' s ')[1]} the Date of IMDS's answer"
        assert abs(float(finding.message.split()[4]) - abs(ahead_seconds or 0)) <= 30
        assert finding.result == "warn"
