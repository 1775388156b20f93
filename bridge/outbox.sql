-- The outbox's SQL. Each statement stands below its name; a name that ends in -migration changes the schema.

-- name: 1-migration
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE event (
    seq INTEGER PRIMARY KEY,          -- in the order of the changes, without holes, never used twice
    id TEXT NOT NULL,                 -- the CloudEvent's
    type TEXT NOT NULL,
    stored_at REAL NOT NULL,          -- steady seconds since 1970
    body BLOB NOT NULL                -- the CloudEvent as structured JSON
);
CREATE INDEX event_by_type ON event (type, seq);
CREATE TABLE cursor (
    sink TEXT PRIMARY KEY,
    seq INTEGER NOT NULL              -- the last event that the sink is done with
) WITHOUT ROWID;
CREATE TABLE dead_letter (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    sink TEXT NOT NULL,
    id TEXT NOT NULL,
    type TEXT NOT NULL,
    reason TEXT NOT NULL,             -- rejected, expired or overflow
    detail TEXT NOT NULL,
    dead_at REAL NOT NULL,
    retry INTEGER NOT NULL DEFAULT 0, -- 1: send again
    body BLOB                         -- NULL: given up for want of room
);
CREATE INDEX dead_letter_by_sink ON dead_letter (sink, retry);
CREATE TABLE occurrence (
    fingerprint TEXT PRIMARY KEY,     -- of a transition with its content
    count INTEGER NOT NULL,           -- how often it was seen
    last_at REAL NOT NULL
) WITHOUT ROWID;

-- name: load-meta
SELECT key, value FROM meta;

-- name: load-cursors
SELECT sink, seq FROM cursor;

-- name: last-seq
SELECT COALESCE(MAX(seq), 0) FROM event;

-- name: save-meta
INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- name: save-event
INSERT INTO event (seq, id, type, stored_at, body) VALUES (?, ?, ?, ?, ?);

-- name: save-cursor
INSERT INTO cursor (sink, seq) VALUES (?, ?) ON CONFLICT (sink) DO UPDATE SET seq = excluded.seq;

-- name: save-dead-letter
INSERT INTO dead_letter (sink, id, type, reason, detail, dead_at, body) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: save-occurrence
INSERT INTO occurrence (fingerprint, count, last_at) VALUES (?, ?, ?)
ON CONFLICT (fingerprint) DO UPDATE SET count = MAX(count, excluded.count), last_at = excluded.last_at;

-- name: occurrences
SELECT count FROM occurrence WHERE fingerprint = ?;

-- name: pending
SELECT seq, id, type, stored_at, body FROM event WHERE seq > ? ORDER BY seq LIMIT ?;

-- name: oldest-stored-at
SELECT stored_at FROM event WHERE seq > ? ORDER BY seq LIMIT 1;

-- name: backlog-by-type
SELECT type, COUNT(*) FROM event WHERE seq > ? GROUP BY type;

-- name: shift-events
UPDATE event SET stored_at = stored_at + ?;

-- name: shift-dead-letters
UPDATE dead_letter SET dead_at = dead_at + ?;

-- name: shift-occurrences
UPDATE occurrence SET last_at = last_at + ?;

-- name: retries
SELECT number, id, type, dead_at, body FROM dead_letter WHERE sink = ? AND retry = 1 ORDER BY number LIMIT ?;

-- name: count-dead-letters
SELECT sink, COUNT(*) FROM dead_letter GROUP BY sink;

-- name: dead-letters
SELECT number, sink, id, type, reason, detail, dead_at, retry, body IS NOT NULL FROM dead_letter ORDER BY number;

-- name: dead-letter
SELECT number, sink, id, type, reason, detail, dead_at, retry, body FROM dead_letter WHERE number = ?;

-- name: mark-retry
UPDATE dead_letter SET retry = 1 WHERE number = ? AND body IS NOT NULL;

-- name: bury-again
UPDATE dead_letter SET retry = 0, reason = ?, detail = ?, dead_at = ? WHERE number = ?;

-- name: drop-dead-letter
DELETE FROM dead_letter WHERE number = ?;

-- name: newest-events
SELECT seq, id, type, stored_at, body FROM event ORDER BY seq DESC LIMIT ?;

-- name: event
SELECT seq, id, type, stored_at, body FROM event WHERE id = ? OR seq = ?;

-- name: prune-events
DELETE FROM event WHERE seq <= ? AND stored_at < ?;

-- name: prune-dead-letters
DELETE FROM dead_letter WHERE dead_at < ? AND retry = 0;

-- name: prune-occurrences
DELETE FROM occurrence WHERE last_at < ?;

-- name: delete-oldest-events
DELETE FROM event WHERE seq IN (SELECT seq FROM event WHERE seq <= ? ORDER BY seq LIMIT ?);

-- name: empty-oldest-dead-letters
UPDATE dead_letter SET body = NULL, retry = 0
WHERE number IN (SELECT number FROM dead_letter WHERE body IS NOT NULL ORDER BY number LIMIT ?);
