"""What the composition root passes to the parts that it builds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bridge.cli.main import main
from bridge.config.loader import load
from bridge.config.models import Config
from bridge.errors import ConfigError
from bridge.service import composition
from bridge.service.composition import Flow, Parts
from bridge.service.identity import Role
from tests.support.process import stored_event, toml

CHAT = {"kind": "webhook", "url": "https://x/", "format": "slack"}
PROGRAM = {"kind": "exec", "run": ["/bin/true"]}


@pytest.fixture(autouse=True)
def outbox(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Have no outbox opened."""
    made = Mock()
    monkeypatch.setattr(composition, "MeasuredOutbox", made)
    return made


def config(tmp_path: Path, **settings: Any) -> Config:
    file = tmp_path / "config.toml"
    file.write_text(toml({"state_dir": tmp_path / "state", **settings}))
    return load(file, {})


def test_the_outbox_gets_its_limits_and_each_sinks_filter_and_start(tmp_path: Path, outbox: Mock) -> None:
    sinks = {"old": {"kind": "stdout", "from_start": True}, "new": {"kind": "stdout"}}
    parts = Parts(config(tmp_path, max_outbox_mb=17.5, retain_seconds=77, sinks=sinks), "forward")
    ((folder,), named) = outbox.call_args
    assert folder.path == tmp_path / "state" / "forward"
    assert (named["max_bytes"], named["retain_seconds"]) == (18_350_080, 77)
    assert named["sinks"] == {"old": (parts.filters["old"], True), "new": (parts.filters["new"], False)}


def test_each_dispatcher_gets_its_own_sinks_limits(tmp_path: Path, outbox: Mock) -> None:
    slow = {"kind": "stdout", "max_age_seconds": 11, "max_per_second": 0.5}
    made = Parts(config(tmp_path, sinks={"slow": slow, "other": {"kind": "stdout"}}), "forward").dispatchers()
    limits = [(one.name, one.max_age_seconds, one.max_per_second) for one in made]
    assert limits == [("slow", 11, 0.5), ("other", 604_800, None)]
    assert made[0].outbox is outbox.return_value


@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_a_dry_run_of_the_command_reaches_the_listener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    flows: list[Flow] = []

    def build(given: Config, role: Role, make: Callable[[Parts], Flow]) -> int:
        flows.append(make(Parts(given, role)))
        return 0

    monkeypatch.setattr(composition, "_run", build)
    config(tmp_path, approvals={"auto": [{}]})
    assert main(["listen", "--config", str(tmp_path / "config.toml"), *options]) == 0
    assert flows[0].status()["dry_run"] is bool(options)


def test_what_is_committed_is_counted(tmp_path: Path) -> None:
    parts = Parts(config(tmp_path), "forward")
    assert parts.outbox.meter is parts.imds.meter is parts.meter


def test_the_boot_of_the_machine_is_known_to_what_compares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composition, "read_boot_id", lambda: "this boot")
    parts = Parts(config(tmp_path), "forward")
    assert (parts.boot_id, parts.identity.boot_id) == ("this boot", "this boot")


def test_a_faulty_template_is_refused_before_the_outbox_is_opened(tmp_path: Path, outbox: Mock) -> None:
    chat = {**CHAT, "format": "template", "template": {"a": "{{ data.Typo }}"}}
    with pytest.raises(ConfigError, match=r"sinks\.chat: "):
        Parts(config(tmp_path, sinks={"chat": chat}), "forward")
    assert not outbox.called


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
    assert composition.filter_of(settings, role).matches(others) is takes
