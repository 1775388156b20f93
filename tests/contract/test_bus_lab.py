"""The lab's Service Bus keeps the contract of a bus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridge.lab.servicebus import ServiceBusLab
from tests.contract.bus_contract import CONFIG, Bus, BusContract


@pytest.fixture
def bus() -> Iterator[Bus]:
    with ServiceBusLab(CONFIG) as lab:
        yield Bus(connection_string=lab.connection_string)
        assert lab.failures == ()


class TestLab(BusContract):
    """Run the suite against the lab."""
