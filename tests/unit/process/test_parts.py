"""What every process is built on: which settings its parts get."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bridge.config.bus import ServiceBusSettings
from bridge.config.loader import load
from bridge.config.models import Config
from bridge.contract.types import type_of
from bridge.delivery.holding import Copies
from bridge.errors import ConfigError
from bridge.events.model import CloudEvent
from bridge.process.identity import Role
from bridge.process.parts import Parts, filter_of, sinks_of
from bridge.runtime.time import read_boot_id
from tests.support.machine import program
from tests.support.outbox import event, waiting
from tests.support.process import stored_event, toml

CHAT = {"kind": "webhook", "url": "https://x/", "format": "slack"}
PROGRAM = {"kind": "exec", "run": [program()]}
STDOUT = {"kind": "stdout"}
HEARTBEAT = "io.imdsbridge.bridge.heartbeat.v1"

MakeParts = Callable[..., Parts]


def config(tmp_path: Path, **settings: Any) -> Config:
    file = tmp_path / "config.toml"
    file.write_text(toml({"state_dir": tmp_path / "state", **settings}))
    return load(file, {})


@pytest.fixture
def make_parts(tmp_path: Path) -> Iterator[MakeParts]:
    """Build the parts of a forwarder from settings; what they hold is closed at the end."""
    with ExitStack() as stack:

        def make(role: Role = "forward", **settings: Any) -> Parts:
            parts = Parts(config(tmp_path, **settings), role)
            stack.callback(parts.imds.close)
            stack.enter_context(closing(parts.outbox))
            return parts

        yield make


def test_the_outbox_gets_its_limits_and_each_sinks_filter_and_start(
    tmp_path: Path, make_parts: MakeParts
) -> None:
    with closing(make_parts(sinks={"first": STDOUT}).outbox) as earlier:
        earlier.commit([event("1"), event("2", type_=HEARTBEAT)])
    sinks = {"old": {**STDOUT, "types": [HEARTBEAT], "from_start": True}, "new": STDOUT}
    parts = make_parts(max_outbox_mb=17.5, retain_seconds=77, sinks=sinks)
    parts.outbox.commit([event("3"), event("4", type_=HEARTBEAT)])
    assert waiting(parts.outbox, "old") == ["2", "4"]
    assert waiting(parts.outbox, "new") == ["3", "4"]
    assert (tmp_path / "state" / "forward" / "outbox.db").exists()
    assert (parts.outbox.max_bytes, parts.outbox.retain_seconds) == (18_350_080, 77)


def test_each_dispatcher_gets_its_own_sinks_limits(make_parts: MakeParts) -> None:
    slow = {**STDOUT, "max_age_seconds": 11, "max_per_second": 0.5}
    parts = make_parts(sinks={"slow": slow, "other": STDOUT})
    made = parts.dispatchers()
    limits = [(one.name, one.max_age_seconds, one.max_per_second) for one in made]
    assert limits == [("slow", 11, 0.5), ("other", 604_800, None)]
    assert made[0].outbox is parts.outbox


@pytest.mark.parametrize("role", ["forward", "listen", "relay"])
def test_only_a_relay_gathers_and_only_for_chats_that_can_show_many_events(
    make_parts: MakeParts, role: Role
) -> None:
    teams = {**CHAT, "format": "teams"}
    sinks = {
        "usual": teams,
        "own": {**CHAT, "digest_seconds": 60},
        "each": {**teams, "digest_seconds": 0},
        "short-lived": {**teams, "max_age_seconds": 100},
        "alerts": {**CHAT, "format": "pagerduty", "routing_key": "0" * 32},
        "template": {**CHAT, "format": "template", "template": {"text": "{{ notice.text }}"}},
        "hook": {"kind": "webhook", "url": "https://x/", "mode": "batch"},
        "out": STDOUT,
    }
    found = {
        one.name: getattr(one.holding, "digest_seconds", 0.0)
        for one in make_parts(role, sinks=sinks).dispatchers()
    }
    gathers = {"usual": 300.0, "own": 60.0, "short-lived": 50.0}
    assert found == {name: gathers.get(name, 0.0) * (role == "relay") for name in sinks}


@pytest.mark.parametrize(
    ("role", "documents", "expected"),
    [("forward", "named", ["bus"]), ("forward", "all", []), ("listen", "named", [])],
)
def test_only_forwarders_of_a_fleet_hold_copies_and_only_for_service_bus(
    make_parts: MakeParts, role: Role, documents: str, expected: list[str]
) -> None:
    bus = {"kind": "servicebus", "namespace": "contoso.servicebus.windows.net", "topic": "events"}
    sinks = {"bus": bus, "other": STDOUT}
    parts = make_parts(role=role, documents=documents, sinks=sinks)
    assert [one.name for one in parts.dispatchers() if isinstance(one.holding, Copies)] == expected


@pytest.mark.parametrize(("role", "signs"), [("listen", True), ("forward", False), ("relay", False)])
def test_only_a_listener_signs_whoever_else_asks_for_the_sinks_of_its_configuration(
    tmp_path: Path, role: str, signs: bool
) -> None:
    bus = {"namespace": "contoso.servicebus.windows.net"}
    approvals = {**bus, "queue": "approvals", "session": "{vm}", "signing_secret": "whsec_" + "MTIz" * 8}
    sinks = {"bus": {**bus, "kind": "servicebus", "topic": "events"}}
    given = config(tmp_path, approvals=approvals, sinks=sinks)
    made = sinks_of(given, role)["bus"]
    sinks_of(given, "listen" if role != "listen" else "forward")
    assert isinstance(made, ServiceBusSettings)
    assert bool(made.signing_secrets) is signs


def test_what_is_committed_is_counted(make_parts: MakeParts) -> None:
    parts = make_parts(metrics={"listen": "127.0.0.1:0"})
    started = CloudEvent("1", "/s", type_of("scheduledevent.started"), "1", datetime.now(UTC), "", {}, {})
    parts.outbox.commit([started])
    assert parts.metrics is not None
    assert parts.metrics.registry.get_sample_value("imds_bridge_changes_total", {"kind": "started"}) == 1


def test_the_boot_of_the_machine_is_known_to_what_compares_it(make_parts: MakeParts) -> None:
    parts = make_parts()
    assert parts.boot_id == parts.identity.boot_id == read_boot_id()
    assert parts.boot_id or sys.platform == "win32"  # whose registry may lack it


def test_a_faulty_template_is_refused_before_the_outbox_is_opened(
    tmp_path: Path, make_parts: MakeParts
) -> None:
    chat = {**CHAT, "format": "template", "template": {"a": "{{ data.Typo }}"}}
    with pytest.raises(ConfigError, match=r"sinks\.chat: "):
        make_parts(sinks={"chat": chat})
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("sink", "role", "takes"),
    [
        (CHAT, "forward", False),
        (CHAT, "relay", True),
        (PROGRAM, "forward", False),
        (PROGRAM, "relay", True),
        ({**PROGRAM, "scope": "all"}, "forward", True),
    ],
)
def test_chat_and_programs_get_events_of_other_vms_from_a_relay_or_if_the_scope_is_set(
    tmp_path: Path, sink: dict[str, Any], role: str, takes: bool
) -> None:
    others = stored_event(1, Resources=["web-1"], Vm={"Name": "web-0", "VmId": "v"})
    settings = config(tmp_path, sinks={"it": sink}).sinks["it"]
    assert filter_of(settings, role).matches(others) is takes
