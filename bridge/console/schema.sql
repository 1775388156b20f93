BEGIN;
-- Events as received, once for each source and id: the copy of the VM that saw it first. Every other table is derived
-- from what was received.
CREATE TABLE event (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    key BLOB NOT NULL UNIQUE,
    id_hash INTEGER NOT NULL,
    kind TEXT NOT NULL,
    event_id TEXT NOT NULL,
    reason TEXT NOT NULL,
    vm INTEGER,
    at REAL NOT NULL,
    received_at REAL NOT NULL,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX event_by_event_id ON event (event_id, at) WHERE event_id <> '';
-- What the history counts; heartbeats and documents are the most frequent, and not counted.
CREATE INDEX event_by_kind ON event (kind, at, reason) WHERE kind NOT IN ('bridge.heartbeat', 'document.changed');
CREATE INDEX event_by_age ON event (received_at);
-- Which VM saw which CloudEvent, also where only another VM's copy was received.
CREATE TABLE sighting (
    id_hash INTEGER NOT NULL,
    vm INTEGER NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (id_hash, vm)
) STRICT, WITHOUT ROWID;
CREATE TABLE scheduled (
    event_id TEXT PRIMARY KEY,
    scope TEXT NOT NULL,
    group_name TEXT NOT NULL,
    shown_id TEXT NOT NULL,
    event_type TEXT NOT NULL,
    event_source TEXT NOT NULL,
    status TEXT NOT NULL,
    is_open INTEGER NOT NULL,
    not_before REAL,
    duration_seconds INTEGER,
    description TEXT NOT NULL,
    resources TEXT NOT NULL,
    first_seen_at REAL NOT NULL,
    last_change_at REAL NOT NULL,
    started_at REAL,
    ended_at REAL,
    notice_seconds REAL,
    approval TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX scheduled_open ON scheduled (last_change_at) WHERE is_open;
-- With every column that the history counts by.
CREATE INDEX scheduled_by_time ON scheduled (first_seen_at, event_type, is_open, status, notice_seconds);
CREATE INDEX scheduled_by_end ON scheduled (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE vm (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    scope TEXT NOT NULL,
    group_name TEXT NOT NULL,
    zone TEXT NOT NULL,
    location TEXT NOT NULL,
    resource_id TEXT NOT NULL,
    alive_at REAL NOT NULL,
    received_at REAL NOT NULL,
    heartbeat_at REAL NOT NULL DEFAULT 0,
    is_stopped INTEGER NOT NULL DEFAULT 0,
    version TEXT NOT NULL DEFAULT '',
    backlog INTEGER NOT NULL DEFAULT 0,
    imds_at REAL NOT NULL DEFAULT 0,
    unreachable_since REAL
) STRICT;
-- Each process's counter: a gap is what is missing between the first and the last number.
CREATE TABLE reporter (
    reporter TEXT NOT NULL,
    epoch TEXT NOT NULL,
    vm INTEGER NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    received INTEGER NOT NULL,
    received_at REAL NOT NULL,
    PRIMARY KEY (reporter, epoch)
) STRICT, WITHOUT ROWID;
CREATE INDEX reporter_gaps ON reporter (vm) WHERE last - first + 1 > received;
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
PRAGMA user_version = 1;
COMMIT;
