"""Events of several VMs with a real listener on each: nobody approves for others, and one leaves after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.imds_lab import ImdsLab
from tests.support.process import LIMIT_SECONDS, Forward, wait_until

NAMES = ("web-0", "web-1", "web-2")
PREPARED = "io.imdsbridge.approval.prepared.v1"

pytestmark = pytest.mark.timeout(300)


class Group:
    """Three listeners on one IMDS; each program adds a line to `ran`."""

    def __init__(self, folder: Path, imds: ImdsLab, **rule: Any) -> None:
        self.imds = imds
        self.ran = folder / "ran"
        self.ran.touch()
        self.listeners = {}
        for name in NAMES:
            begins = f'echo "{name} $IMDS_BRIDGE_EVENT_ID" >> {self.ran}'
            script = f"{begins}; while [ -e {folder}/hold ]; do sleep 0.1; done"
            auto = {"run": ["/bin/sh", "-c", script], "group": True, "run_timeout_seconds": 60, **rule}
            given = {"imds": {"endpoint": imds.url(name)}, "approvals": {"auto": [auto]}}
            self.listeners[name] = Forward(folder / name, given, role="listen")
        self.hold = folder / "hold"

    @property
    def runs(self) -> list[list[str]]:
        """The VM and the EventId of each program that began, in their order."""
        return [line.split() for line in self.ran.read_text().splitlines()]

    @property
    def begun(self) -> list[str]:
        """The EventIds whose programs began."""
        return [event for _, event in self.runs]

    def prepared(self, name: str) -> list[str]:
        """Return the ids of what a VM has published as prepared."""
        return [one["id"] for one in self.listeners[name].printed() if one["type"] == PREPARED]

    def schedule(self, *names: str, **changes: Any) -> str:
        options = {"event_type": "Reboot", "notice_seconds": 900, **changes}
        return self.imds.schedule(resources=[*names], **options)


def heartbeats(listener: Forward) -> list[dict[str, Any]]:
    """Return the heartbeats that were printed so far, also by earlier processes."""
    return [one for one in listener.printed() if "heartbeat" in one["type"]]


@contextmanager
def running(folder: Path, **rule: Any) -> Iterator[Group]:
    with ImdsLab(vms=NAMES, rate_limit=None) as imds, ExitStack() as stack:
        group = Group(folder, imds, **rule)
        for listener in group.listeners.values():
            stack.enter_context(listener)
        yield group


def test_every_vm_prepares_for_an_event_of_all_also_after_a_kill_and_none_approves_it(tmp_path: Path) -> None:
    with running(tmp_path) as group:
        group.hold.touch()
        event = group.schedule(*NAMES)
        wait_until(lambda: len(group.runs) == len(NAMES))
        killed = group.listeners["web-1"]
        killed.kill()
        killed.start()
        wait_until(lambda: len(group.runs) == len(NAMES) + 1)  # it had not ended
        group.hold.unlink()
        wait_until(lambda: all(group.prepared(name) for name in NAMES))
        killed.kill()
        before = len(heartbeats(killed))
        killed.start()
        wait_until(lambda: len(heartbeats(killed)) > before)
        group.imds.update(event, Description="later")  # it changes: all are prepared for that, too
        wait_until(lambda: all(len(set(group.prepared(name))) == 2 for name in NAMES))
        assert group.imds.approvals == []
        group.imds.update(event, Resources=["web-2"])  # and shrinks to one VM
        wait_until(lambda: group.imds.approvals)
        assert {one.vm for one in group.imds.approvals} == {"web-2"}
    assert sorted(name for name, _ in group.runs) == ["web-0", "web-1", "web-1", "web-2"]


def test_of_three_events_of_one_vm_each_two_leave_at_once_and_the_last_once_one_is_over(
    tmp_path: Path,
) -> None:
    with running(tmp_path, max_unavailable=2) as group:
        *first, last = [group.schedule(name, notice_seconds=900 + at) for at, name in enumerate(NAMES)]
        wait_until(lambda: {one.event_id for one in group.imds.approvals} == {*first})
        assert set(group.begun) == {*first}
        group.imds.complete(first[0])
        wait_until(lambda: last in [one.event_id for one in group.imds.approvals])
        assert group.begun[2:] == [last]


def test_behind_an_event_that_never_ends_a_program_starts_at_its_deadline_and_nothing_is_approved(
    tmp_path: Path,
) -> None:
    with running(tmp_path, max_unavailable=1, run_timeout_seconds=5) as group:
        group.schedule("web-2", event_type="Redeploy", event_status="Started")
        late = group.schedule("web-0", notice_seconds=15 + 5)
        wait_until(lambda: group.prepared("web-0"), timeout_seconds=LIMIT_SECONDS)
        assert group.imds.approvals == []
        assert group.begun == [late]
