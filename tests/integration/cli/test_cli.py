"""The commands as an operator types them: help, usage, exit codes, and what `forward --once` does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bridge import __version__
from bridge.cli.main import COMMANDS
from bridge.events.filters import Filter
from bridge.runtime.text import register_secret
from tests.support.cli import Call, Cli
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.outbox import OTHER_TYPE, event, open_outbox
from tests.support.paths import ROOT
from tests.support.process import COMMAND, LIMIT_SECONDS, environment, run, toml

ACTIONS = [
    *(f"outbox {action}" for action in ("list", "show", "retry", "drop")),
    *(f"config {action}" for action in ("schema", "check")),
    *(f"lab {action}" for action in ("schedule", "start", "release", "fault", "state", "scenarios")),
]


# `forward --once`


@pytest.fixture
def once(cli: Cli, imds: ImdsLab, inbox: Inbox) -> Cli:
    sink = {"kind": "webhook", "url": inbox.url}
    cli.write(sinks={"ops": sink}, imds={"endpoint": imds.url("web-0")})
    return cli


def run_once(once: Cli, stop_seconds: float = 30) -> subprocess.CompletedProcess[str]:
    env = {"IMDS_BRIDGE__STOP_SECONDS": str(stop_seconds)}
    return run("forward", "--once", "--config", once.config, env=env)


def test_forward_once_publishes_what_has_changed_and_exits_0(once: Cli, imds: ImdsLab, inbox: Inbox) -> None:
    assert run_once(once).returncode == 0
    imds.schedule(event_type="Reboot", resources=["web-0"])
    assert run_once(once).returncode == 0
    types = [event["type"].split(".", 2)[2] for event in inbox.events()]
    types = [one for one in types if not one.startswith("imds.")]  # of a pause of 5 s on a busy machine
    heartbeat, document = "bridge.heartbeat.v1", "document.changed.v1"
    assert types[:3] == [heartbeat, document, heartbeat]
    second = types[3:]
    assert second.pop(second.index("scheduledevent.scheduled.v1"))
    assert second == [heartbeat, document, heartbeat]
    # before its document; the first heartbeat may have gone already
    assert types.index("scheduledevent.scheduled.v1") < 5


def test_forward_once_exits_3_with_every_reason_why_not_everything_is_done(
    once: Cli, imds: ImdsLab, inbox: Inbox
) -> None:
    imds.fault(500, count=None)
    inbox.fault(400, count=None)
    done = run_once(once)
    reasons = r"IMDS gave no usable answer: .*500.*; sinks\.ops: \d event\(s\) dead-lettered"
    assert (done.returncode, bool(re.search(rf"(?m)^imds-bridge: {reasons}$", done.stderr))) == (3, True), (
        done
    )


def test_forward_once_leaves_to_the_next_start_what_a_sink_does_not_take_in_time(
    once: Cli, inbox: Inbox
) -> None:
    inbox.fault(503, count=None)
    done = run_once(once, stop_seconds=0.5)
    reason = r"sinks\.ops: \d event\(s\) wait for the next start"
    assert (done.returncode, bool(re.search(rf"(?m)^imds-bridge: {reason}$", done.stderr))) == (3, True), done


# Help and usage


def test_help_shows_every_command_the_exit_codes_and_examples(call: Call) -> None:
    done = call("--help")
    assert done.code == 0
    for command in COMMANDS:
        assert re.search(rf"^    {command} +\w", done.out, re.MULTILINE), command
    assert "exit codes:" in done.out
    assert "examples:" in done.out
    assert call() == done, "without a command"


@pytest.mark.parametrize("command", [*COMMANDS, *ACTIONS])
def test_each_command_has_help_with_examples(call: Call, command: str) -> None:
    done = call(*command.split(), "--help")
    assert done.code == 0, done.err
    assert f"usage: imds-bridge {command}" in done.out
    assert "\nexample" in done.out


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


@pytest.mark.parametrize(
    ("arguments", "command", "reason"),
    [
        ("check --snd", "check", "'--snd'; did you mean --send?"),
        ("check --jsn=yes", "check", "'--jsn=yes'; did you mean --json?"),
        ("outbox drop 3 --yess", "outbox drop", "'--yess'; did you mean --yes?"),
        ("lab schedule --type A --durration 5", "lab schedule", "'--durration'; did you mean --duration?"),
        ("status --zzz", "status", "'--zzz'"),
    ],
)
def test_a_mistyped_option_is_answered_with_the_nearest_one_of_the_command(
    call: Call, arguments: str, command: str, reason: str
) -> None:
    done = call(*arguments.split())
    assert done.code == 2
    assert done.err.splitlines()[-1] == f"imds-bridge {command}: error: unknown option {reason}"


@pytest.mark.parametrize("arguments", ["stauts --json", "check --nonsense", "outbox"])
def test_an_unknown_command_exits_2_with_the_usage(call: Call, arguments: str) -> None:
    done = call(*arguments.split())
    assert (done.code, "usage: imds-bridge" in done.err) == (2, True)
    assert "stauts" not in arguments or "unknown command 'stauts'; did you mean status?" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        "--config X outbox list",
        "--config=X outbox list",
        "outbox --config X list",
        "outbox list --config X",
        "--config X status",
        "status --config=X",
    ],
)
def test_config_may_stand_before_or_after_the_command(call: Call, cli: Cli, arguments: str) -> None:
    done = call(*arguments.replace("X", str(cli.config)).split())
    assert (done.code, f"in {cli.state()}: " in done.err) == (2, True)


@pytest.mark.parametrize("command", ["forward", "check", "status", "outbox list", "render", "explain"])
def test_every_command_exits_2_with_all_errors_of_the_configuration(cli: Cli, command: str) -> None:
    cli.config.write_text("a = 1\nb = 2")
    done = cli(*command.split())
    assert (done.code, done.out) == (2, "")
    assert "2 errors in the configuration\n  a: unknown key" in done.err


def test_a_closed_output_pipe_is_not_an_error(cli: Cli) -> None:
    cli.fill()
    reading = [*COMMAND, "outbox", "list", "--config", str(cli.config)]
    with subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@" | true', "sh", *reading], env=environment(), stderr=subprocess.PIPE
    ) as process:
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert b"Traceback" not in errors
    assert b"Exception" not in errors


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "iso8859-5"])
@pytest.mark.parametrize(
    "command", ["outbox list --dead", "outbox list --json", "explain one", "render", "status"]
)
def test_a_receivers_answer_in_another_alphabet_is_shown_with_any_encoding(
    cli: Cli, command: str, encoding: str
) -> None:
    text = "отказано \u6771 \u20ac"
    cli.sinks(ops={"kind": "webhook", "url": "http://127.0.0.1:9"}, other={"kind": "stdout"})
    outbox = open_outbox(cli.state(), sinks={"ops": (Filter(), True), "other": (Filter(), False)})
    outbox.commit([event("one", type_=OTHER_TYPE)])
    outbox.acknowledge("ops", outbox.pending("ops", 1), dead=("rejected", text))
    outbox.close()
    given = environment({"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})
    arguments = [*COMMAND, *command.split(), "--config", str(cli.config)]
    done = subprocess.run(arguments, env=given, capture_output=True, check=False)
    assert done.returncode != 1, done.stderr
    assert b"Traceback" not in done.stderr
    if command == "outbox list --dead":
        assert text.encode(encoding, "backslashreplace") in done.stdout


def test_an_unexpected_error_is_shown_without_secrets_and_control_characters(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        register_secret("c2VjcmV0c2Vj")
        raise RuntimeError("c2VjcmV0c2Vj \x1b[2J")

    monkeypatch.setattr("bridge.cli.status.read_report", fail)
    done = cli("status")
    assert done.code == 1
    assert done.err.endswith("RuntimeError: *** \\u001b[2J\n")


# `config`


def test_config_schema_prints_the_shipped_schema(call: Call) -> None:
    done = call("config", "schema")
    assert (done.code, done.out) == (0, (ROOT / "bridge" / "config" / "schema.json").read_text())


def test_config_check_reports_warnings_of_a_valid_file_without_a_network(call: Call, config: Path) -> None:
    bus = "Endpoint=sb://bus.invalid/;SharedAccessKeyName=a;SharedAccessKey=b"
    approvals = {"connection_string": bus, "queue": "q"}
    config.write_text(toml({"imds": {"endpoint": "http://imds.invalid"}, "approvals": approvals}))
    done = call("config", "check", config)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == f"{config}: the configuration is valid"
    assert "  warning: approvals.policy: no allow rule and no auto rule" in done.out


@pytest.mark.parametrize(
    ("role", "settings", "reason"),
    [
        ("listen", {}, "listen: the configuration has no [approvals]"),
        ("relay", {}, "relay: the configuration has no [relay]"),
        (
            "forward",
            {"sinks": {"own": {"kind": "exec", "run": ["/missing"]}}},
            "forward: sinks.own: /missing: there is no such file",
        ),
        (
            "listen",
            {"approvals": {"auto": [{"event_type": ["Reboot"], "run": ["/missing"]}]}},
            "listen: approvals.auto: /missing: there is no such file",
        ),
    ],
)
@pytest.mark.posix("paths")
def test_config_check_exits_2_for_what_ends_a_role_at_its_start(
    call: Call, config: Path, role: str, settings: dict[str, object], reason: str
) -> None:
    config.write_text(toml(settings))
    assert call("config", "check", config).code == 0
    done = call("config", "check", "--role", role, config)
    assert (done.code, done.out) == (2, "")
    assert reason in done.err


@pytest.mark.parametrize("fault", ["{{ notice.titel }}", "{{ notice."])
def test_config_check_exits_2_with_the_files_name_for_a_faulty_template(
    call: Call, config: Path, fault: str
) -> None:
    url = "https://example.org"
    sink = {"kind": "webhook", "format": "template", "url": url, "template": {"text": fault}}
    config.write_text(toml({"sinks": {"ops": sink}}))
    done = call("config", "check", config)
    assert (done.code, done.out) == (2, "")
    reason = "1 error in the configuration\n  sinks.ops: template.text"
    assert done.err.startswith(f"imds-bridge: {config}: {reason}")
