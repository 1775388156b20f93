"""The simulated IMDS is as strict as the real one, over real sockets."""

from __future__ import annotations

import json
import threading
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest
import requests

from bridge.lab.httpd import LabError
from bridge.lab.imds import COMPUTE_PATH, EVENT_TYPES, EVENT_VERSIONS, EVENTS_PATH, INSTANCE_PATH
from tests.support.imds_lab import ImdsLab
from tests.support.paths import DATA

LIMIT_SECONDS = 20
HEADER = {"Metadata": "true"}
PREVIEW, NEWEST = EVENT_VERSIONS[0], EVENT_VERSIONS[-1]
INSTANCE = "2021-02-01"
EVENT_ID = "4CAEA225-A741-474D-A72E-428C86FCD853"
RECORDED = sorted((DATA / "imds").glob("*.json"))


def ask(
    imds: ImdsLab,
    path: str = EVENTS_PATH,
    vm: str = "web-0",
    *,
    method: str = "GET",
    version: str | None = NEWEST,
    timeout: float = LIMIT_SECONDS,
    **options: Any,
) -> requests.Response:
    """Ask as a good client does, except for what is given."""
    options.setdefault("headers", HEADER)
    params = {} if version is None else {"api-version": version}
    return requests.request(method, imds.url(vm) + path, params=params, timeout=timeout, **options)


def document(imds: ImdsLab, vm: str = "web-0", *, version: str = NEWEST) -> dict[str, Any]:
    answer = ask(imds, vm=vm, version=version)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def statuses(imds: ImdsLab) -> list[str]:
    return [event["EventStatus"] for event in document(imds)["Events"]]


def approve(imds: ImdsLab, *event_ids: str, vm: str = "web-0") -> int:
    body = {"StartRequests": [{"EventId": one} for one in event_ids]}
    return ask(imds, vm=vm, method="POST", json=body).status_code


def compute(imds: ImdsLab, vm: str = "web-0") -> dict[str, Any]:
    found: dict[str, Any] = ask(imds, COMPUTE_PATH, vm, version=INSTANCE).json()
    return found


def reboot(imds: ImdsLab, *vms: str, **values: Any) -> str:
    return imds.schedule(event_type="Reboot", resources=vms or ("web-0",), **values)


# --- requests that are refused ---


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"headers": {}}, 400),
        ({"headers": {"Metadata": "false"}}, 400),
        ({"headers": {"METADATA": "TRUE"}}, 200),
        ({"headers": {}, "version": PREVIEW}, 200),
        ({"headers": {}, "version": "2017-08-01"}, 400),
        ({"headers": {**HEADER, "X-Forwarded-For": "10.0.0.1"}}, 400),
        ({"version": None}, 400),
        ({"version": "2018-01-01"}, 400),
        ({"path": "/metadata/ScheduledEvents"}, 404),
        ({"path": f"{EVENTS_PATH}/"}, 200),
        ({"method": "PUT"}, 405),
        ({"method": "HEAD"}, 405),
        ({"path": COMPUTE_PATH, "version": INSTANCE}, 200),
        ({"path": COMPUTE_PATH, "version": INSTANCE, "headers": {}}, 400),
        ({"path": COMPUTE_PATH, "version": NEWEST}, 400),
        ({"path": COMPUTE_PATH, "version": INSTANCE, "method": "POST"}, 405),
    ],
)
def test_a_request_is_answered_or_refused_as_by_the_service(
    imds: ImdsLab, given: dict[str, Any], status: int
) -> None:
    assert ask(imds, **given).status_code == status


def test_a_wrong_version_is_answered_with_the_known_ones(imds: ImdsLab) -> None:
    assert ask(imds, version="latest").json()["newest-versions"] == sorted(EVENT_VERSIONS, reverse=True)


def test_each_vm_may_send_a_limited_number_of_requests_in_a_lab_second() -> None:
    with ImdsLab(vms=["web-0", "web-1"], time_scale=0.02) as imds:  # one lab second is 50 real seconds
        event_id = reboot(imds)
        assert [ask(imds).status_code for _ in range(3)] == [200] * 3
        assert approve(imds, event_id) == 200
        assert ask(imds, COMPUTE_PATH, version=INSTANCE).status_code == 200
        assert [ask(imds, vm=vm).status_code for vm in imds.vms] == [429, 200]
    with ImdsLab(vms=["web-0"], time_scale=10, rate_limit=1) as imds:
        ask(imds)
        imds.wait_for(lambda: ask(imds).status_code == 429, LIMIT_SECONDS)
        pause = threading.Event()
        imds.wait_for(lambda: pause.wait(0.2) or ask(imds).status_code == 200, LIMIT_SECONDS)


# --- what each api-version shows ---

FIELDS_2019_01 = {"EventId", "EventType", "ResourceType", "Resources", "EventStatus", "NotBefore"}
LATER_FIELDS = {"2019-04-01": "Description", "2019-08-01": "EventSource", "2020-07-01": "DurationInSeconds"}
LATER_TYPES = {"Preempt": "2017-11-01", "Terminate": "2019-01-01"}


@pytest.mark.parametrize("version", EVENT_VERSIONS)
def test_a_version_shows_only_the_fields_types_and_forms_it_has(imds: ImdsLab, version: str) -> None:
    for event_type in EVENT_TYPES:
        imds.schedule(event_type=event_type, resources=["web-0"])
    content = document(imds, version=version)
    event = content["Events"][0]
    assert set(event) == FIELDS_2019_01 | {name for since, name in LATER_FIELDS.items() if version >= since}
    shown = [one["EventType"] for one in content["Events"]]
    assert shown == [one for one in EVENT_TYPES if version >= LATER_TYPES.get(one, PREVIEW)]
    is_preview = version == PREVIEW
    assert event["Resources"] == ["_web-0" if is_preview else "web-0"]
    assert event["NotBefore"].endswith("Z" if is_preview else " GMT")
    assert content["DocumentIncarnation"] == ("6" if is_preview else 6)


@pytest.mark.parametrize("name", ["live-migration", "terminate-2019-01-01", "user-reboot"])
def test_fields_stand_in_the_order_of_the_real_documents(imds: ImdsLab, name: str) -> None:
    recorded = json.loads((DATA / "imds" / f"{name}.json").read_text())["documents"]
    (real, *_) = [event for one in recorded for event in one["Events"]]
    imds.schedule(event_type=real["EventType"], resources=["web-0"])
    shown = document(imds, version="2019-01-01" if "2019-01-01" in name else NEWEST)
    assert (list(shown), list(shown["Events"][0])) == (list(recorded[0]), list(real))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_tests_can_serve_any_document_and_approve_its_events(imds: ImdsLab, path: Path) -> None:
    for recorded in json.loads(path.read_text())["documents"]:
        imds.serve_document(recorded)
        assert document(imds, "web-0") == document(imds, "web-1") == recorded
        for event in recorded["Events"]:
            assert approve(imds, event["EventId"].lower()) == 200
    assert approve(imds, "another") == 400
    imds.serve_document(b"\xff not json")
    assert ask(imds).content == b"\xff not json"
    imds.serve_document(None)
    assert document(imds) == {"DocumentIncarnation": 1, "Events": []}


# --- the life of an event ---


def test_an_event_goes_through_its_life_by_hand_and_every_vm_sees_it() -> None:
    reports: list[str] = []
    with ImdsLab(vms=["web-0", "web-1"], rate_limit=None, report=reports.append) as imds:
        reboot(imds, event_id=EVENT_ID)
        imds.update(EVENT_ID, Resources=["web-0", "web-1"], Mood="fine")
        content = document(imds, "web-1")
        assert (content["DocumentIncarnation"], content["Events"][0]["Mood"]) == (3, "fine")
        imds.start(EVENT_ID)
        assert [(one["EventStatus"], one["NotBefore"]) for one in imds.events] == [("Started", "")]
        with pytest.raises(LabError, match="has started"):
            imds.cancel(EVENT_ID)
        imds.complete(EVENT_ID)
        assert document(imds) == {"DocumentIncarnation": 5, "Events": []}
        imds.cancel(reboot(imds))
        assert document(imds)["DocumentIncarnation"] == 7
        with pytest.raises(LabError, match="it has none"):
            imds.start("no-such-event")
    assert reports[1:3] == [
        f"Reboot {EVENT_ID} of web-0, web-1 changes: Resources, Mood",
        f"Reboot {EVENT_ID} of web-0, web-1 is Started",
    ]


def test_an_unapproved_event_starts_at_the_not_before_that_it_showed_and_completes() -> None:
    with ImdsLab(vms=["web-0"], time_scale=10, rate_limit=None) as imds:
        before = time.time()
        reboot(imds, notice_seconds=15, completes=True, impact_seconds=5)
        shown = parsedate_to_datetime(imds.events[0]["NotBefore"]).timestamp()
        assert before + 0.5 <= shown <= time.time() + 1.5  # whole seconds, rounded down
        imds.wait_for(lambda: imds.events[0]["EventStatus"] == "Started", LIMIT_SECONDS)
        assert time.time() >= shown
        imds.wait_for(lambda: not imds.events, LIMIT_SECONDS)


def test_a_changed_notice_moves_the_start_and_an_event_without_impact_stays(imds: ImdsLab) -> None:
    event_id = reboot(imds)
    imds.update(event_id, notice_seconds=0)
    imds.wait_for(lambda: imds.events[0]["EventStatus"] == "Started", LIMIT_SECONDS)
    assert statuses(imds) == ["Started"]


# --- approvals ---


def test_an_approved_event_is_started_in_the_next_document_and_only_once(imds: ImdsLab) -> None:
    first, second = reboot(imds, "web-0", "web-1"), reboot(imds)
    assert approve(imds, first.lower(), second, vm="web-1") == 200
    assert statuses(imds) == ["Started", "Started"]
    incarnation = imds.incarnation
    assert approve(imds, first) == 200
    assert imds.incarnation == incarnation
    assert [(one.vm, one.event_id) for one in imds.approvals] == [
        ("web-1", first.lower()),
        ("web-1", second),
        ("web-0", first),
    ]


def test_one_unknown_id_among_several_refuses_them_all(imds: ImdsLab) -> None:
    event_id = reboot(imds)
    assert approve(imds, event_id, EVENT_ID) == 400
    assert (statuses(imds), imds.approvals) == (["Scheduled"], [])


STARTS = ("[]", "{}", '["x"]', "[{}]", '[{"EventId": ""}]', '[{"EventId": 5}]')


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[]", b"\xff\xfe", *(f'{{"StartRequests": {one}}}'.encode() for one in STARTS)]
)
def test_a_malformed_approval_is_refused(imds: ImdsLab, body: bytes) -> None:
    answer = ask(imds, method="POST", data=body)
    assert (answer.status_code, answer.json()["error"][:12]) == (400, "Bad request.")


def test_a_held_event_starts_after_approval_and_release_or_at_its_time(imds: ImdsLab) -> None:
    first, second = reboot(imds, hold=True), reboot(imds, hold=True)
    third = reboot(imds, hold=True, notice_seconds=0.5)
    assert approve(imds, first, third) == 200
    imds.release(second)
    imds.wait_for(lambda: statuses(imds) == ["Scheduled", "Scheduled", "Started"], LIMIT_SECONDS)
    imds.release(first)
    assert approve(imds, second) == 200
    assert statuses(imds) == ["Started"] * 3


def test_an_unapproved_deletion_delays_an_approved_one_until_its_deadline(imds: ImdsLab) -> None:
    first, second, third = (
        imds.schedule(event_type="Terminate", resources=[vm], notice_seconds=seconds)
        for vm, seconds in (("web-0", 900), ("web-1", 900), ("web-0", 1))
    )
    reboot(imds)
    assert approve(imds, first, vm="web-1") == 400  # each VM approves only its own deletion
    assert approve(imds, first, third) == 200
    imds.wait_for(lambda: statuses(imds) == ["Scheduled", "Scheduled", "Started", "Scheduled"], LIMIT_SECONDS)
    assert approve(imds, second, vm="web-1") == 200
    assert statuses(imds) == ["Started", "Started", "Started", "Scheduled"]


# --- instance data ---


def test_instance_data_describes_the_vm_in_texts(imds: ImdsLab) -> None:
    own = compute(imds)
    assert (own["name"], own["vmScaleSetName"], own["osType"]) == ("web-0", "web", "Linux")
    assert own["resourceId"].endswith("/virtualMachines/web-0")
    assert {type(value) for name, value in own.items() if name != "tagsList"} == {str}
    assert ask(imds, INSTANCE_PATH, version=INSTANCE).json() == {"compute": own}
    with ImdsLab(vms=["web-0"]) as again:
        assert compute(again)["vmId"] == own["vmId"] != compute(imds, "web-1")["vmId"]


def test_a_vm_can_be_of_a_uniform_scale_set_or_of_none_and_in_another_group() -> None:
    with ImdsLab(vms=["workers_4"], scale_set="workers", resource_group="shop") as imds:
        found = compute(imds, "workers_4")["resourceId"]
        assert "/resourceGroups/shop/" in found
        assert found.endswith("/virtualMachineScaleSets/workers/virtualMachines/4")
    with ImdsLab(vms=["alone"], scale_set="") as imds:
        alone = compute(imds, "alone")
        assert (alone["vmScaleSetName"], alone["placementGroupId"]) == ("", "")


# --- faults ---


def test_faults_are_served_in_order_until_their_count_is_used_or_they_are_cleared(imds: ImdsLab) -> None:
    imds.fault("gone", count=2, retry_after=7)
    imds.fault(503, count=None)
    answers = [ask(imds) for _ in range(5)]
    assert [one.status_code for one in answers] == [410, 410, 503, 503, 503]
    assert answers[0].headers["Retry-After"] == "7"
    imds.clear_faults()
    assert ask(imds).status_code == 200


def test_a_fault_can_be_meant_for_one_vm_one_method_or_one_path(imds: ImdsLab) -> None:
    event_id = reboot(imds)
    imds.fault(500, vm="web-1")
    imds.fault("service-unavailable", method="POST")
    imds.fault(404, path=INSTANCE_PATH)
    assert [ask(imds, vm=vm).status_code for vm in ("web-0", "web-1")] == [200, 500]
    assert [approve(imds, event_id) for _ in range(2)] == [503, 200]
    assert ask(imds, COMPUTE_PATH, version=INSTANCE).status_code == 404


def test_an_answer_can_be_slow_missing_or_lost(imds: ImdsLab) -> None:
    event_id = reboot(imds)
    for kind, status in (("drop", "Scheduled"), ("lost_answer", "Started")):
        imds.fault(kind, method="POST")
        with pytest.raises(requests.ConnectionError):
            approve(imds, event_id)
        assert statuses(imds) == [status]
    imds.fault("timeout")
    with pytest.raises(requests.Timeout):
        ask(imds, timeout=0.3)
    imds.fault("slow", seconds=0.3)
    started = time.monotonic()
    assert statuses(imds) == ["Started"]
    assert time.monotonic() - started >= 0.3


def test_an_answer_can_be_wrong_in_many_ways(imds: ImdsLab) -> None:
    right = ask(imds).content
    for kind in ("empty", "garbage", "junk_prefix", "huge"):
        imds.fault(kind)
    empty, garbage, junk, huge = (ask(imds) for _ in range(4))
    assert [one.status_code for one in (empty, garbage, junk, huge)] == [200] * 4
    assert (empty.content, garbage.content[:6], junk.content) == (b"", b"<html>", b"\x00junk " + right)
    assert len(huge.content) > 4 * 1024 * 1024
    imds.fault(302)
    ask(imds)
    assert imds.requests()[-1].path == "/redirected"


def test_a_request_is_recorded_with_what_was_sent_and_answered(imds: ImdsLab) -> None:
    ask(imds, vm="web-1", method="POST", data=b"{}", headers={**HEADER, "X-Mark": "7"})
    (request,) = imds.requests("web-1")
    assert (request.method, request.path, request.query) == ("POST", EVENTS_PATH, f"api-version={NEWEST}")
    assert (request.headers["x-mark"], request.body, request.status) == ("7", b"{}", 400)
    assert imds.requests("web-0") == []


# --- the lab itself, and its control API ---


@pytest.mark.parametrize("options", [{"vms": []}, {"vms": ["a", "A"]}, {"time_scale": 0}, {"port": -5}])
def test_a_lab_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LabError, match="given"):
        ImdsLab(**options)


def test_a_wait_that_times_out_reports_the_state(imds: ImdsLab) -> None:
    reboot(imds, event_id=EVENT_ID)
    with pytest.raises(AssertionError, match=EVENT_ID):
        imds.wait_for(lambda: False, timeout=0.1)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/start", {}, "event_id"),
        ("/schedule", {"event_type": "Reboot", "resources": ["web-0"], "colour": "red"}, "colour"),
        ("/schedule", {"event_type": "Reboot", "resources": "web-0"}, "list of VM names"),
        ("/schedule", {"event_type": "Reboot", "resources": [], "notice_seconds": "soon"}, "notice_seconds"),
        ("/schedule", {"event_type": 3, "resources": []}, "event_type"),
        ("/fault", {"kind": 99}, "200 to 599"),
        ("/fault", {"kind": 500, "count": 0}, "count given"),
        ("/fault", {"kind": 500, "vm": "nowhere"}, "web-0"),
        ("/schedule", [], "mapping"),
    ],
)
def test_a_wrong_control_request_is_refused_with_what_was_expected(
    imds: ImdsLab, path: str, body: object, words: str
) -> None:
    answer = requests.post(imds.control_url + path, json=body, timeout=LIMIT_SECONDS)
    assert answer.status_code == 400
    assert words in answer.json()["error"]
