"""The simulated IMDS is as strict as the real one, over real sockets."""

from __future__ import annotations

import json
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import pytest
import requests

from bridge.lab.httpd import LabError
from bridge.lab.imds import COMPUTE_PATH, EVENT_TYPES, EVENT_VERSIONS, EVENTS_PATH, INSTANCE_PATH
from tests.support.imds_lab import ImdsLab
from tests.support.paths import DATA

if TYPE_CHECKING:
    from tests.integration.lab.conftest import Passing

LIMIT_SECONDS = 30
HEADER = {"Metadata": "true"}
PREVIEW, NEWEST = EVENT_VERSIONS[0], EVENT_VERSIONS[-1]
INSTANCE = "2021-02-01"
EVENT_ID = "4CAEA225-A741-474D-A72E-428C86FCD853"


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


def statuses(imds: ImdsLab) -> list[str]:
    return [event["EventStatus"] for event in ask(imds).json()["Events"]]


def approve(imds: ImdsLab, *event_ids: str, vm: str = "web-0") -> int:
    body = {"StartRequests": [{"EventId": one} for one in event_ids]}
    return ask(imds, vm=vm, method="POST", json=body).status_code


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
        ({"version": "2018-01-01"}, 404),
        ({"path": "/metadata/ScheduledEvents"}, 404),
        ({"path": f"{EVENTS_PATH}/"}, 200),
        ({"method": "PUT"}, 405),
        ({"path": COMPUTE_PATH, "version": INSTANCE}, 200),
        ({"path": COMPUTE_PATH, "version": INSTANCE, "headers": {}}, 400),
        ({"path": COMPUTE_PATH, "version": NEWEST}, 400),
        ({"path": COMPUTE_PATH, "version": INSTANCE, "method": "POST"}, 405),
    ],
)
def test_a_request_is_answered_or_refused_as_by_the_service(
    imds: ImdsLab, given: dict[str, Any], status: int
) -> None:
    answer = ask(imds, **given)
    assert answer.status_code == status
    if given.get("version") == "2018-01-01":
        assert answer.json() == {"error": "Not found. Invalid version requested"}
    if given == {"version": None}:
        assert answer.json()["newest-versions"] == sorted(EVENT_VERSIONS, reverse=True)


def test_each_vm_may_send_a_limited_number_of_requests_in_a_lab_second() -> None:
    with ImdsLab(vms=["web-0", "web-1"], time_scale=0.001) as imds:  # one lab second is 1,000 real seconds
        assert [ask(imds).status_code for _ in range(3)] == [200] * 3
        assert approve(imds, reboot(imds)) == 200
        assert ask(imds, COMPUTE_PATH, version=INSTANCE).status_code == 200
        assert [ask(imds, vm=vm).status_code for vm in imds.vms] == [429, 200]


# --- what each api-version shows ---

FIELDS_2019_01 = {"EventId", "EventType", "ResourceType", "Resources", "EventStatus", "NotBefore"}
LATER_FIELDS = {"2019-04-01": "Description", "2019-08-01": "EventSource", "2020-07-01": "DurationInSeconds"}
LATER_TYPES = {
    "Preempt": "2017-11-01",
    "Terminate": "2019-01-01",
    "SpotRebalanceRecommendation": "2024-07-09",
}


@pytest.mark.parametrize("version", EVENT_VERSIONS)
def test_a_version_shows_only_the_fields_types_and_forms_it_has(imds: ImdsLab, version: str) -> None:
    for event_type in EVENT_TYPES:
        imds.schedule(event_type=event_type, resources=["web-0"])
    content = ask(imds, version=version).json()
    event = content["Events"][0]
    assert set(event) == FIELDS_2019_01 | {name for since, name in LATER_FIELDS.items() if version >= since}
    shown = [one["EventType"] for one in content["Events"]]
    assert shown == [one for one in EVENT_TYPES if version >= LATER_TYPES.get(one, PREVIEW)]
    is_preview = version == PREVIEW
    assert event["Resources"] == ["_web-0" if is_preview else "web-0"]
    assert event["NotBefore"].endswith("Z" if is_preview else " GMT")
    assert content["DocumentIncarnation"] == ("7" if is_preview else 7)


@pytest.mark.parametrize("name", ["live-migration", "terminate-2019-01-01", "user-reboot"])
def test_fields_are_those_of_the_real_documents(imds: ImdsLab, name: str) -> None:
    recorded = json.loads((DATA / "imds" / f"{name}.json").read_text())["documents"]
    real = next(event for one in recorded for event in one["Events"])
    imds.schedule(event_type=real["EventType"], resources=["web-0"])
    shown = ask(imds, version="2019-01-01" if "2019-01-01" in name else NEWEST).json()
    assert (shown.keys(), shown["Events"][0].keys()) == (recorded[0].keys(), real.keys())


# --- the life of an event ---


def test_an_event_goes_through_its_life_by_hand_and_every_vm_sees_it() -> None:
    reports: list[str] = []
    with ImdsLab(vms=["web-0", "web-1"], rate_limit=None, report=reports.append) as imds:
        reboot(imds, event_id=EVENT_ID)
        imds.update(EVENT_ID, Resources=["web-0", "web-1"], Mood="fine")
        content = ask(imds, vm="web-1").json()
        assert (content["DocumentIncarnation"], content["Events"][0]["Mood"]) == (3, "fine")
        imds.start(EVENT_ID)
        assert [(one["EventStatus"], one["NotBefore"]) for one in imds.events] == [("Started", "")]
        with pytest.raises(LabError, match="has started"):
            imds.cancel(EVENT_ID)
        imds.complete(EVENT_ID)
        assert ask(imds).json() == {"DocumentIncarnation": 5, "Events": []}
        with pytest.raises(LabError, match="it has none"):
            imds.start("no-such-event")
    assert reports[1:3] == [
        f"Reboot {EVENT_ID} of web-0, web-1 changes: Resources, Mood",
        f"Reboot {EVENT_ID} of web-0, web-1 is Started",
    ]


def test_an_unapproved_event_starts_at_the_not_before_that_it_showed_and_completes(passing: Passing) -> None:
    with ImdsLab(vms=["web-0"], rate_limit=None) as imds:
        event_id = reboot(imds, completes=True, impact_seconds=5)
        imds.update(event_id, notice_seconds=15)
        shown = parsedate_to_datetime(imds.events[0]["NotBefore"]).timestamp()
        assert shown - passing.time() == pytest.approx(15, abs=1)
        passing.wait(shown - passing.time() - 0.001)
        assert statuses(imds) == ["Scheduled"]
        passing.wait(0.002)
        assert statuses(imds) == ["Started"]
        passing.wait(5)
        assert statuses(imds) == []


# --- approvals ---


def test_an_approved_event_is_started_in_the_next_document_and_only_once(imds: ImdsLab) -> None:
    first, second = reboot(imds, "web-0", "web-1"), reboot(imds)
    assert approve(imds, first, EVENT_ID) == 400  # one unknown id refuses all
    assert (statuses(imds), imds.approvals) == (["Scheduled", "Scheduled"], [])
    assert approve(imds, first.lower(), second, vm="web-1") == 200
    assert statuses(imds) == ["Started", "Started"]
    incarnation = imds.incarnation
    assert approve(imds, first) == 200
    assert imds.incarnation == incarnation
    approvals = [(one.vm, one.event_id) for one in imds.approvals]
    assert approvals == [("web-1", first.lower()), ("web-1", second), ("web-0", first)]


STARTS = ("[]", "{}", '["x"]', "[{}]", '[{"EventId": ""}]', '[{"EventId": 5}]')


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[]", b"\xff\xfe", *(f'{{"StartRequests": {one}}}'.encode() for one in STARTS)]
)
def test_a_malformed_approval_is_refused(imds: ImdsLab, body: bytes) -> None:
    answer = ask(imds, method="POST", data=body)
    assert (answer.status_code, answer.json()["error"][:12]) == (400, "Bad request.")


def test_a_held_event_starts_after_approval_and_release_or_at_its_time(imds: ImdsLab) -> None:
    first, second = reboot(imds, hold=True), reboot(imds, hold=True)
    third = reboot(imds, hold=True)
    assert approve(imds, first, third) == 200
    imds.release(second)
    imds.update(third, notice_seconds=0)
    assert statuses(imds) == ["Scheduled", "Scheduled", "Started"]
    imds.release(first)
    assert approve(imds, second) == 200
    assert statuses(imds) == ["Started"] * 3


def test_an_unapproved_deletion_delays_an_approved_one_until_its_deadline(imds: ImdsLab) -> None:
    first, second, third = (
        imds.schedule(event_type="Terminate", resources=[vm]) for vm in ("web-0", "web-1", "web-0")
    )
    reboot(imds)
    assert approve(imds, first, vm="web-1") == 400  # each VM approves only its own deletion
    assert approve(imds, first, third) == 200
    imds.update(third, notice_seconds=0)
    assert statuses(imds) == ["Scheduled", "Scheduled", "Started", "Scheduled"]
    assert approve(imds, second, vm="web-1") == 200
    assert statuses(imds) == ["Started", "Started", "Started", "Scheduled"]


# --- instance data ---


def test_instance_data_describes_a_vm_also_of_a_uniform_scale_set(imds: ImdsLab) -> None:
    own = ask(imds, COMPUTE_PATH, version=INSTANCE).json()
    assert (own["name"], own["vmScaleSetName"]) == ("web-0", "web")
    assert own["resourceId"].endswith("/virtualMachines/web-0")
    assert {type(value) for name, value in own.items() if name != "tagsList"} == {str}
    assert ask(imds, INSTANCE_PATH, version=INSTANCE).json() == {"compute": own}
    with ImdsLab(vms=["workers_4", "web-0"], scale_set="workers", resource_group="shop") as other:
        found = ask(other, COMPUTE_PATH, "workers_4", version=INSTANCE).json()
        again = ask(other, COMPUTE_PATH, version=INSTANCE).json()
    assert "/resourceGroups/shop/" in found["resourceId"]
    assert found["resourceId"].endswith("/virtualMachineScaleSets/workers/virtualMachines/4")
    assert again["vmId"] == own["vmId"] != found["vmId"]


# --- faults ---


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


# --- the lab itself, and its control API ---


@pytest.mark.parametrize("options", [{"vms": []}, {"vms": ["a", "A"]}, {"time_scale": 0}, {"port": -5}])
def test_a_lab_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LabError, match="given"):
        ImdsLab(**options)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/start", {}, "event_id"),
        ("/schedule", {"event_type": "Reboot", "resources": ["web-0"], "colour": "red"}, "colour"),
        ("/schedule", {"event_type": "Reboot", "resources": [], "notice_seconds": "soon"}, "notice_seconds"),
        ("/fault", {"kind": 99}, "200 to 599"),
        ("/fault", {"kind": 500, "vm": "nowhere"}, "web-0"),
    ],
)
def test_a_wrong_control_request_is_refused_with_what_was_expected(
    imds: ImdsLab, path: str, body: object, words: str
) -> None:
    answer = requests.post(imds.control_url + path, json=body, timeout=LIMIT_SECONDS)
    assert answer.status_code == 400
    assert words in answer.json()["error"]
