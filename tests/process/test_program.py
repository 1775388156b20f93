"""Programs that sinks and auto rules run, the hostile ones included; Wine runs what needs no shell of POSIX."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import DeliveryError, Misconfigured, Rejected, Unavailable
from bridge.runtime.program import Result, Run, _end_all, _running
from bridge.runtime.threads import start_thread
from bridge.sinks.exec import ExecSettings, ExecSink
from tests.support.only import only
from tests.support.process import LIMIT_SECONDS, stored_event, wait_until

LONG_SECONDS = 60.0
BIG = b"x" * 3_000_000  # more than a pipe holds
if sys.platform == "win32":
    CRASH, CRASH_CODE, FOLDER = "import os; os._exit(0xC0000005 - 2**32)", 0xC0000005 - 2**32, r"c:\windows"
else:
    CRASH, CRASH_CODE, FOLDER = "import os; os.kill(os.getpid(), 9)", -9, "/"
of_posix = pytest.mark.posix("its program is a script of a POSIX shell")


def of_python(code: str, *arguments: str | Path, body: bytes = b"{}", **data: Any) -> Result:
    """Run a program in Python to its end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return Run(command, body, data, timeout_seconds=LONG_SECONDS).finish()


def make(script: str, *, body: bytes = b"{}", timeout_seconds: float = LONG_SECONDS) -> Run:
    """Make a run of the shell, which tests use as a program."""
    return Run(["/bin/sh", "-c", script], body, {}, timeout_seconds=timeout_seconds)


def make_sink(script: str, **settings: Any) -> ExecSink:
    return ExecSink(ExecSettings(kind="exec", run=("/bin/sh", "-c", script), **settings))


def of_shell(script: str, **options: Any) -> Result:
    """Run a script to its end."""
    return make(script, **options).finish()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program end soon, and a busy machine take its time to read what it wrote."""
    monkeypatch.setattr("bridge.runtime.program.KILL_AFTER_SECONDS", 0.3)
    monkeypatch.setattr("bridge.runtime.program._LAST_READ_SECONDS", LONG_SECONDS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file into which a script writes."""
    return tmp_path / "file"


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
    ("program", "code", "output"),
    [
        ("import sys; print(sys.stdin.read())", 0, "{}"),
        ("import sys; print(1, flush=True); sys.exit('err')", 1, "1 err"),
        ("print('a\\033[31mb\\a')", 0, "a [31mb"),
        ("import sys; sys.exit(75)", 75, ""),
        (CRASH, CRASH_CODE, ""),
        ("import os; os.close(1); os.close(2); os._exit(4)", 4, ""),
        ("import os; print(os.path.normcase(os.getcwd()))", 0, FOLDER),
    ],
)
def test_a_program_has_its_exit_code_and_output(program: str, code: int, output: str) -> None:
    assert of_python(program) == Result(code=code, output=output)


@pytest.mark.parametrize("program", ["", "import os; os.close(0)", "import sys; sys.stdin.buffer.read(1)"])
def test_a_program_need_not_read_its_input(program: str) -> None:
    assert of_python(program, body=BIG).fault == ""


def test_input_output_arguments_and_variables_of_any_kind_arrive(tmp_path: Path) -> None:
    code = """
import os, pathlib, sys
body = sys.stdin.buffer.read()
sys.stdout.buffer.write(body + b"end")
got = [len(body), os.environ["IMDS_BRIDGE_EVENT_ID"], *sys.argv[2:]]
pathlib.Path(sys.argv[1]).write_text(repr(got), encoding="utf-8")
"""
    file, event_id = tmp_path / "a file with ü and €", 'a "b" ü€%PATH%'
    arguments = ["a b", 'c"d', "e\\", "", "%PATH%", "&", "^", "ü€🟥"]
    result = of_python(code, file, *arguments, body=BIG, EventId=event_id, Resources=["web-0"])
    assert result.fault == ""
    assert result.output.endswith("xend")
    assert file.read_text(encoding="utf-8") == repr([len(BIG), event_id, *arguments])


@of_posix
def test_of_a_long_output_only_the_end_is_kept() -> None:
    result = of_shell("head -c 100000000 /dev/zero | tr '\\0' y; echo end; exit 3")
    assert result.code == 3
    assert result.output.endswith("yend")
    assert len(result.output) < 5000


@of_posix
def test_a_program_that_is_stopped_is_killed_in_time() -> None:
    assert of_shell("kill -STOP $$", timeout_seconds=0.2).ended_by == "timeout"


@of_posix
def test_what_a_program_leaves_in_its_group_ends_with_it_and_delays_nothing(file: Path) -> None:
    result = of_shell(f"sh -c 'echo $$ > {file}; sleep 3600' & until [ -s {file} ]; do :; done")
    assert result.fault == ""
    assert wait_until(lambda: not is_alive(read_pid(file)))


@of_posix
def test_a_daemon_that_keeps_the_output_open_and_writes_delays_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.runtime.program._LAST_READ_SECONDS", 0.5)
    daemon = f"setsid sh -c 'echo $$ > {file}; while :; do echo x; done' &"
    assert of_shell(f"{daemon} until [ -s {file} ]; do :; done").fault == ""
    with suppress(ProcessLookupError):  # a closed pipe may have ended it
        os.kill(read_pid(file), 9)


@pytest.mark.parametrize("content", [None, "no program", "#!/no/such/interpreter\n"])
def test_a_program_that_cannot_be_started_is_a_fault_of_the_setup(
    tmp_path: Path, content: str | None
) -> None:
    program = tmp_path / "drain.exe"
    if content is not None:
        program.write_text(content)
        program.chmod(0o755)
    with pytest.raises(Misconfigured, match="cannot be started"):
        ExecSink(ExecSettings(kind="exec", run=(str(program),))).send([stored_event(1)])


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        *((script, Unavailable) for script in ("exit 75", "kill -TERM $$", "sleep 3600")),
        *((f"exit {code}", Rejected) for code in (1, 64, 126, 192)),
    ],
)
@of_posix
def test_the_end_of_a_program_decides_what_becomes_of_the_event(
    script: str, kind: type[DeliveryError]
) -> None:
    sink = make_sink(script, timeout_seconds=0.5 if "sleep" in script else LONG_SECONDS)
    with pytest.raises(DeliveryError) as raised:
        sink.send([stored_event(1)])
    assert type(raised.value) is kind
    assert not sink.is_at_work


@of_posix
def test_what_waits_for_a_program_is_no_backlog_until_a_run_fails(file: Path) -> None:
    sink = make_sink(f"test -e {file} || exit 75")
    assert sink.is_at_work
    with pytest.raises(Unavailable):
        sink.send([stored_event(1)])
    assert not sink.is_at_work
    file.touch()
    sink.send([stored_event(1)])
    assert sink.is_at_work


def ended(run: Run) -> Result:
    """Have a run ended, and return its result."""
    run.end()
    return wait_until(lambda: run.result)


@of_posix
def test_a_program_that_ignores_sigterm_is_killed_with_its_whole_group(file: Path) -> None:
    loop = "while :; do sleep 1; done"
    run = make(f"trap '' TERM; sh -c 'echo $$ > {file}; {loop}' & {loop}")
    run.start("run /bin/sh")
    pid = read_pid(file)
    assert ended(run).code == -9
    wait_until(lambda: not is_alive(pid))


@of_posix
def test_a_program_may_clean_up_after_sigterm_and_was_ended_all_the_same(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.runtime.program.KILL_AFTER_SECONDS", LONG_SECONDS)
    run = make(f"trap 'echo cleaned; exit 0' TERM; echo $$ > {file}; while :; do sleep 0.01; done")
    run.start("run /bin/sh")
    read_pid(file)
    result = ended(run)
    assert (result.code, result.ended_by) == (0, "stop")
    assert result.output.endswith("cleaned")


@of_posix
def test_the_end_and_the_output_of_a_program_are_logged_once_and_before_its_result_is_seen(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    run = make("echo no route to the load balancer; exit 1")
    results_at_the_line = []

    def note(_: logging.LogRecord) -> bool:
        results_at_the_line.append(run.result)
        return True

    monkeypatch.setattr(caplog.handler, "filter", note)
    run.start("run /bin/sh")
    wait_until(lambda: run.result)
    record = only(caplog.records)
    assert record.getMessage() == "run /bin/sh has ended: exit code 1"
    assert vars(record)["output"] == "no route to the load balancer"
    assert results_at_the_line == [None]


@pytest.mark.parametrize("allowed", [0, 1, 2], ids=["none", "to run it", "for its input"])
@of_posix
def test_a_program_that_no_thread_can_watch_is_ended_and_has_failed(
    file: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    started: list[str] = []

    def start(name: str, target: Callable[[], object]) -> threading.Thread:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(name)
        return start_thread(name, target)

    monkeypatch.setattr("bridge.runtime.program.start_thread", start)
    run = make(f"sleep 0.2; touch {file}; sleep 3600")
    run.start("run /bin/sh")
    assert wait_until(lambda: run.result).fault == "it cannot be started: can't start new thread"
    assert run not in _running
    assert not file.exists()


@pytest.mark.parametrize(
    ("patience_seconds", "program"),
    [
        pytest.param(3600, "echo started; exec sleep 3600", id="by SIGTERM"),
        pytest.param(
            0.3, "trap '' TERM; echo started; while :; do sleep 0.1; done", id="by SIGKILL if need be"
        ),
    ],
)
@of_posix
def test_a_program_ends_before_its_process(file: Path, patience_seconds: float, program: str) -> None:
    script = f"""
import time
from bridge.runtime import program
program.KILL_AFTER_SECONDS, program._LAST_READ_SECONDS = {patience_seconds}, {LONG_SECONDS}
command = ["/bin/sh", "-c", "echo $$ > {file}; {program}"]
run = program.Run(command, b"", {{}}, timeout_seconds=3600)
run.start("run /bin/sh")
while not run._output:  # it is watched from now on
    time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT_SECONDS)
    assert not is_alive(read_pid(file))


@of_posix
def test_the_end_of_this_process_waits_until_a_run_has_logged_how_it_ended(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that is slow, as one that another thread writes to may be, does not lose the line."""
    caplog.set_level("INFO")
    write = logging.Logger.log

    def write_late(*arguments: Any, **named: Any) -> None:
        time.sleep(0.3)
        write(*arguments, **named)

    monkeypatch.setattr(logging.Logger, "log", write_late)
    make(f"echo $$ > {file}; sleep 60").start("run /bin/sh")
    assert is_alive(read_pid(file))
    _end_all()
    assert [record.getMessage() for record in caplog.records] == [
        "run /bin/sh has ended: it was ended by imds-bridge"
    ]


@of_posix
def test_the_end_of_this_process_waits_for_a_run_whose_thread_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = threading.Timer(0.2, lambda: None)

    def start_late(name: str, target: Callable[[], object]) -> threading.Thread:
        monkeypatch.setattr("bridge.runtime.program.start_thread", start_thread)
        begin.function = lambda: start_thread(name, target)
        begin.start()
        return begin

    monkeypatch.setattr("bridge.runtime.program.start_thread", start_late)
    run = make("sleep 60")
    run.start("run /bin/sh")
    _end_all()
    begin.join()
    assert run.result
    assert run.result.ended_by == "stop"
