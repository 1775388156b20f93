"""`check`: what it finds, and the remedies."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bridge.cli import check as probes
from bridge.config.loader import load
from bridge.config.models import Config, ImdsSettings
from bridge.outbox.state_dir import StateFolder
from tests.support.cli import Call, fill, sinks
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.outbox import event, open_outbox
from tests.support.process import (
    RawServer,
    answering,
    closed_port,
    toml,
)


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with Inbox() as started:
        yield started


def test_a_check_of_a_working_configuration_shows_each_part_and_exits_0(
    call: Call, config: Path, lab: ImdsLab, inbox: Inbox
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


def test_a_check_gives_the_same_as_json(call: Call, config: Path, lab: ImdsLab, inbox: Inbox) -> None:
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
    call: Call, config: Path, lab: ImdsLab, inbox: Inbox
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
    call: Call, config: Path, lab: ImdsLab, inbox: Inbox
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


def test_a_check_finds_an_invalid_answer_of_imds(call: Call, config: Path, lab: ImdsLab) -> None:
    sinks(config, lab)
    lab.fault("garbage")
    done = call("check", "--json", "--config", config)
    assert done.code == 3
    assert {row["check"]: row["result"] for row in done.json}["imds"] == "FAIL"


def test_a_check_finds_a_state_folder_that_cannot_be_used(
    call: Call, config: Path, lab: ImdsLab, tmp_path: Path
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
    call: Call, config: Path, lab: ImdsLab
) -> None:
    sinks(config, lab, screen={"kind": "stdout", "where": {"EventType": ["Rebot", "LiveMigrate"]}})
    done = call("check", "--json", "--config", config)
    assert done.code == 0
    (warning,) = [row for row in done.json if row["result"] == "warn"]
    assert warning["message"] == 'sinks.screen.where.EventType: given "Rebot", did you mean Reboot?'
    assert warning["remedy"]


def test_a_check_warns_of_a_policy_that_allows_nothing(call: Call, config: Path, lab: ImdsLab) -> None:
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
    call: Call, config: Path, lab: ImdsLab
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
    call: Call, config: Path, lab: ImdsLab, inbox: Inbox, answer: tuple[int, str]
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
    call: Call, config: Path, fault: str
) -> None:
    config.write_text(fault)
    done = call("check", "--json", "--config", config)
    assert done.code == 2
    assert {(row["check"], row["result"], row["remedy"]) for row in done.json} == {
        ("configuration", "FAIL", f"correct {config}")
    }


def test_a_check_prints_json_for_a_faulty_template(call: Call, config: Path, lab: ImdsLab) -> None:
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
    call: Call, config: Path, lab: ImdsLab, monkeypatch: pytest.MonkeyPatch
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
    call: Call, config: Path, lab: ImdsLab, monkeypatch: pytest.MonkeyPatch
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
    call: Call, config: Path, lab: ImdsLab, inbox: Inbox
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


def test_a_check_fails_if_everybody_may_write_the_configuration(
    call: Call, config: Path, lab: ImdsLab
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
    call: Call, config: Path, lab: ImdsLab, role: str, status: dict[str, Any]
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
    call: Call, config: Path, lab: ImdsLab, inbox: Inbox
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
    call: Call, config: Path, lab: ImdsLab, inbox: Inbox
) -> None:
    sinks(config, lab, ops={"kind": "webhook", "url": inbox.url})
    inbox.fault(422, body="no such field")
    done = call("check", "--send", "--json", "--config", config)
    assert done.code == 3
    (row,) = [row for row in done.json if row["check"] == "sink ops"]
    assert (row["result"], "no such field" in row["message"]) == ("FAIL", True)


def test_check_and_status_name_a_sink_that_left_the_configuration(call: Call, config: Path) -> None:
    fill(config)
    done = call("check", "--config", config)
    assert "outbox forward  warn    forward: 3 event(s) wait for sink other, which is not" in done.out


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
        found = {one.check: one for one in probes.check(Config(state_dir=tmp_path, imds=settings))}
    assert found["imds"].result == "ok"
    assert ("clock" in found) == bool(expected)
    if expected:
        finding = found["clock"]
        # a second may pass between the two clocks
        assert finding.message.split(" s ")[1] == f"{expected.split(' s ')[1]} the Date of IMDS's answer"
        assert abs(float(finding.message.split()[4]) - abs(ahead_seconds or 0)) <= 30
        assert finding.result == "warn"
