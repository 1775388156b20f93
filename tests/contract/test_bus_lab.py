"""The lab's Service Bus keeps the contract of a bus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.bus_contract import CONFIG, Bus, BusContract
from tests.support.servicebus import ServiceBusLab


@pytest.fixture
def bus() -> Iterator[Bus]:
    with ServiceBusLab(CONFIG) as lab:
        yield Bus(connection_string=lab.connection_string)
        assert lab.failures == ()


class TestLab(BusContract):
    """Run the suite against the lab."""
