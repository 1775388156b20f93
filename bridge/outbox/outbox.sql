-- The outbox's SQL. Each statement stands below its name; a name that ends in -migration changes the schema.
-- Each row ends with a checksum of its other values: SQLite does not notice what a disk changes within a value.

-- name: 1-migration
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE event (
    seq INTEGER PRIMARY KEY,          -- in the order of the changes, never used twice
    id TEXT NOT NULL,                 -- the CloudEvent's
    type TEXT NOT NULL,
    stored_at REAL NOT NULL,          -- steady seconds since 1970
    body BLOB NOT NULL,               -- the CloudEvent as structured JSON
    checksum INTEGER NOT NULL
);
CREATE INDEX event_by_type ON event (type, seq);
CREATE TABLE done (
    sink TEXT NOT NULL,
    seq INTEGER NOT NULL,             -- the sink is done with this event
    is_cursor INTEGER NOT NULL,       -- 1: and with all before it
    checksum INTEGER NOT NULL,
    PRIMARY KEY (sink, seq)
) WITHOUT ROWID;
CREATE TABLE dead_letter (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    retry INTEGER NOT NULL,           -- 1: send again; 2: settled, to be deleted
    sink TEXT NOT NULL,
    id TEXT NOT NULL,
    type TEXT NOT NULL,
    reason TEXT NOT NULL,             -- rejected, expired or overflow
    detail TEXT NOT NULL,
    dead_at REAL NOT NULL,
    body BLOB,                        -- NULL: dropped by the size limit
    checksum INTEGER NOT NULL         -- of the values from `sink` on
);
CREATE INDEX dead_letter_by_sink ON dead_letter (sink, retry);
CREATE TABLE occurrence (
    fingerprint TEXT PRIMARY KEY,     -- of a transition with its content
    count INTEGER NOT NULL,           -- how often it was seen
    last_at REAL NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE record (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,              -- JSON
    saved_at REAL NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (kind, key)
);
CREATE INDEX record_by_age ON record (saved_at);

-- name: save-meta
INSERT INTO meta VALUES (?1, ?2, checksum(?1, ?2))
ON CONFLICT (key) DO UPDATE SET value = excluded.value, checksum = excluded.checksum;

-- name: save-event
-- A disk may fail after it has taken the transaction; then the same events come once more.
INSERT OR REPLACE INTO event VALUES (?1, ?2, ?3, ?4, ?5, checksum(?1, ?2, ?3, ?4, ?5));

-- name: save-done
INSERT OR REPLACE INTO done VALUES (?1, ?2, ?3, checksum(?1, ?2, ?3));

-- name: delete-done
DELETE FROM done WHERE sink = ?1 AND seq <= ?2;

-- name: save-dead_letter
INSERT OR REPLACE INTO dead_letter VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, checksum(?3, ?4, ?5, ?6, ?7, ?8, ?9));

-- name: save-occurrence
INSERT INTO occurrence VALUES (?1, ?2, ?3, checksum(?1, ?2, ?3))
ON CONFLICT (fingerprint) DO UPDATE
SET count = excluded.count, last_at = excluded.last_at, checksum = excluded.checksum
WHERE excluded.count >= count;

-- name: save-record
INSERT INTO record VALUES (?1, ?2, ?3, ?4, checksum(?1, ?2, ?3, ?4))
ON CONFLICT (kind, key) DO UPDATE
SET value = excluded.value, saved_at = excluded.saved_at, checksum = excluded.checksum;

-- name: all-meta
SELECT * FROM meta;

-- name: all-done
SELECT * FROM done;

-- name: all-event
SELECT * FROM event WHERE seq > ?1 ORDER BY seq;

-- name: all-event-newest-first
SELECT * FROM event WHERE seq > ?1 ORDER BY seq DESC;

-- name: all-dead_letter
SELECT * FROM dead_letter ORDER BY number DESC;

-- name: all-occurrence
SELECT * FROM occurrence ORDER BY last_at DESC;

-- name: all-record
SELECT * FROM record ORDER BY saved_at DESC;

-- name: last-seq
SELECT COALESCE(MAX(seq), 0) FROM (SELECT MAX(seq) AS seq FROM event UNION ALL SELECT MAX(seq) FROM done);

-- name: seqs-after
SELECT seq FROM event WHERE seq > ?1 ORDER BY seq;

-- name: event
SELECT * FROM event WHERE seq = ?1;

-- name: stored-before
SELECT MAX(stored_at) FROM event WHERE seq < ?1;

-- name: stored-after
SELECT MIN(stored_at) FROM event WHERE seq > ?1;

-- name: record
SELECT * FROM record WHERE kind = ?1 AND key = ?2;

-- name: occurrence
SELECT * FROM occurrence WHERE fingerprint = ?1;

-- name: oldest-stored-at
SELECT stored_at FROM event WHERE seq > ?1 ORDER BY seq LIMIT 1;

-- name: backlog-by-type
SELECT type, COUNT(*) FROM event
WHERE seq > ?1 AND seq NOT IN (SELECT seq FROM done WHERE sink = ?2) GROUP BY type;

-- name: shift-event
-- A row that is damaged keeps its old checksum, so that the damage is found when it is read.
UPDATE event SET stored_at = stored_at + ?1, checksum = checksum(seq, id, type, stored_at + ?1, body)
WHERE stored_at < ?2 AND checksum = checksum(seq, id, type, stored_at, body);

-- name: shift-dead_letter
UPDATE dead_letter SET dead_at = dead_at + ?1,
    checksum = checksum(sink, id, type, reason, detail, dead_at + ?1, body)
WHERE dead_at < ?2 AND checksum = checksum(sink, id, type, reason, detail, dead_at, body);

-- name: shift-occurrence
UPDATE occurrence SET last_at = last_at + ?1, checksum = checksum(fingerprint, count, last_at + ?1)
WHERE last_at < ?2 AND checksum = checksum(fingerprint, count, last_at);

-- name: shift-record
UPDATE record SET saved_at = saved_at + ?1, checksum = checksum(kind, key, value, saved_at + ?1)
WHERE saved_at < ?2 AND checksum = checksum(kind, key, value, saved_at);

-- name: newest-stored-at
SELECT stored_at FROM event ORDER BY seq DESC LIMIT 1;

-- name: retries
SELECT * FROM dead_letter WHERE sink = ?1 AND retry = 1 AND body IS NOT NULL ORDER BY number LIMIT ?2;

-- name: count-dead-letters
SELECT sink, COUNT(*) FROM dead_letter WHERE retry < 2 GROUP BY sink;

-- name: dead-letters
SELECT number, sink, id, type, reason, detail, dead_at, retry, body IS NOT NULL
FROM dead_letter WHERE retry < 2 ORDER BY number;

-- name: sinks
SELECT sink FROM done UNION SELECT sink FROM dead_letter;

-- name: dead-letter-body
SELECT body FROM dead_letter WHERE id = ?1 AND body IS NOT NULL ORDER BY number DESC LIMIT 1;

-- name: mark-retry
UPDATE dead_letter SET retry = 1 WHERE number = ?1 AND retry < 2 AND body IS NOT NULL;

-- name: dead-letter-again
UPDATE dead_letter SET retry = 0, reason = 'rejected', detail = ?2, dead_at = ?3,
    checksum = checksum(sink, id, type, 'rejected', ?2, ?3, body)
WHERE number = ?1;

-- name: drop-dead-letter
-- It is deleted later: until then a buffer that is written to the file can say that it is settled.
UPDATE dead_letter SET retry = 2 WHERE number = ?1 AND retry < 2;

-- name: newest-events
SELECT seq, id, type, stored_at, LENGTH(body) FROM event ORDER BY seq DESC LIMIT ?1;

-- name: first-event
SELECT * FROM event WHERE type = ?1 AND id = ?2 ORDER BY seq LIMIT 1;

-- name: event-body
SELECT body FROM event WHERE id = ?1 OR seq = ?2 ORDER BY seq DESC LIMIT 1;

-- name: prune-events
DELETE FROM event WHERE seq <= ?1 AND stored_at < ?2;

-- name: prune-dead-letters
DELETE FROM dead_letter WHERE retry = 2 OR (dead_at < ?1 AND retry = 0);

-- name: prune-occurrences
DELETE FROM occurrence WHERE last_at < ?1;

-- name: prune-records
DELETE FROM record WHERE saved_at < ?1;

-- name: delete-oldest-records
-- A record that says that its work is done only recognises what comes again.
DELETE FROM record WHERE rowid IN (
    SELECT rowid FROM record WHERE json_valid(value) AND json_extract(value, '$.done') ORDER BY saved_at LIMIT ?1
);

-- name: delete-event
DELETE FROM event WHERE seq = ?1;

-- name: delete-oldest-events
DELETE FROM event WHERE seq IN (SELECT seq FROM event WHERE seq <= ?1 ORDER BY seq LIMIT ?2);

-- name: empty-oldest-dead-letters
UPDATE dead_letter SET body = NULL, retry = retry & 2,
    checksum = checksum(sink, id, type, reason, detail, dead_at, NULL)
WHERE number IN (SELECT number FROM dead_letter WHERE body IS NOT NULL ORDER BY number LIMIT ?1);

-- name: delete-dead-letters-but-newest
DELETE FROM dead_letter WHERE number <= (SELECT MAX(number) FROM dead_letter) - ?1;
