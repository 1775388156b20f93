"""`outbox`: what is stored, waits, and could not be delivered."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bridge.outbox.state_dir import StateFolder
from tests.support.cli import Cli
from tests.support.only import only
from tests.support.outbox import OTHER_TYPE, event
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
