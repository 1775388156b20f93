"""What the tests over a real bus share: shorter waits, and buses whose connections are collected."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from bridge.azure import bus_receiver
from bridge.runtime import worker
from tests.support.bus import bus_config
from tests.support.servicebus import ServiceBusLab

MakeBus = Callable[[Mapping[str, Any]], ServiceBusLab]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again sooner: how long a receive call, a rest or a pause lasts decides nothing here."""
    for module, name, seconds in (
        (bus_receiver, "IDLE_SECONDS", 0.1),
        (bus_receiver, "REST_SECONDS", 0.05),
        (bus_receiver, "RETRY_LIMIT_SECONDS", 0.05),
        (worker, "STOP_POLL_SECONDS", 0.05),
    ):
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def make_bus() -> Iterator[MakeBus]:
    """Make buses, which must not fail themselves; then collect what the SDK has left open, where it fails no test."""
    made: list[ServiceBusLab] = []
    with ExitStack() as stack:

        def make(config: Mapping[str, Any]) -> ServiceBusLab:
            made.append(stack.enter_context(ServiceBusLab(config)))
            return made[-1]

        yield make
        assert [one.failures for one in made] == [()] * len(made)
    gc.collect()


@pytest.fixture
def bus(make_bus: MakeBus) -> ServiceBusLab:
    """Return a bus with the entities of tests.support.bus."""
    return make_bus(bus_config())
