"""`explain`: whether an event goes to each sink, and what became of it there."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from bridge.events.envelope import read_event
from bridge.events.filters import Filter
from bridge.outbox.state_dir import StateFolder
from tests.support.cli import Cli
from tests.support.only import only
from tests.support.outbox import OTHER_TYPE, TYPE, event, open_outbox
from tests.support.status import write_raw

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
    event = only(cli("explain", "--json", *arguments).json)
    return [(sink["sink"], sink["why"], sink["state"]) for sink in event["sinks"]]


def test_each_sink_says_whether_it_takes_the_event_or_which_key_leaves_it_out(cli: Cli) -> None:
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
    with closing(open_outbox(cli.state(), sinks={})) as outbox:
        outbox.commit([read_event(json.dumps(cloud_event()).encode())])
    new = "older than this sink, or its types, where and scope, with which the process has not started yet"
    assert explained(cli, "5f0c") == [
        ("all", "", new),
        ("chat", "scope (the default): the event names web-1, this VM is web-0", ""),
        ("first", "scope: the event names web-1 in this order, this VM is web-0", ""),
        ("some", f"types: {TYPE} matches none of io.imdsbridge.bridge.*, {OTHER_TYPE}", ""),
        ("freezes", 'where: EventType is "Reboot", wanted "Freeze" or "Preempt"', ""),
    ]
    done = cli("explain")
    assert done.out.startswith(f"{TYPE} about scheduledevents/{EVENT_ID}, id 5f0c\n")
    assert re.search(r"\nall +yes +older than [^\n]+\nchat +no +scope \(the default\)", done.out)


def test_an_event_of_the_outbox_waits_is_a_dead_letter_or_waits_no_longer(cli: Cli) -> None:
    cli.fill()
    write_raw(StateFolder(cli.state()), {"sinks": {"ops": {"last_error": "503 from https://x"}}})
    cli.write(sinks={"ops": WEBHOOK, "new": WEBHOOK})
    ops, new, other = explained(cli)  # the newest
    assert re.fullmatch(
        r"waits for \d.* s, failed 2 time\(s\), next try at 20\S+Z: 503 from https://x", ops[2]
    )
    assert new == (
        "new",
        "",
        "older than this sink, or its types, where and scope, with which the process has not started yet",
    )
    assert other[:2] == ("other", "not configured")
    assert re.fullmatch(r"waits for \d.*: error not known", other[2])
    assert explained(cli, "one")[0] == ("ops", "", "dead letter 1, rejected: one was refused")
    assert explained(cli, "2")[0][2].startswith("dead letter 2, ")
    assert cli("outbox", "drop", "--waiting", "--sink", "ops", "--yes").code == 0
    assert explained(cli, "three")[0][2] == "delivered (the log has the time), unless somebody dropped it"


def started(cli: Cli, *names: str, **sinks: Filter) -> None:
    """Let a process start with these sinks, store events of the names, and deliver them."""
    outbox = open_outbox(cli.state(), sinks={name: (wanted, False) for name, wanted in sinks.items()})
    for name in names:
        outbox.commit([event(name, type_=OTHER_TYPE)])
        for sink in sinks:
            outbox.acknowledge(sink, outbox.pending(sink, 9))
    outbox.close()


def test_an_event_that_was_delivered_is_told_from_one_that_was_never_for_the_sink(cli: Cli) -> None:
    started(cli, "1", ops=Filter(types=[TYPE]), always=Filter())
    started(cli, "2", ops=Filter(), always=Filter(), newer=Filter())
    cli.write(sinks={"ops": WEBHOOK, "always": WEBHOOK, "newer": {**WEBHOOK, "types": [OTHER_TYPE]}})
    delivered = "delivered (the log has the time), unless somebody dropped it"
    never = (
        "was not for this sink as it is now: it is older than the sink, or than its types, where and scope"
    )
    later = "older than this sink, or its types, where and scope, with which the process has not started yet"
    assert explained(cli, "1") == [("ops", "", never), ("always", "", delivered), ("newer", "", later)]
    assert explained(cli, "2") == [("ops", "", delivered), ("always", "", delivered), ("newer", "", later)]


def test_without_an_id_the_newest_event_about_a_scheduled_event_is_meant(cli: Cli) -> None:
    outbox = open_outbox(cli.state(), sinks={"stdout": (Filter(), False)})
    outbox.commit([event("beat", type_="io.imdsbridge.bridge.heartbeat.v1")])
    cli.write()
    assert [one["id"] for one in cli("explain", "--json").json] == ["beat"]
    outbox.commit([event("notice", type_=TYPE), event("again", type_="io.imdsbridge.bridge.heartbeat.v1")])
    outbox.close()
    assert [one["id"] for one in cli("explain", "--json").json] == ["notice"]


def test_an_event_id_of_azure_stands_for_every_event_about_it(cli: Cli) -> None:
    outbox = open_outbox(cli.state(), sinks={"stdout": (Filter(), False)})
    for name in ("scheduled", "started", "other"):
        body = {**cloud_event(), "id": name, "correlationid": EVENT_ID if name != "other" else "other"}
        outbox.commit([replace(event(name), body=json.dumps(body).encode())])
    outbox.close()
    cli.write()
    assert [one["id"] for one in cli("explain", "--json", EVENT_ID.lower()).json] == ["scheduled", "started"]


def test_what_the_listeners_auto_rules_make_of_an_event_is_shown(cli: Cli) -> None:
    outbox = open_outbox(cli.state(), sinks={"stdout": (Filter(), False)})
    body = json.dumps({**cloud_event(), "id": "scheduled"}).encode()
    outbox.commit([replace(event("scheduled"), body=body)])
    outbox.close()
    cli.write()
    assert "auto rules" not in cli("explain").out
    folder = StateFolder(cli.state("listen"))
    folder.acquire()
    write_raw(folder, {"auto": [{"EventId": EVENT_ID.lower(), "Why": "settling", "NeedsPerson": False}]})
    folder.release()
    assert "auto rules of the listener: settling" in cli("explain").out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["none"], "none: no such event is stored; `imds-bridge outbox list` shows which are"),
        (["--role", "relay"], "there is no outbox in"),
    ],
)
def test_what_cannot_be_explained_is_an_error(cli: Cli, arguments: list[str], why: str) -> None:
    cli.fill()
    cli.write()
    done = cli("explain", *arguments)
    assert (done.code, why in done.err) == (2, True)
