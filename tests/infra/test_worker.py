"""The worker as a process, with the real `forward` and `listen` on the lab's bus and IMDS."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bus import SECRET
from tests.support.consumers import APPROVALS, OWN, TOPIC, Script, bus_config, run_script, settings
from tests.support.imds_lab import ImdsLab
from tests.support.process import Forward, wait_until
from tests.support.servicebus import ServiceBusLab

PLACE = ["--topic", TOPIC, "--subscription", OWN, "--vm", "web-0"]
COMMAND = """#!/bin/sh
cd "$(dirname "$0")" && env >> env && echo "$1 $EVENT_TYPE $EVENT_STATUS $RESOURCES" >> runs
"""


def test_it_prepares_approves_with_a_signature_and_recovers(tmp_path: Path) -> None:
    program, runs = tmp_path / "program", tmp_path / "runs"
    program.write_text(COMMAND)
    program.chmod(0o755)
    arguments = [*PLACE, "--approvals", APPROVALS, "--state", str(tmp_path / "worker.json")]
    arguments += ["--prepare", f"{program} prepare", "--recover", f"{program} recover"]
    with ImdsLab(rate_limit=None) as imds, ServiceBusLab(bus_config()) as bus:
        given = settings(imds, bus, signing_secret=SECRET)
        secrets = {"SERVICEBUS_CONNECTION_STRING": bus.connection_string, "SIGNING_SECRET": SECRET}
        with (
            Forward(tmp_path / "forward", given),
            Forward(tmp_path / "listen", given, role="listen"),
            Script(tmp_path / "worker", "worker/worker.py", arguments, env=secrets) as worker,
        ):
            event = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)
            worker.wait_for_text("approval accepted: approved")
            assert [one.event_id for one in imds.approvals] == [event]
            imds.complete(event)
            wait_until(lambda: "recover" in runs.read_text(), describe=worker.__repr__)
            assert worker.stop() == 0, worker
    assert runs.read_text() == "prepare Reboot Scheduled web-0\nrecover Reboot Completed web-0\n"
    assert SECRET not in (tmp_path / "env").read_text()


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        ([], {}, "give either --namespace or"),
        (["--prepare", "/no/such/command"], {"SERVICEBUS_CONNECTION_STRING": "x"}, "'/no/such/command'"),
    ],
)
def test_an_invalid_option_is_reported_with_exit_code_2(
    arguments: list[str], env: dict[str, str], expected: str
) -> None:
    done = run_script(
        "worker/worker.py", *PLACE, "--prepare", "true", "--recover", "true", *arguments, env=env
    )
    assert done.returncode == 2
    assert expected in done.stderr
