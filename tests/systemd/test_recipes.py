"""infra/recipes by the real unit against the real programs, in a Debian that has booted.

The clean round of each belongs to `make units`, the faults to `make recipes`, which prints a table. How a program is
set up, occupied, broken or changed by an admin is a function of its file in tests/systemd/recipes.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.only import only
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.process import wait_until as wait_with_limit
from tests.systemd.machine import Machine, System, booted

SYSTEM = System(
    suite="bookworm",
    packages=(
        *(
            "polkitd",
            "python3",
            "curl",
            "iproute2",
            "haproxy",
            "pacemaker",
            "pacemaker-cli-utils",
            "corosync",
        ),
        *("patroni", "postgresql", "etcd-server", "python3-etcd", "slurmctld", "slurmd", "slurm-client"),
        "prometheus-alertmanager",
    ),
    has_own_network=True,
)
DAEMONS = "haproxy pacemaker corosync patroni postgresql etcd slurmctld slurmd prometheus-alertmanager"
MANAGED = ("shop.service", "patroni-nofailover@on.service", "patroni-nofailover@off.service")
RECIPES = ("service", "haproxy", "pacemaker", "patroni", "slurm")
SETTINGS = """[imds]
endpoint = "http://127.0.0.1:8811"
[sinks.inbox]
kind = "webhook"
url = "http://127.0.0.1:8800/hook"
"""
NETWORK = """hostname web-0 && echo 10.9.8.1 web-0 >>/etc/hosts
ip link add veth0 type veth peer name veth1
ip address add 10.9.8.1/24 dev veth0
ip link set lo up && ip link set veth0 up && ip link set veth1 up
"""
DROP_IN = "/etc/systemd/system/imds-bridge-listen.service.d/recipe.conf"
AZURE_EVENTS = '<primitive id="e" class="ocf" provider="heartbeat" type="azure-events-az"/>'
T = TypeVar("T")
LIMIT_SECONDS = 100.0  # a program that hangs is asked again after a while

pytestmark = [
    pytest.mark.recipes,
    pytest.mark.skipif(sys.platform != "linux", reason="systemd is not there"),
    pytest.mark.timeout(600),  # the first test waits for a new root and the installation
]


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Return a system with imds-bridge, the simulator and the recipes, where none of what they drain runs."""
    with booted(SYSTEM) as started:
        started.do(f"systemctl disable --now --quiet {DAEMONS}; {NETWORK}")
        (started.root / "srv/release").mkdir()
        release: Path = request.getfixturevalue("release")
        unpack: list[str | Path] = ["tar", "-xf", release, "--strip-components=1"]
        unpack += ["-C", started.root / "srv/release"]
        subprocess.run(unpack, check=True)
        started.do(f"/srv/release/install.sh {' '.join(f'--manage {unit}' for unit in MANAGED)}")
        started.do("systemd-run --quiet --unit lab /usr/local/bin/imds-bridge lab --vm web-0")
        shutil.copytree(ROOT / "infra/recipes", started.root / "usr/local/lib/imds-bridge")
        shutil.copytree(ROOT / "tests/systemd/recipes", started.root / "srv/recipes")
        yield started


def wait_until(predicate: Callable[[], T | None], describe: Callable[[], object] = str) -> T:
    """Wait until the predicate returns something true, also on a busy machine, and return it."""
    return wait_with_limit(predicate, timeout_seconds=LIMIT_SECONDS, describe=describe)


class Bridge:
    """What the unit of `listen` or `forward` does about the simulator's events."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def configure(self, role: str, settings: str) -> None:
        """Start a unit again with more settings, and wait until it works."""
        self._machine.write("/etc/imds-bridge/config.toml", SETTINGS + settings, 0o600)
        self._machine.do(f"systemctl daemon-reload && systemctl restart imds-bridge-{role}")
        wait_until(lambda: self.status(role).get("last_good_at"), describe=lambda: self.log(role))

    def status(self, role: str = "listen") -> dict[str, Any]:
        shown = self._machine.try_to_do(f"imds-bridge status --json --role {role}").stdout
        return dict(json.loads(shown)) if shown else {}

    def log(self, role: str = "listen") -> str:
        return self._machine.try_to_do(f"journalctl -q -b -n 60 -o cat -u imds-bridge-{role}").stdout

    def announce(self, event_type: str = "Reboot", options: str = "") -> str:
        command = f"imds-bridge lab schedule --type {event_type} --notice 900 --hold {options}"
        return self._machine.do(command).strip()

    def complete(self, event: str) -> None:
        self._machine.do(f"imds-bridge lab complete {event}")

    def published(self, event: str, kind: str) -> list[dict[str, Any]]:
        """Return what has arrived about an event, of a type."""
        received = json.loads(self._machine.do("curl -s http://127.0.0.1:8800/lab/received"))
        found = [json.loads(one["body"]) for one in received if event in one["body"]]
        return [one for one in found if one["type"] == f"io.imdsbridge.{kind}.v1"]

    def wait_for(self, event: str, kind: str) -> dict[str, Any]:
        """Wait until this has arrived about an event."""
        found = wait_until(lambda: self.published(event, kind), describe=self.log)
        return found[-1]

    def is_approved(self, event: str) -> bool:
        return bool(self.published(event, "approval.accepted"))


class Recipe:
    """A recipe, what it drains, and the unit that runs it."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self.bridge = Bridge(machine)
        self.machine = machine
        self.rule = (ROOT / f"infra/recipes/{name}/rule.toml").read_text()

    def do(self, function: str) -> str:
        return self.machine.do(self._line(function))

    def is_so(self, function: str) -> bool:
        return self.machine.try_to_do(self._line(function)).returncode == 0

    def wait_until(self, function: str) -> None:
        wait_until(lambda: self.is_so(function), describe=self.bridge.log)

    def _line(self, function: str) -> str:
        return f"set -eu; . /srv/recipes/{self.name}.sh; {function}"

    def is_at_work(self) -> bool:
        """Return whether a program of the recipe runs."""
        return self.machine.try_to_do(f"pgrep -f ^[^-].*/imds-bridge/{self.name}/").returncode == 0

    def start(self) -> None:
        drop_in = ROOT / f"infra/recipes/{self.name}/drop-in.conf"
        self.machine.write(DROP_IN, drop_in.read_text() if drop_in.exists() else "")
        self.do("set_up")
        self.wait_until("is_back")
        self.bridge.configure("listen", self.rule)

    def wait_until_back(self, *events: str) -> None:
        """Complete events and wait until nothing is owed."""
        for event in events:
            self.bridge.complete(event)
        self.bridge.wait_for(events[-1], "approval.recovered")
        wait_until(lambda: self.bridge.status()["out_of_work"] == [])


class Table:
    """What `make recipes` prints."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = {}

    def note(self, recipe: Recipe, column: str, since: float) -> None:
        row = self.rows.setdefault(recipe.name, {})
        row[column] = f"{time.monotonic() - since:.1f}"
        if "version" not in row:
            row["version"] = recipe.do("dpkg-query --show $(package)").replace("\t", " ").strip()

    def lines(self) -> Iterator[str]:
        yield "| recipe | program | seconds to drained | and back | killed in between |"
        yield "| --- | --- | --- | --- | --- |"
        for name, row in self.rows.items():
            cells = (row.get(column, "-") for column in ("version", "drained", "back", "killed"))
            yield f"| {name} | {' | '.join(cells)} |"


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    made = Table()
    yield made
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *made.lines(), sep="\n")


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, machine: Machine) -> Recipe:
    recipe = Recipe(request.param, machine)
    recipe.start()
    return recipe


@pytest.fixture
def recipe(started: Recipe) -> Recipe:
    started.do("prepare")
    return started


each = pytest.mark.parametrize("started", RECIPES, indirect=True, scope="module")


def of(name: str) -> Callable[[Any], Any]:
    return pytest.mark.parametrize("started", [name], indirect=True, scope="module")


@pytest.mark.units
@each
def test_the_vm_is_drained_approved_and_put_back(recipe: Recipe, table: Table) -> None:
    begin = time.monotonic()
    event = recipe.bridge.announce()
    recipe.bridge.wait_for(event, "approval.accepted")
    table.note(recipe, "drained", begin)
    recipe.do("is_drained")
    begin = time.monotonic()
    recipe.wait_until_back(event)
    table.note(recipe, "back", begin)
    recipe.do("is_back")


def is_refused(recipe: Recipe, event: str) -> str:
    """Wait until a program has failed; return what it printed. Nothing was approved."""
    recipe.bridge.wait_for(event, "approval.rejected")
    assert not recipe.bridge.is_approved(event)
    return recipe.bridge.log()


@each
@pytest.mark.parametrize(("begin", "end"), [("hang", "go_on"), ("stop", "start")])
def test_while_the_daemon_hangs_or_is_down_nothing_is_approved(recipe: Recipe, begin: str, end: str) -> None:
    recipe.do(begin)
    try:
        event = recipe.bridge.announce()
        is_refused(recipe, event)
    finally:
        recipe.do(end)
    recipe.bridge.wait_for(event, "approval.accepted")
    recipe.do("is_drained")
    recipe.wait_until_back(event)
    recipe.do("is_back")


@each
def test_a_process_that_is_killed_while_the_program_works_drains_to_the_end(
    recipe: Recipe, table: Table
) -> None:
    recipe.do("occupy")
    event = recipe.bridge.announce()
    wait_until(recipe.is_at_work)
    assert not recipe.bridge.is_approved(event)
    begin = time.monotonic()
    recipe.machine.do("systemctl kill --signal=KILL --kill-whom=main imds-bridge-listen")
    wait_until(lambda: not recipe.is_at_work())
    wait_until(recipe.is_at_work)
    assert not recipe.bridge.is_approved(event)
    recipe.do("release")
    recipe.bridge.wait_for(event, "approval.accepted")
    table.note(recipe, "killed", begin)
    recipe.do("is_drained")
    recipe.wait_until_back(event)
    recipe.do("is_back")


@each
def test_a_second_event_keeps_the_vm_out_of_work(recipe: Recipe) -> None:
    first, second = recipe.bridge.announce(), recipe.bridge.announce("Redeploy")
    for event in (first, second):
        recipe.bridge.wait_for(event, "approval.accepted")
    recipe.bridge.complete(first)
    wait_until(lambda: first not in json.dumps(recipe.bridge.status()["events"]))
    recipe.do("is_drained")
    recipe.wait_until_back(second)
    recipe.do("is_back")


@each
def test_recover_may_be_repeated(recipe: Recipe) -> None:
    event = recipe.bridge.announce()
    recipe.bridge.wait_for(event, "approval.accepted")
    recipe.wait_until_back(event)
    command = shlex.join(tomllib.loads(recipe.rule)["approvals"]["auto"][0]["recover"])
    recipe.machine.do(
        "systemd-run --quiet --pipe --wait -p DynamicUser=yes -p StateDirectory=imds-bridge/listen"
        " -p User=$(systemctl show -P User imds-bridge-listen)"
        ' -p SupplementaryGroups="$(systemctl show -P SupplementaryGroups imds-bridge-listen)"'
        " -p Environment=STATE_DIRECTORY=/var/lib/imds-bridge/listen/programs"
        f" -p LoadCredential=secrets:/etc/imds-bridge/listen.secrets {command}"
    )
    recipe.do("is_back")


@each
def test_what_an_admin_did_before_stays(recipe: Recipe) -> None:
    recipe.do("meddle")
    recipe.wait_until("is_meddled")
    event = recipe.bridge.announce()
    recipe.bridge.wait_for(event, "approval.accepted")
    recipe.wait_until_back(event)
    recipe.do("is_meddled")
    recipe.do("undo")
    recipe.wait_until("is_back")


@of("service")
def test_a_service_that_dies_at_once_does_not_count_as_back(recipe: Recipe) -> None:
    event = recipe.bridge.announce()
    recipe.bridge.wait_for(event, "approval.accepted")
    drop_in = "/run/systemd/system/shop.service.d/broken.conf"
    recipe.machine.write(drop_in, "[Service]\nExecStart=\nExecStart=sleep 2\n")
    recipe.machine.do("systemctl daemon-reload")
    recipe.bridge.complete(event)
    wait_until(lambda: "shop.service did not stay up" in recipe.bridge.log())
    assert recipe.bridge.published(event, "approval.recovered") == []
    recipe.machine.do(f"rm {drop_in} && systemctl daemon-reload")
    recipe.bridge.wait_for(event, "approval.recovered")
    recipe.do("is_back")


@of("service")
def test_a_misspelt_service_is_never_approved(recipe: Recipe) -> None:
    recipe.bridge.configure("listen", recipe.rule.replace("shop.service", "shpo.service"))
    event = recipe.bridge.announce()
    assert "shpo.service has not stopped" in is_refused(recipe, event)
    recipe.bridge.complete(event)
    recipe.bridge.configure("listen", recipe.rule)


@of("haproxy")
def test_a_reload_of_haproxy_does_not_end_the_drain_that_waits(recipe: Recipe) -> None:
    recipe.do("occupy")
    event = recipe.bridge.announce()
    recipe.wait_until("is_drained")
    recipe.machine.do("systemctl reload haproxy")
    recipe.do("! is_drained")
    recipe.wait_until("is_drained")
    recipe.do("release")
    recipe.bridge.wait_for(event, "approval.accepted")
    assert "shop/web-0: drain shop/web-0: drain" in recipe.bridge.log()
    recipe.wait_until_back(event)
    recipe.do("is_back")


@of("haproxy")
def test_the_script_of_the_page_that_calls_two_recipes_leaves_first_and_stops_then(recipe: Recipe) -> None:
    service = Recipe("service", recipe.machine)
    service.do("set_up")
    script = only(one.text for one in blocks(ROOT / "infra/recipes/README.md") if "set -eu" in one.text)
    *head, leave, stop = script.splitlines()
    back = [stop.removeprefix("exec ").replace("/run", "/recover"), leave.replace(" run ", " recover ")]
    for verb, lines in (("run", [leave, stop]), ("recover", back)):
        text = "\n".join(["#!/bin/sh", *head, *lines, ""])
        recipe.machine.write(f"/usr/local/lib/imds-bridge/both/{verb}", text, 0o755)
    both = r'\1 = ["/usr/local/lib/imds-bridge/both/\1"]'
    recipe.bridge.configure("listen", re.sub("(?m)^(run|recover) = .*", both, recipe.rule))
    event = recipe.bridge.announce()
    recipe.bridge.wait_for(event, "approval.accepted")
    recipe.do("is_drained")
    service.do("is_drained")
    recipe.wait_until_back(event)
    recipe.do("is_back")
    service.do("is_back")
    recipe.bridge.configure("listen", recipe.rule)


@of("pacemaker")
def test_a_restart_of_pacemaker_brings_nothing_back_during_the_event(recipe: Recipe) -> None:
    event = recipe.bridge.announce()
    recipe.bridge.wait_for(event, "approval.accepted")
    recipe.machine.do("systemctl restart pacemaker")
    wait_until(lambda: "health is RED" in recipe.machine.try_to_do("crm_mon -1").stdout)
    recipe.do("is_drained")
    recipe.wait_until_back(event)
    recipe.wait_until("is_back")


@of("pacemaker")
@pytest.mark.parametrize(
    ("change", "undo", "said"),
    [
        (
            "crm_attribute -t crm_config -n node-health-strategy -v none",
            "crm_attribute -t crm_config -n node-health-strategy -v migrate-on-red",
            "red would move nothing",
        ),
        (
            f"cibadmin -C -o resources -X '{AZURE_EVENTS}'",
            "cibadmin -D -X '<primitive id=\"e\"/>'",
            "use one of both",
        ),
    ],
)
def test_a_cluster_that_would_not_move_or_that_approves_itself_is_refused(
    recipe: Recipe, change: str, undo: str, said: str
) -> None:
    recipe.machine.do(change)
    event = recipe.bridge.announce()
    assert said in is_refused(recipe, event)
    recipe.do("[ $(red) = none ]")
    recipe.machine.do(undo)
    recipe.bridge.wait_for(event, "approval.accepted")
    recipe.wait_until_back(event)
    recipe.wait_until("is_back")


@of("patroni")
def test_a_primary_without_a_replica_is_not_approved(recipe: Recipe) -> None:
    recipe.machine.do("systemctl stop patroni@web-1")
    event = recipe.bridge.announce()
    assert "no good candidates have been found" in is_refused(recipe, event)
    recipe.machine.do("systemctl start patroni@web-1")
    recipe.bridge.wait_for(event, "approval.accepted")
    recipe.do("is_drained")
    recipe.wait_until_back(event)
    recipe.do("is_back")


@of("slurm")
def test_a_node_is_resumed_once_slurmd_has_registered_also_after_its_time_limit(recipe: Recipe) -> None:
    event = recipe.bridge.announce()
    recipe.bridge.wait_for(event, "approval.accepted")
    recipe.machine.do("systemctl stop slurmd")
    wait_until(lambda: recipe.do("state").startswith("drained*"))
    recipe.bridge.complete(event)
    wait_until(lambda: "systemctl is-active slurmd: exit code 3" in recipe.bridge.log())
    recipe.machine.do("systemctl start slurmd")
    recipe.bridge.wait_for(event, "approval.recovered")
    recipe.do("is_back")


@of("slurm")
def test_a_preempt_requeues_the_jobs(recipe: Recipe) -> None:
    recipe.do("occupy")
    event = recipe.bridge.announce("Preempt")
    recipe.bridge.wait_for(event, "approval.accepted")
    assert recipe.machine.do("squeue -h -o %T") == "PENDING\n"
    recipe.do("release")
    recipe.wait_until_back(event)


@of("slurm")
def test_a_controller_that_has_just_started_is_asked_again(recipe: Recipe) -> None:
    recipe.do("occupy")
    event = recipe.bridge.announce()
    wait_until(recipe.is_at_work)
    recipe.do("stop")
    is_refused(recipe, event)
    recipe.do("start; release || true")
    recipe.bridge.wait_for(event, "approval.accepted")
    recipe.do("is_drained")
    recipe.wait_until_back(event)


class Alertmanager:
    """An Alertmanager beside the sink that silences."""

    URL = "http://127.0.0.1:9093/api/v2"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def start(self) -> None:
        machine = self._machine
        machine.write("/etc/default/prometheus-alertmanager", 'ARGS="--cluster.listen-address="\n')
        machine.do("systemctl restart prometheus-alertmanager")
        wait_until(lambda: machine.try_to_do(f"curl -sf {self.URL}/status").stdout)

    def post(self, path: str, body: Any) -> None:
        self._machine.do(
            f"curl -sf -H 'Content-Type: application/json' -d @- {self.URL}/{path} <<'EOF'\n{json.dumps(body)}\nEOF"
        )

    def silences(self, state: str = "active") -> list[dict[str, Any]]:
        found = json.loads(self._machine.do(f"curl -sf --retry 9 --retry-connrefused {self.URL}/silences"))
        return [one for one in found if one["status"]["state"] == state]

    def silenced(self, *alerts: dict[str, str]) -> set[str]:
        """Return which instances of these alerts are silenced."""
        self.post("alerts", [{"labels": labels} for labels in alerts])
        found = wait_until(lambda: json.loads(self._machine.do(f"curl -sf {self.URL}/alerts")))
        return {
            f"{one['labels']['alertname']} {one['labels']['instance']}"
            for one in found
            if one["status"]["silencedBy"]
        }


@pytest.fixture(scope="module")
def alertmanager(machine: Machine) -> Alertmanager:
    made = Alertmanager(machine)
    made.start()
    Bridge(machine).configure("forward", (ROOT / "infra/recipes/alertmanager/sink.toml").read_text())
    return made


@pytest.mark.units
def test_the_vms_alerts_are_silenced_until_the_events_end_and_nobody_elses(
    machine: Machine, alertmanager: Alertmanager
) -> None:
    bridge = Bridge(machine)
    theirs = {
        "matchers": [{"name": "a", "value": "b", "isRegex": False}],
        "createdBy": "admin",
        "comment": "mine",
    }
    times = {"startsAt": "2020-01-01T00:00:00Z", "endsAt": "2099-01-01T00:00:00Z"}
    alertmanager.post("silences", theirs | times)
    event = bridge.announce(options="--duration 60")
    wait_until(lambda: len(alertmanager.silences()) == 2, describe=lambda: bridge.log("forward"))
    ours = only(one for one in alertmanager.silences() if one["comment"] == f"Reboot {event}")
    not_before = bridge.published(event, "scheduledevent.scheduled")[0]["data"]["NotBeforeUtc"]
    assert seconds_between(not_before, ours["endsAt"]) == 60 + 900
    names = ("web-0", "web-0:9100", "web-01:9100")
    alerts = [{"alertname": "InstanceDown", "instance": name} for name in names]
    own = {"alertname": "ImdsBridgeOutOfWork", "instance": "web-0"}
    assert alertmanager.silenced(*alerts, own) == {"InstanceDown web-0", "InstanceDown web-0:9100"}
    bridge.complete(event)
    wait_until(lambda: [one["createdBy"] for one in alertmanager.silences()] == ["admin"])


def instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


def seconds_between(first: str, second: str) -> float:
    return round((instant(second) - instant(first)).total_seconds())


def test_a_postponed_event_moves_its_silence_and_one_of_unknown_length_has_a_limit(
    machine: Machine, alertmanager: Alertmanager
) -> None:
    bridge = Bridge(machine)
    event = bridge.announce()
    found = wait_until(lambda: [one for one in alertmanager.silences() if event in one["comment"]])
    published = bridge.published(event, "scheduledevent.scheduled")[0]
    not_before = published["data"]["NotBeforeUtc"]
    assert seconds_between(not_before, found[0]["endsAt"]) == 7200 + 900
    # The simulator postpones no event: the program is given one that is.
    published["data"]["NotBeforeUtc"] = f"{instant(not_before) + timedelta(hours=2):%Y-%m-%dT%H:%M:%S.000Z}"
    sink = tomllib.loads((ROOT / "infra/recipes/alertmanager/sink.toml").read_text())["sinks"]["silence"]
    machine.do(f"{shlex.join(sink['run'])} <<'EOF'\n{json.dumps(published)}\nEOF")
    moved = only(one for one in alertmanager.silences() if event in one["comment"])
    assert seconds_between(found[0]["endsAt"], moved["endsAt"]) == 7200
    assert moved["startsAt"] == found[0]["startsAt"]
    bridge.complete(event)
    wait_until(lambda: event not in str(alertmanager.silences()))


@pytest.mark.parametrize(("begin", "end"), [("kill --signal=STOP", "kill --signal=CONT"), ("stop", "start")])
def test_while_alertmanager_hangs_or_is_down_the_silence_waits_and_each_event_has_its_own(
    machine: Machine, alertmanager: Alertmanager, begin: str, end: str
) -> None:
    bridge = Bridge(machine)
    machine.do(f"systemctl {begin} prometheus-alertmanager")
    events = [bridge.announce(), bridge.announce("Redeploy")]
    try:
        wait_until(lambda: "exit code 75" in bridge.log("forward"))
        machine.do("systemctl kill --signal=KILL --kill-whom=main imds-bridge-forward")
    finally:
        machine.do(f"systemctl {end} prometheus-alertmanager")
    for event in events:
        wait_until(lambda event=event: event in str(alertmanager.silences()))  # type: ignore[misc]
    bridge.complete(events[0])
    wait_until(lambda: events[0] not in str(alertmanager.silences()))
    assert len([one for one in alertmanager.silences() if events[1] in one["comment"]]) == 1
    bridge.complete(events[1])
    wait_until(lambda: events[1] not in str(alertmanager.silences()))
