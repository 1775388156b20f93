"""The lab's Service Bus in a process of its own, with connection strings, or with TLS and a managed identity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import certifi
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSender

from tests.support.bus import command
from tests.support.process import RawServer
from tests.support.servicebus import Counts, ServiceBusLab
from tests.support.sinks import TokenEndpoint
from tests.support.tls import Authority, forwarding
from tools.bench.measure import BenchError
from tools.bench.simulators import VM, Remote

TOPIC = "events"  # without subscriptions: what is sent there is counted and kept nowhere
RELAY_TOPIC, SUBSCRIPTION = "relayed", "chat"
QUEUE = "approvals"  # with sessions
TRY_SECONDS = 10.0
# The SDK knows no other port with TLS and an identity; whatever else has it, has it at 127.0.0.1.
TLS_HOST, TLS_PORT = "127.83.66.1", 5671
_NAMESPACE = {
    "Name": "bench",
    "Queues": [{"Name": QUEUE, "Properties": {"RequiresSession": True}}],
    "Topics": [{"Name": TOPIC}, {"Name": RELAY_TOPIC, "Subscriptions": [{"Name": SUBSCRIPTION}]}],
}


class _Bus(ServiceBusLab):
    """The lab's Service Bus, and what the benchmark asks of it."""

    def __init__(self) -> None:
        super().__init__({"UserConfig": {"Namespaces": [_NAMESPACE]}})

    def counts(self, path: str) -> Counts:
        """Return how many messages an entity holds and held."""
        return self.entity(path).counts


class _Secured(_Bus):
    """The same behind TLS, with an IMDS beside it that gives tokens to the VM's identity."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        authority = Authority(folder)
        # The SDK loads those that it trusts anyway, as in life.
        authority.file.write_bytes(authority.file.read_bytes() + Path(certifi.where()).read_bytes())
        self.reached_by = {"namespace": TLS_HOST, "ca_file": str(authority.file)}  # settings
        self._front = RawServer(
            forwarding(self.port), tls=authority.server(host=TLS_HOST), address=(TLS_HOST, TLS_PORT)
        )
        self._identity = TokenEndpoint()
        self._identity.token = "bench." + "x" * 1500  # about as long as a real one
        self.identity_url = self._identity.url

    @property
    def asked_for_tokens(self) -> int:
        """Return how many tokens were asked for."""
        return len(self._identity.requests)

    def stop(self) -> None:
        """End all three."""
        self._identity.__exit__()
        self._front.__exit__()
        super().stop()


@contextmanager
def lab(folder: Path | None = None) -> Iterator[Remote]:
    """Run a simulated Service Bus, behind TLS with certificates in `folder`; raise if it failed itself."""
    with Remote(partial(_Secured, folder) if folder else _Bus) as remote:
        yield remote
        if failures := remote("failures"):  # its figures would mean nothing
            raise BenchError(f"the lab's Service Bus failed: {failures[0]!r}")


@contextmanager
def sending(address: str, entity: str = QUEUE) -> Iterator[ServiceBusSender]:
    """Open a sender of the SDK."""
    with (
        ServiceBusClient.from_connection_string(address, retry_total=0) as client,
        client.get_queue_sender(entity) as sender,
    ):
        yield sender


def approval(event_id: str) -> ServiceBusMessage:
    """Make a command for the VM's session."""
    return command(event_id, session=VM, RequestedBy="someone@bench", Reason="the benchmark")
