"""`console import` makes a store of an archive; `console export` has what only the console knew."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from bridge.console.archive import export_own
from bridge.console.expected import read_expected
from bridge.console.forget import dismissed, forgotten
from bridge.outbox.state_dir import StateFolder
from tests.support.cli import Call, CommandResult
from tests.support.console import NOW, FleetVm, Shown, event, shown

LATER = NOW + timedelta(days=2)
REBOOT, REDEPLOY = event(minutes=3000), event("F", minutes=3000, type="Redeploy")
VMS = [FleetVm(f"web-{number}", tags={"owner": "ana", "tier": "a=b"}) for number in range(4)]
ARCHIVE = [
    *(vm.heartbeat() for vm in VMS),
    *(VMS[0].change("scheduled", one) for one in (REBOOT, REDEPLOY)),
    VMS[1].heartbeat(LATER),
]


@pytest.fixture
def console(config: Path, call: Call) -> Call:
    """Return the command line with a state folder."""
    return lambda *arguments: call("console", *arguments, "--config", config)


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def state_of(seen: Shown) -> tuple[object, ...]:
    seen.clock.advance(LATER.timestamp() + 600 - seen.clock.wall())
    vms = [(vm.name, vm.watch, vm.group, vm.alive_at, vm.missing) for vm in seen.vms()]
    return vms, [(one.event_id, one.status, one.resources) for one in seen.events()]


@pytest.mark.parametrize("order", [1, -1])
def test_an_archive_and_an_export_make_the_store_again_in_any_order(
    tmp_path: Path, console: Call, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    monkeypatch.setattr("bridge.console.archive.BATCH_EVENTS", 1)
    monkeypatch.setattr("bridge.console.expected.MAX_BYTES", 100)  # of what is sent: an export has more
    first, second = tmp_path / "first", tmp_path / "state" / "console"
    first.mkdir()
    place = "/subscriptions/s/resourceGroups/shop/providers/Microsoft.Compute/virtualMachines"
    expected = [
        {"Name": name, "ResourceId": f"{place}/{name}", "Tags": {"a": "b"}} for name in ("web-8", "web-9")
    ]
    with shown(first) as seen:
        seen.add(*ARCHIVE, at=LATER)
        now = LATER.timestamp() + 60
        away = [vm for vm in seen.vms() if vm.name == "web-2"]
        own = [
            read_expected(json.dumps(expected).encode(), now=now),
            *forgotten(away, by="ana", now=now, why="scaled in"),
            dismissed(seen.event("F"), by="ana", now=now, why="old", hours=24),
        ]
        seen.store.add(own, received_at=now)
        exported = [*export_own(first / "console.db")]  # while the store is in use
        wanted = state_of(seen)

    marked = "\ufeff".encode() + exported[0] + b"\r", *exported[1:]
    forged = exported[-1].replace(b"old", b"forged").replace(b'"id": "', b'"id": "2')
    archive, exports = write(tmp_path / "archive.jsonl", *ARCHIVE), write(tmp_path / "own.jsonl", *marked)
    files = [*(archive, "--own", exports)[::order]] if order > 0 else ["--own", exports, archive]
    assert console("import", write(tmp_path / "forged.jsonl", forged)).out.startswith(
        "0 new, 0 known, 1 ignored"
    )
    assert console("import", *files) == CommandResult(0, "11 new, 0 known, 0 ignored, 0 unreadable\n", "")
    again = console("import", *files)  # the two lists have no id of their own
    assert again == CommandResult(0, "2 new, 9 known, 0 ignored, 0 unreadable\n", "")
    with shown(second, LATER) as seen:
        assert state_of(seen) == wanted
    names = [name for name, *_ in wanted[0]]  # type: ignore[attr-defined]
    assert sorted(names) == ["web-0", "web-1", "web-3", "web-8", "web-9"]
    assert console("export").out.encode().splitlines()[2:] == exported[2:]


def test_lines_that_cannot_be_read_are_told_and_the_others_are_kept(tmp_path: Path, console: Call) -> None:
    other = b'{"specversion":"1.0","id":"1","source":"s","type":"com.contoso.order"}'
    listed = other.replace(b"com.contoso.order", b"io.imdsbridge.console.expected.v1")[:-1] + b',"data":{}}'
    archive = write(tmp_path / "archive.jsonl", b"{}", b"", other, listed, *ARCHIVE, b'{"id":')
    done = console("import", "--own", archive)
    assert (done.code, done.out) == (3, "7 new, 0 known, 2 ignored, 3 unreadable\n")
    assert done.err.splitlines() == [
        f"{archive}, line 1: the attribute specversion is missing",
        f"{archive}, line 4: the body: Input should be a valid list; expected a list of VMs with Name and ResourceId",
        f"{archive}, line 12: not JSON: Expecting value: line 1 column 7 (char 6)",
    ]


def test_what_cannot_be_done_says_why(tmp_path: Path, console: Call) -> None:
    missing = console("import", tmp_path / "none.jsonl")
    fault = f"imds-bridge: {tmp_path}/none.jsonl cannot be read: No such file or directory\n"
    assert missing == CommandResult(2, "", fault)
    nothing = console("export")
    assert nothing.code == 3
    assert f"{tmp_path}/state/console/console.db cannot be read" in nothing.err
    folder = StateFolder(tmp_path / "state" / "console")
    folder.acquire()
    held = console("import", write(tmp_path / "archive.jsonl", *ARCHIVE))
    folder.release()
    assert (held.code, "process" in held.err) == (3, True)
