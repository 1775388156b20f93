"""Fixtures that run the simulators; the conftest of each folder with sockets offers them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.bus import bus_config
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.servicebus import ServiceBusLab

__all__ = ["bus", "imds", "inbox", "lab"]


@pytest.fixture
def lab() -> Iterator[ImdsLab]:
    """Return IMDS for one VM, without the limit on requests."""
    with ImdsLab(rate_limit=None) as started:
        yield started


@pytest.fixture
def imds() -> Iterator[ImdsLab]:
    """Return IMDS for two VMs of a group, without the limit on requests."""
    with ImdsLab(vms=["web-0", "web-1"], rate_limit=None) as lab:
        yield lab


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    """Return an inbox that refuses what is not a valid CloudEvent."""
    with Inbox(strict=True) as lab:
        yield lab


@pytest.fixture
def bus() -> Iterator[ServiceBusLab]:
    """Return a Service Bus with the entities of tests.support.bus; it must not fail itself."""
    with ServiceBusLab(bus_config()) as lab:
        yield lab
        assert lab.failures == ()
