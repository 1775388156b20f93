"""Orders of the CloudEvents of one EventId that ends, and comes back: when each consumer holds the VM for down.

`tests/data/orders.json` has for each message when its VM saw the change (`at`, seconds), its kind and id, the VMs
that it names, and whether the VM is announced or down once a consumer has had it; `lost` is no message, but a day
without news. What a consumer says instead stands under its name: the console goes by `at` alone, the Function in C#
(`notices`) leaves out what does not name its VM, and these and the worker never give an event up for lost.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.console.merge import Report, merge
from bridge.formats.text import instant_of
from infra.consumers.worker.worker import Worker
from tests.support.paths import ROOT

ORDERS: list[dict[str, Any]] = json.loads((ROOT / "tests/data/orders.json").read_text(encoding="utf-8"))
STORY = runpy.run_path(str(ROOT / "schemas/snippets/story.py"))
PAGE = (ROOT / "schemas/README.md").read_text(encoding="utf-8")
BEGIN = datetime(2026, 11, 20, 12, tzinfo=UTC)
NOT_BEFORE, LATER = "2126-11-20T13:00:00.000Z", "2126-11-22T13:00:00.000Z"
IsDown = Callable[[dict[str, Any]], bool]


def cloud_event(message: dict[str, Any]) -> dict[str, Any]:
    """Return the CloudEvent of a message; of `lost` before when there is no news."""
    kind, at = message["kind"], BEGIN + timedelta(seconds=message["at"])
    if kind == "lost":
        return {"lost": LATER}
    status = {"scheduled": "Scheduled", "updated": "Scheduled"}.get(kind, kind.capitalize())
    data = {"EventId": "E1", "EventType": "Reboot", "EventStatus": status, "Resources": message["resources"]}
    return {
        "id": message["id"],
        "source": "/group",
        "type": f"io.imdsbridge.scheduledevent.{kind}.v1",
        "time": f"{at:%Y-%m-%dT%H:%M:%S}.000Z",
        "correlationid": "E1",
        "data": {**data, "NotBeforeUtc": NOT_BEFORE, "VmIsGone": None},
    }


def story(_: Path) -> IsDown:
    """Judge by schemas/snippets/story.py."""
    told: dict[str, Any] = {}

    def is_down(event: dict[str, Any]) -> bool:
        if "lost" in event:
            STORY["lost"](told, "web-0", event["lost"])
        else:
            STORY["tell"](told, "web-0", event)
        return bool(told["e1"]["down"] and not told["e1"]["end"])

    return is_down


def worker(folder: Path) -> IsDown:
    """Judge by infra/consumers/worker, whose commands succeed at once."""
    judge = Worker(Namespace(vm="web-0", types=["reboot"], state=folder / "state.json", secret=""))

    def is_down(event: dict[str, Any]) -> bool:
        if "lost" not in event:
            assert judge.read(SimpleNamespace(body=[json.dumps(event).encode()], message_id="m"))
        known = judge.events.get("e1", {"phase": "over"})
        if known["phase"] == "ended":
            done: Any = SimpleNamespace(poll=lambda: 0)
            judge.jobs["e1"] = (done, "ended", 0.0, known.get("came_back", ""))
            judge.check("e1", known)
        return str(known["phase"]) != "over"

    return is_down


def console(_: Path) -> IsDown:
    """Judge by the console, which sorts what all VMs have reported by its time."""
    reports: list[Report] = []

    def is_down(event: dict[str, Any]) -> bool:
        if at := instant_of(event.get("time")):
            reports.append(Report(kind=event["type"].split(".")[3], at=at.timestamp(), data=event["data"]))
        merged = merge(reports)
        assert merged
        return merged.is_open and "web-0" in merged.resources

    return is_down


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: str(order["name"]))
@pytest.mark.parametrize("consumer", [story, worker, console])
def test_a_vm_is_down_from_an_announcement_to_its_end_also_if_the_event_comes_back(
    tmp_path: Path, consumer: Callable[[Path], IsDown], order: dict[str, Any]
) -> None:
    is_down = consumer(tmp_path)
    assert [is_down(cloud_event(message)) for message in order["messages"]] == expected(
        consumer.__name__, order
    )


def expected(consumer: str, order: dict[str, Any]) -> list[bool]:
    """Return whether the VM is down for a consumer after each message."""
    return list(order.get(consumer, [message["down"] for message in order["messages"]]))


def downs(told: Sequence[str]) -> Iterator[bool]:
    """Yield after each message whether the VM is down by what was told, "" for nothing."""
    is_down = False
    for line in told:
        is_down = {"DOWN": True, "BACK": False, "GONE": False, "LOST": False}.get(
            line.partition(" ")[0], is_down
        )
        yield is_down


@pytest.mark.timeout(600)  # the first build downloads what it needs
def test_the_consumers_in_csharp_tell_each_order_as_the_others_judge_it(tmp_path: Path) -> None:
    dotnet = shutil.which("dotnet") or pytest.skip("the consumers in C# need .NET")
    given, project = tmp_path / "orders", ROOT / "infra/consumers/dotnet/try/orders"
    lines = [json.dumps([cloud_event(message) for message in order["messages"]]) for order in ORDERS]
    given.write_text("\n".join(lines), encoding="utf-8")
    subprocess.run([dotnet, "build", project, "--artifacts-path", tmp_path / "out"], check=True)
    program = tmp_path / "out/bin/orders/debug/orders.dll"
    told = subprocess.run([dotnet, program, given], check=True, capture_output=True, text=True).stdout
    for order, line in zip(ORDERS, told.splitlines(), strict=True):
        for consumer, said in json.loads(line).items():
            assert [*downs(said)] == expected(consumer, order), (order["name"], consumer, said)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: str(order["name"]))
def test_the_function_stores_every_event_once_whatever_the_order(
    monkeypatch: pytest.MonkeyPatch, order: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "infra/consumers/function"))
    to_row = import_module("function_app").to_row
    messages = [message for message in order["messages"] if message["kind"] != "lost"]
    events = [{"specversion": "1.0", **cloud_event(message)} for message in messages]
    rows = [to_row(json.dumps(event).encode()) for event in events]
    keys = {(row["PartitionKey"], row["RowKey"]) for row in rows}
    assert len(keys) == len({message["id"] for message in messages})


def test_the_logic_app_goes_by_what_a_message_says_alone_and_so_asks_again_for_a_return() -> None:
    text = (ROOT / "infra/consumers/logicapp/definition.json").read_text(encoding="utf-8")
    assert {*re.findall(r"outputs\('Read'\)\?\['(\w+)'\]", text)} == {"id", "type", "data"}
    assert "io.imdsbridge.scheduledevent.scheduled.v1" in text


def test_the_page_has_every_order() -> None:
    for order in ORDERS:
        said = ", ".join("down" if message["down"] else "not down" for message in order["messages"])
        messages = ", ".join(f"{message['kind']} {message['at']}" for message in order["messages"])
        assert f"| {order['name']} | {messages} | {said} |" in PAGE
