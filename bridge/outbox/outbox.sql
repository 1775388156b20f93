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
    urgency REAL,                     -- bridge/events/urgency.py; of the first, also that of a newer one behind it
    state INTEGER NOT NULL,           -- bridge/outbox/rows.py; the first of a key has another one than what is behind it
    tries INTEGER NOT NULL DEFAULT 0, -- how often it failed in a row
    due_at REAL,                      -- when it is sent at the earliest, in steady seconds; NULL: now
    is_sent INTEGER NOT NULL DEFAULT 0,   -- 1: it was sent without a clear answer
    PRIMARY KEY (key, sink, seq)      -- a commit writes few pages, whatever the number of sinks
) WITHOUT ROWID;
CREATE INDEX waiting_by_seq ON waiting (seq, sink);
CREATE INDEX waiting_heads ON waiting (sink, state, urgency, seq) WHERE state <> 4;
CREATE INDEX waiting_by_due ON waiting (sink, due_at) WHERE state IN (1, 3);
CREATE INDEX waiting_due ON waiting (sink, due_at) WHERE state = 2;
CREATE TRIGGER waiting_next AFTER DELETE ON waiting WHEN OLD.state < 4 BEGIN
    -- The next of the key is the first now, and the key is as urgent as before.
    UPDATE waiting SET state = 0, urgency = COALESCE(OLD.urgency, urgency)
    WHERE key = OLD.key AND sink = OLD.sink
    AND seq = (SELECT MIN(seq) FROM waiting WHERE key = OLD.key AND sink = OLD.sink);
END;

-- name: waiting-of-an-earlier-version
-- What waits in a file of version 1 or 2, for reading; writes name main.waiting.
CREATE TEMP VIEW waiting AS SELECT sink, seq, 0 AS tries, NULL AS due_at FROM main.waiting;

-- name: save-event
INSERT OR REPLACE INTO event VALUES (?, ?, ?, ?, ?, ?);

-- name: save-waiting
INSERT OR IGNORE INTO waiting SELECT
    ?1, ?2, ?3, ?4, IIF(is_behind, 4, IIF(?5 = 4, 0, ?5)), IIF(is_behind, 0, ?6), IIF(is_behind, NULL, ?7), ?8
FROM (SELECT EXISTS (SELECT 1 FROM waiting WHERE sink = ?1 AND key = ?3) AS is_behind);

-- name: hasten
-- What is behind a first event makes it urgent, and ends the time for which it is held. A newer notice counts, else
-- what is urgent still (notices since ?6, what has started since ?7) before what is less so.
UPDATE waiting SET
    urgency = CASE
        WHEN ?3 IS NULL OR ?3 <= 0 THEN COALESCE(urgency, ?3)
        WHEN ?3 >= 1e11 AND urgency BETWEEN ?6 AND 1e11 OR ?3 >= 2e11 AND urgency BETWEEN ?7 AND 2e11 THEN urgency
        ELSE ?3
    END,
    due_at = CASE
        WHEN state = 3 AND tries = 0 THEN MIN(due_at, COALESCE(?4, 0))
        WHEN state IN (1, 3) AND ?3 NOTNULL THEN MIN(due_at, ?5)
        ELSE due_at
    END
WHERE key = ?2 AND sink = ?1 AND state <> 4 AND seq < ?8 AND seq = (
    SELECT MIN(seq) FROM waiting WHERE key = ?2 AND sink = ?1
);

-- name: order-key
-- What was put before the first of its key becomes the first.
UPDATE waiting SET
    state = IIF(seq = lowest, 0, 4), tries = 0, due_at = NULL,
    urgency = IIF(seq = lowest, COALESCE(urgent, urgency), urgency)
FROM (
    SELECT MIN(seq) AS lowest, MAX(IIF(state <> 4, urgency, NULL)) AS urgent, MAX(IIF(state <> 4, seq, 0)) AS head
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

-- name: urgent-keys
SELECT urgency, seq, key FROM waiting WHERE state <> 4 AND urgency IS NOT NULL;

-- name: events-of-key
SELECT event.* FROM (SELECT DISTINCT seq FROM waiting WHERE key = ?) AS one CROSS JOIN event ON event.seq = one.seq
ORDER BY event.seq;

-- name: pending
SELECT event.* FROM waiting INDEXED BY waiting_by_seq JOIN event ON event.seq = waiting.seq
WHERE waiting.sink = ? AND waiting.seq > ? ORDER BY waiting.seq;

-- name: heads
SELECT seq, key, urgency, state, tries FROM waiting INDEXED BY waiting_heads
WHERE sink = ? AND state = ? AND state <> 4 AND urgency >= ? AND urgency < ? ORDER BY urgency, seq LIMIT ?;

-- name: heads-in-order
SELECT seq, key, urgency, state, tries FROM waiting INDEXED BY waiting_heads
WHERE sink = ? AND state = ? AND state <> 4 AND urgency IS NULL ORDER BY seq LIMIT ?;

-- name: head
SELECT seq, key, urgency, state, tries FROM waiting WHERE sink = ? AND seq = ? AND state <> 4;

-- name: has-urgent
-- SQLite 3.34 would not look for IS NOT NULL in the index.
SELECT 1 FROM waiting INDEXED BY waiting_heads
WHERE sink = ? AND state = ? AND state <> 4 AND urgency >= -9e999 LIMIT 1;

-- name: newest-due
-- Of what came last, what is due for longest.
SELECT seq, key, urgency, state, tries FROM (
    SELECT * FROM waiting INDEXED BY waiting_by_seq WHERE seq > ? ORDER BY seq DESC LIMIT ?
) WHERE sink = ? AND state = 2 ORDER BY due_at LIMIT 1;

-- name: longest-due
SELECT seq, key, urgency, state, tries FROM waiting INDEXED BY waiting_due
WHERE sink = ? AND state = 2 ORDER BY due_at LIMIT 1;

-- name: next-retry
SELECT tries FROM waiting INDEXED BY waiting_by_due
WHERE sink = ? AND state IN (1, 3) AND tries > 0 ORDER BY due_at LIMIT 1;

-- name: next-notice
SELECT MIN(urgency) FROM waiting INDEXED BY waiting_heads
WHERE sink = ? AND state = ? AND state <> 4 AND urgency >= ? AND urgency < 1e11;

-- name: of-key
SELECT event.*, is_sent FROM waiting JOIN event ON event.seq = waiting.seq
WHERE sink = ? AND key = ? ORDER BY waiting.seq LIMIT ?;

-- name: next-due
SELECT MIN(due_at) FROM waiting INDEXED BY waiting_by_due WHERE sink = ? AND state IN (1, 3);

-- name: promote
-- What is due by now can be sent; a few at once, those that are due first.
UPDATE waiting SET state = IIF(tries, 2, 0), due_at = IIF(tries, due_at, NULL) WHERE sink = ?1 AND seq IN (
    SELECT seq FROM waiting INDEXED BY waiting_by_due
    WHERE sink = ?1 AND state IN (1, 3) AND due_at <= ?2 ORDER BY due_at LIMIT 100
);

-- name: resume
-- After a start all is due: nothing that was known of a receiver outlasts it, and nothing is held.
UPDATE waiting SET state = IIF(tries, 2, 0), due_at = IIF(tries, MIN(due_at, ?), NULL) WHERE state IN (1, 2, 3);

-- name: release
UPDATE waiting SET state = 0, due_at = NULL WHERE sink = ? AND state = 3 AND state <> 4 AND tries = 0;

-- name: note-sent
UPDATE waiting SET is_sent = ? WHERE sink = ? AND seq = ?;

-- name: note-failure
UPDATE waiting SET state = ?, tries = ?, due_at = ? WHERE sink = ? AND seq = ?;

-- name: note-tries
-- What another database knows of the tries; which one is the first of its key is known here.
UPDATE waiting SET
    state = IIF(state = 4 OR ?3 = 4, state, ?3), tries = IIF(state = 4 OR ?3 = 4, tries, ?4),
    due_at = IIF(state = 4 OR ?3 = 4, due_at, ?5), is_sent = ?6
WHERE sink = ?1 AND seq = ?2;

-- name: forgive
UPDATE waiting SET state = 2, due_at = MIN(due_at, ?2) WHERE sink = ?1 AND state = 1 AND state <> 4;

-- name: event
SELECT * FROM event WHERE seq = ?;

-- name: oldest-waiting
-- The oldest that waits is the first of its key.
SELECT * FROM event WHERE seq = (
    SELECT MIN(seq) FROM waiting INDEXED BY waiting_heads WHERE sink = ? AND state <> 4
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

-- name: delivered
SELECT seq FROM event
WHERE seq >= ? AND NOT EXISTS (SELECT 1 FROM waiting WHERE waiting.seq = event.seq) ORDER BY seq LIMIT ?;

-- name: delete-done-records
DELETE FROM record WHERE rowid IN (
    SELECT rowid FROM record WHERE kind != 'state' AND json_extract(value, ?) ORDER BY rowid LIMIT ?
);

-- name: oldest-dead-letters
SELECT number, sink, dead_at FROM dead_letter ORDER BY number LIMIT ?;

-- name: oldest-event
SELECT seq, stored_at FROM event WHERE seq = (SELECT MIN(seq) FROM waiting);

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

-- name: move-waiting-of-an-earlier-version
UPDATE OR REPLACE main.waiting SET sink = ? WHERE sink = ? AND seq = ?;
