-- Events as received, once for each source and id: the copy of the VM that saw it first. Of heartbeats and documents,
-- which are nearly all of what a fleet publishes, no row is kept: other tables have what the pages need of them.
CREATE TABLE event (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    key BLOB NOT NULL UNIQUE,
    sighting INTEGER NOT NULL,
    kind TEXT NOT NULL,
    event_id TEXT NOT NULL,
    reason TEXT NOT NULL,
    vm INTEGER,
    at REAL NOT NULL,
    received_at REAL NOT NULL,
    body BLOB NOT NULL
) STRICT;
-- Which VM saw which CloudEvent, also where only another VM's copy was received.
CREATE TABLE sighting (
    id INTEGER NOT NULL,
    vm INTEGER NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (id, vm)
) STRICT, WITHOUT ROWID;
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
