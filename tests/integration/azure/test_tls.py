"""A broker behind a private authority and a port of its own: to send, to receive, and who is not trusted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from bridge.azure.bus_receiver import try_to_receive
from bridge.config.approvals import ApprovalSettings
from bridge.config.base import Secret
from bridge.config.bus import ServiceBusSettings
from bridge.config.values import UNTRUSTED
from bridge.errors import Misconfigured
from bridge.service.parts import build_sinks
from tests.support.bus import QUEUE
from tests.support.process import RawServer, stored_event
from tests.support.servicebus import ServiceBusLab
from tests.support.tls import Authority, forwarding


@pytest.fixture
def settings(bus: ServiceBusLab, authority: Authority) -> Iterator[dict[str, Any]]:
    """Serve the bus with TLS on a port of its own; return how to reach it."""
    with RawServer(forwarding(bus.port), tls=authority.server()) as front:
        plain = bus.connection_string.replace(str(bus.port), str(urlsplit(front.url).port))
        secured = plain.replace("UseDevelopmentEmulator=true", "").rstrip(";")
        yield {"connection_string": Secret(secured), "queue": QUEUE}


def test_events_and_commands_go_through_tls_to_the_port_of_the_connection_string(
    bus: ServiceBusLab, settings: dict[str, Any], authority: Authority
) -> None:
    given = {**settings, "ca_file": authority.file}
    (sink,) = build_sinks({"bus": ServiceBusSettings(kind="servicebus", **given)}).values()
    sink.send([stored_event(1)])
    sink.close()
    assert bus.entity(QUEUE).counts.active == 1
    assert "commands wait there" in try_to_receive(ApprovalSettings(**given), what="commands")


def test_a_broker_of_another_authority_is_refused(bus: ServiceBusLab, settings: dict[str, Any]) -> None:
    (sink,) = build_sinks({"bus": ServiceBusSettings(kind="servicebus", **settings)}).values()
    with pytest.raises(Misconfigured, match=UNTRUSTED):
        sink.send([stored_event(1)])
    sink.close()
    assert bus.entity(QUEUE).counts.enqueued == 0
