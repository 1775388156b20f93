"""The API, its document, health and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from prometheus_client.parser import text_string_to_metric_families

from bridge.console.api import openapi
from tests.support.console import (
    TOKEN,
    FleetVm,
    RunningConsole,
    behind_proxy,
    event,
    event_id,
    running_console,
)

NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console that knows an event of three VMs, one of which has never reported."""
    with running_console(tmp_path_factory.mktemp("console")) as running:
        first, second = FleetVm("api-0"), FleetVm("api-1")
        reboot = event("api", at=NOW, vms=["api-0", "api-2"])
        running.send(
            *(vm.heartbeat(NOW) for vm in (first, second)),
            *(vm.change("scheduled", reboot, NOW) for vm in (first, second)),
            first.receipt(reboot, NOW),
        )
        yield running


def validator(path: str, status: str) -> Draft202012Validator:
    document = openapi()
    response = document["paths"][path]["get"]["responses"][status]
    schema = response["content"]["application/json"]["schema"]
    whole = {**schema, "components": document["components"]}
    return Draft202012Validator(whole, format_checker=FormatChecker())


@pytest.mark.parametrize(
    ("template", "path", "status"),
    [
        ("/api/v1/events", "/api/v1/events", 200),
        ("/api/v1/events", "/api/v1/events?type=Freeze", 200),
        ("/api/v1/events/{event_id}", f"/api/v1/events/{event_id('api')}", 200),
        ("/api/v1/events/{event_id}", "/api/v1/events/unknown", 404),
        ("/api/v1/vms", "/api/v1/vms", 200),
        ("/api/v1/vms", "/api/v1/vms?status=unknown", 200),
        ("/api/v1/history", "/api/v1/history?days=90", 200),
    ],
)
def test_every_answer_is_as_the_document_describes(
    console: RunningConsole, template: str, path: str, status: int
) -> None:
    response = console.get(path)
    assert response.status_code == status
    validator(template, str(status)).validate(response.json())


def test_the_api_shows_what_the_pages_show(console: RunningConsole) -> None:
    details = console.get(f"/api/v1/events/{event_id('api').lower()}").json()
    assert details["event"]["approval"] == "accepted"
    assert [one["vm"] for one in details["reports"][0]["seen_by"]] == ["api-0", "api-1"]
    assert details["reports"][0]["cloudevent"]["data"]["EventId"] == event_id("api")
    states = {vm["name"]: vm["state"] for vm in console.get("/api/v1/vms").json()["vms"]}
    assert states == {"api-0": "Scheduled", "api-1": "quiet", "api-2": "unknown"}
    assert console.get("/api/v1/events?vm=nothing").json() == {"events": []}
    assert console.get("/api/v1/openapi.json").json()["openapi"] == "3.1.0"


def test_health_and_metrics_say_how_it_is(console: RunningConsole) -> None:
    assert console.get("/livez").json() == {"ok": True, "role": "console"}
    assert console.get("/readyz").status_code == 200
    families = {
        family.name: family for family in text_string_to_metric_families(console.get("/metrics").text)
    }
    vms = {sample.labels["state"]: sample.value for sample in families["imds_bridge_console_vms"].samples}
    assert (vms["Scheduled"], vms["quiet"], vms["unknown"]) == (1, 1, 1)
    assert families["imds_bridge_console_received"].samples[0].value == 4
    assert families["imds_bridge_console_repeated"].samples[0].value == 1


def test_a_scraper_shows_the_token_where_people_sign_in(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = behind_proxy()
    with running_console(tmp_path_factory.mktemp("guarded"), **settings) as guarded:
        statuses = [
            guarded.get("/metrics", headers).status_code
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {TOKEN}"})
        ]
        assert statuses == [401, 401, 200]
        assert guarded.get("/livez").status_code == 200
        assert guarded.get("/api/v1/events").json() == {"error": "You are not signed in; reload the page."}
