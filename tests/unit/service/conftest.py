"""What holds for the tests of the services: their state is on a disk that answers at once."""

from __future__ import annotations

import os
import sqlite3
from contextlib import AbstractContextManager
from typing import Any

import pytest

from bridge.outbox import sqlite
from bridge.outbox.sqlite import Database, transaction
from tests.support.listener import ListenerRig, MakeListener


@pytest.fixture(autouse=True)
def disk_that_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no disk: no test here cuts the power, and what was written is there after a kill without that."""
    connect = sqlite._connect

    def connect_unsynced(*given: Any) -> sqlite3.Connection:
        connection = connect(*given)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    def unsynced(database: Database, *, synced: bool = True) -> AbstractContextManager[sqlite3.Connection]:
        del synced
        return transaction(database._connection)

    monkeypatch.setattr(sqlite, "_connect", connect_unsynced)
    monkeypatch.setattr(Database, "transaction", unsynced)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def rig(make_listener: MakeListener) -> ListenerRig:
    """Return a listener whose policy allows everything, and that has no auto rule."""
    return make_listener()
