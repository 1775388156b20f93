-- The outbox's SQL. Each statement stands below its name; `schema` makes the tables of a new file.

-- name: schema
CREATE TABLE event (
    seq INTEGER PRIMARY KEY,          -- in the order of the changes, never given twice
    id TEXT NOT NULL,                 -- the CloudEvent's
    type TEXT NOT NULL,
    stored_at REAL NOT NULL,          -- steady seconds since 1970
    body BLOB NOT NULL,               -- the CloudEvent as structured JSON
    checksum INTEGER NOT NULL         -- of id, type and body: SQLite does not notice what a disk changes in them
);
CREATE INDEX event_by_age ON event (stored_at);
CREATE TABLE waiting (                -- this sink still has to get this event
    sink TEXT NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (sink, seq)
) WITHOUT ROWID;
CREATE INDEX waiting_by_seq ON waiting (seq);
CREATE TABLE dead_letter (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    sink TEXT NOT NULL,
    id TEXT NOT NULL,
    type TEXT NOT NULL,
    reason TEXT NOT NULL,             -- rejected or expired
    detail TEXT NOT NULL,
    dead_at REAL NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    retry INTEGER NOT NULL DEFAULT 0  -- 1: an operator wants it sent again
);
CREATE INDEX dead_letter_by_sink ON dead_letter (sink, id);
CREATE TABLE record (                 -- all that is remembered by key
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,              -- JSON
    saved_at REAL NOT NULL,
    checksum INTEGER NOT NULL,        -- of kind, key and value
    PRIMARY KEY (kind, key)
);

-- name: save-event
INSERT OR REPLACE INTO event VALUES (?, ?, ?, ?, ?, ?);

-- name: save-waiting
INSERT OR IGNORE INTO waiting VALUES (?, ?);

-- name: save-dead-letter
-- The same one again changes nothing: a transaction that failed may be in the file all the same.
INSERT INTO dead_letter SELECT NULL, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9
WHERE NOT EXISTS (SELECT 1 FROM dead_letter WHERE sink = ?1 AND id = ?2 AND checksum = ?8);

-- name: save-record
INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?, ?);

-- name: record
SELECT * FROM record WHERE kind = ? AND key = ?;

-- name: records-by-age
SELECT * FROM record ORDER BY kind != 'state', saved_at DESC;

-- name: all-waiting
SELECT sink, seq FROM waiting WHERE seq > ?;

-- name: events-after
SELECT * FROM event WHERE seq > ? ORDER BY seq;

-- name: sinks-waiting-for
SELECT sink FROM waiting WHERE seq = ?;

-- name: waiting-events
SELECT event.* FROM event WHERE seq IN (SELECT seq FROM waiting) ORDER BY seq;

-- name: pending
SELECT event.* FROM waiting JOIN event ON event.seq = waiting.seq
WHERE waiting.sink = ? AND waiting.seq > ? ORDER BY waiting.seq;

-- name: has-waiting-since
SELECT 1 FROM event WHERE stored_at > ? AND (type GLOB ? OR type GLOB ?)
AND EXISTS (SELECT 1 FROM waiting WHERE sink = ? AND seq = event.seq) LIMIT 1;

-- name: newest-waiting
SELECT * FROM event WHERE seq IN (SELECT seq FROM waiting WHERE sink = ? ORDER BY seq DESC LIMIT ?)
AND stored_at < ? AND type GLOB ?;

-- name: oldest-waiting
SELECT stored_at FROM event WHERE seq = (SELECT MIN(seq) FROM waiting WHERE sink = ?);

-- name: count-waiting
SELECT sink, COUNT(*) FROM waiting GROUP BY sink;

-- name: count-dead-letters
SELECT sink, COUNT(*) FROM dead_letter GROUP BY sink;

-- name: last-seq
SELECT COALESCE(MAX(seq), 0) FROM event;

-- name: last-waiting
SELECT COALESCE(MAX(seq), 0) FROM waiting;

-- name: delete-waiting
DELETE FROM waiting WHERE sink = ? AND seq = ?;

-- name: delete-waiting-after
DELETE FROM waiting WHERE seq > ?;

-- name: delete-waiting-without-event
DELETE FROM waiting WHERE seq NOT IN (SELECT seq FROM event);

-- name: retries
SELECT number FROM dead_letter WHERE retry = 1 ORDER BY number LIMIT ?;

-- name: dead-letter
SELECT * FROM dead_letter WHERE number = ?;

-- name: delete-dead-letter
DELETE FROM dead_letter WHERE number = ?;

-- name: prune-events
DELETE FROM event WHERE seq IN (
    SELECT seq FROM event
    WHERE stored_at < ? AND NOT EXISTS (SELECT 1 FROM waiting WHERE waiting.seq = event.seq) LIMIT ?
);

-- name: prune-dead-letters
DELETE FROM dead_letter WHERE dead_at < ? AND retry = 0;

-- name: prune-records
DELETE FROM record WHERE saved_at < ? AND kind != 'state';

-- name: delete-delivered
DELETE FROM event WHERE seq IN (
    SELECT seq FROM event
    WHERE NOT EXISTS (SELECT 1 FROM waiting WHERE waiting.seq = event.seq) ORDER BY seq LIMIT ?
);

-- name: delete-done-records
DELETE FROM record WHERE rowid IN (
    SELECT rowid FROM record WHERE kind != 'state' AND json_extract(value, ?) ORDER BY saved_at LIMIT ?
);

-- name: delete-oldest-dead-letters
DELETE FROM dead_letter WHERE number IN (SELECT number FROM dead_letter ORDER BY number LIMIT ?);

-- name: oldest-event
SELECT seq, stored_at FROM event WHERE seq = (SELECT MIN(seq) FROM waiting);

-- name: delete-waiting-for
DELETE FROM waiting WHERE seq = ? RETURNING sink;

-- name: delete-event
DELETE FROM event WHERE seq = ?;

-- What the command line asks for:

-- name: newest-events
SELECT seq, id, type, stored_at, LENGTH(body) FROM event ORDER BY seq DESC LIMIT ?;

-- name: list-waiting
SELECT sink, waiting.seq, id, type, stored_at, body FROM waiting JOIN event ON event.seq = waiting.seq
WHERE sink = COALESCE(?, sink) ORDER BY waiting.seq, sink LIMIT ?;

-- name: list-dead-letters
SELECT number, sink, id, type, reason, detail, dead_at, retry FROM dead_letter ORDER BY number;

-- name: event-body
SELECT body FROM event WHERE id = ? OR seq = ? ORDER BY seq DESC LIMIT 1;

-- name: find-events
SELECT * FROM event WHERE CASE ?1 WHEN '' THEN seq = COALESCE(
    (SELECT MAX(seq) FROM event WHERE type LIKE '%.scheduledevent.%'), (SELECT MAX(seq) FROM event)
) ELSE
    ?1 IN (id, CAST(seq AS TEXT)) OR json_extract(CAST(body AS TEXT), '$.correlationid') = ?1 COLLATE NOCASE
END ORDER BY seq;

-- name: dead-letters-of
SELECT sink, number, reason, detail FROM dead_letter WHERE id = ?;

-- name: dead-letter-body
SELECT body FROM dead_letter WHERE id = ? ORDER BY number DESC LIMIT 1;

-- name: mark-retry
UPDATE dead_letter SET retry = 1 WHERE number = ?;

-- name: waiting-seqs
SELECT seq FROM waiting WHERE sink = ? ORDER BY seq;

-- name: move-waiting
UPDATE OR REPLACE waiting SET sink = ? WHERE sink = ? AND seq = ?;
