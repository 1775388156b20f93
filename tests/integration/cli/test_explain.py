"""`explain`: whether an event goes to each sink, and what became of it there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bridge.events.filters import Filter
from bridge.outbox.state_dir import StateFolder
from tests.support.cli import Cli
from tests.support.outbox import OTHER_TYPE, TYPE, event, open_outbox

WEBHOOK = {"kind": "webhook", "url": "http://127.0.0.1:9/"}
EVENT_ID = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"


def cloud_event(**data: Any) -> dict[str, Any]:
    """Return a CloudEvent about a reboot of web-1, seen by web-0."""
    data = {"EventType": "Reboot", "Resources": ["web-1"], "Vm": {"Name": "web-0", "VmId": "1"}, **data}
    return {
        "specversion": "1.0",
        "id": "5f0c",
        "source": "/vms/web-0",
        "type": TYPE,
        "subject": f"scheduledevents/{EVENT_ID}",
        "correlationid": EVENT_ID,
        "data": data,
    }


def explained(cli: Cli, *arguments: str) -> list[tuple[str, str, str]]:
    """Return each sink's name, why it does not take the event, and where the event is."""
    (event,) = cli("explain", "--json", *arguments).json
    return [(sink["sink"], sink["why"], sink["state"]) for sink in event["sinks"]]


def test_each_sink_says_whether_it_takes_the_event_of_a_file_or_which_key_leaves_it_out(
    cli: Cli, tmp_path: Path
) -> None:
    slack = {**WEBHOOK, "format": "slack"}
    cli.write(
        sinks={
            "all": WEBHOOK,
            "chat": slack,
            "first": {**WEBHOOK, "scope": "first"},
            "some": {**WEBHOOK, "types": ["io.imdsbridge.bridge.*", OTHER_TYPE]},
            "freezes": {**WEBHOOK, "where": {"EventType": ["Freeze", "Preempt"]}},
        }
    )
    file = tmp_path / "event.json"
    file.write_text(json.dumps(cloud_event()))
    assert explained(cli, str(file)) == [
        ("all", "", ""),
        ("chat", "scope (the default): the event names web-1, this VM is web-0", ""),
        ("first", "scope: the event names web-1 in this order, this VM is web-0", ""),
        ("some", f"types: {TYPE} matches none of io.imdsbridge.bridge.*, {OTHER_TYPE}", ""),
        ("freezes", 'where: EventType is "Reboot", wanted "Freeze" or "Preempt"', ""),
    ]
    done = cli("explain", str(file))
    assert done.out.startswith(f"{TYPE} about scheduledevents/{EVENT_ID}, id 5f0c\n")
    assert re.search(r"\nall +yes +-\nchat +no +scope \(the default\)", done.out)


def test_an_event_of_the_outbox_waits_is_a_dead_letter_or_waits_no_longer(cli: Cli) -> None:
    cli.fill()
    StateFolder(cli.state()).write_status({"sinks": {"ops": {"last_error": "503 from https://x"}}})
    cli.write(sinks={"ops": WEBHOOK, "new": WEBHOOK})
    ops, new, other = explained(cli)  # the newest
    assert re.fullmatch(r"waits for \d.*: 503 from https://x", ops[2])
    assert new == (
        "new",
        "",
        "older than this sink, which the process has not started with yet; with from_start it will wait then",
    )
    assert other[:2] == ("other", "not configured")
    assert re.fullmatch(r"waits for \d.*: no error", other[2])
    assert explained(cli, "one")[0] == ("ops", "", "dead letter 1, rejected: one was refused")
    assert explained(cli, "2")[0][2].startswith("dead letter 2, ")
    assert cli("outbox", "drop", "--waiting", "--sink", "ops", "--yes").code == 0
    assert explained(cli, "three")[0][2].startswith("waits no longer: delivered (the log has the time)")


def test_an_event_id_of_azure_stands_for_every_event_about_it(cli: Cli) -> None:
    outbox = open_outbox(cli.state(), sinks={"stdout": (Filter(), False)})
    for name in ("scheduled", "started", "other"):
        made, _ = event(name)
        body = {**cloud_event(), "id": name, "correlationid": EVENT_ID if name != "other" else "other"}
        outbox.commit([(made, json.dumps(body).encode())])
    outbox.close()
    cli.write()
    assert [one["id"] for one in cli("explain", "--json", EVENT_ID.lower()).json] == ["scheduled", "started"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["none"], "none: no such event is stored; `imds-bridge outbox list` shows which are"),
        (["none.json"], "No such file"),
        (["event.json"], "event.json: "),
        (["--role", "relay"], "there is no outbox in"),
    ],
)
def test_what_cannot_be_explained_is_an_error(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    cli.fill()
    cli.write()
    monkeypatch.chdir(tmp_path)
    Path("event.json").write_text('{"id": 5}')
    done = cli("explain", *arguments)
    assert (done.code, why in done.err) == (2, True)
