"""The drain on Kubernetes, against an API server that allows no more than the ClusterRole in drain.yaml."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import pytest

from bridge.runtime.time import iso_utc
from infra.kubernetes import drain
from tests.support.consumers import SHORT_SLEEPS, Script
from tests.support.imds_lab import ImdsLab
from tests.support.kubernetes import BUDGET, KUBERNETES, NO_ANSWER, Answer, ApiServer, Json, rights, status
from tests.support.only import only
from tests.support.process import LIMIT_SECONDS, Forward, wait_until
from tests.support.tls import Authority

PROGRAM = KUBERNETES / "drain.py"
EVENT = "4CAEA225-A741-474D-A72E-428C86FCD853"
BEFORE = {f"drain.imdsbridge.io/{name}": "of the version before" for name in (EVENT, "602D9444")}
# Of others than the API server, which may change their mind.
WEBHOOK = status(403, 'admission webhook "db.example.org" denied the request: the replica cannot be evicted')
POLICY = status(403, 'pods "web" is forbidden: ValidatingAdmissionPolicy "x" denied request: not now')
ECHO = status(403, 'webhook "w" denied: pods "web" is forbidden: User "eve" cannot create resource "pods"')
DISRUPTION = status(429, BUDGET, "The disruption budget web needs 2 healthy pods and has 1 currently")
EVICT, CHANGE, LIST = ("pods/eviction", "create"), ("nodes", "patch"), ("pods", "list")
DELETE = ("pods", "delete")


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as server:
        yield server


@pytest.fixture
def run(api: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the drain with arguments; it returns the exit code and what was printed."""
    monkeypatch.setattr(drain, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run_once(*arguments: str, seconds_left: float | None = None, **variables: str) -> tuple[int, str]:
        if seconds_left is not None:
            now = datetime.now(UTC)  # which stays: a busy machine needs seconds for a few requests
            frozen = type("Frozen", (datetime,), {"now": staticmethod(lambda _: now)})
            monkeypatch.setattr(drain, "datetime", frozen)
            variables["IMDS_BRIDGE_NOT_BEFORE"] = iso_utc(now + timedelta(seconds=seconds_left))
        for name, value in (variables_of(api) | variables).items():
            monkeypatch.setenv(name, value)
        return drain.main([*(arguments or ["drain"]), "--account", str(api.folder)]), capsys.readouterr().out

    return run_once


def variables_of(api: ApiServer) -> dict[str, str]:
    event = {"IMDS_BRIDGE_EVENT_STATUS": "Scheduled", "IMDS_BRIDGE_EVENT_ID": EVENT}
    return {**api.environment, **event}


def mark_of(api: ApiServer) -> str:
    """Return what the only mark says, without the time."""
    assert [*api.marks] == [drain.MARK]
    return api.marks[drain.MARK].split()[0]


def answers(*each: Answer) -> list[Callable[[], Answer | None]]:
    left = iter(each)
    return [lambda: next(left)] * len(each)


def hanging(times: int = 1) -> tuple[threading.Event, list[Callable[[], Answer | None]]]:
    """Return steps that hang until the event is set."""
    answered = threading.Event()

    def hang() -> None:
        answered.wait(LIMIT_SECONDS)

    return answered, [hang] * times


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
    assert (api.is_cordoned, mark_of(api)) == (True, "cordoned")
    assert api.calls.index(CHANGE) < api.calls.index(LIST)
    assert {*api.calls} == rights() - {DELETE}  # nothing is allowed that is not needed
    assert set(api.graces.values()) == {None}


def test_it_may_run_again_after_it_was_ended_half_way(api: ApiServer, run: Run) -> None:
    api.add("web")
    assert [run()[0], run()[0], run("recover")[0], run("recover")[0]] == [0] * 4
    assert api.evictions == ["web"]
    assert (api.is_cordoned, mark_of(api)) == (False, "recovered")


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


def test_evictions_are_asked_for_in_parallel_but_not_all_at_once(
    api: ApiServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "AT_ONCE", 3)
    together, free, was_free = threading.Barrier(3), threading.Semaphore(3), []

    def wait_for_the_others() -> None:
        was_free.append(free.acquire(blocking=False))
        together.wait(LIMIT_SECONDS)  # broken unless three requests are here at the same time
        free.release()

    for number in range(6):
        api.add(f"web-{number}")
    api.before[EVICT] = [wait_for_the_others] * 6
    assert run()[0] == 0
    assert sorted(api.evictions) == [f"web-{number}" for number in range(6)]
    assert was_free == [True] * 6  # never a fourth one


def ended(api: ApiServer, until: Callable[[], object]) -> list[str]:
    """Run the drain as a process and end it as soon as something is so; return its output."""
    arguments = ["drain", "--account", str(api.folder)]
    with Script(api.folder / "run", str(PROGRAM), arguments, env=variables_of(api)) as script:
        wait_until(until, describe=lambda: script)
        assert script.stop() == 75
    return script.output.read_text().splitlines()


def test_a_drain_that_is_ended_says_what_each_budget_needs_and_leaves_the_node_cordoned(
    api: ApiServer,
) -> None:
    api.add("web")
    api.add("slow", deletionTimestamp="2026-11-22T09:00:00Z")
    api.lingers = {"slow": 1_000_000}
    api.before[EVICT] = answers(*[DISRUPTION] * 100_000)
    output = ended(api, lambda: api.calls.count(EVICT) > 2)
    reason = f"429 {BUDGET} The disruption budget web needs 2 healthy pods and has 1 currently"
    left = f"shop/slow: terminating; shop/web: {reason}"
    text = f"ended before it was done; evictions were asked for: 1; {left}"
    assert output == [f"drain: {text}"]
    assert api.told == [
        ("EvictionRefused", f"It is asked for again: shop/web: {reason}"),
        ("NotDrained", f"Event {EVENT}: {text}"),
    ]
    assert (api.is_cordoned, mark_of(api)) == (True, "cordoned")


def test_a_drain_that_is_ended_while_it_waits_for_answers_says_what_it_asked_for(api: ApiServer) -> None:
    """A webhook hangs: the drain ends at once all the same, and says which requests it has sent."""
    for number in range(drain.AT_ONCE + 1):
        api.add(f"web-{number:02}")
    answered, api.before[EVICT] = hanging(drain.AT_ONCE + 1)
    output = ended(api, lambda: api.calls.count(EVICT) == drain.AT_ONCE)
    answered.set()
    line = only(output)
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
    output = ended(api, lambda: api.calls.count(("nodes", "get")) > 2)
    # what is tried meanwhile may print its error after that
    assert "drain: ended before it was done; no eviction was asked for" in output
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
    api.refusals["web"] = [DISRUPTION]
    code, output = run("drain", "--force", seconds_left=9)
    resource, verb = missing
    assert code == (0 if missing in (DELETE, ("events", "create")) else 75)
    assert f'imds-bridge-drain" cannot {verb} resource "{resource}"' in output
    if code:
        reason, message = only(api.told)
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
    api.before[CHANGE] = answers(WEBHOOK)
    api.before[EVICT] = answers(NO_ANSWER)
    code, output = run()
    assert (code, api.token, api.is_cordoned, [*api.pods]) == (0, "token-2", True, [])
    assert "503 etcdserver: leader changed" in output


MARKED = {drain.MARK: "cordoned 2026-11-20T12:00:00+00:00"}


@pytest.mark.parametrize(
    ("marks", "is_cordoned", "stays"),
    [
        (MARKED, True, False),
        (BEFORE, True, False),
        ({**BEFORE, **MARKED}, True, False),
        ({drain.MARK: "recovered 2026-11-20T12:00:00+00:00"}, True, True),
        ({}, True, True),
        ({}, False, False),
    ],
)
def test_a_node_is_uncordoned_if_a_drain_of_this_version_or_the_one_before_has_cordoned_it(
    api: ApiServer, run: Run, marks: dict[str, str], is_cordoned: bool, stays: bool
) -> None:
    api.node["metadata"]["annotations"] = {**marks, "a": "b"}
    api.touch_node(unschedulable=is_cordoned)
    assert run("recover")[0] == 0
    assert api.node["metadata"]["annotations"].pop("a") == "b"
    assert (api.is_cordoned, mark_of(api)) == (stays, "recovered")
    assert ("Uncordoned" in dict(api.told)) == (is_cordoned and not stays)


def set_by(*managers: str) -> list[Json]:
    """Return managedFields, as the API server has them, of who has set `unschedulable`, and of others."""
    other: Json = {"manager": "kubelet", "fieldsV1": {"f:metadata": {"f:annotations": {}}}}
    return [other, *({"manager": one, "fieldsV1": {"f:spec": {"f:unschedulable": {}}}} for one in managers)]


def test_a_node_that_somebody_else_has_cordoned_since_stays_and_is_told(api: ApiServer, run: Run) -> None:
    assert run()[0] == 0
    assert api.managers == [drain.MANAGER]
    api.node["metadata"]["managedFields"] = set_by("kubectl-cordon")
    code, text = run("recover")
    assert (code, api.is_cordoned, mark_of(api)) == (0, True, "recovered")
    who = "cordoned by kubectl-cordon after the drain, or without one"
    assert (
        text == f"drain: node-0 was {who}: it is still unschedulable, and `kubectl uncordon` puts it back\n"
    )
    api.node["metadata"] |= {"annotations": dict(MARKED), "managedFields": set_by(drain.MANAGER)}
    assert (run("recover")[0], api.is_cordoned) == (0, False)


def test_a_node_whose_mark_was_removed_is_said_to_be_still_unschedulable(api: ApiServer, run: Run) -> None:
    assert run()[0] == 0
    del api.node["metadata"]["annotations"]
    code, text = run("recover")
    assert (code, api.is_cordoned) == (0, True)
    assert "its mark was removed: it is still unschedulable, and `kubectl uncordon`" in text


@pytest.mark.parametrize("is_cordoned", [False, True])
@pytest.mark.parametrize("theirs", ["", "true"])
def test_a_node_leaves_the_load_balancers_before_the_first_eviction_and_returns_unless_others_took_it_out(
    api: ApiServer, run: Run, is_cordoned: bool, theirs: str
) -> None:
    labels = {drain.EXCLUDE: theirs} if theirs else {}
    api.node["metadata"]["labels"] = {"a": "b", **labels}
    api.touch_node(unschedulable=is_cordoned)
    api.add("web")
    before: list[str] = []
    api.before[EVICT] = [lambda: before.append(api.node["metadata"]["labels"][drain.EXCLUDE])]
    assert run(DRAIN_EXCLUDE_FROM_LOAD_BALANCERS="true")[0] == 0
    assert before == [theirs or drain.MANAGER]
    assert run("recover")[0] == 0
    assert api.node["metadata"]["labels"] == {"a": "b", **labels}
    assert api.is_cordoned == is_cordoned


# The condition of the node.

READY = {
    "type": "Ready",
    "status": "True",
    "reason": "KubeletReady",
    "lastTransitionTime": "2026-11-01T00:00:00Z",
}
DISK = {"type": "DiskPressure", "status": "False"}
STATUS = ("nodes/status", "patch")
REBOOT = {"EventId": "A1", "EventStatus": "Scheduled", "EventType": "Reboot", "Resources": ["WEB-0", "web-1"]}
FREEZE = REBOOT | {"EventId": "F2", "EventType": "Freeze", "NotBefore": "Fri, 27 Nov 2026 02:00:00 GMT"}
LATE = REBOOT | {"NotBefore": "Fri, 27 Nov 2026 03:00:02 GMT", "EventSource": "Platform"}
STARTED = REBOOT | {"EventId": "S3", "EventStatus": "Started", "NotBefore": ""}


@pytest.fixture
def tell(api: ApiServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Return a function that tells of a document with events; the node has conditions of its kubelet."""
    api.rights |= {STATUS}
    api.node["status"] = {"conditions": [dict(READY), dict(DISK)]}

    def tell_once(*events: object, unreadable: int = 0, name: str = "web-0") -> tuple[int, str]:
        document = {"DocumentIncarnation": 2, "Events": [*events]}
        data = {"Document": document, "Unreadable": unreadable, "Vm": {"Name": name}}
        monkeypatch.setattr(sys, "stdin", StringIO(json.dumps({"type": "document.changed", "data": data})))
        return run("tell")

    return tell_once


def condition(api: ApiServer) -> tuple[str, str, str]:
    """Return status, reason and message, if all conditions of the kubelet are as they were."""
    *others, own = api.node["status"]["conditions"]
    assert (others, own["type"]) == ([READY, DISK], drain.CONDITION)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]{8}Z", own["lastHeartbeatTime"])
    return own["status"], own["reason"], own["message"]


NONE = ("False", "NoScheduledEvent", "Scheduled events of this VM: 0; that cannot be read: 0")
SOON = "EventId A1, EventStatus Scheduled, NotBefore Fri, 27 Nov 2026 03:00:02 GMT, EventSource Platform"


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], NONE),
        ([LATE | {"Resources": ["web-1"]}, 7], NONE),
        ([LATE], ("True", "Reboot", f"{SOON}; later: 0")),
        ([LATE | {"Resources": "_web-0"}], ("True", "Reboot", f"{SOON}; later: 0")),
        ([LATE | {"Resources": []}], ("True", "Reboot", f"{SOON}; later: 0")),
        (
            [LATE, FREEZE],
            (
                *("True", "Freeze"),
                "EventId F2, EventStatus Scheduled, NotBefore Fri, 27 Nov 2026 02:00:00 GMT, EventSource -; later: 1",
            ),
        ),
        (
            [FREEZE, STARTED],
            ("True", "Reboot", "EventId S3, EventStatus Started, NotBefore -, EventSource -; later: 1"),
        ),
    ],
)
def test_the_condition_tells_of_the_earliest_event_of_this_vm_and_the_others_stay(
    api: ApiServer, tell: Run, events: list[object], told: tuple[str, str, str]
) -> None:
    assert tell(*events)[0] == 0
    assert condition(api) == told
    assert [call for call in api.calls if call[1] != "get"] == [STATUS]
    assert api.node["spec"] == {}


def test_the_condition_is_unknown_while_an_event_cannot_be_read_or_may_be_of_this_vm(
    api: ApiServer, tell: Run
) -> None:
    assert (tell(unreadable=1)[0], condition(api)[0]) == (0, "Unknown")
    assert (tell(LATE | {"Resources": ["web-1"]}, name="")[0], condition(api)[0]) == (0, "True")


def test_the_condition_keeps_the_time_of_its_last_transition_until_its_status_changes(
    api: ApiServer, tell: Run
) -> None:
    def since() -> str:
        return str(api.node["status"]["conditions"][-1]["lastTransitionTime"])

    assert tell(LATE)[0] == 0
    api.node["status"]["conditions"][-1]["lastTransitionTime"] = "2026-11-02T00:00:00Z"
    assert (tell(STARTED)[0], since()) == (0, "2026-11-02T00:00:00Z")
    assert (tell()[0], condition(api)) == (0, NONE)
    assert since() > "2026-11-02"


@pytest.mark.parametrize("given", ["", "[", "{}", '{"data": {"EventId": "A1"}}'])
def test_what_is_no_document_is_said(run: Run, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(given))
    code, text = run("tell")
    assert code == drain.FAILED
    assert "expected on standard input: an event document.changed" in text or "Expecting value" in text


def test_without_the_right_the_condition_is_tried_again_and_the_right_is_named(
    api: ApiServer, tell: Run
) -> None:
    api.rights -= {STATUS}
    code, text = tell(LATE)
    assert (code, 'cannot patch resource "nodes/status"' in text) == (drain.FAILED, True)
    assert api.node["status"]["conditions"] == [READY, DISK]


@pytest.mark.parametrize("at", ["read", "changed"])
def test_a_cordon_that_arrives_while_the_node_is_put_back_is_undone(
    api: ApiServer, run: Run, at: str
) -> None:
    def cordon() -> None:
        api.node["metadata"]["annotations"] = dict(MARKED)
        api.touch_node(unschedulable=True)

    api.before[("nodes", "get") if at == "read" else CHANGE] = [cordon]
    assert run("recover")[0] == 0
    assert (api.is_cordoned, mark_of(api)) == (False, "recovered")


@pytest.mark.parametrize(
    ("seconds_left", "grace", "expected"),
    [(None, 60, None), (64, 60, None), (60, 60, 56), (30, 60, 26), (30, 20, None), (5, 60, 1), (-3, 60, 1)],
)
def test_a_pod_has_as_long_to_end_as_is_left_less_three_seconds(
    api: ApiServer, run: Run, seconds_left: float | None, grace: int, expected: int | None
) -> None:
    api.add("web", grace=grace)
    assert run(seconds_left=seconds_left)[0] == 0
    assert api.graces == {"web": expected}


@pytest.mark.parametrize(
    ("arguments", "seconds_left", "deleted"),
    [
        (["drain", "--force"], 11, ["web"]),
        (["drain", "--force"], -3, ["web"]),
        (["drain", "--force"], 30, []),
        (["drain", "--force"], None, []),
        (["drain"], 11, []),
    ],
)
def test_with_force_what_is_refused_in_the_last_seconds_is_deleted_with_what_is_left(
    api: ApiServer, run: Run, arguments: list[str], seconds_left: float | None, deleted: list[str]
) -> None:
    api.add("web")
    api.add("willing")
    api.refusals["web"] = [DISRUPTION, NO_ANSWER]
    assert run(*arguments, seconds_left=seconds_left)[0] == 0
    assert (api.deletions, api.pods) == (deleted, {})


def test_with_force_an_eviction_that_hangs_is_not_waited_for_beyond_the_last_twelve_seconds(
    api: ApiServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "FORCE_ANSWER_SECONDS", 0.05)
    api.add("web")
    answered, api.before[EVICT] = hanging()
    assert run("drain", "--force", seconds_left=11)[0] == 0
    answered.set()
    assert api.deletions == ["web"]


NODES_WEBHOOK = status(500, 'failed calling webhook "nodes.example.org": connection refused')


@pytest.mark.parametrize("event_type", ["Preempt", "Terminate"])
def test_pods_of_a_vm_that_goes_away_leave_although_the_node_cannot_be_cordoned(
    api: ApiServer, run: Run, monkeypatch: pytest.MonkeyPatch, event_type: str
) -> None:
    monkeypatch.setattr(drain, "CORDON_SECONDS", 0.05)
    api.add("web")
    api.before[CHANGE] = answers(*[NODES_WEBHOOK] * 10_000)
    code, text = run(seconds_left=30, IMDS_BRIDGE_EVENT_TYPE=event_type)
    assert (code, api.pods, api.is_cordoned) == (drain.FAILED, {}, False)
    assert "is not cordoned: other pods may have come" in text
    assert [reason for reason, _ in api.told] == ["NotDrained"]


def test_pods_of_a_vm_that_goes_away_leave_while_a_webhook_on_nodes_hangs(
    api: ApiServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "CORDON_SECONDS", 0.05)
    api.add("web")
    answered, api.before[CHANGE] = hanging()
    code, _ = run(seconds_left=30, IMDS_BRIDGE_EVENT_TYPE="Preempt")
    answered.set()
    assert (code, api.pods) == (drain.FAILED, {})


@pytest.mark.parametrize(("arguments", "left"), [(["drain", "--force"], 0.0), (["drain"], None)])
def test_with_force_pods_leave_in_the_last_third_without_a_cordon_and_else_never(
    api: ApiServer, run: Run, arguments: list[str], left: float | None
) -> None:
    api.add("web")
    denials = [NODES_WEBHOOK] * (10_000 if left is not None else 3)
    api.before[CHANGE] = answers(*denials)
    code, text = run(*arguments, seconds_left=0.2, IMDS_BRIDGE_EVENT_TYPE="Reboot")
    assert (code, api.pods) == (0 if left is None else drain.FAILED, {})
    assert ("asked to leave without that" in text) == (left is not None)
    assert api.is_cordoned == (left is None)


@pytest.mark.parametrize("force", [True, False])
def test_a_cordon_that_is_refused_for_good_ends_the_drain_at_once_unless_force_waits_for_the_last_third(
    api: ApiServer, run: Run, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    api.add("web")
    api.rights -= {CHANGE}
    flags = ["--force"] if force else []
    code, text = run("drain", *flags, seconds_left=900, IMDS_BRIDGE_EVENT_TYPE="Reboot")
    assert (code, [*api.pods]) == (drain.FAILED, [] if force else ["web"])
    assert 'cannot patch resource "nodes"' in text
    assert [round(one, -1) for one in slept if one > drain.PAUSE_SECONDS] == ([600] if force else [])


@pytest.mark.parametrize("command", ["drain", "recover"])
def test_a_node_that_is_gone_needs_no_cordon_and_no_recover(api: ApiServer, run: Run, command: str) -> None:
    api.add("web")
    api.before["nodes", "get"] = answers(status(404, 'nodes "node-7" not found'))
    code, text = run(command, IMDS_BRIDGE_EVENT_TYPE="Preempt")
    assert (code, [*api.pods]) == (0, ["web"] if command == "recover" else [])
    assert "is no node of the cluster any more" in text


def test_variables_take_force_away_and_add_cordon_only(api: ApiServer, run: Run) -> None:
    api.add("web")
    api.refusals["web"] = [DISRUPTION]
    code, text = run("drain", "--force", seconds_left=11, DRAIN_FORCE="false")
    assert (code, api.deletions, api.pods) == (0, [], {})
    done = "pods that left: 1 (DRAIN_FORCE=false: no pod is deleted)"
    assert text.endswith(f"node-0 is drained; {done}\n")
    assert api.told[-1] == ("Drained", f"Drained for event {EVENT}; {done}")
    api.add("web")
    code, text = run("drain", "--force", DRAIN_FORCE="", DRAIN_CORDON_ONLY="true")
    assert (code, [*api.pods]) == (0, ["web"])
    kept = "no pod is evicted (DRAIN_CORDON_ONLY=true)"
    assert text == f"drain: node-0 is cordoned; {kept}\n"
    assert api.told[-1] == ("Cordoned", f"Cordoned only, for event {EVENT}; {kept}")


@pytest.mark.parametrize("variable", ["DRAIN_FORCE", "DRAIN_CORDON_ONLY"])
def test_another_word_in_a_variable_is_an_error(api: ApiServer, run: Run, variable: str) -> None:
    code, text = run(**{variable: "maybe"})
    assert code == drain.FAILED
    assert f"{variable} is 'maybe'; expected" in text
    assert not api.is_cordoned


def test_a_missing_right_to_delete_is_told_once_and_evictions_go_on(api: ApiServer, run: Run) -> None:
    """The role is that of the version before."""
    api.rights -= {DELETE}
    api.add("web")
    api.add("other")
    api.refusals = {"web": [DISRUPTION] * 3, "other": [DISRUPTION]}
    code, output = run("drain", "--force", seconds_left=9)
    why = 'cannot delete resource "pods"'
    assert (code, api.pods, output.count(why)) == (0, {}, 1)
    assert [(reason, why in text) for reason, text in api.told] == [
        ("EvictionRefused", False),
        ("DeletionRefused", True),
        ("Drained", False),
    ]


def test_a_node_that_is_only_to_be_cordoned_keeps_its_pods(api: ApiServer, run: Run) -> None:
    api.add("web")
    assert run("drain", "--cordon-only") == (0, "drain: node-0 is cordoned; no pod is evicted\n")
    assert (api.is_cordoned, api.evictions) == (True, [])


def test_who_cordons_the_node_at_the_same_time_keeps_it_cordoned(api: ApiServer, run: Run) -> None:
    api.before[CHANGE] = [lambda: api.touch_node(unschedulable=True)]
    code, output = run()
    assert (code, api.marks, api.is_cordoned) == (0, {}, True)
    assert "not by a drain: it will not be uncordoned" in output


@pytest.mark.parametrize(
    ("fault", "variables"),
    [
        ("Connection refused", {"KUBERNETES_SERVICE_PORT": "1"}),
        ("503 busy", {}),
        ("CERTIFICATE_VERIFY_FAILED", {}),
        ("No such file", {}),
    ],
)
def test_what_could_not_be_undone_is_tried_again_later(
    api: ApiServer, run: Run, tmp_path: Path, fault: str, variables: dict[str, str]
) -> None:
    match fault:
        case "503 busy":
            api.before["nodes", "get"] = answers(status(503, "busy"))
        case "CERTIFICATE_VERIFY_FAILED":
            (tmp_path / "ca.crt").write_bytes(Authority(tmp_path, "other").file.read_bytes())
        case "No such file":
            (tmp_path / "token").unlink()
    code, output = run("recover", **variables)
    assert (code, output.startswith("drain: "), fault in output) == (75, True, True), output


def test_the_readme_says_what_is_lost_and_names_every_kubernetes_event() -> None:
    text = (KUBERNETES / "README.md").read_text()
    told = set(re.findall(r'tell\("\w+", "(\w+)"', PROGRAM.read_text()))
    assert len(told) == 6
    assert [reason for reason in told if f"`{reason}`" not in text] == []
    assert f"{drain.AT_ONCE} at a time" in text
    assert f"until {drain.SPARE_SECONDS:g} s before NotBefore" in text
    assert f"until {drain.FORCE_SECONDS:g} s before NotBefore; then the pod is deleted" in text


def test_outside_a_pod_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert drain.main(["recover"]) == 75
    assert "variable 'KUBERNETES_SERVICE_HOST' is missing: this runs in a pod" in capsys.readouterr().out


@contextmanager
def listening(api: ApiServer, imds: ImdsLab, vm: str = "web-0", **variables: str) -> Iterator[Forward]:
    """Run listen with the configuration of the pod."""
    given = {"imds": {"endpoint": imds.url(vm)}, **tomllib.loads((KUBERNETES / "drain.toml").read_text())}
    for rule in given["approvals"]["auto"]:
        for name in ("run", "recover"):
            assert rule[name][:2] == ["/opt/imds-bridge/bin/python", "/opt/imds-bridge/drain.py"]
            rule[name][:2] = [sys.executable, "-c", SHORT_SLEEPS, str(PROGRAM), "--account", str(api.folder)]
    with Forward(api.folder / "listen", given, role="listen", env=api.environment | variables) as listen:
        yield listen


@pytest.mark.parametrize(
    ("event_type", "notice_seconds", "deleted", "told"),
    [
        ("Reboot", 900, [], ["EvictionRefused", "Drained", "Uncordoned"]),
        ("Preempt", drain.FORCE_SECONDS, ["web"], ["Drained", "Uncordoned"]),
    ],
)
def test_with_the_configuration_of_the_pod_a_node_is_drained_approved_and_uncordoned(
    api: ApiServer, event_type: str, notice_seconds: float, deleted: list[str], told: list[str]
) -> None:
    api.add("web")
    api.refusals["web"] = [DISRUPTION]
    with ImdsLab() as imds, listening(api, imds) as listen:
        event = imds.schedule(event_type=event_type, resources=["web-0"], notice_seconds=notice_seconds)
        wait_until(lambda: imds.approvals, describe=lambda: listen)
        assert (api.is_cordoned, [*api.pods], api.deletions) == (True, [], deleted)
        imds.complete(event)
        wait_until(lambda: len(api.told) == len(told), describe=lambda: listen)
    assert not api.is_cordoned
    assert [reason for reason, _ in api.told] == told


def test_the_listener_gives_the_switches_of_the_pod_to_the_drain(api: ApiServer) -> None:
    api.add("web")
    switches = {"DRAIN_CORDON_ONLY": "true", "DRAIN_EXCLUDE_FROM_LOAD_BALANCERS": "true"}
    with ImdsLab() as imds, listening(api, imds, **switches) as listen:
        imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=900)
        wait_until(lambda: imds.approvals, describe=lambda: listen)
        done = "no pod is evicted (DRAIN_CORDON_ONLY=true)"
        assert done in listen.log.read_text()  # written before the approval
    assert (api.is_cordoned, [*api.pods]) == (True, ["web"])
    assert [(reason, text.partition("; ")[2]) for reason, text in api.told] == [("Cordoned", done)]
    assert api.node["metadata"]["labels"] == {drain.EXCLUDE: drain.MANAGER}


def test_the_listener_takes_force_away_and_says_so_in_its_log_and_the_event(api: ApiServer) -> None:
    api.add("web")
    api.refusals["web"] = [DISRUPTION]
    with ImdsLab() as imds, listening(api, imds, DRAIN_FORCE="false") as listen:
        imds.schedule(event_type="Preempt", resources=["web-0"], notice_seconds=drain.FORCE_SECONDS)
        wait_until(lambda: imds.approvals, describe=lambda: listen)
        done = "pods that left: 1 (DRAIN_FORCE=false: no pod is deleted)"
        assert done in listen.log.read_text()  # written before the approval
    assert api.deletions == []
    assert (api.told[-1][0], api.told[-1][1].partition("; ")[2]) == ("Drained", done)


def test_a_forward_with_the_sink_of_the_chart_tells_the_node_what_comes_and_that_it_is_over(
    api: ApiServer,
) -> None:
    api.rights |= {STATUS}
    api.node["status"] = {"conditions": [dict(READY), dict(DISK)]}
    run = [sys.executable, str(PROGRAM), "tell", "--account", str(api.folder)]
    types = ["io.imdsbridge.document.changed.v1"]
    with ImdsLab() as imds:
        given = {
            "imds": {"endpoint": imds.url("web-0")},
            "sinks": {"node_condition": {"kind": "exec", "run": run, "types": types}},
        }
        with Forward(api.folder / "forward", given, env=api.environment) as forward:
            event = imds.schedule(event_type="Freeze", resources=["web-0"], notice_seconds=900)
            wait_until(lambda: len(api.node["status"]["conditions"]) > 2, describe=lambda: forward)
            wait_until(lambda: condition(api)[:2] == ("True", "Freeze"), describe=lambda: forward)
            imds.complete(event)
            wait_until(lambda: condition(api) == NONE, describe=lambda: forward)


def test_a_cordon_that_is_on_its_way_when_its_event_is_canceled_conflicts(api: ApiServer) -> None:
    released, api.before[CHANGE] = hanging()
    with ImdsLab() as imds, listening(api, imds) as listen:
        event = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=900)
        wait_until(lambda: CHANGE in api.calls and not api.before[CHANGE], describe=lambda: listen)
        imds.cancel(event)
        wait_until(lambda: api.marks, describe=lambda: listen)
        released.set()
        wait_until(lambda: api.conflicts)
    assert (api.is_cordoned, mark_of(api)) == (False, "recovered")


def test_an_event_of_two_nodes_drains_both_and_nobody_approves_it(tmp_path: Path) -> None:
    names = ("web-0", "web-1")
    with ImdsLab(vms=names) as imds, ExitStack() as stack:
        for name in names:
            (tmp_path / name).mkdir()
        nodes = {name: stack.enter_context(ApiServer(tmp_path / name)) for name in names}
        for name, api in nodes.items():
            api.add("web")
            stack.enter_context(listening(api, imds, name))
        imds.schedule(event_type="Reboot", resources=[*names], notice_seconds=900)
        wait_until(lambda: all(api.is_cordoned and not api.pods for api in nodes.values()))
    assert imds.approvals == []
