"""What the composition root passes to the parts that it builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.config.loader import load
from bridge.config.models import Config
from bridge.errors import ConfigError
from bridge.service import composition
from bridge.service import dispatcher as dispatcher_module
from bridge.service.composition import Parts
from tests.support.process import stored_event, toml


class Built:
    """What one constructor was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *positional: Any, **named: Any) -> Built:
        self.calls.append((positional, named))
        return self


@pytest.fixture
def outbox(monkeypatch: pytest.MonkeyPatch) -> Built:
    built = Built()
    monkeypatch.setattr(composition, "MeasuredOutbox", built)
    return built


@pytest.fixture
def dispatchers(monkeypatch: pytest.MonkeyPatch) -> Built:
    built = Built()
    monkeypatch.setattr(dispatcher_module, "Dispatcher", built)
    return built


def config(tmp_path: Path, **settings: Any) -> Config:
    file = tmp_path / "config.toml"
    file.write_text(toml({"state_dir": tmp_path / "state", **settings}))
    return load(file, {})


def test_the_outbox_gets_its_limits(tmp_path: Path, outbox: Built) -> None:
    Parts(config(tmp_path, max_outbox_mb=17.5, retain_seconds=77), "forward")
    ((positional, named),) = outbox.calls
    assert (named["max_bytes"], named["retain_seconds"]) == (18_350_080, 77)
    assert positional[0].path == tmp_path / "state" / "forward"


def test_the_outbox_gets_each_sinks_filter_and_start(tmp_path: Path, outbox: Built) -> None:
    sinks = {"old": {"kind": "stdout", "from_start": True}, "new": {"kind": "stdout"}}
    parts = Parts(config(tmp_path, sinks=sinks), "forward")
    assert outbox.calls[0][1]["sinks"] == {
        "old": (parts.filters["old"], True),
        "new": (parts.filters["new"], False),
    }


def test_each_dispatcher_gets_its_own_sinks_limits(tmp_path: Path, outbox: Built, dispatchers: Built) -> None:
    sinks = {
        "slow": {"kind": "stdout", "max_age_seconds": 11, "max_per_second": 0.5},
        "other": {"kind": "stdout"},
    }
    parts = Parts(config(tmp_path, sinks=sinks), "forward")
    parts.dispatchers()
    named = {positional[0]: named for positional, named in dispatchers.calls}
    assert (named["slow"]["max_age_seconds"], named["slow"]["max_per_second"]) == (11, 0.5)
    assert (named["other"]["max_age_seconds"], named["other"]["max_per_second"]) == (604_800, None)
    assert named["slow"]["outbox"] is outbox


def test_a_faulty_template_is_refused_before_the_outbox_is_opened(tmp_path: Path, outbox: Built) -> None:
    chat = {
        "kind": "webhook",
        "url": "https://x/",
        "format": "template",
        "template": {"a": "{{ data.Typo }}"},
    }
    with pytest.raises(ConfigError, match=r"sinks\.chat: "):
        Parts(config(tmp_path, sinks={"chat": chat}), "forward")
    assert outbox.calls == []


def test_a_relays_sinks_take_the_events_of_every_vm(tmp_path: Path) -> None:
    chat = {"kind": "webhook", "url": "https://x/", "format": "slack"}
    settings = config(tmp_path, sinks={"chat": chat}).sinks["chat"]
    others = stored_event(1, Resources=["web-1"], Vm={"Name": "web-0", "VmId": "v"})
    assert composition.filter_of(settings, "relay").matches(others)
    assert not composition.filter_of(settings, "forward").matches(others)


def test_a_program_gets_only_events_that_may_affect_this_vm_unless_scope_is_set(tmp_path: Path) -> None:
    program = {"kind": "exec", "run": ["/bin/true"]}
    sinks = config(tmp_path, sinks={"mine": program, "every": {**program, "scope": "all"}}).sinks
    others = stored_event(1, Resources=["web-1"], Vm={"Name": "web-0", "VmId": "v"})
    assert not composition.filter_of(sinks["mine"], "forward").matches(others)
    assert composition.filter_of(sinks["mine"], "relay").matches(others)
    assert composition.filter_of(sinks["every"], "forward").matches(others)
