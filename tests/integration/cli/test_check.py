"""`check`: what it finds, and the remedies."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

import pytest

from bridge.cli import check as probes
from bridge.config.loader import load
from bridge.config.models import Config, ImdsSettings, find_exposed
from bridge.imds.client import ImdsClient
from bridge.outbox.state_dir import StateFolder
from tests.support.bus import FLEET, QUEUE, SUBSCRIPTION, TOPIC
from tests.support.cli import Cli
from tests.support.disk import small_disk
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.outbox import event, open_outbox
from tests.support.ports import free_address
from tests.support.process import RawServer, answering, closed_port, toml
from tests.support.servicebus import ServiceBusLab
from tests.support.sinks import set_proxy
from tests.support.status import process_status, write_raw
from tests.support.tls import Authority

BUS = {"connection_string": "Endpoint=sb://127.0.0.1:9;SharedAccessKeyName=a;SharedAccessKey=b"}
TEMPLATE = {"kind": "webhook", "format": "template", "url": "https://example.org", "template": {"a": "{{ b"}}


def silent(server: RawServer, _: object) -> None:
    server.ended.wait(60)


def webhook(inbox: Inbox, **more: Any) -> dict[str, Any]:
    return {"kind": "webhook", "url": inbox.url, **more}


def test_a_working_configuration_shows_each_part_and_exits_0(cli: Cli, imds: ImdsLab, inbox: Inbox) -> None:
    imds.schedule(event_type="Reboot", resources=["web-0"])
    cli.sinks(ops=webhook(inbox), screen={"kind": "stdout"})
    done = cli("check")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["CHECK", "RESULT", "MESSAGE"]
    assert [line.split()[0] for line in lines[1:]] == ["state", "imds", "instance", "sink", "sink"]
    for text in (f"1 event(s) from {imds.url('web-0')}", "VM is web-0", f"{inbox.base_url}: reachable"):
        assert text in done.out
    done = cli.check()
    parts = ["state forward", "imds", "instance", "sink ops", "sink screen"]
    assert [(row["check"], row["result"]) for row in done.json] == [(part, "ok") for part in parts]
    assert (done.code, set(done.json[0])) == (0, {"check", "result", "message", "remedy"})
    assert {one.method for one in inbox.received} == {"OPTIONS"}
    assert not cli.state().exists()


def test_a_part_of_instance_data_and_a_source_without_the_vm_are_warnings(cli: Cli, imds: ImdsLab) -> None:
    imds.describe("web-0", {"vmId": None, "subscriptionId": ""})
    endpoint = {"endpoint": imds.url("web-0")}
    cli.write(vm_source="urn:contoso:fleet", imds=endpoint)
    warnings = [row["message"] for row in cli.check().json if row["result"] == "warn"]
    assert warnings == [
        "this VM is web-0; IMDS lacks vmId, subscriptionId",
        "vm_source names no VM: urn:contoso:fleet",
    ]
    imds.describe("web-0", {})
    cli.write(vm_source="urn:contoso:WEB-0", imds=endpoint)
    assert {row["result"] for row in cli.check().json} == {"ok"}


def test_an_api_version_that_imds_does_not_know_is_named(cli: Cli, imds: ImdsLab) -> None:
    cli.write(imds={"endpoint": imds.url("web-0"), "api_version": "2099-01-01"})
    row = cli.check().row(check="imds", result="warn")
    assert "Invalid version requested" in row["message"]
    assert "2020-07-01 is asked for" in row["message"]


def test_an_imds_that_is_down_fails_with_the_reason_and_the_remedy(cli: Cli, imds: ImdsLab) -> None:
    cli.sinks()
    url = imds.url("web-0")
    imds.close()
    done = cli("check")
    assert done.code == 3
    for text in (f"IMDS at {url}: the connection failed: Connection refused", "-> on an Azure VM", "stdout"):
        assert text in done.out


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (429, "check again in a minute; else find what asks too often"),
        (503, "check again in a minute"),
        (404, "on an Azure VM, look for a firewall"),
    ],
)
def test_an_imds_that_answers_is_not_looked_for_behind_a_firewall(
    cli: Cli, imds: ImdsLab, status: int, remedy: str
) -> None:
    cli.sinks()
    imds.fault(status, count=None)
    assert cli.check().row(check="imds", result="FAIL")["remedy"].startswith(remedy)
    imds.clear_faults()


def test_an_imds_that_never_answers_ends_soon_and_says_what_that_means(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "IMDS_SECONDS", 0.2)
    with RawServer(silent) as imds:
        cli.write(imds={"endpoint": imds.url, "vm_name": "web-0"})
        row = cli.check().row(check="imds", result="FAIL")
    assert row["message"] == f"IMDS at {imds.url}: no answer within 0.2 s"
    assert row["remedy"].startswith(
        "a VM's first question turns Scheduled Events on, which may take two minutes"
    )


def test_how_long_an_answer_takes_counts_from_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Imds:
        base = "http://imds"

        def document(self, *, waiting: Callable[[], object], **_: object) -> bytes:
            waiting()
            return b'{"DocumentIncarnation": 1, "Events": []}'

    clock = SimpleNamespace(monotonic=iter([10.0, 12.0, 13.5]).__next__)
    monkeypatch.setattr("bridge.cli.check.time", clock)
    message = "document 1 with 0 event(s) from http://imds in 1.50 s"
    assert probes._document(cast("ImdsClient", Imds())).message == message


def test_an_unexpected_error_fails_and_the_other_checks_follow(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("an unexpected error")

    cli.sinks()
    monkeypatch.setattr(probes, "_document", fail)
    done = cli.check()
    assert done.code == 3
    assert done.row(check="imds", result="FAIL")["message"] == "RuntimeError: an unexpected error"
    assert done.row(check="sink stdout", result="ok")


# Sinks


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "check the credentials in [sinks.ops] and what they permit"),
        (404, "check the address in [sinks.ops]"),
        (405, "it may accept"),
        (500, "look for the fault at the"),
    ],
)
def test_an_answer_that_is_an_error_is_a_warning_and_a_failure_where_it_refuses_a_message(
    cli: Cli, inbox: Inbox, status: int, remedy: str
) -> None:
    cli.sinks(ops=webhook(inbox))
    inbox.fault(status, method="OPTIONS")
    done = cli.check()
    warning = done.row(check="sink ops", result="warn")["remedy"]
    assert (done.code, warning.startswith(remedy)) == (0, True)
    assert warning.endswith("run check --send to be sure")
    inbox.fault(status, body="no such field")
    done = cli.check("--send")
    failure = done.row(check="sink ops", result="FAIL")
    assert (done.code, failure["remedy"].startswith(remedy)) == (3, True)
    assert "no such field" in failure["message"]


def test_each_fault_of_a_sink_or_of_approvals_has_a_remedy_of_its_own(
    cli: Cli, inbox: Inbox, bus: ServiceBusLab, authority: Authority, tmp_path: Path
) -> None:
    program = tmp_path / "drain"
    program.write_text("#!/usr/bin/pyhton3\n")
    program.chmod(0o755)
    to_bus = {"connection_string": bus.connection_string}
    auto = [{"event_type": ["Freeze"], "run": [str(program)]}]
    with RawServer(lambda *_: None, tls=authority.server()) as secured, closed_port() as down:
        cli.here(
            sinks={
                "down": {"kind": "webhook", "url": f"{down}/hook?sig=topsecret"},
                "unknown": {"kind": "webhook", "url": secured.url},
                "plain": {"kind": "webhook", "url": inbox.url.replace("http:", "https:")},
                "fleet": {"kind": "servicebus", **to_bus, "queue": FLEET},
                "own": {"kind": "exec", "run": [str(program)]},
            },
            approvals={**to_bus, "queue": QUEUE, "session": "x", "auto": auto},
        )
        tried, done = cli.check(), cli.check("--send")
    for name, message, remedy in (
        (
            "sink down",
            ": the connection failed: Connection refused",
            "check host, port, DNS, firewall or program",
        ),
        ("sink unknown", ": TLS failed: ", "check the settings of [sinks.unknown]"),
        ("sink plain", ": TLS failed: ", "this port speaks plain HTTP, not TLS"),
        ("sink fleet", ": the queue or subscription requires sessions", "set `session` in [sinks.fleet]"),
        ("approvals", ": the queue or subscription has no sessions", "leave `session` out of [approvals]"),
    ):
        row = done.row(check=name, result="FAIL")
        assert (message in row["message"], row["remedy"].startswith(remedy)) == (True, True), row
    for name in ("sink own", "approvals.auto"):
        assert (
            "its interpreter '/usr/bin/pyhton3' does not" in tried.row(check=name, result="FAIL")["message"]
        )
    remedy = tried.row(check="sink own", result="FAIL")["remedy"]
    assert remedy == "check the settings of [sinks.own] and what they name"
    assert (done.code, "topsecret" in done.out) == (3, False)


def test_only_what_can_have_no_proxy_of_its_own_uses_the_environments(
    cli: Cli, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_proxy(monkeypatch, "http://user:secret-password@127.0.0.1:9")
    bus = {
        "kind": "servicebus",
        "connection_string": "Endpoint=sb://bus.invalid/;SharedAccessKeyName=k;SharedAccessKey=abcdefgh",
        "queue": QUEUE,
        "transport": "websocket",
    }
    cli.sinks(hook=webhook(inbox), one=bus, two={**bus, "http_proxy": "http://proxy.invalid:3128"})
    done = cli.check()
    assert done.row(check="sink hook", result="ok")  # without a proxy
    assert "Connection refused" in done.row(check="sink one", result="FAIL")["message"]
    two = done.row(check="sink two", result="FAIL")
    assert (two["message"].partition(": ")[2][:32], two["remedy"]) == (
        "the host name cannot be resolved",
        "check the host in [sinks.two], the proxy and DNS",
    )
    assert "secret-password" not in done.out


def test_with_send_each_sink_gets_a_message_marked_as_a_test(cli: Cli) -> None:
    with Inbox() as inbox:
        cli.sinks(ops=webhook(inbox), chat=webhook(inbox, format="slack"))
        done = cli("check", "--send")
    assert (done.code, done.out.count("accepted a test message")) == (0, 2)
    event, message = (one.json() for one in inbox.accepted)
    assert event["type"] == "io.imdsbridge.bridge.test.v1"
    assert "test" in event["data"]["Message"]
    assert "TEST" in message["text"]
    assert "nothing is scheduled" in message["text"]


# The configuration


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("colour = 1\nshape = 2", ["colour: unknown key", "shape: unknown key"]),
        ("[broken", [""]),
        (toml({"sinks": {"ops": TEMPLATE}}), ["sinks.ops: template.a"]),
    ],
    ids=["unknown keys", "no TOML", "a faulty template"],
)
def test_errors_of_the_configuration_are_json_as_well(cli: Cli, text: str, messages: list[str]) -> None:
    cli.config.write_text(text)
    done = cli.check()
    assert done.code == 2
    assert {(row["check"], row["result"], row["remedy"][:8]) for row in done.json} == {
        ("configuration", "FAIL", "correct ")
    }
    for row, message in zip(done.json, messages, strict=True):
        assert row["message"].startswith(message)


def test_settings_that_are_hardly_meant_are_warnings(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for probe in ("_imds", "_approvals"):
        monkeypatch.setattr(probes, probe, lambda *_: ())
    where = {"EventType": ["Preempt", "Rebot"]}
    cli.write(
        imds={"api_version": "2017-08-01"},
        sinks={
            "screen": {"kind": "stdout", "where": where},
            "log": {"kind": "exec", "run": ["/bin/true"]},
        },
        approvals={"auto": [{"event_type": ["terminate", "Reboot"], "run": ["/bin/true"]}]},
    )
    done = cli.check()
    comes_with = "%s comes with api_version %s, and [imds] asks for 2017-08-01"
    assert done.code == 0
    assert {(row["check"].split()[0], row["message"]) for row in done.json if row["result"] == "warn"} == {
        ("settings", 'sinks.screen.where.EventType: given "Rebot"; did you mean Reboot?'),
        ("settings", f"sinks.screen.where.EventType: {comes_with % ('Preempt', '2017-11-01')}"),
        ("settings", f"approvals.auto[0].event_type: {comes_with % ('Terminate', '2019-01-01')}"),
        (
            "settings",
            "approvals.auto[0].run: given without recover: once the event is over, nothing puts the VM back to work",
        ),
    }


def test_a_configuration_that_everybody_may_write_fails(cli: Cli) -> None:
    cli.sinks()
    cli.config.chmod(0o666)
    done = cli.check()
    failure = done.row(result="FAIL")
    assert (done.code, failure["remedy"]) == (3, f"chmod o-w {cli.config}")
    assert failure["message"].startswith(f"everybody may write {cli.config}")


@pytest.mark.parametrize(
    ("is_linked", "is_read_only", "exposed"),
    [
        (True, True, False),
        (False, True, True),
        (True, False, True),
    ],  # the kubelet's, a bind of Docker, neither
)
def test_a_folder_that_the_kubelet_mounts_is_written_by_nobody(
    tmp_path: Path, is_linked: bool, is_read_only: bool, exposed: bool
) -> None:
    with small_disk(tmp_path / "etc") as disk:
        folder, file = disk.path / ("..2026" if is_linked else "."), disk.path / "config.toml"
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text("")
        if is_linked:
            (disk.path / "..data").symlink_to("..2026")
            file.symlink_to("..data/config.toml")
        disk.path.chmod(0o777)
        disk.set_read_only(is_read_only)
        found = [*find_exposed(load(file, {}), "forward")]
    assert found == ([disk.path] if exposed else [])


# The state of each process


def test_a_state_folder_that_cannot_be_used_fails(cli: Cli) -> None:
    cli.state().parent.write_text("a file")
    cli.sinks()
    done = cli.check()
    assert (done.code, bool(done.row(check="state forward", result="FAIL")["remedy"])) == (3, True)


def test_a_full_disk_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bridge.outbox.state_dir.os.fsync", full)
    cli.sinks()
    row = cli.check().row(result="FAIL")
    assert (row["check"], row["remedy"][:10]) == ("state forward", "free space")
    assert "No space left" in row["message"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"not a database" * 100,
        lambda body: body[:4096] + bytes(4096) + body[8192:],
        lambda body: body[: len(body) // 2],
    ],
    ids=["not a database", "a page of zeros", "half of the file"],
)
def test_the_state_of_every_process_that_is_configured_is_looked_at(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    for role in ("forward", "listen", "relay"):
        with closing(open_outbox(cli.state(role), sinks={})) as outbox:
            outbox.commit([event(str(number), size=500) for number in range(50)])
    file = cli.state("listen") / "outbox.db"
    file.write_bytes(damage(file.read_bytes()))
    cli.write(approvals={**BUS, "queue": "a"}, relay={**BUS, "queue": "b"})
    for probe in ("_imds", "_sinks", "_approvals", "_relay"):
        monkeypatch.setattr(probes, probe, lambda *_, **__: ())
    done = cli.check()
    for role in ("forward", "relay"):
        assert done.row(check=f"state {role}", result="ok")
    failure = done.row(check="state listen", result="FAIL")
    assert str(file.parent) in failure["message"]
    assert failure["remedy"]


def test_a_relay_alone_needs_no_imds_and_no_forwarders_state(cli: Cli) -> None:
    cli.write(relay={**BUS, "queue": "b"})
    loaded = load(cli.config, {})
    assert list(probes.configured_roles(loaded)) == ["relay"]
    cli.state().mkdir(parents=True)
    assert list(probes.configured_roles(loaded)) == ["forward", "relay"]


def test_a_consoles_file_is_tried_as_the_console_uses_it(cli: Cli, bus: ServiceBusLab) -> None:
    address, sent = free_address(), {"connection_string": bus.connection_string, "queue": QUEUE}
    source = {"connection_string": bus.connection_string, "topic": TOPIC, "subscription": SUBSCRIPTION}
    cli.write(
        console={"listen": address, "bus": source}, approvals=sent, imds={"endpoint": "http://127.0.0.1:9"}
    )
    done = cli.check()
    names = ["state console", "console store", "console", "console.bus", "approvals"]
    assert [(row["check"], row["result"]) for row in done.json] == [(name, "ok") for name in names]
    assert ("listen`" in done.out, "IMDS" in done.err) == (False, False)
    assert not cli.state("console").exists()


def test_what_a_console_cannot_use_fails_by_its_section(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cli.write(console={"listen": address, "bus": {**BUS, "queue": "b"}})
        done = cli.check()
    for name, reason, remedy in (
        ("console", f"{address} cannot be listened on", "correct what it names"),
        ("console.bus", "127.0.0.1:9", "check host, port"),
    ):
        failure = done.row(check=name, result="FAIL")
        assert (reason in failure["message"], remedy in failure["remedy"]) == (True, True), failure


@pytest.mark.parametrize(
    ("more", "roles"),
    [
        ({}, ["console"]),
        ({"approvals": {**BUS, "queue": "a"}}, ["console"]),
        (
            {"approvals": {**BUS, "queue": "a", "policy": {"allow": [{"event_type": ["Reboot"]}]}}},
            ["forward", "listen", "console"],
        ),
        ({"sinks": {"screen": {"kind": "stdout"}}}, ["forward", "console"]),
    ],
)
def test_a_console_beside_other_processes_is_one_of_them(
    cli: Cli, more: dict[str, Any], roles: list[str]
) -> None:
    cli.write(console={}, **more)
    assert list(probes.configured_roles(load(cli.config, {}))) == roles


def test_a_container_with_the_state_of_one_process_has_only_that_process(cli: Cli) -> None:
    cli.write(approvals={**BUS, "queue": "a"})
    loaded = load(cli.config, {})
    cli.state().parent.mkdir()
    with small_disk(cli.state("listen")):
        assert list(probes.configured_roles(loaded)) == ["listen"]
    assert list(probes.configured_roles(loaded)) == ["forward", "listen"]


@pytest.mark.parametrize(
    ("role", "status", "reason"),
    [
        ("forward", {"written_at": "2026-01-01T00:00:00+00:00"}, "has not written its status for "),
        ("forward", {"storage_error": "disk I/O error"}, "the state cannot be written: disk I/O error"),
        (
            "listen",
            {"commands": {"from": "bus", "last_error": "closed"}},
            "nothing is received from bus: closed",
        ),
        ("relay", {"relay": {"from": "bus", "last_error": "closed"}}, "nothing is received from bus: closed"),
        (
            "listen",
            {"program_faults": ["/drain: this user may not execute it"]},
            "cannot be started by this process",
        ),
        ("forward", {"identity_error": "404"}, "instance data is missing or incomplete"),
        ("forward", {"sinks": {"ops": {"state": "gone", "last_error": "404"}}}, "sink ops is gone: 404"),
    ],
)
def test_a_running_process_that_does_not_do_its_work_fails(
    tmp_path: Path, role: str, status: dict[str, Any], reason: str
) -> None:
    folder = StateFolder(tmp_path / role)
    folder.acquire()
    now = datetime.now(UTC).isoformat()
    write_raw(folder, {"role": role, "written_at": now, "last_good_at": now, **status})
    found = probes._state(folder)
    folder.release()
    assert (found.check, found.result) == (f"state {role}", "FAIL")
    assert reason in found.message
    assert found.remedy


def test_a_process_that_has_loaded_another_file_is_a_warning(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "forward")
    folder.acquire()
    now = datetime.now(UTC).isoformat()
    own, copy, other = tmp_path / "forward.toml", tmp_path / "credential.toml", tmp_path / "config.toml"
    for path in (own, copy):
        path.write_text("poll_seconds = 1")
    other.write_text("poll_seconds = 2")
    status = {"role": "forward", "written_at": now, "last_good_at": now, "config": str(own)}
    write_raw(folder, status)
    found = [probes._state(folder, path) for path in (own, copy, tmp_path / "missing", other)]
    folder.release()
    assert [one.result for one in found] == ["ok", "ok", "ok", "warn"]
    assert f"has loaded {own}, which differs from {other}" in found[-1].message


def test_events_that_wait_for_a_sink_that_left_the_configuration_are_a_warning(cli: Cli) -> None:
    cli.fill()
    cli.sinks(ops={"kind": "stdout"})
    message = "forward: 3 event(s) wait for sink other, which is not configured"
    assert cli.check().row(check="outbox forward", result="warn")["message"] == message


def test_a_metrics_port_in_use_fails_unless_the_process_has_it(cli: Cli, inbox: Inbox) -> None:
    listen = urlsplit(inbox.base_url).netloc
    cli.here(metrics={"listen": listen})
    done = cli.check()
    message = f"{listen} cannot be listened on: Address already in use"
    assert (done.code, done.row(check="metrics", result="FAIL")["message"]) == (3, message)
    folder = StateFolder(cli.state())
    folder.acquire()
    folder.write_status(process_status(datetime.now(UTC), metrics="127.0.0.1:9465"))
    assert cli.check().row(check="metrics forward", result="ok")["message"] == "served on 127.0.0.1:9465"
    folder.write_status(process_status(datetime.now(UTC), metrics_error="there are no metrics: no"))
    assert cli.check().row(check="metrics forward", result="FAIL")["message"] == "there are no metrics: no"
    folder.release()


def test_a_port_that_two_processes_share_is_said_to_be_two(cli: Cli) -> None:
    approvals = {"auto": [{"event_type": ["Freeze"]}]}
    listen = free_address()
    cli.here(metrics={"listen": listen}, approvals=approvals)
    message = f"{listen} is free; of forward and listen, the second takes the next port"
    assert cli.check().row(check="metrics", result="ok")["message"] == message


# The clock


@pytest.mark.parametrize(
    ("ahead_seconds", "side"), [(600, "ahead of"), (-90, "behind"), (0, None), (None, None)]
)
def test_a_clock_that_is_more_than_30_s_off_is_a_warning(
    tmp_path: Path, ahead_seconds: float | None, side: str | None
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
    assert ("clock" in found) == bool(side)
    if side:
        seconds, _, rest = found["clock"].message.removeprefix("this VM's clock is ").partition(" s ")
        assert (rest, found["clock"].result) == (
            f"{side} IMDS's, and so times and deadlines are wrong",
            "warn",
        )
        assert abs(float(seconds) - abs(ahead_seconds or 0)) <= 30  # it takes a while until it is asked
