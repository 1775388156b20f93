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

-- name: schema-waiting
CREATE TABLE waiting (                -- this sink still has to get this event
    sink TEXT NOT NULL,
    seq INTEGER NOT NULL,
    key INTEGER NOT NULL,             -- stands for the order key, of which the first event goes first
    urgency REAL,                     -- bridge/events/urgency.py; of the first, that of the newest notice behind it
    state INTEGER NOT NULL,           -- bridge/outbox/rows.py; the first of a key has another one than what is behind it
    tries INTEGER NOT NULL DEFAULT 0, -- how often it failed in a row
    due_at REAL,                      -- when it is sent at the earliest, in steady seconds; NULL: now
    is_asked INTEGER NOT NULL DEFAULT 0,  -- 1: the receiver has asked to wait until then
    is_sent INTEGER NOT NULL DEFAULT 0,   -- 1: it was sent without a clear answer
    PRIMARY KEY (key, sink, seq)      -- a commit writes few pages, whatever the number of sinks
) WITHOUT ROWID;
CREATE INDEX waiting_by_seq ON waiting (seq, sink);
CREATE INDEX waiting_heads ON waiting (sink, state, urgency, seq) WHERE state <> 7;
CREATE INDEX waiting_by_due ON waiting (sink, due_at) WHERE due_at IS NOT NULL;
CREATE TRIGGER waiting_next AFTER DELETE ON waiting WHEN OLD.state < 7 BEGIN
    -- The next of the key is the first now, and the key is as urgent as before.
    UPDATE waiting SET state = 0, urgency = COALESCE(OLD.urgency, urgency)
    WHERE key = OLD.key AND sink = OLD.sink
    AND seq = (SELECT MIN(seq) FROM waiting WHERE key = OLD.key AND sink = OLD.sink);
END;

-- name: waiting-of-version-1
-- What waits in a file of version 1, for reading; writes name main.waiting.
CREATE TEMP VIEW waiting AS SELECT sink, seq, 0 AS tries, NULL AS due_at FROM main.waiting;

-- name: save-event
INSERT OR REPLACE INTO event VALUES (?, ?, ?, ?, ?, ?);

-- name: save-waiting
INSERT OR IGNORE INTO waiting SELECT
    ?1, ?2, ?3, ?4, IIF(is_behind, 7, IIF(?5 = 7, 0, ?5)), IIF(is_behind, 0, ?6), IIF(is_behind, NULL, ?7), ?8, ?9
FROM (SELECT EXISTS (SELECT 1 FROM waiting WHERE sink = ?1 AND key = ?3) AS is_behind)
RETURNING state;

-- name: hasten
-- What is behind a first event makes it urgent, and ends the time for which it is held.
UPDATE waiting SET
    urgency = IIF((?3 > 0 AND ?3 < 1e11) OR urgency IS NULL, ?3, urgency),
    due_at = CASE
        WHEN state = 6 THEN MIN(due_at, COALESCE(?4, 0)) WHEN state IN (2, 3) AND ?3 NOTNULL THEN MIN(due_at, ?5) ELSE due_at
    END,
    is_asked = IIF(?3 NOTNULL, 0, is_asked)
WHERE key = ?2 AND sink = ?1 AND state <> 7 AND seq = (
    SELECT MIN(seq) FROM waiting WHERE key = ?2 AND sink = ?1
);

-- name: order-key
-- What was put before the first of its key becomes the first.
UPDATE waiting SET
    state = IIF(seq = lowest, 0, 7), tries = 0, due_at = NULL, is_asked = 0,
    urgency = IIF(seq = lowest, COALESCE(urgent, urgency), urgency)
FROM (
    SELECT MIN(seq) AS lowest, MAX(IIF(state <> 7, urgency, NULL)) AS urgent, MAX(IIF(state <> 7, seq, 0)) AS head
    FROM waiting WHERE sink = ?1 AND key = ?2
)
WHERE sink = ?1 AND key = ?2 AND lowest <> head AND seq IN (lowest, head);

-- name: save-dead-letter
-- The same one again changes nothing: a transaction that failed may be in the file all the same.
INSERT INTO dead_letter SELECT NULL, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9
WHERE NOT EXISTS (SELECT 1 FROM dead_letter WHERE sink = ?1 AND id = ?2 AND checksum = ?8);

-- name: save-record
INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?, ?);

-- name: record
SELECT * FROM record WHERE kind = ? AND key = ?;

-- name: records-of
SELECT * FROM record WHERE kind = ?;

-- name: records-by-age
-- The newest first: what is saved again gets a new rowid. To sort them would need a file, which a full disk refuses.
SELECT * FROM record WHERE kind != 'state' ORDER BY rowid DESC;

-- name: all-waiting
SELECT * FROM waiting WHERE seq > ? ORDER BY seq;

-- name: events-after
SELECT * FROM event WHERE seq > ? ORDER BY seq;

-- name: sinks-waiting-for
SELECT sink FROM waiting WHERE seq = ?;

-- name: waiting-for
SELECT * FROM waiting WHERE seq = ? ORDER BY sink;

-- name: waiting-events
SELECT event.* FROM (SELECT seq FROM waiting GROUP BY seq) AS one CROSS JOIN event ON event.seq = one.seq;

-- name: pending
SELECT event.* FROM waiting INDEXED BY waiting_by_seq JOIN event ON event.seq = waiting.seq
WHERE waiting.sink = ? AND waiting.seq > ? ORDER BY waiting.seq;

-- name: heads
SELECT seq, key, urgency, state, tries FROM waiting INDEXED BY waiting_heads
WHERE sink = ? AND state = ? AND state <> 7 AND urgency >= ? AND urgency < ? ORDER BY urgency, seq LIMIT ?;

-- name: heads-in-order
SELECT seq, key, urgency, state, tries FROM waiting INDEXED BY waiting_heads
WHERE sink = ? AND state = ? AND state <> 7 AND urgency IS NULL ORDER BY seq LIMIT ?;

-- name: head
SELECT seq, key, urgency, state, tries FROM waiting WHERE sink = ? AND seq = ? AND state <> 7;

-- name: has-urgent
SELECT 1 FROM waiting INDEXED BY waiting_heads
WHERE sink = ? AND state = ? AND state <> 7 AND urgency IS NOT NULL LIMIT 1;

-- name: has-failed
SELECT 1 FROM waiting INDEXED BY waiting_heads
WHERE sink = ? AND state BETWEEN 1 AND 5 AND state <> 7 LIMIT 1;

-- name: most-tries
SELECT COALESCE(MAX(tries), 0) FROM waiting INDEXED BY waiting_heads
WHERE sink = ? AND state BETWEEN 2 AND 5 AND state <> 7;

-- name: of-key
SELECT event.*, is_sent FROM waiting JOIN event ON event.seq = waiting.seq
WHERE sink = ? AND key = ? ORDER BY waiting.seq LIMIT ?;

-- name: next-due
SELECT due_at FROM waiting INDEXED BY waiting_by_due
WHERE sink = ? AND due_at IS NOT NULL ORDER BY due_at LIMIT 1;

-- name: promote
-- What is due by now can be sent; a few at once, those that are due first.
UPDATE waiting SET state = IIF(state = 6, 0, state + 2), due_at = NULL, is_asked = 0 WHERE sink = ?1 AND seq IN (
    SELECT seq FROM waiting INDEXED BY waiting_by_due
    WHERE sink = ?1 AND due_at IS NOT NULL AND due_at <= ?2 AND (due_at <= ?3 OR NOT is_asked) ORDER BY due_at LIMIT 100
);

-- name: resume
-- After a start nothing is held, and a clock that was wrong delays no retry.
UPDATE waiting SET state = IIF(state = 6, 0, state), due_at = IIF(state = 6, NULL, MIN(due_at, ?)), is_asked = 0
WHERE due_at IS NOT NULL;

-- name: release
UPDATE waiting SET state = 0, due_at = NULL WHERE sink = ? AND state = 6 AND state <> 7;

-- name: note-sent
UPDATE waiting SET is_sent = ? WHERE sink = ? AND seq = ?;

-- name: note-failure
UPDATE waiting SET state = ?, tries = ?, due_at = ?, is_asked = ? WHERE sink = ? AND seq = ?;

-- name: forgive
UPDATE waiting SET state = 1, tries = 0, due_at = NULL WHERE sink = ? AND state IN (2, 4) AND state <> 7;

-- name: event
SELECT * FROM event WHERE seq = ?;

-- name: oldest-waiting
-- The oldest that waits is the first of its key.
SELECT * FROM event WHERE seq = (
    SELECT MIN(seq) FROM waiting INDEXED BY waiting_heads WHERE sink = ? AND state <> 7
);

-- name: count-waiting
SELECT sink, COUNT(*) FROM waiting GROUP BY sink;

-- name: count-dead-letters
SELECT sink, COUNT(*) FROM dead_letter GROUP BY sink;

-- name: last-seq
SELECT COALESCE(MAX(seq), 0) FROM event;

-- name: last-waiting
SELECT COALESCE(MAX(seq), 0) FROM waiting;

-- name: delete-waiting
DELETE FROM main.waiting WHERE sink = ? AND seq = ?;

-- name: delete-waiting-after
DELETE FROM waiting WHERE seq > ?;

-- name: retries
SELECT number FROM dead_letter WHERE retry = 1 ORDER BY number LIMIT ?;

-- name: dead-letter
SELECT * FROM dead_letter WHERE number = ?;

-- name: delete-dead-letter
DELETE FROM dead_letter WHERE number = ?;

-- name: prune-events
-- Numbers grow with the time, so the first that is young enough ends the search.
DELETE FROM event WHERE seq IN (
    SELECT seq FROM event WHERE seq < COALESCE((SELECT MIN(seq) FROM event WHERE stored_at >= ?), 9e18)
    AND NOT EXISTS (SELECT 1 FROM waiting WHERE waiting.seq = event.seq) LIMIT ?
);

-- name: prune-dead-letters
DELETE FROM dead_letter WHERE retry = 0 AND number < COALESCE(
    (SELECT MIN(number) FROM dead_letter WHERE dead_at >= ?), 9e18
);

-- name: prune-records
DELETE FROM record WHERE kind != 'state' AND rowid < COALESCE(
    (SELECT MIN(rowid) FROM record WHERE saved_at >= ? AND kind != 'state'), 9e18
);

-- name: delete-delivered
DELETE FROM event WHERE seq IN (
    SELECT seq FROM event
    WHERE seq >= ? AND NOT EXISTS (SELECT 1 FROM waiting WHERE waiting.seq = event.seq) ORDER BY seq LIMIT ?
) RETURNING seq;

-- name: delete-done-records
DELETE FROM record WHERE rowid IN (
    SELECT rowid FROM record WHERE kind != 'state' AND json_extract(value, ?) ORDER BY rowid LIMIT ?
);

-- name: delete-oldest-dead-letters
DELETE FROM dead_letter WHERE number IN (SELECT number FROM dead_letter ORDER BY number LIMIT ?)
RETURNING sink, dead_at;

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
SELECT sink, waiting.seq, id, type, stored_at, body, tries, due_at FROM waiting JOIN event ON event.seq = waiting.seq
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

-- name: tries-of
SELECT sink, tries, due_at FROM waiting WHERE seq = ?;

-- name: key-and-urgency
SELECT key, urgency FROM waiting WHERE sink = ? AND seq = ?;

-- name: move-waiting-of-version-1
UPDATE OR REPLACE main.waiting SET sink = ? WHERE sink = ? AND seq = ?;
