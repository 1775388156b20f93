"""Every unit with its shipped sandbox under a real systemd, and in them what docs/maintenance.md says: `make units`.

The tests are one story of one machine, in the order of this file, and its main parts that of others. Namespaces
enforce the sandbox but for what the control group would do: the filters of ports and addresses (SocketBindDeny,
IPAddressDeny) and of devices need BPF there, MemoryMax and TasksMax its controllers. The network is this machine's,
so the simulators answer on loopback.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import URLError

import pytest

from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.only import only
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.process import toml, wait_until
from tests.support.relay import SUBSCRIPTION, TOPIC, fleet_bus
from tests.support.servicebus import ServiceBusLab
from tests.systemd.machine import Machine, System, add_checkout, booted

ROLES = ("console", "forward", "listen", "relay")
PAGE = (ROOT / "docs/maintenance.md").read_text(encoding="utf-8")
CHECKOUT = "/srv/imds-bridge/infra/systemd"
RELEASE = "/srv/release"
FOREIGN = {"PIP_USER": "1", "PIP_TARGET": "/srv/foreign", "PYTHONPATH": "/srv/foreign"}
SYSTEMS = {
    "Debian 12, a checkout": System(
        suite="bookworm", packages=("polkitd", "python3-venv", "ca-certificates")
    ),
    "Debian 13, a release": System(suite="trixie", packages=("polkitd", "python3")),
    "Debian 12, a release, as if systemd were 251": System(
        suite="bookworm", packages=("polkitd", "python3"), claimed_systemd=251
    ),
    "Debian 11, a release": System(
        suite="bullseye",
        packages=("policykit-1",),
        borrowed_python=System(suite="bookworm", packages=("polkitd", "python3")),
    ),
}
CONFIG = "/etc/imds-bridge/config.toml"
# The program of a rule, which tries what the sandbox forbids.
PROGRAM = """#!/bin/sh
touch /etc/outside 2>/dev/null && exit 1
test ! -e /proc/stat || exit 1
touch /tmp/inside
"""

pytestmark = [
    pytest.mark.units,
    pytest.mark.skipif(sys.platform != "linux", reason="systemd is not there"),
    pytest.mark.timeout(600),  # the first test waits for a new root and the installation
]
everywhere = pytest.mark.parametrize("machine", SYSTEMS, indirect=True, scope="module")
with_rules = pytest.mark.parametrize("machine", [*SYSTEMS][:3], indirect=True, scope="module")
once = pytest.mark.parametrize("machine", [*SYSTEMS][:1], indirect=True, scope="module")


@pytest.fixture(scope="module")
def imds() -> Iterator[ImdsLab]:
    with ImdsLab(vms=["web-0"], rate_limit=None) as started:
        yield started


@pytest.fixture(scope="module")
def inbox() -> Iterator[Inbox]:
    with Inbox() as started:
        yield started


@pytest.fixture(scope="module")
def bus() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(fleet_bus()) as started:
        yield started


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Return a system with what is to be installed in it."""
    with booted(SYSTEMS[request.param]) as started:
        if request.param.endswith("a checkout"):
            add_checkout(started.root)
        else:
            (started.root / RELEASE[1:]).mkdir()
            command = ["tar", "-xf", request.getfixturevalue("release"), "--strip-components=1"]
            subprocess.run([*command, "-C", started.root / RELEASE[1:]], check=True)
        yield started


def install(machine: Machine, *options: str) -> str:
    """Install, without a network if it is a release; return what is printed."""
    if (machine.root / RELEASE[1:]).exists():
        return machine.do(f"unshare -n {RELEASE}/install.sh {' '.join(options)}")
    machine.write("/srv/foreign/sitecustomize.py", "raise SystemExit('foreign')\n")
    machine.write("/srv/foreign/bridge/__init__.py", "raise SystemExit('foreign')\n")
    return machine.do(f"{CHECKOUT}/install.sh {' '.join(options)}", **FOREIGN)


@pytest.fixture(scope="module")
def ports(machine: Machine) -> dict[str, int]:
    """Return the port of each unit's metrics, which it has from a drop-in as the page says."""
    ports = {role: free_port() for role in ROLES}
    for role, port in ports.items():
        text = f"[Service]\nSocketBindAllow=tcp:{port}\nEnvironment=IMDS_BRIDGE__METRICS__LISTEN=127.0.0.1:{port}\n"
        machine.write(f"/etc/systemd/system/imds-bridge-{role}.service.d/metrics.conf", text)
    machine.do("systemctl daemon-reload")
    return ports


def metrics(port: int) -> str:
    """Return what a process serves, "" before it does."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read().decode())
    except URLError:
        return ""


def block(heading: str, language: str) -> str:
    """Return the first block of code of a section of the page."""
    section = PAGE.partition(f"{heading}\n")[2]
    return textwrap.dedent(re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)[0])


def errors(machine: Machine, role: str) -> str:
    return machine.do(f"journalctl -q -o cat -b -p err -u imds-bridge-{role}")


def events_of(inbox: Inbox, event_id: str, *, path: str = "") -> list[str]:
    """Return the types of what arrived about an event, at a path that ends so."""
    return [
        one.json()["type"].removeprefix("io.imdsbridge.").removesuffix(".v1")
        for one in inbox.accepted
        if event_id in str(one.body) and one.path.endswith(path)
    ]


def announce(imds: ImdsLab, event_type: str = "Freeze") -> str:
    return imds.schedule(event_type=event_type, resources=["web-0"])


def wait_for_event(
    inbox: Inbox, event_id: str, kind: str = "scheduledevent.scheduled", path: str = ""
) -> None:
    inbox.wait_for(lambda: kind in events_of(inbox, event_id, path=path))


def status(machine: Machine, role: str = "forward") -> dict[str, Any]:
    shown = machine.try_to_do(f"imds-bridge status --json --role {role}").stdout
    return dict(json.loads(shown)) if shown else {}


def works(machine: Machine) -> str:
    """Return what `check` prints, "" while it finds a fault."""
    done = machine.try_to_do("imds-bridge check")
    return "" if done.returncode else done.stdout


@everywhere
def test_an_installation_ends_with_the_line_that_starts_it_and_check_says_that_nothing_runs(
    machine: Machine, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    *_, last = install(machine).splitlines()
    line = last.partition("boot: ")[2]
    relay = {"connection_string": bus.connection_string, "topic": TOPIC, "subscription": SUBSCRIPTION}
    rule = {"event_type": ["Reboot"], "run": ["/usr/local/bin/drain"], "recover": ["/usr/local/bin/recover"]}
    settings = {
        "imds": {"endpoint": imds.url("web-0")},
        "console": {"listen": f"127.0.0.1:{free_port()}"},
        "approvals": {"auto": [rule]},
    }
    for name in ("drain", "recover"):
        machine.write(f"/usr/local/bin/{name}", PROGRAM, 0o755)
    machine.write(CONFIG, toml(settings), 0o600)
    machine.do("cd /etc/imds-bridge && cp --remove-destination config.toml relay.toml")
    with (machine.root / "etc/imds-bridge/relay.toml").open("a") as file:
        file.write(toml({"relay": relay}))
    found = json.loads(machine.try_to_do("imds-bridge check --json").stdout)
    assert {row["message"]: row["result"] for row in found if row["check"] == "unit"} == {
        f"imds-bridge-{role} is not enabled and does not run (dead)": "warn"
        for role in ("forward", "listen", "console")
    }
    assert f"not enabled and does not run (dead): {line}\n" in machine.try_to_do("imds-bridge status").stdout
    machine.do(line)
    shown = wait_until(lambda: works(machine))
    assert "imds-bridge-forward is enabled and runs" in shown
    assert machine.do("imds-bridge --version", **FOREIGN).startswith("imds-bridge ")


@everywhere
@pytest.mark.parametrize("role", ROLES)
def test_a_unit_starts_in_its_sandbox_and_its_metrics_have_what_the_alerts_need(
    machine: Machine, ports: dict[str, int], role: str
) -> None:
    machine.do(f"systemctl enable --now imds-bridge-{role} && systemctl restart imds-bridge-{role}")
    pid = machine.show(role, "MainPID")
    shown = dict(line.split(":", 1) for line in machine.do(f"cat /proc/{pid}/status").splitlines())
    sandbox = {"NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0" * 16, "Umask": "0077"}
    assert {name: shown[name].strip() for name in sandbox} == sandbox
    assert shown["Uid"].split()[0] != "0"
    inside = f"nsenter -t {pid} -m --"
    assert machine.try_to_do(f"{inside} cat /proc/stat").returncode
    assert machine.try_to_do(f"{inside} touch /etc/outside").returncode
    found = wait_until(lambda: metrics(ports[role]), describe=lambda: errors(machine, role))
    needed = ("imds_bridge_start_time_seconds", "process_resident_memory_bytes", "process_cpu_seconds_total")
    assert [name for name in needed if not re.search(rf"(?m)^{name} [1-9]|^{name} 0\.", found)] == []
    machine.do(
        f"test -s /var/lib/private/imds-bridge/{role}/{'console' if role == 'console' else 'outbox'}.db"
    )
    said = machine.do(f"imds-bridge status --role {role} || true")
    assert f"imds-bridge-{role} is enabled and runs\n" in said


@everywhere
def test_a_channel_is_added(machine: Machine, imds: ImdsLab, inbox: Inbox) -> None:
    section = re.sub(r"(?s)```.*?```", "", PAGE.partition("## Add a channel\n")[2].partition("\n## ")[0])
    first, *commands = re.findall(r"`((?:\(umask|imds-bridge |systemctl ).*?)`", section)
    settings = block("## Add a channel", "toml").replace('"teams"', '"cloudevents"')
    machine.do(first, URL=inbox.url)
    with (machine.root / CONFIG[1:]).open("a") as file:
        file.write(settings)
    wait_until(lambda: status(machine, "listen")["last_good_at"])
    for command in commands:
        machine.do(f"{command} || [ $? = 3 ]" if "status" in command else command)
    wait_for_event(inbox, announce(imds))


@everywhere
def test_a_secret_is_rotated(machine: Machine, imds: ImdsLab, inbox: Inbox) -> None:
    lines = block("## Rotating secrets", "sh").replace("ops-url", "chat-url")
    machine.do(lines, NEW=f"{inbox.url}/new")
    wait_for_event(inbox, announce(imds), path="/new")


@everywhere
def test_a_vm_is_drained_approved_and_put_back(machine: Machine, imds: ImdsLab, inbox: Inbox) -> None:
    event = announce(imds, "Reboot")
    wait_for_event(inbox, event, "approval.accepted")
    assert [one.event_id for one in imds.approvals][-1] == event
    imds.complete(event)
    wait_for_event(inbox, event, "approval.recovered")
    wait_until(lambda: status(machine, "listen")["out_of_work"] == [])
    machine.do("test ! -e /etc/outside -a ! -e /tmp/inside")


@pytest.mark.parametrize("machine", [*SYSTEMS][3:], indirect=True, scope="module")
def test_a_polkit_without_rules_for_units_is_refused_before_anything_is_done(machine: Machine) -> None:
    done = machine.try_to_do(f"{RELEASE}/install.sh --manage shop.service")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--manage needs polkit 0.106 or newer" in done.stderr
    assert "here it is 0.105" in done.stderr


@with_rules
def test_the_programs_of_listen_start_and_stop_the_units_that_they_may_manage_and_no_others(
    machine: Machine,
) -> None:
    for name in ("shop", "other"):
        machine.write(f"/etc/systemd/system/{name}.service", "[Service]\nExecStart=sleep infinity\n")
    install(machine, "--manage shop.service")
    machine.wait_until_active("listen")
    program = "systemd-run --quiet --pipe --wait -p User=imds-bridge-listen systemctl"
    for action, state in (("start", "active"), ("restart", "active"), ("stop", "inactive")):
        machine.do(f"{program} {action} shop.service")
        assert machine.try_to_do("systemctl is-active shop.service").stdout == f"{state}\n"
    for refused in ("start other.service", "set-property shop.service CPUWeight=1", "daemon-reload"):
        assert machine.try_to_do(f"{program} {refused}").returncode


@once
def test_a_wrong_configuration_is_an_error_of_the_journal_and_starts_once_it_is_right(
    machine: Machine,
) -> None:
    assert "[nonsense]" not in errors(machine, "forward")
    machine.do(f"cp -p {CONFIG} /srv/right.toml && echo '[nonsense]' >> {CONFIG}")
    assert machine.try_to_do("systemctl restart imds-bridge-forward").returncode
    wait_until(lambda: "nonsense" in errors(machine, "forward"))
    assert "/etc/imds-bridge/forward.toml: 1 error" in errors(machine, "forward")
    wait_until(lambda: "does not run (auto-restart)" in machine.try_to_do("imds-bridge status").stdout)
    machine.do(f"cp -p /srv/right.toml {CONFIG}")
    machine.wait_until_active("forward")


@once
def test_a_process_that_is_stopped_by_sigstop_is_restarted_by_the_watchdog(machine: Machine) -> None:
    drop_in = "/run/systemd/system/imds-bridge-forward.service.d/watchdog.conf"
    machine.do(f"mkdir -p {drop_in.rpartition('/')[0]} && printf '[Service]\\nWatchdogSec=8\\n' > {drop_in}")
    machine.do("systemctl daemon-reload && systemctl restart imds-bridge-forward")
    pid = machine.show("forward", "MainPID")
    machine.do("systemctl kill --kill-whom=main --signal=STOP imds-bridge-forward")
    wait_until(lambda: machine.show("forward", "MainPID") not in (pid, "0"))
    machine.wait_until_active("forward")
    wait_until(lambda: "Fatal Python error: Aborted" in machine.do("journalctl -q -b -u imds-bridge-forward"))
    machine.do(f"rm {drop_in} && systemctl daemon-reload && systemctl restart imds-bridge-forward")


@once
def test_a_full_disk_keeps_no_notice_from_its_receiver_and_ends(
    machine: Machine, imds: ImdsLab, inbox: Inbox, ports: dict[str, int]
) -> None:
    disk = "/var/lib/private/imds-bridge/forward"
    machine.do(f"systemctl stop imds-bridge-forward && mount -t tmpfs -o size=4m,mode=0700 tmpfs {disk}")
    machine.do("systemctl start imds-bridge-forward")
    machine.do(f"cat /dev/zero > {disk}/filling || true")
    wait_for_event(inbox, announce(imds), path="/new")
    wait_until(lambda: "imds_bridge_storage_available 0.0" in metrics(ports["forward"]))
    wait_until(lambda: "state" in errors(machine, "forward"))
    assert machine.try_to_do("imds-bridge check").returncode == 3
    machine.do(f"rm {disk}/filling")
    wait_until(lambda: "imds_bridge_storage_available 1.0" in metrics(ports["forward"]))
    machine.do(f"systemctl stop imds-bridge-forward && umount {disk} && systemctl start imds-bridge-forward")


@once
def test_an_upgrade_and_a_rollback_send_what_waits_and_keep_the_units_running(
    machine: Machine, imds: ImdsLab, inbox: Inbox
) -> None:
    for number, command in enumerate(
        (f"{CHECKOUT}/install.sh", "/opt/imds-bridge/systemd/install.sh --rollback")
    ):
        before = {role: machine.show(role, "MainPID") for role in ROLES}
        inbox.fault(503, count=None)
        event = announce(imds)
        wait_until(lambda: status(machine)["sinks"]["chat"]["backlog"])
        if not number:
            machine.do("echo '# newer' >> /srv/imds-bridge/bridge/__init__.py")
        machine.do(command)
        for role in ROLES:
            machine.wait_until_active(role)
            assert machine.show(role, "MainPID") != before[role]
        newer = only(machine.root.glob("opt/imds-bridge/lib/python3*/site-packages/bridge/__init__.py"))
        assert ("# newer" in newer.read_text()) is (number == 0)
        inbox.clear_faults()
        wait_for_event(inbox, event, path="/new")


@everywhere
def test_nothing_is_left_after_an_uninstallation(machine: Machine) -> None:
    machine.do("/opt/imds-bridge/systemd/install.sh --uninstall --purge")
    assert machine.try_to_do("getent passwd imds-bridge-listen").returncode
    assert machine.do("systemctl list-unit-files --no-legend 'imds-bridge-*' || true") == ""
    found = machine.do("find / -xdev -name '*imds-bridge*' -not -path '/srv/*' -not -path '/proc/*'")
    assert found.split() == []
