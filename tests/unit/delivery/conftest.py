"""What the tests of deliveries share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import DeliveryError
from tests.support.moved_delivery import MakeDelivery, MovedDelivery


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDelivery]:
    """Make deliveries whose sink fails in these ways first, and whose jitter always draws the longest wait."""
    monkeypatch.setattr(random, "random", lambda: 1.0)
    numbers = itertools.count()
    with ExitStack() as stack:

        def build(*failures: DeliveryError, **settings: Any) -> MovedDelivery:
            rig = MovedDelivery(tmp_path / f"delivery-{next(numbers)}", **settings)
            rig.sink.failures.extend(failures)
            stack.callback(rig.close)
            return rig

        yield build
