"""The simulated IMDS is as strict as the real one, over real sockets."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest
import requests

from bridge.lab.faults import HUGE_BODY_BYTES
from bridge.lab.httpd import LabError
from bridge.lab.imds import COMPUTE_PATH, EVENT_VERSIONS, EVENTS_PATH, INSTANCE_PATH
from tests.support.imds_lab import ImdsLab
from tests.support.paths import DATA

LIMIT_SECONDS = 20
HEADER = {"Metadata": "true"}
NEWEST = "2020-07-01"
EVENT_ID = "4CAEA225-A741-474D-A72E-428C86FCD853"
RECORDED = sorted((DATA / "imds").glob("*.json"))


def get(
    imds: ImdsLab, vm: str = "web-0", *, version: str = NEWEST, timeout: float = LIMIT_SECONDS, **options: Any
) -> requests.Response:
    options.setdefault("headers", HEADER)
    return requests.get(f"{imds.url(vm)}{EVENTS_PATH}?api-version={version}", timeout=timeout, **options)


def document(imds: ImdsLab, vm: str = "web-0", *, version: str = NEWEST) -> dict[str, Any]:
    answer = get(imds, vm, version=version)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def post(imds: ImdsLab, body: object, vm: str = "web-0", **options: Any) -> requests.Response:
    data = body if isinstance(body, (bytes, str)) else json.dumps(body)
    options.setdefault("headers", HEADER)
    url = f"{imds.url(vm)}{EVENTS_PATH}?api-version={NEWEST}"
    return requests.post(url, data=data, timeout=LIMIT_SECONDS, **options)


def approve(imds: ImdsLab, *event_ids: str, vm: str = "web-0") -> int:
    return post(imds, {"StartRequests": [{"EventId": one} for one in event_ids]}, vm).status_code


def instance(imds: ImdsLab, path: str = COMPUTE_PATH, vm: str = "web-0", **options: Any) -> requests.Response:
    options.setdefault("headers", HEADER)
    return requests.get(imds.url(vm) + path, timeout=LIMIT_SECONDS, **options)


def request_without_answer(imds: ImdsLab, failures: list[Exception]) -> threading.Thread:
    """Start a request whose connection will be closed; the thread records the failure."""

    def ask() -> None:
        try:
            get(imds)
        except requests.ConnectionError as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    return asking


def only_event(imds: ImdsLab, vm: str = "web-0", *, version: str = NEWEST) -> dict[str, Any]:
    (event,) = document(imds, vm, version=version)["Events"]
    shown: dict[str, Any] = event
    return shown


# --- requests that are refused ---


def test_a_request_without_the_metadata_header_is_refused(imds: ImdsLab) -> None:
    answer = get(imds, headers={})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("Bad request.")


def test_a_metadata_header_that_is_not_true_is_refused(imds: ImdsLab) -> None:
    assert get(imds, headers={"Metadata": "false"}).status_code == 400


@pytest.mark.parametrize(
    ("name", "value"), [("metadata", "true"), ("METADATA", "TRUE"), ("Metadata", "True")]
)
def test_the_metadata_header_is_read_without_case(imds: ImdsLab, name: str, value: str) -> None:
    assert get(imds, headers={name: value}).status_code == 200


def test_only_the_oldest_version_does_not_demand_the_metadata_header(imds: ImdsLab) -> None:
    statuses = {version: get(imds, version=version, headers={}).status_code for version in EVENT_VERSIONS}
    assert statuses == {version: 200 if version == "2017-03-01" else 400 for version in EVENT_VERSIONS}


@pytest.mark.parametrize("query", ["", "?api-version=", "?api-version=latest", "?api-version=2018-01-01"])
def test_no_known_api_version_is_refused_with_a_list_of_them(imds: ImdsLab, query: str) -> None:
    answer = requests.get(imds.url("web-0") + EVENTS_PATH + query, headers=HEADER, timeout=LIMIT_SECONDS)
    assert answer.status_code == 400
    assert answer.json()["newest-versions"] == sorted(EVENT_VERSIONS, reverse=True)


def test_a_request_that_came_through_a_proxy_is_refused(imds: ImdsLab) -> None:
    assert get(imds, headers={**HEADER, "X-Forwarded-For": "10.0.0.1"}).status_code == 400


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
def test_another_method_is_refused(imds: ImdsLab, method: str) -> None:
    url = f"{imds.url('web-0')}{EVENTS_PATH}?api-version={NEWEST}"
    answer = requests.request(method, url, headers=HEADER, timeout=LIMIT_SECONDS)
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, POST")


@pytest.mark.parametrize("path", ["/", "/metadata", "/metadata/identity", "/metadata/ScheduledEvents"])
def test_an_unknown_path_is_not_found(imds: ImdsLab, path: str) -> None:
    assert instance(imds, f"{path}?api-version={NEWEST}").status_code == 404


def test_a_slash_at_the_end_of_the_path_does_no_harm(imds: ImdsLab) -> None:
    assert instance(imds, f"{EVENTS_PATH}/?api-version={NEWEST}").status_code == 200


# --- the limit of requests ---


def test_the_sixth_request_within_a_second_is_refused() -> None:
    with ImdsLab(vms=["web-0"], time_scale=0.02) as imds:  # one lab second is 50 real seconds
        assert [get(imds).status_code for _ in range(7)] == [200] * 5 + [429] * 2


def test_the_limit_counts_approvals_and_instance_data_too() -> None:
    with ImdsLab(vms=["web-0"], time_scale=0.02, rate_limit=2) as imds:
        event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
        assert approve(imds, event_id) == 200
        assert instance(imds, COMPUTE_PATH + "?api-version=2021-02-01").status_code == 200
        assert get(imds).status_code == 429


def test_each_vm_has_a_limit_of_its_own() -> None:
    with ImdsLab(vms=["web-0", "web-1"], time_scale=0.02, rate_limit=1) as imds:
        assert [get(imds, vm).status_code for vm in ("web-0", "web-0", "web-1")] == [200, 429, 200]


def test_the_limit_ends_with_the_second_as_the_time_scale_makes_it() -> None:
    with ImdsLab(vms=["web-0"], time_scale=10, rate_limit=1) as imds:
        assert get(imds).status_code == 200
        imds.wait_for(lambda: get(imds).status_code == 429, LIMIT_SECONDS)
        pause = threading.Event()
        imds.wait_for(lambda: pause.wait(0.2) or get(imds).status_code == 200, LIMIT_SECONDS)


# --- what each api-version shows ---

FIELDS_2019_01 = {"EventId", "EventType", "ResourceType", "Resources", "EventStatus", "NotBefore"}
FIELDS = {
    "2017-03-01": FIELDS_2019_01,
    "2017-08-01": FIELDS_2019_01,
    "2017-11-01": FIELDS_2019_01,
    "2019-01-01": FIELDS_2019_01,
    "2019-04-01": FIELDS_2019_01 | {"Description"},
    "2019-08-01": FIELDS_2019_01 | {"Description", "EventSource"},
    "2020-07-01": FIELDS_2019_01 | {"Description", "EventSource", "DurationInSeconds"},
}


@pytest.mark.parametrize("version", EVENT_VERSIONS)
def test_a_version_shows_only_the_fields_it_has(imds: ImdsLab, version: str) -> None:
    imds.schedule(event_type="Freeze", resources=["web-0"], duration_seconds=5, description="A pause.")
    assert set(only_event(imds, version=version)) == FIELDS[version]


@pytest.mark.parametrize("version", EVENT_VERSIONS)
def test_a_version_shows_only_the_event_types_it_has(imds: ImdsLab, version: str) -> None:
    for event_type in ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"):
        imds.schedule(event_type=event_type, resources=["web-0"])
    shown = [event["EventType"] for event in document(imds, version=version)["Events"]]
    expected = ["Freeze", "Reboot", "Redeploy"]
    expected += ["Preempt"] if version >= "2017-11-01" else []
    expected += ["Terminate"] if version >= "2019-01-01" else []
    assert shown == expected


@pytest.mark.parametrize("version", EVENT_VERSIONS)
def test_only_the_oldest_version_spells_names_with_an_underscore(imds: ImdsLab, version: str) -> None:
    imds.schedule(event_type="Freeze", resources=["web-0"])
    assert only_event(imds, version=version)["Resources"] == [
        "_web-0" if version == "2017-03-01" else "web-0"
    ]


def test_the_oldest_version_has_an_iso_time_and_a_text_as_incarnation(imds: ImdsLab) -> None:
    imds.schedule(event_type="Freeze", resources=["web-0"])
    content = document(imds, version="2017-03-01")
    assert content["DocumentIncarnation"] == "2"
    assert datetime.fromisoformat(content["Events"][0]["NotBefore"]).tzinfo is not None


@pytest.mark.parametrize("name", ["live-migration", "terminate-2019-01-01", "user-reboot"])
def test_fields_stand_in_the_order_of_the_real_documents(imds: ImdsLab, name: str) -> None:
    (path,) = [path for path in RECORDED if path.stem == name]
    recorded = json.loads(path.read_text())["documents"]
    (real, *_) = [event for one in recorded for event in one["Events"]]
    version = "2019-01-01" if "2019-01-01" in name else NEWEST
    imds.schedule(event_type=real["EventType"], resources=["web-0"])
    assert list(only_event(imds, version=version)) == list(real)
    assert list(document(imds)) == list(recorded[0])


def test_not_before_is_rfc_1123_and_is_when_the_event_starts(imds: ImdsLab) -> None:
    before = time.time()
    imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=900)
    text = only_event(imds)["NotBefore"]
    assert text.endswith(" GMT")
    assert before + 898 <= parsedate_to_datetime(text).timestamp() <= time.time() + 900


def test_not_before_shows_real_time_under_a_time_scale() -> None:
    with ImdsLab(vms=["web-0"], time_scale=9, rate_limit=None) as imds:
        before = time.time()
        imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=900)
        shown = parsedate_to_datetime(only_event(imds)["NotBefore"]).timestamp()
        assert before + 98 <= shown <= time.time() + 100


# --- the life of an event ---


def test_the_first_document_is_empty(imds: ImdsLab) -> None:
    assert document(imds) == {"DocumentIncarnation": 1, "Events": []}


def test_all_vms_of_the_group_see_all_events_under_one_incarnation(imds: ImdsLab) -> None:
    for event_type in ("Freeze", "Preempt", "Terminate"):
        imds.schedule(event_type=event_type, resources=["web-0"])
    assert document(imds, "web-0") == document(imds, "web-1")
    assert document(imds)["DocumentIncarnation"] == 4


def test_an_event_goes_through_its_life_by_hand(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"], event_id=EVENT_ID, description="x")
    assert only_event(imds)["EventId"] == event_id == EVENT_ID
    imds.start(event_id)
    started = only_event(imds)
    assert (started["EventStatus"], started["NotBefore"]) == ("Started", "")
    imds.complete(event_id)
    assert document(imds) == {"DocumentIncarnation": 4, "Events": []}


def test_a_scheduled_event_can_be_canceled_and_a_started_one_cannot(imds: ImdsLab) -> None:
    first = imds.schedule(event_type="Reboot", resources=["web-0"])
    imds.cancel(first)
    assert document(imds)["Events"] == []
    second = imds.schedule(event_type="Reboot", resources=["web-0"], event_status="Started")
    with pytest.raises(LabError, match="has started"):
        imds.cancel(second)


def test_an_event_without_notice_is_started_from_the_first(imds: ImdsLab) -> None:
    imds.schedule(event_type="Reboot", resources=["web-0"], event_status="Started")
    assert document(imds)["DocumentIncarnation"] == 2
    assert only_event(imds)["EventStatus"] == "Started"


def test_an_unapproved_event_starts_at_not_before_and_completes() -> None:
    reports: list[str] = []
    with ImdsLab(vms=["web-0"], time_scale=100, rate_limit=None, report=reports.append) as imds:
        imds.schedule(
            event_type="Freeze",
            resources=["web-0"],
            notice_seconds=100,
            completes=True,
            impact_seconds=100,
            event_id=EVENT_ID,
        )
        assert only_event(imds)["EventStatus"] == "Scheduled"
        imds.wait_for(lambda: not document(imds)["Events"], LIMIT_SECONDS)
    assert [sentence.partition(",")[0].rpartition(" is ")[2] for sentence in reports] == [
        "Scheduled",
        "Started",
        "completed",
    ]


def test_an_event_does_not_start_before_the_not_before_it_showed() -> None:
    with ImdsLab(vms=["web-0"], time_scale=10, rate_limit=None) as imds:
        imds.schedule(event_type="Freeze", resources=["web-0"], notice_seconds=15)
        shown = parsedate_to_datetime(only_event(imds)["NotBefore"]).timestamp()
        imds.wait_for(lambda: imds.events[0]["EventStatus"] == "Started", LIMIT_SECONDS)
        assert time.time() >= shown


def test_a_started_event_stays_unless_it_is_asked_to_complete(imds: ImdsLab) -> None:
    imds.schedule(event_type="Freeze", resources=["web-0"], notice_seconds=0, impact_seconds=0)
    imds.wait_for(lambda: imds.events[0]["EventStatus"] == "Started", LIMIT_SECONDS)
    assert only_event(imds)["EventStatus"] == "Started"


def test_any_field_can_be_updated_under_a_new_incarnation(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    later = "Fri, 01 Jan 2100 00:00:00 GMT"
    imds.update(event_id, NotBefore=later, Resources=["web-0", "web-1"], Mood="fine")
    content = document(imds)
    assert content["DocumentIncarnation"] == 3
    event = content["Events"][0]
    assert (event["NotBefore"], event["Resources"], event["Mood"]) == (later, ["web-0", "web-1"], "fine")


def test_an_updated_not_before_moves_the_start(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    imds.update(event_id, NotBefore=datetime.now(UTC).isoformat())
    imds.wait_for(lambda: imds.events[0]["EventStatus"] == "Started", LIMIT_SECONDS)


def test_an_event_that_is_not_there_is_an_error_that_names_those_that_are(imds: ImdsLab) -> None:
    imds.schedule(event_type="Reboot", resources=["web-0"], event_id=EVENT_ID)
    with pytest.raises(LabError, match=EVENT_ID):
        imds.start("no-such-event")


# --- recorded documents ---


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_documents_are_served_exactly(imds: ImdsLab, path: Path) -> None:
    for recorded in json.loads(path.read_text())["documents"]:
        imds.serve_document(recorded)
        assert document(imds, "web-0") == document(imds, "web-1") == recorded
    imds.serve_document(None)
    assert document(imds) == {"DocumentIncarnation": 1, "Events": []}


def test_raw_bytes_are_served(imds: ImdsLab) -> None:
    imds.serve_document(b"\xff not json")
    assert get(imds, "web-1").content == b"\xff not json"


def test_an_event_of_a_served_document_can_be_approved(imds: ImdsLab) -> None:
    imds.serve_document({"DocumentIncarnation": 9, "Events": [{"EventId": EVENT_ID, "EventType": "Reboot"}]})
    assert approve(imds, EVENT_ID.lower()) == 200
    assert approve(imds, "another") == 400


# --- approvals ---


def test_an_approved_event_is_started_in_the_next_document(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0", "web-1"])
    answer = post(imds, {"StartRequests": [{"EventId": event_id}]}, vm="web-1")
    assert (answer.status_code, answer.content) == (200, b"")
    assert only_event(imds)["EventStatus"] == "Started"


def test_an_approval_is_matched_without_case_and_kept_as_posted(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    assert approve(imds, event_id.lower()) == 200
    assert [(one.vm, one.event_id) for one in imds.approvals] == [("web-0", event_id.lower())]


def test_an_approval_can_be_given_again_and_after_the_start(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    assert [approve(imds, event_id) for _ in range(3)] == [200, 200, 200]
    assert document(imds)["DocumentIncarnation"] == 3


def test_several_events_are_approved_at_once(imds: ImdsLab) -> None:
    ids = [imds.schedule(event_type="Reboot", resources=[vm]) for vm in imds.vms]
    assert approve(imds, *ids) == 200
    assert {event["EventStatus"] for event in document(imds)["Events"]} == {"Started"}


def test_one_unknown_id_among_several_refuses_them_all(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    assert approve(imds, event_id, EVENT_ID) == 400
    assert (only_event(imds)["EventStatus"], imds.approvals) == ("Scheduled", [])


def test_an_ended_event_is_unknown(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    imds.cancel(event_id)
    assert approve(imds, event_id) == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[]",
        b"{}",
        b'{"StartRequests": []}',
        b'{"StartRequests": {}}',
        b'{"StartRequests": ["x"]}',
        b'{"StartRequests": [{}]}',
        b'{"StartRequests": [{"EventId": ""}]}',
        b'{"StartRequests": [{"EventId": 5}]}',
        b"\xff\xfe\x00",
    ],
)
def test_a_malformed_approval_is_refused(imds: ImdsLab, body: bytes) -> None:
    answer = post(imds, body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("Bad request.")


@pytest.mark.parametrize("incarnation", [2, "2", 99])
def test_an_approval_may_carry_the_incarnation(imds: ImdsLab, incarnation: object) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    body = {"DocumentIncarnation": incarnation, "StartRequests": [{"EventId": event_id}]}
    assert post(imds, body).status_code == 200


def test_a_held_approval_waits_for_its_release() -> None:
    with ImdsLab(vms=["web-0"], approvals="hold", rate_limit=None) as imds:
        event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
        assert approve(imds, event_id) == 200
        assert document(imds)["DocumentIncarnation"] == 2  # no field shows that it was approved
        assert only_event(imds)["EventStatus"] == "Scheduled"
        imds.release(event_id)
        assert only_event(imds)["EventStatus"] == "Started"


def test_a_held_approval_ends_at_not_before() -> None:
    with ImdsLab(vms=["web-0"], approvals="hold", rate_limit=None) as imds:
        event_id = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=0.5)
        assert approve(imds, event_id) == 200
        imds.wait_for(lambda: imds.events[0]["EventStatus"] == "Started", LIMIT_SECONDS)


def test_a_release_without_approval_starts_nothing_yet() -> None:
    with ImdsLab(vms=["web-0"], approvals="hold", rate_limit=None) as imds:
        event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
        imds.release(event_id)
        assert only_event(imds)["EventStatus"] == "Scheduled"
        approve(imds, event_id)
        assert only_event(imds)["EventStatus"] == "Started"


# --- deletions ---


def statuses(imds: ImdsLab) -> list[str]:
    return [event["EventStatus"] for event in document(imds)["Events"]]


def test_each_vm_approves_only_its_own_deletion(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Terminate", resources=["web-0"])
    assert approve(imds, event_id, vm="web-1") == 400
    assert approve(imds, event_id, vm="web-0") == 200


def test_an_unapproved_deletion_delays_an_approved_one_and_both_start_together(imds: ImdsLab) -> None:
    first = imds.schedule(event_type="Terminate", resources=["web-0"], notice_seconds=300)
    second = imds.schedule(event_type="Terminate", resources=["web-1"], notice_seconds=300)
    assert approve(imds, first, vm="web-0") == 200
    assert statuses(imds) == ["Scheduled", "Scheduled"]
    assert approve(imds, second, vm="web-1") == 200
    assert statuses(imds) == ["Started", "Started"]


def test_a_deletion_held_back_goes_at_its_deadline(imds: ImdsLab) -> None:
    first = imds.schedule(event_type="Terminate", resources=["web-0"], notice_seconds=1)
    imds.schedule(event_type="Terminate", resources=["web-1"], notice_seconds=900)
    approve(imds, first)
    imds.wait_for(lambda: statuses(imds) == ["Started", "Scheduled"], LIMIT_SECONDS)


def test_a_canceled_deletion_no_longer_holds_back_another(imds: ImdsLab) -> None:
    first = imds.schedule(event_type="Terminate", resources=["web-0"])
    second = imds.schedule(event_type="Terminate", resources=["web-1"])
    approve(imds, first)
    imds.cancel(second)
    assert statuses(imds) == ["Started"]


def test_other_events_do_not_hold_back_a_deletion(imds: ImdsLab) -> None:
    imds.schedule(event_type="Reboot", resources=["web-1"])
    event_id = imds.schedule(event_type="Terminate", resources=["web-0"])
    approve(imds, event_id)
    assert statuses(imds) == ["Scheduled", "Started"]


# --- instance data ---


def test_instance_data_describes_the_vm(imds: ImdsLab) -> None:
    compute = instance(imds, COMPUTE_PATH + "?api-version=2021-02-01").json()
    assert (compute["name"], compute["vmScaleSetName"], compute["osType"]) == ("web-0", "web", "Linux")
    assert compute["resourceId"].endswith("/virtualMachines/web-0")
    assert compute["subscriptionId"] in compute["resourceId"]
    assert compute["resourceGroupName"] in compute["resourceId"]
    assert {"vmId", "location", "placementGroupId", "zone"} <= set(compute)
    assert [sorted(tag) for tag in compute["tagsList"]] == [["name", "value"]]


def test_every_primitive_of_instance_data_is_a_text(imds: ImdsLab) -> None:
    compute = instance(imds, COMPUTE_PATH + "?api-version=2025-04-07").json()
    assert {type(value) for name, value in compute.items() if name != "tagsList"} == {str}


def test_the_whole_instance_holds_the_same_compute(imds: ImdsLab) -> None:
    whole = instance(imds, INSTANCE_PATH + "?api-version=2021-02-01").json()
    assert whole["compute"] == instance(imds, COMPUTE_PATH + "?api-version=2021-02-01").json()


def test_a_vm_keeps_its_id_from_one_lab_to_the_next(imds: ImdsLab) -> None:
    path = COMPUTE_PATH + "?api-version=2021-02-01"
    own, other = instance(imds, path).json()["vmId"], instance(imds, path, "web-1").json()["vmId"]
    with ImdsLab(vms=["web-0"], rate_limit=None) as again:
        assert instance(again, path).json()["vmId"] == own != other


def test_a_vm_of_a_uniform_scale_set_has_the_resource_id_of_an_instance() -> None:
    with ImdsLab(vms=["workers_4"], scale_set="workers") as imds:
        compute = instance(imds, COMPUTE_PATH + "?api-version=2021-02-01", "workers_4").json()
        assert compute["resourceId"].endswith("/virtualMachineScaleSets/workers/virtualMachines/4")


def test_a_lab_can_be_in_another_resource_group() -> None:
    with ImdsLab(vms=["web-0"], resource_group="shop") as imds:
        compute = instance(imds, COMPUTE_PATH + "?api-version=2021-02-01", "web-0").json()
        assert compute["resourceGroupName"] == "shop"
        assert "/resourceGroups/shop/providers/" in compute["resourceId"]


def test_what_does_not_apply_to_a_standalone_vm_is_an_empty_text() -> None:
    with ImdsLab(vms=["alone"], scale_set="") as imds:
        compute = instance(imds, COMPUTE_PATH + "?api-version=2021-02-01", "alone").json()
        assert (compute["vmScaleSetName"], compute["placementGroupId"]) == ("", "")


@pytest.mark.parametrize("version", ["2021-02-01", "2021-08-01", "2023-11-15", "2024-07-17", "2025-04-07"])
def test_instance_data_is_served_under_each_documented_version(imds: ImdsLab, version: str) -> None:
    assert instance(imds, f"{COMPUTE_PATH}?api-version={version}").json()["name"] == "web-0"


@pytest.mark.parametrize(
    ("query", "headers"), [("?api-version=2021-02-01", {}), ("?api-version=2020-07-01", HEADER), ("", HEADER)]
)
def test_instance_data_demands_header_and_version(imds: ImdsLab, query: str, headers: dict[str, str]) -> None:
    assert instance(imds, COMPUTE_PATH + query, headers=headers).status_code == 400


# --- faults ---


@pytest.mark.parametrize(
    ("kind", "status"),
    [(404, 404), ("410", 410), ("gone", 410), (429, 429), (500, 500), ("service-unavailable", 503)],
)
def test_a_status_is_answered_once_by_number_or_name(imds: ImdsLab, kind: str | int, status: int) -> None:
    imds.fault(kind)
    assert [get(imds).status_code for _ in range(2)] == [status, 200]


def test_a_status_can_carry_retry_after(imds: ImdsLab) -> None:
    imds.fault(429, retry_after=7)
    assert get(imds).headers["Retry-After"] == "7"


def test_faults_are_served_in_order_until_their_count_is_used(imds: ImdsLab) -> None:
    imds.fault(500, count=2)
    imds.fault(410)
    assert [get(imds).status_code for _ in range(4)] == [500, 500, 410, 200]


def test_a_fault_for_ever_lasts_until_it_is_cleared(imds: ImdsLab) -> None:
    imds.fault(503, count=None)
    assert {get(imds).status_code for _ in range(10)} == {503}
    imds.clear_faults()
    assert get(imds).status_code == 200


def test_a_fault_can_be_meant_for_one_vm_one_method_or_one_path(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    imds.fault(500, vm="web-1")
    imds.fault(503, method="POST")
    imds.fault(404, path=INSTANCE_PATH)
    assert [get(imds, vm).status_code for vm in ("web-0", "web-1")] == [200, 500]
    assert [approve(imds, event_id) for _ in range(2)] == [503, 200]
    assert instance(imds, COMPUTE_PATH + "?api-version=2021-02-01").status_code == 404


def test_a_redirect_leads_to_a_path_that_is_recorded(imds: ImdsLab) -> None:
    imds.fault("redirect")
    assert get(imds, allow_redirects=False).status_code == 302
    imds.fault("redirect")
    get(imds)
    assert imds.requests()[-1].path == "/redirected"


def test_a_slow_answer_is_right(imds: ImdsLab) -> None:
    imds.fault("slow", seconds=0.3)
    started = time.monotonic()
    assert document(imds)["Events"] == []
    assert time.monotonic() - started >= 0.3


def test_calls_wait_until_the_first_has_turned_the_service_on(imds: ImdsLab) -> None:
    imds.fault("slow_first_call", seconds=1.5)
    started = time.monotonic()
    with pytest.raises(requests.Timeout):
        get(imds, timeout=0.2)
    assert get(imds).status_code == 200  # waits only for the remaining time
    assert time.monotonic() - started >= 1.4
    assert get(imds).status_code == 200


def test_a_timeout_never_answers(imds: ImdsLab) -> None:
    imds.fault("timeout")
    with pytest.raises(requests.Timeout):
        get(imds, timeout=0.3)
    assert imds.wait_for(imds.requests, LIMIT_SECONDS)[-1].status == 0


def test_a_cleared_timeout_lets_go_of_the_request(imds: ImdsLab) -> None:
    imds.fault("timeout")
    failures: list[Exception] = []
    asking = request_without_answer(imds, failures)
    imds.wait_for(imds.requests, LIMIT_SECONDS)
    imds.clear_faults()
    asking.join(LIMIT_SECONDS)
    assert len(failures) == 1


def test_a_dropped_connection_gives_no_answer(imds: ImdsLab) -> None:
    imds.fault("drop")
    with pytest.raises(requests.ConnectionError):
        get(imds)


def test_a_dropped_approval_is_not_processed_and_a_lost_answer_is(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    for kind, status in (("drop", "Scheduled"), ("lost_answer", "Started")):
        imds.fault(kind, method="POST")
        with pytest.raises(requests.ConnectionError):
            approve(imds, event_id)
        assert only_event(imds)["EventStatus"] == status


def test_an_empty_answer_is_200_without_a_body(imds: ImdsLab) -> None:
    imds.fault("empty")
    answer = get(imds)
    assert (answer.status_code, answer.content) == (200, b"")


def test_garbage_is_200_and_no_json(imds: ImdsLab) -> None:
    imds.fault("garbage")
    answer = get(imds)
    assert answer.status_code == 200
    with pytest.raises(ValueError, match="Expecting value"):
        answer.json()


def test_junk_comes_before_a_good_document(imds: ImdsLab) -> None:
    imds.fault("junk_prefix")
    content = get(imds).content
    assert not content.startswith(b"{")
    assert json.loads(content[content.index(b"{") :]) == document(imds)


def test_a_huge_answer_is_larger_than_four_mebibytes(imds: ImdsLab) -> None:
    imds.fault("huge")
    answer = get(imds)
    assert answer.status_code == 200
    assert len(answer.content) > HUGE_BODY_BYTES > 4 * 1024 * 1024


def test_an_unknown_fault_is_an_error_that_names_the_known_ones(imds: ImdsLab) -> None:
    with pytest.raises(LabError, match="junk_prefix"):
        imds.fault("wobble")
    with pytest.raises(LabError, match="count given"):
        imds.fault(500, count=0)


# --- the lab itself ---


def test_requests_are_recorded_with_what_was_sent_and_answered(imds: ImdsLab) -> None:
    post(imds, b"{}", vm="web-1", headers={**HEADER, "X-Mark": "7"})
    (request,) = imds.requests("web-1")
    assert (request.method, request.path, request.query) == ("POST", EVENTS_PATH, f"api-version={NEWEST}")
    assert (request.headers["x-mark"], request.body, request.status) == ("7", b"{}", 400)
    assert request.at <= time.monotonic()
    assert imds.requests("web-0") == []


def test_connections_are_kept_alive(imds: ImdsLab) -> None:
    with requests.Session() as session:
        url = f"{imds.url('web-0')}{EVENTS_PATH}?api-version={NEWEST}"
        ports = set()
        for _ in range(3):
            with session.get(url, headers=HEADER, stream=True, timeout=LIMIT_SECONDS) as answer:
                assert answer.raw.connection is not None
                ports.add(answer.raw.connection.sock.getsockname())
                assert answer.json()["Events"] == []
    assert len(ports) == 1


def test_closing_is_prompt_while_requests_hang_and_connections_are_open() -> None:
    imds = ImdsLab(vms=["web-0"])
    imds.fault("timeout")
    url_host, url_port = imds.url("web-0").removeprefix("http://").split(":")
    with socket.create_connection((url_host, int(url_port)), LIMIT_SECONDS):  # idle, and stays open
        failures: list[Exception] = []
        asking = request_without_answer(imds, failures)
        imds.wait_for(imds.requests, LIMIT_SECONDS)
        started = time.monotonic()
        imds.close()
        assert time.monotonic() - started < 9  # it would wait ten seconds for an open connection
        asking.join(LIMIT_SECONDS)
        assert len(failures) == 1
    imds.close()  # a second call does nothing


def test_a_wait_that_times_out_reports_the_state(imds: ImdsLab) -> None:
    imds.schedule(event_type="Reboot", resources=["web-0"], event_id=EVENT_ID)
    with pytest.raises(AssertionError, match=EVENT_ID):
        imds.wait_for(lambda: False, timeout=0.1)


def test_every_change_is_reported() -> None:
    reports: list[str] = []
    with ImdsLab(vms=["web-0"], report=reports.append) as imds:
        imds.cancel(imds.schedule(event_type="Reboot", resources=["web-0"], event_id=EVENT_ID))
    assert [sentence.partition(",")[0] for sentence in reports] == [
        f"Reboot {EVENT_ID} of web-0 is Scheduled",
        f"Reboot {EVENT_ID} of web-0 is canceled",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"vms": []},
        {"vms": ["a", "A"]},
        {"time_scale": 0},
        {"time_scale": float("nan")},
        {"approvals": "never"},
    ],
)
def test_a_lab_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LabError, match="given"):
        ImdsLab(**options)


def test_a_taken_port_is_an_error_and_leaves_nothing_open(imds: ImdsLab) -> None:
    taken = int(imds.control_url.rpartition(":")[2])
    with pytest.raises(LabError, match=str(taken)):
        ImdsLab(port=taken)


# --- the control API ---


def control(imds: ImdsLab, path: str, body: object = None) -> requests.Response:
    return requests.post(imds.control_url + path, json={} if body is None else body, timeout=LIMIT_SECONDS)


def test_an_event_can_be_driven_over_http(imds: ImdsLab) -> None:
    answer = control(
        imds, "/schedule", {"event_type": "Reboot", "resources": ["web-0"], "notice_seconds": 60}
    )
    event_id = answer.json()["event_id"]
    assert control(imds, "/start", {"event_id": event_id}).json() == {"ok": True}
    assert only_event(imds)["EventStatus"] == "Started"
    control(imds, "/complete", {"event_id": event_id})
    assert document(imds)["Events"] == []
    again = control(imds, "/schedule", {"event_type": "Freeze", "resources": []}).json()["event_id"]
    assert control(imds, "/cancel", {"event_id": again}).status_code == 200


def test_the_state_can_be_read_over_http(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    approve(imds, event_id)
    state = requests.get(imds.control_url + "/state", timeout=LIMIT_SECONDS).json()
    assert state["vms"] == {vm: imds.url(vm) for vm in imds.vms}
    assert state["approvals"] == [{"vm": "web-0", "event_id": event_id}]
    assert [event["approved"] for event in state["events"]] == [True]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/start", {"event_id": "nobody"}, "nobody"),
        ("/start", {}, "event_id"),
        ("/schedule", {"event_type": "Reboot", "resources": ["web-0"], "colour": "red"}, "colour"),
        ("/schedule", {"event_type": "Reboot", "resources": "web-0"}, "list of VM names"),
        ("/schedule", {"event_type": "Reboot", "resources": [], "notice_seconds": "soon"}, "notice_seconds"),
        ("/schedule", {"event_type": 3, "resources": []}, "event_type"),
        ("/fault", {"kind": "wobble"}, "wobble"),
        ("/fault", {"kind": 99}, "200 to 599"),
        ("/fault", {"kind": 500, "vm": "nowhere"}, "web-0"),
        ("/schedule", [], "mapping"),
    ],
)
def test_a_wrong_control_request_is_refused_with_what_was_expected(
    imds: ImdsLab, path: str, body: object, words: str
) -> None:
    answer = control(imds, path, body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_an_unknown_control_path_names_the_known_ones(imds: ImdsLab) -> None:
    answer = control(imds, "/nothing")
    assert answer.status_code == 404
    assert "POST /schedule" in answer.json()["error"]


# --- the requests of Microsoft's samples ---

POWERSHELL = "Mozilla/5.0 (Windows NT; Windows NT 10.0; en-US) WindowsPowerShell/5.1.17763.2931"
FORM = "application/x-www-form-urlencoded"


def curl(*arguments: str) -> str:
    command = shutil.which("curl")
    if command is None:
        pytest.skip("curl is not on this machine")
    done = subprocess.run(
        [command, "--silent", "--show-error", "--noproxy", "*", "--max-time", str(LIMIT_SECONDS), *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_the_curl_sample_reads_and_approves(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    url = f"{imds.url('web-0')}{EVENTS_PATH}?api-version={NEWEST}"
    read = json.loads(curl("-H", "Metadata:true", url))
    body = json.dumps({"StartRequests": [{"EventId": read["Events"][0]["EventId"]}]})
    assert curl("-H", "Metadata:true", "-X", "POST", "-d", body, "-w", "%{http_code}", url) == "200"
    assert imds.requests()[-1].headers["content-type"] == FORM
    assert [one.event_id for one in imds.approvals] == [event_id]


def test_the_powershell_sample_reads_and_approves(imds: ImdsLab) -> None:
    imds.schedule(event_type="Reboot", resources=["web-0"])
    headers = {**HEADER, "User-Agent": POWERSHELL}
    read = get(imds, headers=headers).json()
    body = {
        "DocumentIncarnation": read["DocumentIncarnation"],
        "StartRequests": [{"EventId": event["EventId"]} for event in read["Events"]],
    }
    assert post(imds, body, headers={**headers, "Content-Type": FORM}).status_code == 200


def test_the_old_csharp_sample_approves_without_the_metadata_header(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    assert document(imds, version="2017-03-01")["Events"][0]["EventId"] == event_id
    answer = requests.post(
        f"{imds.url('web-0')}{EVENTS_PATH}?api-version=2017-03-01",
        json={"DocumentIncarnation": "2", "StartRequests": [{"EventId": event_id}]},
        timeout=LIMIT_SECONDS,
    )
    assert (answer.status_code, answer.request.headers["Content-Type"]) == (200, "application/json")


def test_the_python_samples_read_and_approve(imds: ImdsLab) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    assert get(imds, headers={"metadata": "true"}).json()["Events"][0]["EventId"] == event_id
    url = f"{imds.url('web-0')}{EVENTS_PATH}?api-version={NEWEST}"
    body = json.dumps({"StartRequests": [{"EventId": event_id}]}).encode()
    for data in (None, body):
        request = urllib.request.Request(url, data=data, headers={"metadata": "true"})  # noqa: S310 - loopback
        with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:  # noqa: S310 - loopback
            assert answer.status == 200
    assert [one.event_id for one in imds.approvals] == [event_id]
