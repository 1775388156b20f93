"""`outbox`: what is stored, waits, and could not be delivered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bridge.outbox.state_dir import StateFolder
from tests.support.cli import Call, fill
from tests.support.outbox import OTHER_TYPE


def test_outbox_list_shows_the_newest_events(call: Call, config: Path) -> None:
    fill(config)
    done = call("outbox", "list", "--config", config)
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == ["SEQ", "1", "2", "3"]
    done = call("outbox", "list", "--json", "--limit", "2", "--config", config)
    assert [(row["seq"], row["id"], row["type"]) for row in done.json] == [
        (2, "two", OTHER_TYPE),
        (3, "three", OTHER_TYPE),
    ]


def test_outbox_list_shows_dead_letters_with_the_reason(call: Call, config: Path) -> None:
    fill(config)
    done = call("outbox", "list", "--dead", "--config", config)
    assert re.search(r"1 +ops +\S+ +rejected +False +one +one was refused", done.out)
    done = call("outbox", "list", "--dead", "--json", "--config", config)
    assert [(row["number"], row["reason"], row["retry"]) for row in done.json] == [
        (1, "rejected", False),
        (2, "rejected", False),
    ]
    assert call("outbox", "list", "--sink", "other", "--config", config).out == "no dead letters\n"


@pytest.mark.parametrize("which", ["two", "2"])
def test_outbox_show_prints_an_event_as_it_is_sent(call: Call, config: Path, which: str) -> None:
    fill(config)
    done = call("outbox", "show", which, "--config", config)
    assert done.json["id"] == "two"
    assert "\n  " in done.out
    assert call("outbox", "show", which, "--json", "--config", config).json == done.json


def test_outbox_list_shows_what_waits_with_its_age_and_the_sinks_last_error(call: Call, config: Path) -> None:
    fill(config)
    folder = StateFolder(config.parent / "state" / "forward")
    folder.write_status({"sinks": {"ops": {"last_error": "503 from https://x"}}})
    done = call("outbox", "list", "--waiting", "--config", config)
    assert re.search(rf"3 +ops +\d.*s +{OTHER_TYPE} +three +503 from https://x", done.out)
    assert len(done.out.splitlines()) == 5  # sink other has all three
    rows = call("outbox", "list", "--waiting", "--sink", "ops", "--json", "--config", config).json
    assert [(row["id"], row["subject"]) for row in rows] == [("three", "three")]
    assert call("outbox", "list", "--waiting", "--limit", "1", "--config", config).out.count("\n") == 2


def test_outbox_retry_marks_dead_letters(call: Call, config: Path) -> None:
    fill(config)
    done = call("outbox", "retry", "2", "--config", config)
    assert (done.code, done.out) == (0, "1 dead letter(s) will be sent again\n")
    rows = call("outbox", "list", "--dead", "--json", "--config", config).json
    assert [row["retry"] for row in rows] == [False, True]


def test_outbox_move_hands_what_waits_to_another_sink(call: Call, config: Path) -> None:
    fill(config)
    done = call("outbox", "move", "--from", "other", "--to", "ops", "--config", config)
    assert (done.code, done.out.partition(";")[0]) == (0, "3 event(s) wait for ops now")
    rows = call("outbox", "list", "--waiting", "--json", "--config", config).json
    assert [(row["sink"], row["id"]) for row in rows] == [("ops", "one"), ("ops", "two"), ("ops", "three")]
    done = call("outbox", "drop", "--waiting", "--sink", "ops", "--yes", "--config", config)
    assert done.out == "3 event(s) dropped that waited for ops\n"
    assert call("outbox", "list", "--waiting", "--config", config).out == "nothing waits\n"


def test_outbox_drop_deletes_dead_letters(call: Call, config: Path) -> None:
    fill(config)
    assert call("outbox", "drop", "1", "2", "--config", config).out == "2 dead letter(s) dropped\n"
    assert call("outbox", "list", "--dead", "--config", config).out == "no dead letters\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("y", ("2 dead letter(s) dropped\n", 0)),
        ("", ("nothing dropped\n", 2)),
        ("n", ("nothing dropped\n", 2)),
    ],
)
def test_outbox_drop_all_asks(
    call: Call, config: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: tuple[str, int]
) -> None:
    fill(config)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    shown = call("outbox", "drop", "--all", "--config", config).out
    left = call("outbox", "list", "--dead", "--json", "--config", config).json
    assert (shown, len(left)) == expected


def test_outbox_drop_all_with_yes_does_not_ask(call: Call, config: Path) -> None:
    fill(config)
    assert call("outbox", "drop", "--all", "--yes", "--config", config).out == "2 dead letter(s) dropped\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["show", "nothing"], "nothing: no such event is stored"),
        (["retry", "7"], "unknown dead letter: 7"),
        (["retry"], "give the numbers of dead letters, or --all"),
        (["drop", "1", "--all"], "give the numbers of dead letters, or --all"),
        (["drop", "1", "--sink", "other"], "unknown dead letter: 1"),
        (["list", "--sink", "opps"], "given --sink opps, expected ops, other; did you mean ops?"),
        (["drop", "--all", "--sink", "opps"], "given --sink opps"),
        (["drop", "--all"], "without a terminal it cannot ask; give --yes"),
        (["drop", "--waiting"], "give --sink and no numbers"),
        (["drop", "--waiting", "--sink", "other"], "without a terminal it cannot ask; give --yes"),
        (["move", "--from", "opps", "--to", "ops"], "given --sink opps, expected ops, other"),
        (["move", "--from", "ops", "--to", "ops"], "expected two different sinks"),
    ],
)
def test_outbox_with_wrong_arguments_exits_2_with_the_reason(
    call: Call, config: Path, arguments: list[str], why: str
) -> None:
    fill(config)
    done = call("outbox", *arguments, "--config", config)
    assert done.code == 2
    assert why in done.err


def test_outbox_without_a_state_exits_2_with_the_reason(call: Call, config: Path) -> None:
    done = call("outbox", "list", "--config", config)
    assert done.code == 2
    assert "there is no outbox in" in done.err
