"""What tests of the sinks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from bridge.runtime.time import Clock
from bridge.sinks.servicebus import ServiceBusSink
from bridge.sinks.webhook import WebhookSink
from tests.support.inbox import Inbox
from tests.support.servicebus import ServiceBusLab
from tests.support.sink import Connect, settings
from tests.support.tls import Authority
from tests.support.webhook import Make, sink


@pytest.fixture
def make(inbox: Inbox, tmp_path: Path) -> Iterator[Make]:
    """Make webhook sinks with these settings, for the inbox or another URL."""
    with ExitStack() as stack:

        def make(url: str = inbox.url, **settings: Any) -> WebhookSink:
            return stack.enter_context(closing(sink(tmp_path, url, **settings)))

        yield make


@pytest.fixture
def connect(lab: ServiceBusLab) -> Iterator[Connect]:
    """Make Service Bus sinks with these settings for the lab of the test's file."""
    with ExitStack() as stack:

        def connect(*, clock: Clock | None = None, **more: Any) -> ServiceBusSink:
            return stack.enter_context(closing(ServiceBusSink(settings(lab, **more), clock=clock)))

        yield connect


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return an authority that nothing trusts yet."""
    return Authority(tmp_path)
