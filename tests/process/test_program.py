"""Programs that sinks and auto rules run, the hostile ones included, and runs that outlive their process."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.config.sinks import ExecSettings
from bridge.errors import DeliveryError, Misconfigured, Rejected, Unavailable
from bridge.runtime.program import RUNNER, DetachedRun, Result, encode_job, run
from bridge.sinks.exec import ExecSink
from tests.support.disk import small_disk
from tests.support.process import LIMIT_SECONDS, stored_event, wait_until

LONG_SECONDS = 60.0
BIG = b"x" * 3_000_000  # more than a pipe holds


def job(script: str, *, body: bytes = b"{}", timeout_seconds: float = LONG_SECONDS, **changes: Any) -> bytes:
    """Write a job for the shell, which tests use as a program; `changes` replace fields of it."""
    encoded = encode_job(["/bin/sh", "-c", script], body, {}, timeout_seconds=timeout_seconds)
    return json.dumps({**json.loads(encoded), "kill_after_seconds": 0.3, **changes}).encode() + b"\n"


def outcome(script: str, **job_fields: Any) -> Result:
    """Run a script to its end."""
    return run(job(script, **job_fields), timeout_seconds=job_fields.get("timeout_seconds", LONG_SECONDS))


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def read_pid(file: Path) -> int:
    """Return the process id that a script has written, once it has."""
    return int(wait_until(lambda: file.read_text().strip() if file.exists() else ""))


@pytest.mark.parametrize(
    ("script", "code", "output"),
    [
        ("cat", 0, "{}"),
        ("echo out; echo err >&2; exit 3", 3, "out err"),
        ("printf 'a\\033[31mb\\a\\n'", 0, "a [31mb"),
        ("kill -9 $$", -9, ""),
        ("exec >&- 2>&-; exit 4", 4, ""),
        ("pwd; echo $0 $#", 0, "/ /bin/sh 0"),
    ],
)
def test_a_program_has_its_exit_code_and_output(script: str, code: int, output: str) -> None:
    assert outcome(script) == Result(code=code, output=output)


@pytest.mark.parametrize("script", ["exit 0", "exec <&-; exit 0", "head -c 1 > /dev/null; exit 0"])
def test_a_program_need_not_read_its_input(script: str) -> None:
    assert outcome(script, body=BIG).fault == ""


def test_a_program_gets_an_input_of_any_size(tmp_path: Path) -> None:
    assert outcome(f"cat > {tmp_path / 'got'}", body=BIG).fault == ""
    assert (tmp_path / "got").read_bytes() == BIG


def test_of_a_long_output_only_the_end_is_kept() -> None:
    result = outcome("head -c 100000000 /dev/zero | tr '\\0' y; echo end; exit 3")
    assert result.code == 3
    assert result.output.endswith("yend")
    assert len(result.output) < 5000


def test_a_program_that_is_stopped_is_killed_in_time() -> None:
    assert outcome("kill -STOP $$", timeout_seconds=0.2).ended_by == "timeout"


def test_what_a_program_leaves_in_its_group_ends_with_it_and_delays_nothing(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    result = outcome(f"sh -c 'echo $$ > {file}; sleep 60' & until [ -s {file} ]; do :; done")
    assert result.fault == ""
    assert wait_until(lambda: not is_alive(read_pid(file)))


def test_a_daemon_that_keeps_the_output_open_and_writes_delays_nothing(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    daemon = f"setsid sh -c 'echo $$ > {file}; while :; do echo x; done' &"
    assert outcome(f"{daemon} until [ -s {file} ]; do :; done").fault == ""
    os.kill(read_pid(file), 9)


@pytest.mark.parametrize("content", [None, "no program", "#!/no/such/interpreter\n"])
def test_a_program_that_cannot_be_started_is_a_fault_of_the_setup(
    tmp_path: Path, content: str | None
) -> None:
    program = tmp_path / "program"
    if content is not None:
        program.write_text(content)
        program.chmod(0o755)
    with pytest.raises(Misconfigured, match="cannot be started"):
        ExecSink(ExecSettings(kind="exec", run=(str(program),))).send([stored_event(1)])


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("exit 75", Unavailable),
        ("kill -TERM $$", Unavailable),
        ("sleep 60", Unavailable),
        ("exit 1", Rejected),
        ("exit 64", Rejected),
        ("exit 126", Rejected),
        ("exit 192", Rejected),
    ],
)
def test_the_end_of_a_program_decides_what_becomes_of_the_event(
    script: str, kind: type[DeliveryError]
) -> None:
    limit_seconds = 0.5 if "sleep" in script else LONG_SECONDS
    settings = ExecSettings(kind="exec", run=("/bin/sh", "-c", script), timeout_seconds=limit_seconds)
    with pytest.raises(DeliveryError) as raised:
        ExecSink(settings).send([stored_event(1)])
    assert type(raised.value) is kind


@pytest.fixture
def detached(tmp_path: Path) -> Iterator[DetachedRun]:
    started = DetachedRun(tmp_path / "runs" / "one.run")
    yield started
    started.end()
    wait_until(lambda: not started.is_running())


def test_a_program_of_a_process_that_ends_is_ended_if_it_was_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    runner = subprocess.Popen(RUNNER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert runner.stdin
    assert runner.stdout
    runner.stdin.write(job(f"echo $$ > {file}; sleep 60"))
    runner.stdin.close()
    pid = read_pid(file)
    runner.stdout.close()  # as the end of a process does
    runner.wait(LIMIT_SECONDS)
    assert not is_alive(pid)


def later(run: DetachedRun) -> DetachedRun:
    """Return the run as a later process sees it."""
    return DetachedRun(run.path)


def test_a_later_process_sees_that_a_run_has_not_ended_and_then_how_it_ended(
    detached: DetachedRun, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    detached.start(job(f"read line < {fifo}; echo $line; exit 3"))
    assert later(detached).is_running()
    assert later(detached).result() is None
    with pytest.raises(BlockingIOError):
        later(detached).start(job("exit 0"))
    fifo.write_text("go\n")
    other = later(detached)
    assert wait_until(other.result) == Result(code=3, output="go") == detached.result()
    assert not other.is_running()


def end_of(run: DetachedRun) -> dict[str, Any]:
    """Ask for the end of a run, and return what its runner has written."""
    run.end()
    wait_until(lambda: not run.is_running())
    return dict(json.loads(run.path.read_bytes().rstrip().splitlines()[-1]))


def test_a_program_that_ignores_sigterm_is_killed_with_its_whole_group(
    detached: DetachedRun, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    loop = "while :; do sleep 1; done"
    detached.start(job(f"trap '' TERM; sh -c 'echo $$ > {file}; {loop}' & {loop}"))
    pid = read_pid(file)
    assert end_of(detached)["code"] == -9
    wait_until(lambda: not is_alive(pid))


def test_a_program_may_clean_up_after_sigterm_and_has_no_result_all_the_same(
    detached: DetachedRun, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    script = f"trap 'echo cleaned; exit 0' TERM; echo $$ > {file}; while :; do sleep 0.01; done"
    detached.start(job(script, kill_after_seconds=LONG_SECONDS))
    read_pid(file)
    end = end_of(detached)
    assert end["code"] == 0
    assert end["output"].endswith("cleaned\n")
    assert detached.result() is None


@pytest.mark.parametrize("by_a_later_process", [False, True])
def test_a_run_that_is_ended_has_no_result_and_can_start_again(
    detached: DetachedRun, tmp_path: Path, by_a_later_process: bool
) -> None:
    detached.start(job(f"echo $$ > {tmp_path / 'pid'}; sleep 60"))
    pid = read_pid(tmp_path / "pid")
    ending = later(detached) if by_a_later_process else detached
    ending.end()
    wait_until(lambda: not detached.is_running())
    assert not is_alive(pid)
    assert detached.result() is None
    detached.start(job("exit 0"))
    assert wait_until(detached.result) == Result(code=0)


def test_a_run_whose_runner_was_killed_has_no_result_and_its_program_is_killed_too(
    detached: DetachedRun, tmp_path: Path
) -> None:
    detached.start(job(f"trap '' TERM; echo $$ > {tmp_path / 'pid'}; while :; do sleep 1; done"))
    program = read_pid(tmp_path / "pid")
    os.kill(json.loads(detached.path.read_bytes().splitlines()[1])["pid"], 9)
    wait_until(lambda: not detached.is_running())
    wait_until(lambda: not is_alive(program))
    assert later(detached).result() is detached.result() is None


def test_a_disk_that_is_full_when_a_program_ends_does_not_lose_its_result(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        detached = DetachedRun(disk.path / "runs" / "1.run")
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        detached.start(job(f"read line < {fifo}; head -c 9000 /dev/zero"))
        disk.fill()
        fifo.write_text("go\n")
        result = wait_until(lambda: detached.result() or not detached.is_running())
        assert isinstance(result, Result)
        assert result.fault == ""
        with pytest.raises(OSError, match="No space left"):
            DetachedRun(disk.path / "runs" / "2.run").start(job("exit 0"))


def test_a_result_that_was_not_written_to_its_end_does_not_count(detached: DetachedRun) -> None:
    detached.start(job("exit 0"))
    wait_until(detached.result)
    detached.path.write_bytes(detached.path.read_bytes().rstrip()[:-5])
    assert later(detached).result() is None


@pytest.mark.parametrize(
    "line", ["[1]", "7", '{"code": "0"}', '{"code": 0, "output": 5}', '{"code": 0, "ended_by": []}']
)
def test_a_result_that_the_disk_has_changed_does_not_count(detached: DetachedRun, line: str) -> None:
    detached.path.parent.mkdir()
    detached.path.write_text(f'{{"command": []}}\n{{"pid": 5}}\n{line}\n')
    assert detached.result() is None


def test_the_lock_is_not_inherited_by_the_program(detached: DetachedRun, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    detached.start(job(f"setsid sh -c 'echo $$ > {file}; exec sleep 60' & until [ -s {file} ]; do :; done"))
    wait_until(detached.result)
    os.kill(read_pid(file), 9)
    assert not later(detached).is_running()


def test_the_file_of_a_run_is_kept_for_a_while(detached: DetachedRun, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    detached.start(job(f"read line < {fifo}"))
    assert not detached.forget(older_than_seconds=-1.0)
    fifo.write_text("go\n")
    wait_until(detached.result)
    assert not detached.forget(older_than_seconds=60.0)
    os.utime(detached.path, (time.time() - 100,) * 2)
    assert detached.forget(older_than_seconds=60.0)
    assert not detached.path.exists()
    assert detached.forget(older_than_seconds=60.0)
