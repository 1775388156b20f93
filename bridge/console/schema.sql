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
-- Which VM saw which CloudEvent, also where only another VM's copy was received.
CREATE TABLE sighting (
    id INTEGER NOT NULL,
    vm INTEGER NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (id, vm)
) STRICT, WITHOUT ROWID;
-- The VMs that events name, with what is looked for at each VM: whether the event is open, and when it deletes the VM.
CREATE TABLE affected (
    key TEXT NOT NULL,
    scope TEXT NOT NULL,
    folded TEXT NOT NULL,
    name TEXT NOT NULL,
    event_open INTEGER NOT NULL,
    over_at REAL,
    PRIMARY KEY (key, folded)
) STRICT, WITHOUT ROWID;
-- Those that have reported, and those that are expected and have not: `alive_at` is 0 then.
-- Of a fleet whose VMs are replaced, most VMs are gone. `left_at` is when the last deletion was over after which nothing
-- was heard of a VM, and beyond all times without one: a day later the VM is on no list, and need not be looked at.
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
    unreachable_since REAL,
    left_at REAL NOT NULL DEFAULT 9e99
) STRICT;
-- Each run's counter, and when it was last there. What is missing is counted from the first number that was received, and
-- from 1 if a run before it was there: then the console has heard of the VM before this run began.
CREATE TABLE reporter (
    reporter TEXT NOT NULL,
    epoch TEXT NOT NULL,
    vm INTEGER NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    received INTEGER NOT NULL,
    received_at REAL NOT NULL,
    at REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (reporter, epoch)
) STRICT, WITHOUT ROWID;
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
