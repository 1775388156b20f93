"""The Service Bus SDK without its fixed pauses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from azure.servicebus import _servicebus_receiver, _servicebus_sender
from azure.servicebus._pyamqp import client

# What the SDK sleeps, and what tests let it sleep: between two looks of its keep-alive thread, the rest of which
# every close waits for, and between two looks at a link that is being opened.
PAUSES_SECONDS = {1: 0.02, 0.05: 0.001}


def _sleep(seconds: float) -> None:
    time.sleep(PAUSES_SECONDS.get(seconds, seconds))


@contextmanager
def without_pauses() -> Iterator[None]:
    """Shorten these pauses, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (client, _servicebus_receiver, _servicebus_sender):
            patch.setattr(module, "time", SimpleNamespace(**{**vars(time), "sleep": _sleep}))
        yield
