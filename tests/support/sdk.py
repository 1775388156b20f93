"""Let the Service Bus SDK open and close without its fixed pauses, which most of a test's time went to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

# What the SDK sleeps, and what tests let it sleep: between two looks of its keep-alive thread, the rest of which
# every close waits for, and between two looks at a link that is being opened.
PAUSES_SECONDS = {1: 0.02, 0.05: 0.001}


def _sleep(seconds: float) -> None:
    time.sleep(PAUSES_SECONDS.get(seconds, seconds))


@pytest.fixture(autouse=True, scope="session")
def sdk_without_pauses() -> Iterator[None]:
    """Shorten these pauses, and nothing else, for every test below a conftest that imports this."""
    from azure.servicebus import _servicebus_receiver, _servicebus_sender  # noqa: PLC0415 - 42 MiB
    from azure.servicebus._pyamqp import client  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch:
        for module in (client, _servicebus_receiver, _servicebus_sender):
            patch.setattr(module, "time", SimpleNamespace(**{**vars(time), "sleep": _sleep}))
        yield
