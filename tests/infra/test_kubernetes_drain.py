"""The drain on Kubernetes, against an API server that allows no more than the ClusterRole in drain.yaml."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bridge.config.models import Config
from infra.kubernetes import drain
from tests.support.consumers import SHORT_SLEEPS
from tests.support.imds_lab import ImdsLab
from tests.support.kubernetes import BUDGET, KUBERNETES, NO_ANSWER, Answer, ApiServer, rights, status
from tests.support.process import LIMIT_SECONDS, Forward, closed_port, environment, wait_until
from tests.support.tls import Authority

PROGRAM = str(KUBERNETES / "drain.py")
EVENT = "4CAEA225-A741-474D-A72E-428C86FCD853"
OWN, OTHER = f"drain.imdsbridge.io/{EVENT}", "drain.imdsbridge.io/602D9444"
SHOWN = "drain.imdsbridge.io/602D9445"
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
WEBHOOK = status(403, 'admission webhook "db.example.org" denied the request: the replica cannot be evicted')
POLICY = status(
    403, 'pods "web" is forbidden: ValidatingAdmissionPolicy "x" denied request: it cannot be evicted'
)
ECHO = status(
    403,
    'admission webhook "w" denied the request: pods "web" is forbidden: User "eve" cannot create resource "pods"',
)
DISRUPTION = status(429, BUDGET, "The disruption budget web needs 2 healthy pods and has 1 currently")
EVICT, CHANGE, LIST = ("pods/eviction", "create"), ("nodes", "patch"), ("pods", "list")


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as server:
        yield server


@pytest.fixture
def imds() -> Iterator[ImdsLab]:
    with ImdsLab() as lab:
        yield lab


@pytest.fixture
def run(
    api: ApiServer, imds: ImdsLab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that runs the drain for an event; it returns the exit code and what was printed."""
    monkeypatch.setattr(drain, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["drain.py", str(api.folder), imds.url("web-0")])

    def run_once(event_status: str = "Scheduled", **variables: str) -> tuple[int, str]:
        for name, value in (variables_of(api, event_status) | variables).items():
            monkeypatch.setenv(name, value)
        return drain.main(), capsys.readouterr().out

    return run_once


def variables_of(api: ApiServer, event_status: str) -> dict[str, str]:
    event = {"IMDS_BRIDGE_EVENT_STATUS": event_status, "IMDS_BRIDGE_EVENT_ID": EVENT}
    return {**api.environment, **event}


def answers(*each: Answer) -> list[Callable[[], Answer | None]]:
    left = iter(each)
    return [lambda: next(left)] * len(each)


def test_it_cordons_evicts_what_has_to_leave_and_waits_until_it_is_gone(api: ApiServer, run: Run) -> None:
    api.add("web")
    api.add("bare", owner="")
    api.add("leaving", deletionTimestamp="2026-11-22T09:00:00Z")
    api.add("agent", owner="DaemonSet")
    api.add("kubelet", owner="Node", annotations={"kubernetes.io/config.mirror": "hash"})
    api.add("job", phase="Succeeded")
    api.add("evicted", phase="Failed")
    api.add("elsewhere", node="node-1")
    api.lingers = {"web": 3, "leaving": 5}
    assert run() == (0, "drain: node-0 is drained; pods that left: 3\n")
    assert sorted(api.evictions) == ["bare", "web"]
    assert api.told == [("Drained", f"Drained for event {EVENT}; pods that left: 3")]
    assert [*api.pods] == ["agent", "kubelet", "job", "evicted", "elsewhere"]
    assert (api.is_cordoned, api.marks) == (True, {OWN: BOOT})
    assert api.calls.index(CHANGE) < api.calls.index(LIST)
    assert {*api.calls} == rights()  # nothing is allowed that is not needed


def test_it_may_run_again_after_it_was_ended_half_way(api: ApiServer, run: Run) -> None:
    api.add("web")
    api.touch_node(unschedulable=True)
    api.node["metadata"]["annotations"] = {OWN: BOOT}
    assert [run()[0], run()[0], run("Completed")[0], run("Completed")[0]] == [0] * 4
    assert api.evictions == ["web"]
    assert (api.is_cordoned, api.marks) == (False, {})


@pytest.mark.parametrize(
    "refusal",
    [DISRUPTION, WEBHOOK, POLICY, ECHO, status(500, "This pod has more than one PodDisruptionBudget")],
)
def test_a_refused_eviction_is_asked_for_again_and_holds_no_other_up(
    api: ApiServer, run: Run, refusal: Answer
) -> None:
    api.add("web")
    api.add("other")
    api.refusals["web"] = [refusal, refusal]
    assert run()[0] == 0
    assert sorted(api.evictions) == ["other", "web", "web", "web"]
    # The first refusal is told at once: somebody may give way before the event's time.
    message = f"It is asked for again: shop/web: {refusal[0]} {refusal[1]['message']}"
    causes = "".join(f" {cause['message']}" for cause in refusal[1]["details"]["causes"])
    drained = f"Drained for event {EVENT}; pods that left: 2"
    assert api.told == [("EvictionRefused", message + causes), ("Drained", drained)]
    assert [event["type"] for event in api.events] == ["Warning", "Normal"]


def test_what_others_refuse_when_the_node_is_cordoned_is_asked_for_again(api: ApiServer, run: Run) -> None:
    api.before[CHANGE] = answers(WEBHOOK)
    assert run()[0] == 0
    assert api.is_cordoned


def test_evictions_are_asked_for_in_parallel_but_not_all_at_once(
    api: ApiServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "AT_ONCE", 3)
    together, busy, most = threading.Barrier(3), 0, []
    lock = threading.Lock()

    def wait_for_the_others() -> None:
        nonlocal busy
        with lock:
            busy += 1
            most.append(busy)
        together.wait(LIMIT_SECONDS)  # broken unless three requests are here at the same time
        with lock:
            busy -= 1

    for number in range(6):
        api.add(f"web-{number}")
    api.before[EVICT] = [wait_for_the_others] * 6
    assert run()[0] == 0
    assert sorted(api.evictions) == [f"web-{number}" for number in range(6)]
    assert max(most) == 3


@contextmanager
def ended(api: ApiServer, until: Callable[[], object]) -> Iterator[list[str]]:
    """Run the drain as a process and end it as soon as something is so; yield its output, when it has ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", SHORT_SLEEPS, PROGRAM, str(api.folder)],
        env=environment(variables_of(api, "Scheduled")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        wait_until(until)
        process.terminate()
        output = process.communicate(timeout=LIMIT_SECONDS)[0]
    assert process.returncode == 75
    yield output.splitlines()


def test_a_drain_that_is_ended_says_what_each_budget_needs_and_leaves_the_node_cordoned(
    api: ApiServer,
) -> None:
    api.add("web")
    api.add("slow", deletionTimestamp="2026-11-22T09:00:00Z")
    api.lingers = {"slow": 1_000_000}
    api.before[EVICT] = answers(*[DISRUPTION] * 100_000)
    with ended(api, lambda: api.calls.count(EVICT) > 2) as output:
        reason = f"429 {BUDGET} The disruption budget web needs 2 healthy pods and has 1 currently"
        left = f"shop/slow: terminating; shop/web: {reason}"
        text = f"ended before the node was drained; evictions were asked for: 1; {left}"
        assert output == [f"drain: {text}"]
        assert api.told == [
            ("EvictionRefused", f"It is asked for again: shop/web: {reason}"),
            ("NotDrained", f"Event {EVENT}: {text}"),
        ]
        assert (api.is_cordoned, api.marks) == (True, {OWN: BOOT})


def test_a_drain_that_is_ended_while_it_waits_for_answers_says_what_it_asked_for(api: ApiServer) -> None:
    """A webhook hangs: the drain ends at once all the same, and says which requests it has sent."""
    answered = threading.Event()
    for number in range(drain.AT_ONCE + 1):
        api.add(f"web-{number:02}")

    def hang() -> None:
        answered.wait(LIMIT_SECONDS)

    api.before[EVICT] = [hang] * (drain.AT_ONCE + 1)
    with ended(api, lambda: api.calls.count(EVICT) == drain.AT_ONCE) as [line]:
        answered.set()
        assert f"evictions were asked for: {drain.AT_ONCE}; " in line
        assert line.count("asked to leave, not answered yet") == drain.AT_ONCE
        assert line.endswith(f"shop/web-{drain.AT_ONCE}: not asked to leave yet")


def test_threads_do_not_hold_up_the_end_of_the_program() -> None:
    seen: list[bool] = []
    drain.in_parallel(lambda _: seen.append(threading.current_thread().daemon), [1, 2])
    assert seen == [True, True]


def test_a_drain_that_is_ended_before_it_asked_for_anything_says_that(api: ApiServer) -> None:
    api.add("web")
    api.before["nodes", "get"] = answers(*[NO_ANSWER] * 100_000)
    with ended(api, lambda: api.calls.count(("nodes", "get")) > 2) as output:
        assert output[-1] == "drain: ended before the node was drained; no eviction was asked for"
        assert [reason for reason, _ in api.told] == ["NotDrained"]


@pytest.mark.parametrize("other", [False, True])
def test_a_pod_that_vanishes_meanwhile_counts_as_gone_and_its_successor_stays(
    api: ApiServer, run: Run, other: bool
) -> None:
    def vanish() -> None:
        del api.pods["db-0"]
        if other:
            api.add("db-0", uid="another", owner="StatefulSet")

    api.add("db-0", owner="StatefulSet")
    api.before[EVICT] = [vanish]
    assert run()[0] == 0
    assert [*api.pods] == (["db-0"] if other else [])
    assert api.evictions == ["db-0"]


@pytest.mark.parametrize("missing", sorted(rights()))
def test_a_missing_right_ends_the_drain_unless_it_is_only_to_tell_of_it_and_is_named(
    api: ApiServer, run: Run, missing: tuple[str, str]
) -> None:
    api.add("web")
    api.rights -= {missing}
    code, output = run()
    resource, verb = missing
    assert code == (0 if resource == "events" else 75)
    assert f'imds-bridge-drain" cannot {verb} resource "{resource}"' in output
    if code:
        [(reason, message)] = api.told
        assert reason == "NotDrained"
        assert f'cannot {verb} resource "{resource}"' in message


def test_the_drain_goes_on_when_the_api_server_works_again_and_the_kubelet_has_replaced_the_token(
    api: ApiServer, run: Run
) -> None:
    def replace() -> Answer:
        api.change_token("token-2")
        return status(401, "Unauthorized")

    api.add("web")
    busy = status(503, "etcdserver: leader changed")
    api.before[LIST] = answers(busy, NO_ANSWER, status(429, "too many requests"))
    api.before["nodes", "get"] = [lambda: busy, replace]
    api.before[EVICT] = answers(NO_ANSWER)
    code, output = run()
    assert (code, api.token, [*api.pods]) == (0, "token-2", [])
    assert "503 etcdserver: leader changed" in output


MARKS: dict[str, Any] = {
    "of this event": ("Completed", {OWN: BOOT}, True, False, {}),
    "of this event, which was canceled": ("Canceled", {OWN: BOOT}, True, False, {}),
    "of this event, whose end is unknown": ("Ended", {OWN: BOOT}, True, False, {}),
    "of another event, too": ("Completed", {OWN: BOOT, OTHER: BOOT}, True, True, {OTHER: BOOT}),
    "none": ("Completed", {"note": "patched by hand"}, True, True, {"note": "patched by hand"}),
    "of an event that goes on": ("Started", {OWN: BOOT}, True, True, {OWN: BOOT}),
    "from before the boot, at a heartbeat": ("", {OTHER: "earlier", "a": "b"}, True, False, {"a": "b"}),
    "from before the boot, and one of today": ("", {OTHER: "earlier", OWN: BOOT}, True, True, {OWN: BOOT}),
    "from before the boot, still announced": ("", {SHOWN: "earlier"}, True, True, {SHOWN: "earlier"}),
    "from before the boot, one still announced": (
        *("", {SHOWN: "earlier", OTHER: "earlier"}, True, True),
        {SHOWN: "earlier"},
    ),
    "from before the boot, announced, and this event's": (
        *("Completed", {SHOWN: "earlier", OWN: BOOT}, True, True),
        {SHOWN: "earlier"},
    ),
    "from before the boot, of this event": ("Completed", {OWN: "earlier"}, True, False, {}),
    "out of date": ("Scheduled", {OTHER: BOOT, "a": "b"}, False, True, {OWN: BOOT, "a": "b"}),
    "of another drain": ("Scheduled", {OTHER: BOOT}, True, True, {OTHER: BOOT, OWN: BOOT}),
    "none, but cordoned": ("Scheduled", {}, True, True, {}),
}


@pytest.mark.parametrize("name", MARKS)
def test_a_node_is_uncordoned_only_when_the_last_mark_leaves(
    api: ApiServer, run: Run, imds: ImdsLab, name: str
) -> None:
    imds.serve_document({"DocumentIncarnation": 1, "Events": [{"EventId": "602D9445"}]})
    event_status, before, is_cordoned, stays_cordoned, after = MARKS[name]
    api.node["metadata"]["annotations"] = dict(before)
    api.touch_node(unschedulable=is_cordoned)
    assert run(event_status)[0] == 0
    assert (api.is_cordoned, api.marks) == (stays_cordoned, after)
    assert (CHANGE in api.calls) == (before != after)
    is_released = event_status != "Scheduled" and is_cordoned and not stays_cordoned
    assert ("Uncordoned" in dict(api.told)) == is_released


@pytest.mark.parametrize("document", [b"{}", b"[]", b'{"Events": [{}]}', b"junk", None])
def test_a_mark_stays_while_the_document_cannot_be_read(
    api: ApiServer, run: Run, imds: ImdsLab, document: bytes | None
) -> None:
    api.node["metadata"]["annotations"] = {OTHER: "earlier"}
    api.touch_node(unschedulable=True)
    if document is None:
        imds.fault("status", status=503)
    else:
        imds.serve_document(document)
    assert run("")[0] == 75
    assert (api.is_cordoned, api.marks) == (True, {OTHER: "earlier"})
    imds.serve_document({"DocumentIncarnation": 2, "Events": []})
    assert run("")[0] == 0
    assert not api.is_cordoned


def test_who_cordons_the_node_at_the_same_time_keeps_it_cordoned(api: ApiServer, run: Run) -> None:
    api.before[CHANGE] = [lambda: api.touch_node(unschedulable=True)]
    code, output = run()
    assert (code, api.marks, api.is_cordoned) == (0, {}, True)
    assert "not by a drain: it will not be uncordoned" in output


@pytest.mark.parametrize("fault", ["down", "busy", "another authority", "no token", "no such node"])
def test_what_could_not_be_undone_is_tried_again_later(
    api: ApiServer, run: Run, tmp_path: Path, fault: str
) -> None:
    variables = {}
    match fault:
        case "down":
            with closed_port() as url:
                variables["KUBERNETES_SERVICE_PORT"] = url.rpartition(":")[2]
        case "busy":
            api.before["nodes", "get"] = answers(status(503, "busy"))
        case "another authority":
            (tmp_path / "ca.crt").write_bytes(Authority(tmp_path, "other").file.read_bytes())
        case "no token":
            (tmp_path / "token").unlink()
        case "no such node":
            variables["NODE_NAME"] = "node-7"
    expected = {
        "down": "refused",
        "busy": "503 busy",
        "another authority": "CERTIFICATE_VERIFY_FAILED",
        "no token": "No such file",
        "no such node": '404 nodes "node-7" not found',
    }
    code, output = run("Completed", **variables)
    assert (code, expected[fault] in output) == (75, True), output
    assert output.startswith("drain: ")


def test_the_readme_says_what_is_lost_and_names_every_kubernetes_event() -> None:
    text = (KUBERNETES / "README.md").read_text()
    told = set(re.findall(r'tell\("\w+", "(\w+)"', (KUBERNETES / "drain.py").read_text()))
    assert told == {"EvictionRefused", "Drained", "NotDrained", "Uncordoned"}
    assert [reason for reason in told if f"`{reason}`" not in text] == []
    assert "**Pods without a controller are evicted, too**" in text
    assert "`emptyDir`**, as with `--delete-emptydir-data`: its data is deleted with the pod" in text
    assert f"{drain.AT_ONCE} at a time" in text


def test_it_asks_the_imds_that_the_processes_of_its_pod_read() -> None:
    assert Config().imds.endpoint == drain.IMDS


def test_outside_a_pod_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert drain.main() == 75
    assert "variable 'KUBERNETES_SERVICE_HOST' is missing: this runs in a pod" in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_with_the_configuration_of_the_pod_a_node_is_drained_approved_and_uncordoned(
    api: ApiServer, tmp_path: Path
) -> None:
    text = (KUBERNETES / "drain.toml").read_text().replace("/opt/imds-bridge/bin/python", sys.executable)
    text = text.replace('"/opt/imds-bridge/drain.py"', f'"{PROGRAM}", "{tmp_path}"')
    api.add("web")
    with ImdsLab() as imds:
        given = {"imds": {"endpoint": imds.url("web-0")}, **tomllib.loads(text)}
        with (
            Forward(tmp_path / "listen", given, role="listen", env=api.environment) as listen,
            Forward(tmp_path / "forward", given, env=api.environment) as forward,
        ):
            event = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=900)
            wait_until(lambda: imds.approvals, describe=lambda: listen)
            assert (api.is_cordoned, [*api.pods]) == (True, [])
            imds.complete(event)
            wait_until(lambda: len(api.told) == 2, describe=lambda: forward)
    assert (api.is_cordoned, api.evictions) == (False, ["web"])
    assert [reason for reason, _ in api.told] == ["Drained", "Uncordoned"]


@pytest.mark.timeout(300)
def test_a_reboot_for_another_reason_leaves_the_node_cordoned_for_the_event_that_is_approved(
    api: ApiServer, tmp_path: Path
) -> None:
    text = (KUBERNETES / "drain.toml").read_text().replace("/opt/imds-bridge/bin/python", sys.executable)
    with ImdsLab() as imds:
        address = imds.url("web-0")
        text = text.replace('"/opt/imds-bridge/drain.py"', f'"{PROGRAM}", "{tmp_path}", "{address}"')
        given = {"imds": {"endpoint": address}, **tomllib.loads(text)}
        with Forward(tmp_path / "listen", given, role="listen", env=api.environment) as listen:
            event = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=900)
            wait_until(lambda: imds.approvals, describe=lambda: listen)
        [mark] = api.marks
        api.node["metadata"]["annotations"][mark] = "of an earlier boot"
        with Forward(tmp_path / "forward", given, env=api.environment) as forward:
            # The heartbeat of the start is the first event that the drain gets.
            forward.wait_for_status(lambda status: status["sinks"]["node"]["last_success_at"])
            assert (api.is_cordoned, [*api.marks]) == (True, [mark])
            imds.complete(event)
            wait_until(lambda: not api.is_cordoned, describe=lambda: forward)
    assert api.marks == {}


@pytest.mark.timeout(300)
def test_an_event_of_two_nodes_drains_both_and_nobody_approves_it(tmp_path: Path) -> None:
    text = (KUBERNETES / "drain.toml").read_text().replace("/opt/imds-bridge/bin/python", sys.executable)
    with ImdsLab(vms=("web-0", "web-1")) as imds, ExitStack() as stack:
        nodes = {}
        for name in ("web-0", "web-1"):
            (folder := tmp_path / name).mkdir()
            api = nodes[name] = stack.enter_context(ApiServer(folder))
            api.add("web")
            config = text.replace('"/opt/imds-bridge/drain.py"', f'"{PROGRAM}", "{folder}"')
            given = {"imds": {"endpoint": imds.url(name)}, **tomllib.loads(config)}
            stack.enter_context(Forward(folder / "listen", given, role="listen", env=api.environment))
        imds.schedule(event_type="Reboot", resources=["web-0", "web-1"], notice_seconds=900)
        wait_until(lambda: all(api.is_cordoned and not api.pods for api in nodes.values()))
    assert imds.approvals == []
