-- Tables that follow from the events, and for an upgrade from the tables of the version before. A `place` is a VM's name
-- within its scope: by it, the VMs that an event names are those that have reported.
CREATE TABLE affected (
    key TEXT NOT NULL,
    folded TEXT NOT NULL,
    name TEXT NOT NULL,
    place INTEGER NOT NULL,
    over_at REAL,
    PRIMARY KEY (key, folded)
) STRICT, WITHOUT ROWID;
CREATE INDEX affected_by_place ON affected (place, over_at);
-- What the programs of VMs said last about an event, and when a VM was prepared for it first.
CREATE TABLE preparation (
    key TEXT NOT NULL,
    folded TEXT NOT NULL,
    at REAL NOT NULL,
    state TEXT NOT NULL,
    detail TEXT NOT NULL,
    prepared_at REAL,
    PRIMARY KEY (key, folded)
) STRICT, WITHOUT ROWID;
-- For which types of events some VM has a program.
CREATE TABLE program (event_type TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
-- Since when a VM is out of work although its program should have put it back; NULL once it has.
CREATE TABLE work (vm INTEGER PRIMARY KEY, at REAL NOT NULL, since REAL) STRICT;
CREATE INDEX work_missed ON work (vm) WHERE since IS NOT NULL;
CREATE TABLE scope (
    id INTEGER PRIMARY KEY,
    scope TEXT NOT NULL,
    subscription TEXT NOT NULL,
    "group" TEXT NOT NULL,
    scale_set TEXT NOT NULL
) STRICT;
CREATE INDEX scope_in_order ON scope ("group", scope);
CREATE TABLE tagged (id INTEGER PRIMARY KEY, tags TEXT NOT NULL) STRICT;
-- Those that have reported, and those that are expected and have not: `alive_at` is 0 then. `expected` is 1 on the newest
-- list of expected VMs, and -1 on an earlier one only, also before it is heard of: such a VM is shown nowhere. `heard` is the number of the last commit about it, `clock` is how far a VM's clock was ahead of the console's.
-- From `left_at` on, a VM is on no list unless it reports: a day after an event has deleted it, since it was put away, or
-- once it is silent and no longer expected. Most VMs of a fleet whose VMs are replaced have left: nobody has to look at them.
CREATE TABLE vm (
    id INTEGER PRIMARY KEY,
    place INTEGER NOT NULL,
    scope INTEGER NOT NULL,
    tags INTEGER NOT NULL,
    name TEXT NOT NULL,
    folded TEXT NOT NULL,
    natural TEXT NOT NULL,
    zone TEXT NOT NULL,
    location TEXT NOT NULL,
    resource_id TEXT NOT NULL,
    alive_at REAL NOT NULL,
    received_at REAL NOT NULL,
    clock REAL NOT NULL DEFAULT 0,
    heartbeat_at REAL NOT NULL DEFAULT 0,
    is_stopped INTEGER NOT NULL DEFAULT 0,
    version TEXT NOT NULL DEFAULT '',
    waiting INTEGER NOT NULL DEFAULT 0,
    imds_at REAL NOT NULL DEFAULT 0,
    unreachable_since REAL,
    expected INTEGER NOT NULL DEFAULT 0,
    heard REAL NOT NULL DEFAULT 0,
    doubled_at REAL NOT NULL DEFAULT 0,
    left_at REAL NOT NULL DEFAULT 9e99
) STRICT;
-- What was put away last, an event by its key or a VM by its id, and until when: 0 once it was brought back. `number` is that of
-- the commit, `covers` that of the last commit about it that was known then, and `seen` the time of the last report: what is
-- later than one of both brings it back. An import has no commits to compare.
CREATE TABLE away (
    what ANY PRIMARY KEY,
    number REAL NOT NULL,
    covers REAL NOT NULL,
    seen REAL NOT NULL,
    at REAL NOT NULL,
    until REAL NOT NULL,
    person TEXT NOT NULL,
    why TEXT NOT NULL
) STRICT, WITHOUT ROWID;
-- Each run of a process: the numbers from `first` to `last` have arrived but for those in `hole`. `missing` counts them, and
-- what is before `first` if an earlier run is known: then the console has heard of the VM before this run began. Of a run
-- that only the next one names, `first` is after `last`.
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    vm INTEGER NOT NULL,
    reporter TEXT NOT NULL,
    began_at REAL NOT NULL,
    at REAL NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    missing INTEGER NOT NULL DEFAULT 0,
    started_at REAL
) STRICT;
CREATE TABLE hole (
    run INTEGER NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    PRIMARY KEY (run, first)
) STRICT, WITHOUT ROWID;
