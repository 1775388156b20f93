-- Events as received, once for each source and id: the copy of the VM that saw it first. Every other table is derived
-- from what was received; the columns of `scheduled` are the fields of ScheduledEvent.
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
CREATE INDEX event_by_event_id ON event (event_id, at) WHERE event_id <> '';
-- What the history counts; heartbeats and documents are the most frequent, and not counted.
CREATE INDEX event_by_kind ON event (kind, at, reason) WHERE kind NOT IN ('bridge.heartbeat', 'document.changed');
CREATE INDEX event_by_age ON event (received_at);
-- Which VM saw which CloudEvent, also where only another VM's copy was received.
CREATE TABLE sighting (
    id INTEGER NOT NULL,
    vm INTEGER NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (id, vm)
) STRICT, WITHOUT ROWID;
CREATE INDEX scheduled_open ON scheduled (last_change_at) WHERE is_open;
-- With every column that the history counts by.
CREATE INDEX scheduled_by_time ON scheduled (first_seen_at, event_type, is_open, status, notice_seconds);
CREATE INDEX scheduled_by_end ON scheduled (ended_at) WHERE ended_at IS NOT NULL;
-- The VMs that open events name.
CREATE TABLE affected (
    key TEXT NOT NULL,
    scope TEXT NOT NULL,
    folded TEXT NOT NULL,
    name TEXT NOT NULL,
    PRIMARY KEY (key, folded)
) STRICT, WITHOUT ROWID;
CREATE INDEX affected_by_vm ON affected (scope, folded);
CREATE TABLE vm (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    folded TEXT NOT NULL,
    natural TEXT NOT NULL,
    scope TEXT NOT NULL,
    subscription TEXT NOT NULL,
    "group" TEXT NOT NULL,
    scale_set TEXT NOT NULL,
    zone TEXT NOT NULL,
    location TEXT NOT NULL,
    resource_id TEXT NOT NULL,
    tags TEXT NOT NULL,
    alive_at REAL NOT NULL,
    received_at REAL NOT NULL,
    heartbeat_at REAL NOT NULL DEFAULT 0,
    is_stopped INTEGER NOT NULL DEFAULT 0,
    version TEXT NOT NULL DEFAULT '',
    waiting INTEGER NOT NULL DEFAULT 0,
    imds_at REAL NOT NULL DEFAULT 0,
    unreachable_since REAL
) STRICT;
CREATE INDEX vm_by_name ON vm (folded, scope);
CREATE INDEX vm_by_scope ON vm (scope);
-- Each run's counter: a gap is what is missing between the first and the last number.
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
