"""The commands as an operator types them: help, check, status, outbox, and exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest

from bridge import __version__
from bridge.cli import check as probes
from bridge.cli.main import COMMANDS, main
from bridge.config.loader import load
from bridge.events.filters import Filter
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.text import UNSAFE, register_secret
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.outbox import OTHER_TYPE, event, open_outbox
from tests.support.paths import ROOT
from tests.support.process import (
    COMMAND,
    LIMIT_SECONDS,
    closed_port,
    environment,
    run,
    toml,
    wait_until,
)

ACTIONS = [
    *(f"outbox {action}" for action in ("list", "show", "retry", "drop")),
    *(f"config {action}" for action in ("schema", "check")),
    *(f"lab {action}" for action in ("schedule", "start", "release", "fault", "state", "scenarios")),
]


EVENT_TYPES_IN_ORDER = [
    f"io.imdsbridge.{name}.v1"
    for name in (
        *(
            f"scheduledevent.{kind}"
            for kind in ("scheduled", "started", "updated", "completed", "canceled", "ended")
        ),
        *("document.changed", "imds.unreachable", "imds.recovered", "bridge.heartbeat", "bridge.loss"),
        *("approval.accepted", "approval.rejected", "approval.failed"),
    )
]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with Inbox() as started:
        yield started


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("IMDS_BRIDGE__"):
            monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a configuration that names a state folder and nothing else."""
    file = tmp_path / "config.toml"
    file.write_text(toml({"state_dir": tmp_path / "state"}))
    return file


class CommandResult:
    """What a command in this process returned and printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str | Path) -> CommandResult:
        code = main([str(argument) for argument in arguments])
        return CommandResult(code, *capfd.readouterr())

    return call


# --- forward --once ---


def once_settings(folder: Path, lab: ImdsLab, inbox: Inbox) -> str:
    sink = {"kind": "webhook", "url": inbox.url}
    settings = {"state_dir": folder / "state", "stop_seconds": 0.5, "sinks": {"ops": sink}}
    return toml({**settings, "imds": {"endpoint": lab.url("web-0")}})


def test_forward_once_publishes_what_has_changed_and_exits_0(
    tmp_path: Path, lab: ImdsLab, inbox: Inbox
) -> None:
    file = tmp_path / "once.toml"
    file.write_text(once_settings(tmp_path, lab, inbox))
    assert run("forward", "--once", "--config", file).returncode == 0
    lab.schedule(event_type="Reboot", resources=["web-0"])
    done = run("forward", "--once", "--config", file)
    assert done.returncode == 0, done.stderr
    types = [event["type"].split(".", 2)[2] for event in inbox.events()]
    heartbeat, document = "bridge.heartbeat.v1", "document.changed.v1"
    assert types == [
        *(heartbeat, document, heartbeat),
        *(heartbeat, "scheduledevent.scheduled.v1", document, heartbeat),
    ]


def test_forward_once_without_an_answer_of_imds_exits_3_with_the_reason(
    tmp_path: Path, lab: ImdsLab, inbox: Inbox
) -> None:
    file = tmp_path / "once.toml"
    file.write_text(once_settings(tmp_path, lab, inbox))
    lab.fault(500, count=None)
    done = run("forward", "--once", "--config", file)
    assert done.returncode == 3
    assert re.search(r"^imds-bridge: IMDS gave no usable answer: .*500", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("status", "reason"),
    [(503, r"\d event\(s\) wait for the next start"), (400, r"\d event\(s\) dead-lettered")],
)
def test_forward_once_exits_3_if_a_sink_has_not_got_everything(
    tmp_path: Path, lab: ImdsLab, inbox: Inbox, status: int, reason: str
) -> None:
    file = tmp_path / "once.toml"
    file.write_text(once_settings(tmp_path, lab, inbox))
    inbox.fault(status, count=None)
    done = run("forward", "--once", "--config", file)
    assert done.returncode == 3
    assert re.search(rf"^imds-bridge: sinks\.ops: {reason}$", done.stderr, re.MULTILINE)


# --- help and usage ---


def test_help_shows_every_command_the_exit_codes_and_examples() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"^    {command} +\w", done.stdout, re.MULTILINE), command
    assert "exit codes:" in done.stdout
    assert "examples:" in done.stdout


@pytest.mark.parametrize("command", [*COMMANDS, *ACTIONS])
def test_each_command_has_help_with_examples(command: str) -> None:
    done = run(*command.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: imds-bridge {command}" in done.stdout
    assert "\nexample" in done.stdout


def test_version_prints_the_version() -> None:
    assert run("--version").stdout == f"imds-bridge {__version__}\n"


def test_the_installed_command_is_imds_bridge_and_never_bridge() -> None:
    folder = Path(sys.executable).parent
    command = shutil.which("imds-bridge", path=str(folder))
    if command is None:
        pytest.skip("the package is not installed beside this Python")
    done = subprocess.run(
        [command, "--version"], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True
    )
    assert done.stdout == f"imds-bridge {__version__}\n"
    assert not (folder / "bridge").exists()


def test_without_a_command_it_prints_the_help() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("--help").stdout


def test_a_mistyped_command_is_answered_with_the_nearest_one() -> None:
    assert "unknown command 'stauts'; did you mean status?" in run("stauts", "--json").stderr


@pytest.mark.parametrize(
    ("arguments", "command", "reason"),
    [
        ("check --snd", "check", "'--snd'; did you mean --send?"),
        ("check --jsn=yes", "check", "'--jsn=yes'; did you mean --json?"),
        ("outbox drop 3 --yess", "outbox drop", "'--yess'; did you mean --yes?"),
        (
            "lab schedule --type Reboot --durration 5",
            "lab schedule",
            "'--durration'; did you mean --duration?",
        ),
        ("status --zzz", "status", "'--zzz'"),
    ],
)
def test_a_mistyped_option_is_answered_with_the_nearest_one_of_the_command(
    arguments: str, command: str, reason: str
) -> None:
    done = run(*arguments.split())
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"imds-bridge {command}: error: unknown option {reason}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "X", "outbox", "list"],
        ["--config=X", "outbox", "list"],
        ["outbox", "--config", "X", "list"],
        ["outbox", "list", "--config", "X"],
        ["--config", "X", "status"],
        ["status", "--config=X"],
    ],
)
def test_config_may_stand_before_or_after_the_command(call: Any, config: Path, arguments: list[str]) -> None:
    done = call(*(argument.replace("X", str(config)) for argument in arguments))
    assert done.code == 2
    assert f"in {config.parent / 'state' / 'forward'}: " in done.err


@pytest.mark.parametrize("arguments", [["forwrad"], ["check", "--nonsense"], ["outbox"]])
def test_an_unknown_command_exits_2_with_the_usage(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: imds-bridge" in done.stderr


@pytest.mark.parametrize("command", [["forward"], ["check"], ["status"], ["outbox", "list"]])
def test_every_command_exits_2_with_all_errors_of_the_configuration(
    call: Any, tmp_path: Path, command: list[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("a = 1\nb = 2")
    done = call(*command, "--config", file)
    assert (done.code, done.out) == (2, "")
    assert "2 errors in the configuration\n  a: unknown key" in done.err


def test_a_closed_output_pipe_is_not_an_error(config: Path) -> None:
    fill(config)
    reading = [*COMMAND, "outbox", "list", "--config", str(config)]
    with subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@" | true', "sh", *reading], env=environment(), stderr=subprocess.PIPE
    ) as process:
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert b"Traceback" not in errors
    assert b"Exception" not in errors


# --- config ---


def test_config_schema_prints_the_shipped_schema(call: Any) -> None:
    done = call("config", "schema")
    assert (done.code, done.out) == (0, (ROOT / "bridge" / "config" / "schema.json").read_text())


def test_config_check_reports_warnings_of_a_valid_file_without_a_network(call: Any, config: Path) -> None:
    bus = {
        "connection_string": "Endpoint=sb://bus.invalid/;SharedAccessKeyName=a;SharedAccessKey=b",
        "queue": "q",
    }
    config.write_text(toml({"imds": {"endpoint": "http://imds.invalid"}, "approvals": bus}))
    done = call("config", "check", config)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == f"{config}: the configuration is valid"
    assert "  warning: approvals.policy: no allow rule and no auto rule" in done.out


@pytest.mark.parametrize("fault", ["{{ notice.titel }}", "{{ notice."])
def test_config_check_exits_2_with_the_files_name_for_a_faulty_template(
    call: Any, config: Path, fault: str
) -> None:
    settings = {
        "kind": "webhook",
        "format": "template",
        "url": "https://example.org",
        "template": {"text": fault},
    }
    config.write_text(toml({"sinks": {"ops": settings}}))
    done = call("config", "check", config)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        f"imds-bridge: {config}: 1 error in the configuration\n  sinks.ops: template.text"
    )


# --- check ---


def sinks(config: Path, lab: ImdsLab, **sinks: dict[str, Any]) -> None:
    config.write_text(
        toml({"state_dir": config.parent / "state", "imds": {"endpoint": lab.url("web-0")}, "sinks": sinks})
    )


def test_a_check_of_a_working_configuration_shows_each_part_and_exits_0(
    call: Any, config: Path, lab: ImdsLab, inbox: Inbox
) -> None:
    lab.schedule(event_type="Reboot", resources=["web-0"])
    sinks(config, lab, ops={"kind": "webhook", "url": inbox.url}, screen={"kind": "stdout"})
    done = call("check", "--config", config)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["CHECK", "RESULT", "MESSAGE"]
    assert [line.split()[0] for line in lines[1:]] == ["state", "imds", "instance", "sink", "sink"]
    assert f"document 2 with 1 event(s) from {lab.url('web-0')}" in done.out
    assert "this VM is web-0" in done.out
    assert f"{inbox.base_url}: reachable" in done.out
    assert {one.method for one in inbox.received} == {"OPTIONS"}
    assert not (config.parent / "state").exists()


def test_a_check_gives_the_same_as_json(call: Any, config: Path, lab: ImdsLab, inbox: Inbox) -> None:
    sinks(config, lab, ops={"kind": "webhook", "url": inbox.url})
    done = call("check", "--json", "--config", config)
    assert done.code == 0
    assert [(row["check"], row["result"]) for row in done.json] == [
        ("state forward", "ok"),
        ("imds", "ok"),
        ("instance", "ok"),
        ("sink ops", "ok"),
    ]
    assert all(set(row) == {"check", "result", "message", "remedy"} for row in done.json)


def test_a_check_with_imds_down_exits_3_with_the_reason_and_the_remedy(
    call: Any, config: Path, lab: ImdsLab, inbox: Inbox
) -> None:
    sinks(config, lab, ops={"kind": "webhook", "url": inbox.url})
    url = lab.url("web-0")
    lab.close()
    done = call("check", "--config", config)
    assert done.code == 3
    assert f"IMDS at {url}: the connection failed: Connection refused" in done.out
    assert "-> on an Azure VM, look for a firewall or proxy" in done.out
    assert "sink ops" in done.out


def test_a_check_with_a_sink_down_exits_3_with_the_reason_and_the_remedy(
    call: Any, config: Path, lab: ImdsLab, inbox: Inbox
) -> None:
    with closed_port() as down:
        inbox.fault(401, method="OPTIONS")
        sinks(
            config,
            lab,
            down={"kind": "webhook", "url": f"{down}/hook?sig=topsecret"},
            locked={"kind": "webhook", "url": inbox.url},
        )
        done = call("check", "--json", "--config", config)
    assert done.code == 3
    found = {row["check"]: row for row in done.json}
    assert (found["sink down"]["result"], found["sink locked"]["result"]) == ("FAIL", "warn")
    assert found["sink down"]["message"] == f"{down}: the connection failed: Connection refused"
    assert found["sink down"]["remedy"].startswith("check host, port, DNS and firewall")
    assert found["sink locked"]["remedy"] == (
        "check the credentials in [sinks.locked] and what they permit; run check --send to be sure"
    )
    assert found["imds"]["result"] == "ok"


def test_a_check_finds_an_invalid_answer_of_imds(call: Any, config: Path, lab: ImdsLab) -> None:
    sinks(config, lab)
    lab.fault("garbage")
    done = call("check", "--json", "--config", config)
    assert done.code == 3
    assert {row["check"]: row["result"] for row in done.json}["imds"] == "FAIL"


def test_a_check_finds_a_state_folder_that_cannot_be_used(
    call: Any, config: Path, lab: ImdsLab, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file")
    sinks(config, lab)
    done = call("check", "--json", "--config", config)
    assert done.code == 3
    (state,) = [row for row in done.json if row["check"] == "state forward"]
    assert state["result"] == "FAIL"
    assert state["remedy"]


BUS = {"connection_string": "Endpoint=sb://127.0.0.1:9;SharedAccessKeyName=a;SharedAccessKey=b"}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "not a database": lambda _: b"not a database" * 100,
    "a page of zeros": lambda body: body[:4096] + bytes(4096) + body[8192:],
    "half of the file": lambda body: body[: len(body) // 2],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_check_looks_at_the_state_of_every_process_that_is_configured(
    monkeypatch: pytest.MonkeyPatch, config: Path, damage: str
) -> None:
    for role in ("forward", "listen", "relay"):
        folder = config.parent / "state" / role
        outbox = open_outbox(folder, sinks={})
        for number in range(50):
            outbox.commit([event(f"{role}-{number}", size=500)])
        outbox.close()
    file = config.parent / "state" / "listen" / "outbox.db"
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    settings = {"approvals": {**BUS, "queue": "a"}, "relay": {**BUS, "queue": "b"}}
    config.write_text(toml({"state_dir": config.parent / "state", **settings}))
    for probe in ("_imds", "_sinks", "_approvals", "_relay"):
        monkeypatch.setattr(probes, probe, lambda *_, **__: ())
    found = {finding.check: finding for finding in probes.check(load(config, {}))}
    assert found["state forward"].result == found["state relay"].result == "ok"
    assert found["state listen"].result == "FAIL"
    assert str(file) in found["state listen"].message or str(file.parent) in found["state listen"].message
    assert found["state listen"].remedy


def test_a_check_of_a_relay_alone_needs_no_imds_and_no_forwarders_state(config: Path) -> None:
    config.write_text(toml({"state_dir": config.parent / "state", "relay": {**BUS, "queue": "b"}}))
    loaded = load(config, {})
    assert list(probes.configured_roles(loaded)) == ["relay"]
    (config.parent / "state" / "forward").mkdir(parents=True)
    assert list(probes.configured_roles(loaded)) == ["forward", "relay"]


def test_a_check_warns_of_a_value_that_looks_like_a_slip_and_exits_0(
    call: Any, config: Path, lab: ImdsLab
) -> None:
    sinks(config, lab, screen={"kind": "stdout", "where": {"EventType": ["Rebot", "LiveMigrate"]}})
    done = call("check", "--json", "--config", config)
    assert done.code == 0
    (warning,) = [row for row in done.json if row["result"] == "warn"]
    assert warning["message"] == 'sinks.screen.where.EventType: given "Rebot", did you mean Reboot?'
    assert warning["remedy"]


def test_a_check_warns_of_a_policy_that_allows_nothing(call: Any, config: Path, lab: ImdsLab) -> None:
    bus = "Endpoint=sb://127.0.0.1:9;SharedAccessKeyName=a;SharedAccessKey=YQ==;UseDevelopmentEmulator=true"
    config.write_text(
        toml(
            {
                "state_dir": config.parent / "state",
                "imds": {"endpoint": lab.url("web-0")},
                "approvals": {"connection_string": bus, "queue": "approvals"},
            }
        )
    )
    done = call("check", "--json", "--config", config)
    policy, session = [row for row in done.json if row["result"] == "warn"]
    assert {policy["check"], session["check"]} == {"settings approvals"}
    assert "no allow rule and no auto rule" in policy["message"]
    assert "approvals.session: without sessions" in session["message"]


def test_a_check_warns_of_event_types_that_the_api_version_does_not_have(
    call: Any, config: Path, lab: ImdsLab
) -> None:
    rule = {"event_type": ["terminate", "Reboot"]}
    settings = {
        "imds": {"endpoint": lab.url("web-0"), "api_version": "2017-08-01"},
        "sinks": {"screen": {"kind": "stdout", "where": {"EventType": ["Preempt", "Freeze"]}}},
        "approvals": {"auto": [rule]},
    }
    config.write_text(toml({"state_dir": config.parent / "state", **settings}))
    done = call("check", "--json", "--config", config)
    assert [row["message"] for row in done.json if row["result"] == "warn"] == [
        "sinks.screen.where.EventType: Preempt comes with api_version 2017-11-01, and [imds] asks for 2017-08-01",
        "approvals.auto[0].event_type: Terminate comes with api_version 2019-01-01, and [imds] asks for 2017-08-01",
    ]


@pytest.mark.parametrize(
    "answer",
    [(404, "check the address in [sinks.ops]"), (500, "look for the fault at the"), (405, "it may accept")],
)
def test_a_check_warns_where_the_receiver_answers_an_error_and_fails_where_it_refuses_a_message(
    call: Any, config: Path, lab: ImdsLab, inbox: Inbox, answer: tuple[int, str]
) -> None:
    status, remedy = answer
    sinks(config, lab, ops={"kind": "webhook", "url": inbox.url})
    inbox.fault(status, method="OPTIONS")
    done = call("check", "--json", "--config", config)
    (row,) = [row for row in done.json if row["check"] == "sink ops"]
    assert (done.code, row["result"]) == (0, "warn")
    assert row["remedy"].startswith(remedy)
    assert row["remedy"].endswith("run check --send to be sure")
    inbox.fault(status)
    done = call("check", "--send", "--json", "--config", config)
    (row,) = [row for row in done.json if row["check"] == "sink ops"]
    assert (done.code, row["result"]) == (3, "FAIL")
    assert row["remedy"].startswith(remedy)


@pytest.mark.parametrize("fault", ["colour = 1\nshape = 2", "[broken"])
def test_a_check_prints_json_for_errors_of_the_configuration_as_well(
    call: Any, config: Path, fault: str
) -> None:
    config.write_text(fault)
    done = call("check", "--json", "--config", config)
    assert done.code == 2
    assert {(row["check"], row["result"], row["remedy"]) for row in done.json} == {
        ("configuration", "FAIL", f"correct {config}")
    }


def test_a_check_prints_json_for_a_faulty_template(call: Any, config: Path, lab: ImdsLab) -> None:
    template = {
        "kind": "webhook",
        "format": "template",
        "url": "https://example.org",
        "template": {"a": "{{ b"},
    }
    sinks(config, lab, ops=template)
    done = call("check", "--json", "--config", config)
    (row,) = done.json
    assert (done.code, row["check"], row["result"]) == (2, "configuration", "FAIL")
    assert row["message"].startswith("sinks.ops: template.a")


def test_a_check_reports_an_unexpected_error_as_json_and_goes_on(
    call: Any, config: Path, lab: ImdsLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an unexpected error")

    sinks(config, lab)
    monkeypatch.setattr(probes, "_document", fail)
    done = call("check", "--json", "--config", config)
    found = {row["check"]: (row["result"], row["message"]) for row in done.json}
    assert done.code == 3
    assert found["imds"] == ("FAIL", "RuntimeError: an unexpected error")
    assert found["sink stdout"][0] == "ok"


@pytest.mark.parametrize(
    ("age_seconds", "error", "reason"),
    [(300, None, "has not written its status for 30"), (0, "disk I/O error", "cannot write: disk I/O error")],
)
def test_a_check_fails_if_a_running_process_hangs_or_cannot_write(
    config: Path, age_seconds: float, error: str | None, reason: str
) -> None:
    config.write_text(toml({"state_dir": config.parent / "state"}))
    folder = StateFolder(config.parent / "state" / "forward")
    folder.acquire()
    written = datetime.now(UTC) - timedelta(seconds=age_seconds)
    folder.write_status({"written_at": written.isoformat(), "storage_error": error})
    found = probes._state(folder)
    folder.release()
    assert found.result == "FAIL"
    assert reason in found.message
    assert found.remedy


def test_a_check_finds_a_full_disk(
    call: Any, config: Path, lab: ImdsLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bridge.cli.check.os.fsync", full)
    sinks(config, lab)
    (row,) = [row for row in call("check", "--json", "--config", config).json if row["result"] == "FAIL"]
    assert row["check"] == "state forward"
    assert "No space left" in row["message"]
    assert row["remedy"].startswith("free space")


def test_a_check_finds_a_metrics_port_that_cannot_be_used(
    call: Any, config: Path, lab: ImdsLab, inbox: Inbox
) -> None:
    listen = urlsplit(inbox.base_url).netloc
    given = {"state_dir": config.parent / "state", "imds": {"endpoint": lab.url("web-0")}}
    config.write_text(toml({**given, "metrics": {"listen": listen}}))

    def found() -> tuple[int, str, str]:
        done = call("check", "--json", "--config", config)
        (row,) = [row for row in done.json if row["check"] == "metrics"]
        return done.code, row["result"], row["message"]

    assert found() == (3, "FAIL", f"{listen} cannot be listened on: Address already in use")
    folder = StateFolder(config.parent / "state" / "forward")
    folder.acquire()
    assert found() == (0, "ok", f"{listen} is in use, and imds-bridge runs")
    folder.release()


def test_an_unexpected_error_is_shown_without_secrets_and_control_characters(
    call: Any, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        register_secret("c2VjcmV0c2Vj")
        raise RuntimeError("c2VjcmV0c2Vj \x1b[2J")

    monkeypatch.setattr("bridge.cli.status.read_status", fail)
    done = call("status", "--config", config)
    assert done.code == 1
    assert done.err.endswith("RuntimeError: *** \\u001b[2J\n")


def test_a_check_fails_if_everybody_may_write_the_configuration(
    call: Any, config: Path, lab: ImdsLab
) -> None:
    sinks(config, lab)
    config.chmod(0o666)
    done = call("check", "--json", "--config", config)
    (failure,) = [row for row in done.json if row["result"] == "FAIL"]
    assert done.code == 3
    assert failure["message"].startswith(f"everybody may write {config}")
    assert failure["remedy"] == f"chmod o-w {config}"


@pytest.mark.parametrize(
    ("role", "status"),
    [
        ("listen", {"commands": {"last_error": "it is closed"}}),
        ("relay", {"relay": {"last_error": "it is closed"}}),
    ],
)
def test_a_check_fails_if_a_running_process_cannot_receive(
    call: Any, config: Path, lab: ImdsLab, role: str, status: dict[str, Any]
) -> None:
    section = {"listen": "approvals", "relay": "relay"}[role]
    settings = {"imds": {"endpoint": lab.url("web-0")}, section: {**BUS, "queue": "q"}}
    config.write_text(toml({"state_dir": config.parent / "state", **settings}))
    folder = StateFolder(config.parent / "state" / role)
    folder.acquire()
    folder.write_status(status)
    (row,) = [
        row for row in call("check", "--json", "--config", config).json if row["check"] == f"state {role}"
    ]
    folder.release()
    assert (row["result"], row["remedy"][:8]) == ("FAIL", "it tries")
    assert "cannot receive from the bus: it is closed" in row["message"]


def test_a_check_with_send_sends_each_sink_a_message_marked_as_a_test(
    call: Any, config: Path, lab: ImdsLab, inbox: Inbox
) -> None:
    sinks(
        config,
        lab,
        ops={"kind": "webhook", "url": inbox.url},
        chat={"kind": "webhook", "format": "slack", "url": f"{inbox.base_url}/chat"},
    )
    done = call("check", "--send", "--config", config)
    assert done.code == 0, done
    assert done.out.count("accepted a test message") == 2
    event, message = (one.json() for one in inbox.accepted)
    assert event["type"] == "io.imdsbridge.bridge.test.v1"
    assert "test" in event["data"]["Message"]
    assert "TEST" in message["text"]
    assert "nothing is scheduled" in message["text"]


def test_a_check_with_send_reports_a_sink_that_refuses_the_message(
    call: Any, config: Path, lab: ImdsLab, inbox: Inbox
) -> None:
    sinks(config, lab, ops={"kind": "webhook", "url": inbox.url})
    inbox.fault(422, body="no such field")
    done = call("check", "--send", "--json", "--config", config)
    assert done.code == 3
    (row,) = [row for row in done.json if row["check"] == "sink ops"]
    assert (row["result"], "no such field" in row["message"]) == ("FAIL", True)


# --- render ---


@pytest.mark.parametrize(
    "sink",
    [
        {"kind": "stdout"},
        {"kind": "webhook", "url": "https://example.org/hook/secret-part?sig=topsecret"},
        {"kind": "webhook", "mode": "binary", "url": "https://example.org/hook"},
        {"kind": "webhook", "mode": "batch", "url": "https://example.org/hook"},
        {"kind": "webhook", "format": "teams", "url": "https://example.org/hook?sig=topsecret"},
        {"kind": "webhook", "format": "slack", "url": "https://example.org/hook"},
        {"kind": "webhook", "format": "pagerduty", "routing_key": "0123456789topsecret0123456789abcd"[:32]},
        {
            "kind": "webhook",
            "format": "template",
            "url": "https://example.org/",
            "template": {"t": "{{ data }}"},
        },
        {"kind": "eventgrid", "endpoint": "https://example.org/api/events", "key": "topsecret"},
        {
            "kind": "servicebus",
            "connection_string": "Endpoint=sb://x;SharedAccessKeyName=a;SharedAccessKey=topsecret",
            "topic": "events",
        },
    ],
    ids=lambda sink: f"{sink['kind']}-{sink.get('format', sink.get('mode', ''))}",
)
def test_render_shows_every_type_of_event_as_it_is_sent_without_secrets(
    call: Any, config: Path, lab: ImdsLab, sink: dict[str, Any]
) -> None:
    sinks(config, lab, it=sink)
    done = call("render", "--config", config)
    assert done.code == 0, done
    headings = [line.split()[1].rstrip(":") for line in done.out.splitlines() if line.startswith("# ")]
    assert headings == EVENT_TYPES_IN_ORDER
    assert "topsecret" not in done.out
    assert "secret-part" not in done.out
    assert "dead-lettered" not in done.out


def test_render_shows_the_exact_bytes_or_indented_json(call: Any, config: Path, lab: ImdsLab) -> None:
    sinks(config, lab, it={"kind": "stdout"})
    arguments = ("render", "--type", "scheduledevent.started", "--config", config)
    heading, body, *_ = call(*arguments).out.splitlines()
    assert heading == "# io.imdsbridge.scheduledevent.started.v1"
    laid_out = call(*arguments, "--indent").out.partition("\n")[2]
    assert json.loads(body)["data"].keys() == json.loads(laid_out)["data"].keys()
    assert laid_out.startswith('{\n  "specversion": "1.0",')


def test_render_names_the_events_that_a_sink_does_not_take(call: Any, config: Path, lab: ImdsLab) -> None:
    sinks(config, lab, it={"kind": "stdout", "where": {"EventType": "Terminate"}})
    done = call("render", "--type", "scheduledevent.*", "--config", config)
    assert done.out.count("not sent, types, where or scope of [sinks.it] leave it out") == 6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--sink", "opps"], "given --sink opps, expected one of ops, it"),
        ([], "given --sink nothing, expected one of ops, it"),
        (["--sink", "ops", "--type", "scheduled"], "given --type scheduled, expected one of io.imdsbridge."),
    ],
)
def test_render_of_an_unknown_sink_or_type_exits_2_with_the_known_ones(
    call: Any, config: Path, lab: ImdsLab, arguments: list[str], expected: str
) -> None:
    sinks(config, lab, ops={"kind": "stdout"}, it={"kind": "stdout"})
    done = call("render", *arguments, "--config", config)
    assert done.code == 2
    assert expected in done.err


@pytest.mark.parametrize(
    "faulty",
    [
        ({"format": "template", "template": {"text": "{{ data.EvntType }}"}}, "did you mean EventType?"),
        (
            {"format": "teams", "time_zone": "Europe/Berln"},
            "expected an IANA time zone such as Europe/Berlin",
        ),
        ({"format": "pagerduty"}, "routing_key: is missing (or routing_key_file)"),
        ({"types": ["io.imdsbridge.scheduledevent.starte?.v1"]}, "expected existing event types"),
        ({"max_per_second": 1e-11}, "max_per_second: given 1e-11, expected"),
        ({"where": {"EventTyp": ["Reboot"]}}, "did you mean EventType?"),
        ({"where": {"AffectsThisVm": "yes"}}, 'AffectsThisVm: given "yes", expected true or false'),
        ({"ca_file": "/etc/nothing.pem"}, 'ca_file: given "/etc/nothing.pem": No such file or directory'),
        (
            {"format": "pagerduty", "routing_key": "R0UT1NGKEY0123456789abcdefABCDEF", "types": ["*"]},
            "document.changed",
        ),
    ],
)
@pytest.mark.parametrize("command", ["forward", "check", "render"])
def test_settings_that_a_sink_cannot_use_are_a_configuration_error_with_the_remedy(
    call: Any, config: Path, lab: ImdsLab, command: str, faulty: tuple[dict[str, Any], str]
) -> None:
    sink, expected = faulty
    sinks(config, lab, ops={"kind": "webhook", "url": "https://example.org/", **sink})
    done = call(command, "--config", config)
    assert done.code == 2
    assert "sinks.ops" in done.err
    assert expected in done.err


# --- status ---


def live_status(config: Path, **more: Any) -> StateFolder:
    """Write a status as a running process does, with an event that starts in a quarter of an hour."""
    folder = StateFolder(config.parent / "state" / "forward")
    folder.acquire()
    soon = format_datetime(datetime.now(UTC) + timedelta(minutes=15, seconds=30), usegmt=True)
    folder.write_status(
        {
            "version": __version__,
            "role": "forward",
            "pid": os.getpid(),
            "running": True,
            "written_at": datetime.now(UTC).isoformat(),
            "vm": "web-0",
            "imds": "http://169.254.169.254",
            "last_good_at": datetime.now(UTC).isoformat(),
            "document": {
                "DocumentIncarnation": 7,
                "Events": [
                    {
                        "EventId": "4CAEA225",
                        "EventType": "Reboot",
                        "EventStatus": "Scheduled",
                        "EventSource": "User",
                        "Resources": ["web-0", "web-1"],
                        "NotBefore": soon,
                    },
                    {"EventId": "C7061BAC", "EventType": "Freeze", "EventStatus": "Started", "NotBefore": ""},
                ],
            },
            "sinks": {
                "ops": {
                    "state": "retrying",
                    "backlog": 3,
                    "oldest_waits_seconds": 65.0,
                    "last_success_at": None,
                    "next_retry_at": "2026-01-01T00:00:07.000Z",
                    "last_error": "503",
                    "last_error_at": "2026-01-01T00:00:00.000Z",
                    "dead_letters": 2,
                }
            },
            **more,
        }
    )
    return folder


@pytest.mark.parametrize(
    "damage",
    [{"role": None}, {"document": 5}, {"document": {"Events": 5}}, {"sinks": []}, {"sinks": {"ops": {}}}],
)
@pytest.mark.parametrize("form", ["--json", "--check", None])
def test_a_damaged_status_is_reported_as_such(
    call: Any, config: Path, damage: dict[str, Any], form: str | None
) -> None:
    folder = live_status(config)
    status = {**folder.load_status(), **damage}
    folder.write_status({key: value for key, value in status.items() if value is not None})
    done = call("status", *([form] if form else []), "--config", config)
    assert (done.code, "it is damaged" in done.err) == (2, True)


def test_status_shows_the_document_countdowns_and_sinks(call: Any, config: Path) -> None:
    folder = live_status(config)
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 0
    assert re.search(
        rf"imds-bridge {re.escape(__version__)}, process {os.getpid()}, updated \d+ s ago", done.out
    )
    assert "Document 7:" in done.out
    assert re.search(r"Reboot +Scheduled +in 15 min \d+ s +User +4CAEA225 +web-0, web-1", done.out)
    assert re.search(r"Freeze +Started +- +- +C7061BAC +-", done.out)
    assert re.search(
        r"ops +retrying +3 \(oldest 1 min 5 s\) +never +2 +2026-01-01T00:00:07.000Z +2026-01-01T00:00:00.000Z 503",
        done.out,
    )


def test_status_gives_the_same_as_json(call: Any, config: Path) -> None:
    folder = live_status(config)
    done = call("status", "--json", "--config", config)
    folder.release()
    assert done.code == 0
    assert done.json["running"] is True
    assert 900 < done.json["events"][0]["StartsInSeconds"] <= 930
    assert done.json["events"][1]["StartsInSeconds"] is None
    assert done.json["sinks"]["ops"]["backlog"] == 3


def test_status_of_a_process_that_cannot_receive_reports_it_and_exits_3(call: Any, config: Path) -> None:
    commands = {"from": "bus/approvals", "unsettled": 0, "last_error": "the SDK has closed its receiver"}
    folder = live_status(config, commands=commands, waiting_commands=0, dry_run=False)
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 3
    assert "0 command(s) waiting; NOT RECEIVING: the SDK has closed its receiver" in done.out


def test_status_shows_text_from_outside_with_escapes(call: Any, config: Path) -> None:
    forged = "\x1b[2J\nimds-bridge: all is well\u202e"
    document = {"DocumentIncarnation": forged, "Events": [{"EventId": forged, "EventType": forged}]}
    folder = live_status(config, vm=forged, last_error=forged, document=document)
    texts = call("status", "--config", config).out, call("status", "--json", "--config", config).out
    folder.release()
    for text in texts:
        assert not UNSAFE.search(text.replace("\n", ""))
        assert "\nimds-bridge: all is well" not in text
    assert r"VM    \u001b[2J\nimds-bridge: all is well\u202e" in texts[0]
    assert json.loads(texts[1])["vm"] == forged


def test_status_of_a_stopped_process_reports_it_and_exits_3(call: Any, config: Path) -> None:
    live_status(config, storage_error="no space", running=False).release()
    done = call("status", "--config", config)
    assert done.code == 3
    assert re.match(r"NOT RUNNING: stopped \d+ s ago", done.out)
    assert "STORE UNAVAILABLE, events are buffered in memory: no space" in done.out


def test_status_of_a_process_that_is_gone_without_a_stop_reports_it_and_exits_3(
    call: Any, config: Path
) -> None:
    live_status(config).release()
    done = call("status", "--config", config)
    assert done.code == 3
    assert re.match(r"NOT RESPONDING: the process is gone without a stop, last updated \d+ s ago", done.out)


def test_status_of_a_process_that_has_not_written_for_a_minute_reports_it_and_exits_3(
    call: Any, config: Path
) -> None:
    long_ago = datetime.now(UTC) - timedelta(seconds=61)
    folder = live_status(config, written_at=long_ago.isoformat())
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 3
    assert re.match(rf"NOT RESPONDING: process {os.getpid()} .*has not written for 1 min", done.out)


def test_status_before_the_first_start_exits_2_with_the_reason(call: Any, config: Path) -> None:
    done = call("status", "--config", config)
    assert done.code == 2
    assert "`imds-bridge forward` has never run with this state_dir" in done.err


def test_status_of_a_process_that_cannot_write_exits_2_with_the_reason(call: Any, config: Path) -> None:
    folder = live_status(config)
    (folder.path / "status.json").unlink()
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 2
    assert re.search(rf"process {os.getpid()}.* runs, but cannot write there", done.err)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\x00"])
def test_status_of_a_damaged_file_exits_2_with_the_reason(call: Any, config: Path, text: str) -> None:
    folder = live_status(config)
    (folder.path / "status.json").write_text(text)
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 2
    assert "it cannot be read: " in done.err


def test_status_without_permission_exits_2_with_the_reason(
    call: Any, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = live_status(config)
    denied = PermissionError(13, "Permission denied")  # root may read everything

    def refuse(_: StateFolder) -> NoReturn:
        raise denied

    monkeypatch.setattr(StateFolder, "load_status", refuse)
    done = call("status", "--config", config)
    folder.release()
    assert done.code == 2
    assert "this user may not read it; use sudo" in done.err


def test_status_check_prints_only_what_needs_a_person(call: Any, config: Path) -> None:
    waiting = {
        "state": "retrying",
        "backlog": 3,
        "oldest_waits_seconds": 65.0,
        "dead_letters": 0,
        "last_error": "503",
        "last_error_at": "2026-01-01T00:00:00.000Z",
        "last_success_at": None,
    }
    folder = live_status(config, sinks={"ops": waiting})
    done = call("status", "--check", "--config", config)
    assert (done.code, done.out) == (0, "nothing needs a person\n")
    done = call("status", "--check", "--backlog-seconds", "60", "--config", config)
    folder.release()
    assert done.code == 3
    assert re.fullmatch(r"sink ops has 3 event\(s\) waiting, the oldest for 65 s: 503\n", done.out)
    done = call("status", "--check", "--config", config)
    assert done.code == 3
    assert done.out.startswith("NOT RESPONDING")


def test_status_watch_shows_it_again_until_it_is_interrupted(
    call: Any, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = live_status(config)
    waits: list[float] = []

    def interrupt_the_second(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("bridge.cli.status.time.sleep", interrupt_the_second)
    done = call("status", "--watch", "--config", config)
    folder.release()
    assert done.code == 0
    assert done.out.count("Document 7:") == 2
    assert "\x1b" not in done.out


def test_status_of_the_real_process_is_live(config: Path, lab: ImdsLab, call: Any) -> None:
    lab.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=900)
    sinks(config, lab)
    with subprocess.Popen(
        [*COMMAND, "forward", "--config", str(config)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        folder = config.parent / "state" / "forward"
        wait_until((folder / "status.json").exists)
        done = wait_until(
            lambda: (done := call("status", "--json", "--config", config)).json["events"] and done
        )
        assert (done.code, done.json["pid"], done.json["vm"]) == (0, process.pid, "web-0")
        assert done.json["sinks"]["stdout"]["state"] == "ok"
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 0
    assert call("status", "--config", config).code == 3


# --- outbox ---


def fill(config: Path) -> None:
    """Leave three events in an outbox, of which two are dead letters of sink ops, and one waits for it."""
    outbox = open_outbox(
        config.parent / "state" / "forward", sinks={"ops": (Filter(), True), "other": (Filter(), False)}
    )
    for name, type_ in (("one", OTHER_TYPE), ("two", OTHER_TYPE), ("three", OTHER_TYPE)):
        outbox.commit([event(name, type_=type_)])
    for sent in outbox.pending("ops", 2):
        outbox.acknowledge("ops", [sent], dead=("rejected", f"{sent.id} was refused"))
    outbox.close()


def test_outbox_list_shows_the_newest_events(call: Any, config: Path) -> None:
    fill(config)
    done = call("outbox", "list", "--config", config)
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == ["SEQ", "1", "2", "3"]
    done = call("outbox", "list", "--json", "--limit", "2", "--config", config)
    assert [(row["seq"], row["id"], row["type"]) for row in done.json] == [
        (2, "two", OTHER_TYPE),
        (3, "three", OTHER_TYPE),
    ]


def test_outbox_list_shows_dead_letters_with_the_reason(call: Any, config: Path) -> None:
    fill(config)
    done = call("outbox", "list", "--dead", "--config", config)
    assert re.search(r"1 +ops +\S+ +rejected +False +one +one was refused", done.out)
    done = call("outbox", "list", "--dead", "--json", "--config", config)
    assert [(row["number"], row["reason"], row["retry"]) for row in done.json] == [
        (1, "rejected", False),
        (2, "rejected", False),
    ]
    assert call("outbox", "list", "--sink", "other", "--config", config).out == "no dead letters\n"


@pytest.mark.parametrize("which", ["two", "2"])
def test_outbox_show_prints_an_event_as_it_is_sent(call: Any, config: Path, which: str) -> None:
    fill(config)
    done = call("outbox", "show", which, "--config", config)
    assert done.json["id"] == "two"
    assert "\n  " in done.out
    assert call("outbox", "show", which, "--json", "--config", config).json == done.json


def test_outbox_list_shows_what_waits_with_its_age_and_the_sinks_last_error(call: Any, config: Path) -> None:
    fill(config)
    folder = StateFolder(config.parent / "state" / "forward")
    folder.write_status({"sinks": {"ops": {"last_error": "503 from https://x"}}})
    done = call("outbox", "list", "--waiting", "--config", config)
    assert re.search(rf"3 +ops +\d.*s +{OTHER_TYPE} +three +503 from https://x", done.out)
    assert len(done.out.splitlines()) == 5  # sink other has all three
    rows = call("outbox", "list", "--waiting", "--sink", "ops", "--json", "--config", config).json
    assert [(row["id"], row["subject"]) for row in rows] == [("three", "three")]
    assert call("outbox", "list", "--waiting", "--limit", "1", "--config", config).out.count("\n") == 2


def test_outbox_retry_marks_dead_letters(call: Any, config: Path) -> None:
    fill(config)
    done = call("outbox", "retry", "2", "--config", config)
    assert (done.code, done.out) == (0, "1 dead letter(s) will be sent again\n")
    rows = call("outbox", "list", "--dead", "--json", "--config", config).json
    assert [row["retry"] for row in rows] == [False, True]


def test_outbox_move_hands_what_waits_to_another_sink(call: Any, config: Path) -> None:
    fill(config)
    done = call("outbox", "move", "--from", "other", "--to", "ops", "--config", config)
    assert (done.code, done.out.partition(";")[0]) == (0, "3 event(s) wait for ops now")
    rows = call("outbox", "list", "--waiting", "--json", "--config", config).json
    assert [(row["sink"], row["id"]) for row in rows] == [("ops", "one"), ("ops", "two"), ("ops", "three")]
    done = call("outbox", "drop", "--waiting", "--sink", "ops", "--yes", "--config", config)
    assert done.out == "3 event(s) dropped that waited for ops\n"
    assert call("outbox", "list", "--waiting", "--config", config).out == "nothing waits\n"


def test_check_and_status_name_a_sink_that_left_the_configuration(call: Any, config: Path) -> None:
    fill(config)
    done = call("check", "--config", config)
    assert "outbox forward  warn    forward: 3 event(s) wait for sink other, which is not" in done.out


def test_outbox_drop_deletes_dead_letters(call: Any, config: Path) -> None:
    fill(config)
    assert call("outbox", "drop", "1", "2", "--config", config).out == "2 dead letter(s) dropped\n"
    assert call("outbox", "list", "--dead", "--config", config).out == "no dead letters\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("y", ("2 dead letter(s) dropped\n", 0)),
        ("", ("nothing dropped\n", 2)),
        ("n", ("nothing dropped\n", 2)),
    ],
)
def test_outbox_drop_all_asks(
    call: Any, config: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: tuple[str, int]
) -> None:
    fill(config)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    shown = call("outbox", "drop", "--all", "--config", config).out
    left = call("outbox", "list", "--dead", "--json", "--config", config).json
    assert (shown, len(left)) == expected


def test_outbox_drop_all_with_yes_does_not_ask(call: Any, config: Path) -> None:
    fill(config)
    assert call("outbox", "drop", "--all", "--yes", "--config", config).out == "2 dead letter(s) dropped\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["show", "nothing"], "nothing: no such event is stored"),
        (["retry", "7"], "unknown dead letter: 7"),
        (["retry"], "give the numbers of dead letters, or --all"),
        (["drop", "1", "--all"], "give the numbers of dead letters, or --all"),
        (["drop", "1", "--sink", "other"], "unknown dead letter: 1"),
        (["list", "--sink", "opps"], "given --sink opps, expected ops, other; did you mean ops?"),
        (["drop", "--all", "--sink", "opps"], "given --sink opps"),
        (["drop", "--all"], "without a terminal it cannot ask; give --yes"),
        (["drop", "--waiting"], "give --sink and no numbers"),
        (["drop", "--waiting", "--sink", "other"], "without a terminal it cannot ask; give --yes"),
        (["move", "--from", "opps", "--to", "ops"], "given --sink opps, expected ops, other"),
        (["move", "--from", "ops", "--to", "ops"], "expected two different sinks"),
    ],
)
def test_outbox_with_wrong_arguments_exits_2_with_the_reason(
    call: Any, config: Path, arguments: list[str], why: str
) -> None:
    fill(config)
    done = call("outbox", *arguments, "--config", config)
    assert done.code == 2
    assert why in done.err


def test_outbox_without_a_state_exits_2_with_the_reason(call: Any, config: Path) -> None:
    done = call("outbox", "list", "--config", config)
    assert done.code == 2
    assert "there is no outbox in" in done.err


def test_reading_the_state_does_not_need_readable_secrets(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        f'state_dir = "{tmp_path.as_posix()}"\n[sinks.a]\nkind = "webhook"\nurl_file = "{tmp_path.as_posix()}/none"'
    )
    done = call("status", "--config", file)
    assert (done.code, f"no status in {tmp_path / 'forward'}" in done.err) == (2, True)
    assert call("check", "--config", file).code == 2
