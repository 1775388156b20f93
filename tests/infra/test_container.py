"""The image: its Dockerfile, its content, and its health check on real state folders."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from bridge.config.console import ConsoleSettings
from bridge.outbox.state_dir import StateFolder
from bridge.process.metrics import MetricsServer
from bridge.runtime.time import Clock, iso_utc
from infra.container.health import _read_files, main, read_listen
from tests.support.cli import Call
from tests.support.disk import small_disk
from tests.support.imds_lab import ImdsLab
from tests.support.paths import ROOT
from tests.support.process import COMMAND, Forward, RawServer, answering, completed, environment, wait_until
from tests.support.status import process_status, write_raw


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"  # from the dependency group dev
    done = completed(hadolint, "Dockerfile", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_made_of_files_that_are_there_and_of_no_address_of_an_index() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "*"
    assert [line for line in lines if line.startswith("!") and not (ROOT / line[1:]).exists()] == []
    for text in ("\n".join(lines), (ROOT / "Dockerfile").read_text(encoding="utf-8")):
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links[ =](?!/wheels)", text)


# --- the health check ---

Health = Callable[..., tuple[int, str]]
HEALTHY = (0, "healthy\n")
GONE = (1, "forward does not run\n")


@pytest.fixture
def health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Health:
    """Return a function that checks the processes of the test's folder; it returns the exit code and the reason."""

    def check(*arguments: str, listen: str = "") -> tuple[int, str]:
        monkeypatch.setenv("IMDS_BRIDGE__STATE_DIR", str(tmp_path))
        for name in ("METRICS", "CONSOLE"):
            monkeypatch.setenv(f"IMDS_BRIDGE__{name}__LISTEN", listen)
        monkeypatch.setattr(sys, "argv", ["health.py", *arguments])
        code = main()
        return code, capsys.readouterr().out

    return check


def status(*, age_seconds: float = 0.0, **more: Any) -> dict[str, Any]:
    written_at = iso_utc(datetime.now(UTC) - timedelta(seconds=age_seconds))
    return {"running": True, "role": "forward", "written_at": written_at, "last_good_at": written_at, **more}


@pytest.fixture
def held(tmp_path: Path) -> Iterator[StateFolder]:
    """Hold the state folder of a forwarder."""
    folder = StateFolder(tmp_path / "forward")
    folder.acquire()
    yield folder
    folder.release()


def test_the_program_checks_a_forwarder_until_it_is_killed_and_knows_every_role(
    tmp_path: Path, call: Call
) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        variables = {"IMDS_BRIDGE__STATE_DIR": str(tmp_path / "state"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / "infra/container/health.py"), *arguments]
        return completed(*command, env=environment(variables))

    with ImdsLab() as lab, Forward(tmp_path, {"imds": {"endpoint": lab.url("web-0")}}) as forward:
        wait_until(lambda: run("--ready").stdout == "healthy\n", apart_seconds=0.5)
        forward.kill()
    done = run()
    assert (done.returncode, done.stdout) == GONE
    roles = re.search(r"--role \{.*?\}", call("status", "--help").out)
    assert roles
    assert roles[0] in run("--help").stdout


def test_a_process_whose_disk_became_read_only_counts_as_healthy(held: StateFolder, health: Health) -> None:
    write_raw(held, status(age_seconds=3600))
    assert "has written no status" in health()[1]
    if completed("mount", "--bind", held.path, held.path).returncode:
        pytest.skip("no file system can be mounted here: must be superuser to use mount.")
    try:
        assert completed("mount", "-o", "remount,bind,ro", held.path).returncode == 0
        assert health() == HEALTHY
    finally:
        completed("umount", held.path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_process_whose_lock_is_another_users_file_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no other user may pass the folders above
    tmp_path.chmod(0o711)
    folder = StateFolder(Path("forward"))
    folder.path.mkdir()
    monkeypatch.setenv("IMDS_BRIDGE__STATE_DIR", ".")
    write_raw(folder, status(storage_error="Permission denied"))
    (folder.path / "lock").touch(0o600)
    for path in (folder.path, folder.path / "status.json"):
        os.chown(path, 65532, 65532)
    os.seteuid(65532)
    try:
        assert _read_files("forward", ready=False) == ""
        (folder.path / "lock").unlink()
        assert _read_files("forward", ready=False) == "forward does not run"
    finally:
        os.seteuid(0)


@contextmanager
def as_process_1(user: Sequence[str], env: Mapping[str, str]) -> Iterator[list[str]]:
    """Run the forwarder as process 1 of a namespace until its log says that it works; yield how to enter that."""
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    if completed(*namespace, *user, sys.executable, "-c", "import bridge", env=env).returncode:
        pytest.skip("no namespace can be made here, or another user cannot run this Python")
    with Popen([*namespace, *user, *COMMAND, "forward"], env=env, stdout=DEVNULL, stderr=PIPE) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        first = int(wait_until(children.read_text))
        try:
            assert process.stderr
            assert any(b"forward started" in line for line in process.stderr)
            yield ["nsenter", f"--target={first}", "--pid", "--mount", *user]
        finally:
            os.kill(first, signal.SIGKILL)


@pytest.mark.parametrize(
    "case", ["a folder of another user", "--user 12345", "a full disk", "a read-only disk"]
)
def test_a_process_that_could_never_write_its_status_is_alive_and_not_ready(case: str) -> None:
    with TemporaryDirectory() as above, small_disk(Path(above) / "disk") as disk:
        Path(above).chmod(0o755)  # for other users
        folder = StateFolder(disk.path / "forward")
        if case == "a folder of another user":
            disk.path.chmod(0o755)
            folder.path.mkdir(mode=0o700)
        elif case == "a full disk":
            disk.fill()
        elif case == "a read-only disk":
            folder.path.mkdir(mode=0o700)
            write_raw(folder, status(running=False))  # as the last run left it
            disk.set_read_only(True)
        user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"] if "user" in case else []
        settings = {"STATE_DIR": str(disk.path), "IMDS__ENDPOINT": "http://127.0.0.1:1"}
        env = environment(
            {f"IMDS_BRIDGE__{name}": value for name, value in settings.items()} | {"PYTHONPATH": str(ROOT)}
        )
        with as_process_1(user, env) as inside:
            health = [*inside, sys.executable, str(ROOT / "infra/container/health.py")]
            assert completed(*health, env=env).stdout == "healthy\n"
            done = completed(*health, "--ready", env=env)
            why = f"forward could not write its status to {folder.path} yet\n"
            assert (done.returncode, done.stdout) == (1, why)


def test_a_process_that_cannot_do_its_work_is_alive_but_not_ready_and_gives_the_reason(
    held: StateFolder, health: Health
) -> None:
    """The reasons are those of tests/unit/process/test_health.py."""
    write_raw(held, status())
    assert health() == health("--ready") == HEALTHY
    write_raw(held, status(storage_error="disk full"))
    assert health() == HEALTHY
    assert health("--ready") == (1, "the state cannot be written: disk full\n")


def test_the_health_check_asks_the_port_that_the_process_serves(health: Health) -> None:
    with closing(
        MetricsServer("127.0.0.1:0", role="forward", registry=CollectorRegistry(), clock=Clock())
    ) as server:
        server.start(lambda: process_status(Clock().now(), last_good_at=None, last_error="503"))
        listen = f"127.0.0.1:{server.port}"
        assert health(listen=listen) == HEALTHY
        assert health("--ready", listen=listen) == (1, "IMDS has given no valid answer yet: 503\n")
        assert health("--role", "listen", listen=listen) == (1, "listen does not run\n")


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "nonsense", "[::1]:1"])
def test_the_status_file_is_read_where_no_port_answers(
    held: StateFolder, health: Health, listen: str
) -> None:
    write_raw(held, status())
    assert health(listen=listen) == HEALTHY


@pytest.mark.parametrize(
    ("role", "body", "reason"),
    [
        ("forward", "not JSON, since it is another program", "forward does not run"),
        ("forward", "", "forward does not run"),
        # a console gives no reasons
        ("console", '{"ok": false, "role": "console"}', "/readyz of console fails"),
    ],
)
def test_what_a_port_answers_is_believed_only_of_the_role(
    health: Health, monkeypatch: pytest.MonkeyPatch, role: str, body: str, reason: str
) -> None:
    answer = f"HTTP/1.1 503 No\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    if not body:
        monkeypatch.setattr("infra.container.health.ASK_SECONDS", 0.1)
    with RawServer(answering(answer if body else b"")) as server:
        listen = server.url.removeprefix("http://")
        assert health("--role", role, "--ready", listen=listen) == (1, f"{reason}\n")


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
