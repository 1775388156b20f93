"""What tests of the HTTP client share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from bridge.http.client import HttpClient
from tests.support.http_client import Make, http_client
from tests.support.tls import Authority


@pytest.fixture
def make() -> Iterator[Make]:
    """Make clients that are closed at the end."""
    with ExitStack() as stack:

        def make(**settings: Any) -> HttpClient:
            return stack.enter_context(closing(http_client(**settings)))

        yield make


@pytest.fixture
def client(make: Make) -> HttpClient:
    """Return a client with the settings that need not be given."""
    return make()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return an authority that nothing trusts yet."""
    return Authority(tmp_path)
