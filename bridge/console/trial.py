"""A trial of what the console uses: its store, its address and the bus; nothing changes, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge.azure.bus_receiver import try_to_receive
from bridge.azure.servicebus import address_of, connect, mapped_errors, sender_of
from bridge.config.approvals import ApprovalSettings
from bridge.config.models import Config
from bridge.console.process import DATABASE, listen_on
from bridge.console.store import Store
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.time import Clock


def trials(config: Config, beside: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the section of each trial, and what tries it and says what works; a trial may raise any error.

    Args:
        config: has [console].
        beside: an existing folder on the disk of the state.
    """
    yield "console store", partial(_try_store, beside)
    if settings := config.console:
        yield "console", partial(_try_address, settings.listen, StateFolder(config.state_dir / "console"))
        if settings.bus:
            yield "console.bus", partial(try_to_receive, settings.bus, what="events")
    if config.approvals and config.approvals.has_bus:
        yield "approvals", partial(_try_to_send, config.approvals)


def _try_store(beside: Path) -> str:
    with TemporaryDirectory(prefix="check-", dir=beside) as folder:
        Store(Path(folder, DATABASE), clock=Clock()).close()
    return f"a store can be made in {beside}"


def _try_address(listen: str, folder: StateFolder) -> str:
    if holder := folder.owner():
        return f"{holder} serves the pages"
    listen_on(listen).close()
    return f"{listen} is free"


def _try_to_send(settings: ApprovalSettings) -> str:
    """Open a sender, which needs the queue and the right to send."""
    address = address_of(settings)
    with mapped_errors(address), connect(settings) as client, sender_of(client, settings):
        return f"{address}: commands can be sent"
