"""`outbox` and `explain`: what is stored, waits, could not be delivered, and why an event is not sent."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge.events.envelope import read_event
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox.state_dir import StateFolder
from tests.support.cli import Cli
from tests.support.only import only
from tests.support.outbox import OTHER_TYPE, TYPE, event, open_outbox
from tests.support.status import write_raw


@pytest.fixture
def filled(cli: Cli) -> Cli:
    cli.fill()
    write_raw(StateFolder(cli.state()), {"sinks": {"ops": {"last_error": "503 from https://x"}}})
    return cli


def rows(cli: Cli, *options: str) -> list[dict[str, Any]]:
    """Return what `outbox list` shows."""
    return [*cli("outbox", "list", "--json", *options).json]


def test_list_shows_the_newest_events(filled: Cli) -> None:
    done = filled("outbox", "list")
    assert (done.code, [line.split()[0] for line in done.out.splitlines()]) == (0, ["SEQ", "1", "2", "3"])
    newest = rows(filled, "--limit", "2")
    values = [(row["seq"], row["id"], row["type"], row["stored_at"]) for row in newest]
    stored_at = "2027-01-15T08:00:00.000Z"
    assert values == [(2, "two", OTHER_TYPE, stored_at), (3, "three", OTHER_TYPE, stored_at)]
    assert newest[0]["bytes"] == len(event("two", type_=OTHER_TYPE).body)


def test_list_shows_dead_letters_with_the_reason(filled: Cli) -> None:
    done = filled("outbox", "list", "--dead")
    assert re.search(r"1 +ops +\S+ +rejected +False +one +one was refused", done.out)
    found = [(row["number"], row["reason"], row["retry"]) for row in rows(filled, "--dead")]
    assert found == [(1, "rejected", False), (2, "rejected", False)]
    assert filled("outbox", "list", "--sink", "other").out == "no dead letters\n"


def test_list_shows_what_waits_with_its_age_and_the_sinks_last_error(filled: Cli) -> None:
    done = filled("outbox", "list", "--waiting")
    assert re.search(rf"3 +ops +\d.*s +{OTHER_TYPE} +three +2 +20\d\d-\S+Z +503 from https://x", done.out)
    assert len(done.out.splitlines()) == 5  # sink other has all three
    row = only(rows(filled, "--waiting", "--sink", "ops"))
    assert (row["id"], row["subject"], row["tries"]) == ("three", "three", 2)
    assert filled("outbox", "list", "--waiting", "--limit", "1").out.count("\n") == 2


@pytest.mark.parametrize("which", ["two", "2"])
def test_show_prints_an_event_as_it_is_sent(filled: Cli, which: str) -> None:
    done = filled("outbox", "show", which)
    assert (done.json["id"], "\n  " in done.out) == ("two", True)
    assert filled("outbox", "show", which, "--json").json == done.json


@pytest.mark.parametrize(
    ("action", "said", "left"),
    [
        ("retry 2", "1 dead letter(s) will be sent again\n", [(1, False), (2, True)]),
        ("retry --all", "2 dead letter(s) will be sent again\n", [(1, True), (2, True)]),
        ("drop 1", "1 dead letter(s) dropped\n", [(2, False)]),
        ("drop --all --sink other", "0 dead letter(s) dropped\n", [(1, False), (2, False)]),
        ("drop --all --yes", "2 dead letter(s) dropped\n", []),
    ],
)
def test_retry_and_drop_change_dead_letters(
    filled: Cli, action: str, said: str, left: list[tuple[int, bool]]
) -> None:
    done = filled("outbox", *action.split())
    assert (done.code, done.out) == (0, said)
    assert [(row["number"], row["retry"]) for row in rows(filled, "--dead")] == left


@pytest.mark.parametrize(
    ("answer", "said", "left"),
    [("y", "2 dead letter(s) dropped\n", 0), ("", "nothing dropped\n", 2), ("n", "nothing dropped\n", 2)],
)
def test_drop_all_asks(
    filled: Cli, monkeypatch: pytest.MonkeyPatch, answer: str, said: str, left: int
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    assert (filled("outbox", "drop", "--all").out, len(rows(filled, "--dead"))) == (said, left)


def test_move_hands_what_waits_to_another_sink_and_drop_deletes_it(filled: Cli) -> None:
    done = filled("outbox", "move", "--from", "other", "--to", "ops")
    assert (done.code, done.out) == (0, "3 event(s) wait for ops now\n")
    waiting = [(row["sink"], row["id"]) for row in rows(filled, "--waiting")]
    assert waiting == [("ops", "one"), ("ops", "two"), ("ops", "three")]
    done = filled("outbox", "move", "--from", "ops", "--to", "new")
    assert done.out == (
        "3 event(s) wait for new now; no running process has this sink: restart it with the new configuration\n"
    )
    done = filled("outbox", "drop", "--waiting", "--sink", "new", "--yes")
    assert done.out == "3 event(s) dropped that waited for new\n"
    assert filled("outbox", "list", "--waiting").out == "nothing waits\n"


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("show nothing", "nothing: no such event is stored"),
        ("retry 7", "unknown dead letter: 7"),
        ("retry", "give the numbers of dead letters, or --all"),
        ("drop 1 --all", "give the numbers of dead letters, or --all"),
        ("drop 1 --sink other", "unknown dead letter: 1"),
        ("list --sink opps", "given --sink opps, expected ops, other; did you mean ops?"),
        ("drop --all --sink opps", "given --sink opps"),
        ("drop --all", "without a terminal it cannot ask; give --yes"),
        ("drop --waiting", "give --sink and no numbers"),
        ("drop --waiting --sink other", "without a terminal it cannot ask; give --yes"),
        ("move --from opps --to ops", "given --sink opps, expected ops, other"),
        ("move --from ops --to ops", "expected two different sinks"),
    ],
)
def test_wrong_arguments_exit_2_with_the_reason(filled: Cli, action: str, why: str) -> None:
    done = filled("outbox", *action.split())
    assert (done.code, why in done.err) == (2, True)


def test_without_a_state_it_exits_2_with_the_reason(cli: Cli) -> None:
    done = cli("outbox", "list")
    assert (done.code, "there is no outbox in" in done.err) == (2, True)


# --- `explain` ---


WEBHOOK = {"kind": "webhook", "url": "http://127.0.0.1:9/"}
LATER = "older than this sink, or its types, where and scope, with which the process has not started yet"
DELIVERED = "delivered (the log has the time), unless somebody dropped it"
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
    assert explained(cli, "5f0c") == [
        ("all", "", LATER),
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
    assert new == ("new", "", LATER)
    assert other[:2] == ("other", "not configured")
    assert re.fullmatch(r"waits for \d.*: error not known", other[2])
    assert explained(cli, "one")[0] == ("ops", "", "dead letter 1, rejected: one was refused")
    assert explained(cli, "2")[0][2].startswith("dead letter 2, ")
    assert cli("outbox", "drop", "--waiting", "--sink", "ops", "--yes").code == 0
    assert explained(cli, "three")[0][2] == DELIVERED


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
    never = (
        "was not for this sink as it is now: it is older than the sink, or than its types, where and scope"
    )
    assert explained(cli, "1") == [("ops", "", never), ("always", "", DELIVERED), ("newer", "", LATER)]
    assert explained(cli, "2") == [("ops", "", DELIVERED), ("always", "", DELIVERED), ("newer", "", LATER)]


def stored(cli: Cli, *events: StoredEvent) -> None:
    """Leave these events in the outbox; nothing waits for them."""
    cli.write()
    with closing(open_outbox(cli.state(), sinks={"stdout": (Filter(), False)})) as outbox:
        outbox.commit(events)


def about(name: str, event_id: str = EVENT_ID) -> StoredEvent:
    """Make an event of this name about a Scheduled Event."""
    body = {**cloud_event(), "id": name, "correlationid": event_id}
    return replace(event(name), body=json.dumps(body).encode())


@pytest.mark.parametrize(
    ("names", "arguments", "expected"),
    [
        (["beat"], [], ["beat"]),
        (["beat", "notice", "beat again"], [], ["notice"]),
        (["beat", "notice", "later notice", "other notice"], [EVENT_ID.lower()], ["notice", "later notice"]),
    ],
    ids=["the newest if all are of the VM", "the newest notice", "all with the EventId of Azure"],
)
def test_the_events_that_are_meant_are_explained(
    cli: Cli, names: list[str], arguments: list[str], expected: list[str]
) -> None:
    made = {name: event(name, type_="io.imdsbridge.bridge.heartbeat.v1") for name in ("beat", "beat again")}
    made |= {"notice": about("notice"), "later notice": about("later notice")}
    made["other notice"] = about("other notice", "another EventId")
    stored(cli, *(made[name] for name in names))
    assert [one["id"] for one in cli("explain", "--json", *arguments).json] == expected


def test_what_the_listeners_auto_rules_make_of_an_event_is_shown(cli: Cli) -> None:
    stored(cli, about("scheduled"))
    assert "auto rules" not in cli("explain").out
    folder = StateFolder(cli.state("listen"))
    folder.acquire()
    write_raw(folder, {"auto": [{"EventId": EVENT_ID.lower(), "Why": "settling", "NeedsPerson": False}]})
    folder.release()
    assert "auto rules of the listener: settling" in cli("explain").out


def test_explain_says_that_the_process_has_loaded_another_file(cli: Cli, tmp_path: Path) -> None:
    cli.fill()
    cli.sinks(ops={"kind": "stdout"})
    folder, other = StateFolder(cli.state()), tmp_path / "own.toml"
    other.write_text("stop_seconds = 1")
    folder.acquire()
    for config, said in (
        (other, f"has loaded {other}, which differs from {cli.config}: restart it"),
        (cli.config, ""),
    ):
        write_raw(folder, {"role": "forward", "config": str(config)})
        done = cli("explain", "--json")
        assert (said in done.err, bool(done.err), len(done.json)) == (True, bool(said), 1)
    folder.release()


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
