"""The image: its Dockerfile, its content, and its health check on real state folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from bridge.cli.main import main
from bridge.config.console import ConsoleSettings
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.time import Clock, iso_utc
from bridge.service.metrics import MetricsServer
from infra.container.health import _fault, read_listen
from tests.support.imds_lab import ImdsLab
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS, Forward, RawServer, answering, environment, wait_until

HEALTH = ROOT / "infra" / "container" / "health.py"


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hadolint = shutil.which("hadolint", path=path)
    assert hadolint, "hadolint is missing: it comes with the dependency group dev"
    done = subprocess.run(
        [hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_made_of_files_that_are_there_and_of_no_address_of_an_index() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "*"
    assert [line for line in lines if line.startswith("!") and not (ROOT / line[1:]).exists()] == []
    for text in ("\n".join(lines), (ROOT / "Dockerfile").read_text(encoding="utf-8")):
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links[ =](?!/wheels)", text)


# --- the health check ---


def health(state_dir: Path, *arguments: str, listen: str = "") -> subprocess.CompletedProcess[str]:
    variables = {
        "IMDS_BRIDGE__STATE_DIR": str(state_dir),
        "IMDS_BRIDGE__METRICS__LISTEN": listen,
        "IMDS_BRIDGE__CONSOLE__LISTEN": listen,
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, str(HEALTH), *arguments],
        env=environment(variables),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def is_healthy(state_dir: Path, *arguments: str) -> bool:
    return health(state_dir, *arguments).returncode == 0


def status(*, age_seconds: float = 0.0, role: str = "forward", **more: Any) -> dict[str, Any]:
    written_at = iso_utc(datetime.now(UTC) - timedelta(seconds=age_seconds))
    return {"running": True, "role": role, "written_at": written_at, "last_good_at": written_at, **more}


@pytest.fixture
def held(tmp_path: Path) -> Iterator[StateFolder]:
    """Hold the state folder of a forwarder."""
    folder = StateFolder(tmp_path / "forward")
    folder.acquire()
    yield folder
    folder.release()


def test_a_forwarder_is_alive_while_it_runs_and_ready_once_imds_has_answered(tmp_path: Path) -> None:
    assert health(tmp_path / "state").stdout == "forward does not run\n"
    with ImdsLab() as lab:
        lab.fault("503", count=None)
        with Forward(tmp_path, {"imds": {"endpoint": lab.url("web-0")}}) as forward:
            wait_until(lambda: is_healthy(tmp_path / "state"))
            assert not is_healthy(tmp_path / "state", "--ready")
            lab.clear_faults()
            wait_until(lambda: is_healthy(tmp_path / "state", "--ready"))
            assert health(tmp_path / "state", "--role", "listen").stdout == "listen does not run\n"
            forward.kill()
            assert not is_healthy(tmp_path / "state")


def test_a_process_whose_disk_became_read_only_counts_as_healthy(held: StateFolder, tmp_path: Path) -> None:
    def call(*command: str | Path) -> int:
        return subprocess.run(command, capture_output=True, check=False).returncode

    held.write_status(status(age_seconds=3600))
    read_only = tmp_path / "read-only" / "forward"
    read_only.mkdir(parents=True)
    if call("mount", "--bind", held.path, read_only):
        pytest.skip("no file system can be mounted here: must be superuser to use mount.")
    try:
        assert "has written no status" in health(read_only.parent).stdout
        assert call("mount", "-o", "remount,bind,ro", read_only) == 0
        assert is_healthy(read_only.parent)
    finally:
        call("umount", read_only)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_process_whose_lock_is_another_users_file_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no other user may pass the folders above
    tmp_path.chmod(0o711)
    folder = StateFolder(Path("forward"))
    folder.path.mkdir()
    folder.write_status(status(storage_error="Permission denied"))
    (folder.path / "lock").touch(0o600)
    for path in (folder.path, folder.path / "status.json"):
        os.chown(path, 65532, 65532)
    os.seteuid(65532)
    try:
        assert _fault(folder, folder.read_status()) == ""
        (folder.path / "lock").unlink()
        assert _fault(folder, folder.read_status()) == "forward does not run"
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "fault",
    [
        {"last_good_at": None},
        {"last_good_at": iso_utc(datetime.now(UTC) - timedelta(minutes=5))},
        {"role": "listen", "commands": {"from": "bus", "last_error": "no role"}},
        {"role": "relay", "relay": {"from": "bus", "last_error": "no role"}},
        {"role": "console", "bus": {"from": "bus", "last_error": "no role"}},
        {"storage_error": "database or disk is full"},
    ],
)
def test_a_process_that_cannot_do_its_work_is_not_ready_and_gives_the_reason(
    held: StateFolder, fault: dict[str, Any]
) -> None:
    held.write_status(status())
    assert is_healthy(held.path.parent, "--ready")
    held.write_status(status(**fault))
    assert is_healthy(held.path.parent)
    assert health(held.path.parent, "--ready").stdout != "\n"
    assert not is_healthy(held.path.parent, "--ready")


def test_the_health_check_asks_the_port_that_the_process_serves(tmp_path: Path) -> None:
    with closing(
        MetricsServer("127.0.0.1:0", role="forward", registry=CollectorRegistry(), clock=Clock())
    ) as server:
        server.start(lambda: status(last_good_at=None, last_error="503", storage_error=None, sinks={}))
        listen = f"127.0.0.1:{server.port}"
        assert health(tmp_path, listen=listen).stdout == "healthy\n"
        asked = health(tmp_path, "--ready", listen=listen)
        of_another = health(tmp_path, "--role", "listen", listen=listen)
    assert (asked.returncode, asked.stdout) == (1, "IMDS has given no valid answer yet: 503\n")
    assert of_another.stdout == "listen does not run\n"


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "nonsense", "[::1]:1"])
def test_the_status_file_is_read_where_no_port_answers(held: StateFolder, listen: str) -> None:
    held.write_status(status())
    assert health(held.path.parent, listen=listen).stdout == "healthy\n"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b""])
def test_a_port_of_another_program_is_not_believed(held: StateFolder, answer: bytes) -> None:
    held.write_status(status(age_seconds=3600))
    with RawServer(answering(answer)) as server:
        asked = health(held.path.parent, listen=server.url.removeprefix("http://"))
    assert "has written no status" in asked.stdout


@pytest.mark.parametrize(
    ("role", "text", "expected"),
    [
        ("listen", '[metrics]\nlisten = "127.0.0.1:9465"', "127.0.0.1:9465"),
        ("listen", "", ""),
        ("listen", "metrics = 1", ""),
        ("listen", "[", ""),
        ("listen", None, ""),
        ("console", '[console]\nlisten = "0.0.0.0:80"', "0.0.0.0:80"),
        ("console", "", ConsoleSettings().listen),
        ("console", "[", ConsoleSettings().listen),
    ],
)
def test_the_port_is_the_one_in_the_configuration_of_the_process(
    tmp_path: Path, role: str, text: str | None, expected: str
) -> None:
    config = tmp_path / "config.toml"
    if text is not None:
        config.write_text(text)
    assert read_listen(["imds-bridge", role, "--config", str(config)], role) == expected


def test_the_health_check_asks_a_console_which_gives_no_reasons(tmp_path: Path) -> None:
    body = b'{"ok": false, "role": "console"}'
    answer = b"HTTP/1.1 503 No\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with RawServer(answering(answer)) as server:
        listen = server.url.removeprefix("http://")
        ready = health(tmp_path, "--role", "console", "--ready", listen=listen)
    assert (ready.returncode, ready.stdout) == (1, "/readyz of console fails\n")


def test_the_health_check_knows_every_role(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    roles = re.search(r"--role \{.*?\}", capsys.readouterr().out)
    assert roles
    assert roles[0] in health(tmp_path, "--help").stdout
