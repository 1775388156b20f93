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
    body BLOB NOT NULL,               -- the CloudEvent as structured JSON
    checksum INTEGER NOT NULL         -- CRC-32 of the body: SQLite itself does not notice what a disk makes of it
);
CREATE INDEX event_by_type ON event (type, seq);
CREATE TABLE cursor (
    sink TEXT PRIMARY KEY,
    seq INTEGER NOT NULL,             -- the sink is done with the events up to this one
    ahead TEXT NOT NULL               -- JSON list: and with these
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
    body BLOB,                        -- NULL: given up for want of room
    checksum INTEGER
);
CREATE INDEX dead_letter_by_sink ON dead_letter (sink, retry);
CREATE TABLE occurrence (
    fingerprint TEXT PRIMARY KEY,     -- of a transition with its content
    count INTEGER NOT NULL,           -- how often it was seen
    last_at REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE record (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,              -- JSON
    saved_at REAL NOT NULL,
    PRIMARY KEY (kind, key)
) WITHOUT ROWID;

-- name: load-meta
SELECT key, value FROM meta;

-- name: load-cursors
SELECT sink, seq, ahead FROM cursor;

-- name: last-seq
SELECT COALESCE(MAX(seq), 0) FROM (SELECT MAX(seq) AS seq FROM event UNION ALL SELECT MAX(seq) FROM cursor);

-- name: save-meta
INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?);

-- name: save-event
-- A disk may fail after it has taken the transaction; then the same events come once more.
INSERT OR REPLACE INTO event (seq, id, type, stored_at, body, checksum) VALUES (?, ?, ?, ?, ?, ?);

-- name: save-cursor
INSERT OR REPLACE INTO cursor (sink, seq, ahead) VALUES (?, ?, ?);

-- name: save-dead-letter
INSERT INTO dead_letter (sink, id, type, reason, detail, dead_at, body, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: save-occurrence
INSERT INTO occurrence (fingerprint, count, last_at) VALUES (?, ?, ?)
ON CONFLICT (fingerprint) DO UPDATE SET count = MAX(count, excluded.count), last_at = excluded.last_at;

-- name: save-record
INSERT OR REPLACE INTO record (kind, key, value, saved_at) VALUES (?, ?, ?, ?);

-- name: record
SELECT value FROM record WHERE kind = ? AND key = ?;

-- name: prune-records
DELETE FROM record WHERE saved_at < ?;

-- name: shift-records
UPDATE record SET saved_at = saved_at + ?;

-- name: occurrences
SELECT count FROM occurrence WHERE fingerprint = ?;

-- name: pending
SELECT seq, id, type, stored_at, body, checksum FROM event WHERE seq > ? ORDER BY seq;

-- name: oldest-stored-at
SELECT stored_at FROM event WHERE seq > ? ORDER BY seq LIMIT 1;

-- name: backlog-by-type
SELECT type, COUNT(*) FROM event WHERE seq > ? AND seq NOT IN (SELECT value FROM json_each(?)) GROUP BY type;

-- name: shift-events
UPDATE event SET stored_at = stored_at + ?;

-- name: shift-dead-letters
UPDATE dead_letter SET dead_at = dead_at + ?;

-- name: shift-occurrences
UPDATE occurrence SET last_at = last_at + ?;

-- name: retries
SELECT number, id, type, dead_at, body, checksum FROM dead_letter
WHERE sink = ? AND retry = 1 AND body IS NOT NULL ORDER BY number LIMIT ?;

-- name: count-dead-letters
SELECT sink, COUNT(*) FROM dead_letter GROUP BY sink;

-- name: dead-letters
SELECT number, sink, id, type, reason, detail, dead_at, retry, body IS NOT NULL FROM dead_letter ORDER BY number;

-- name: dead-letter-body
SELECT body FROM dead_letter WHERE id = ? AND body IS NOT NULL ORDER BY number DESC LIMIT 1;

-- name: mark-retry
UPDATE dead_letter SET retry = 1 WHERE number = ? AND body IS NOT NULL;

-- name: bury-again
UPDATE dead_letter SET retry = 0, reason = 'rejected', detail = ?, dead_at = ? WHERE number = ?;

-- name: drop-dead-letter
DELETE FROM dead_letter WHERE number = ?;

-- name: newest-events
SELECT seq, id, type, stored_at, LENGTH(body) FROM event ORDER BY seq DESC LIMIT ?;

-- name: event-body
SELECT body FROM event WHERE id = ? OR seq = ? ORDER BY seq DESC LIMIT 1;

-- name: prune-events
DELETE FROM event WHERE seq <= ? AND stored_at < ?;

-- name: prune-dead-letters
DELETE FROM dead_letter WHERE dead_at < ? AND retry = 0;

-- name: prune-occurrences
DELETE FROM occurrence WHERE last_at < ?;

-- name: delete-oldest-events
DELETE FROM event WHERE seq IN (SELECT seq FROM event WHERE seq <= ? ORDER BY seq LIMIT ?);

-- name: empty-oldest-dead-letters
UPDATE dead_letter SET body = NULL, checksum = NULL, retry = 0
WHERE number IN (SELECT number FROM dead_letter WHERE body IS NOT NULL ORDER BY number LIMIT ?);

-- name: delete-dead-letters-but-newest
DELETE FROM dead_letter WHERE number <= (SELECT MAX(number) FROM dead_letter) - ?;
