"""The lab's IMDS, on which tests can wait."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from bridge.lab import imds
from tests.support.waiting import wait_for

T = TypeVar("T")


class ImdsLab(imds.ImdsLab):
    """The lab's IMDS, for tests."""

    def wait_for(self, predicate: Callable[[], T], timeout: float = 10) -> T:
        """Wait until the predicate holds; raise AssertionError with the state after `timeout` real seconds."""
        return wait_for(predicate, timeout, self._changed, lambda: json.dumps(self.state()))
