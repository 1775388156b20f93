-- What follows from the tables: made with them, and after an upgrade of them.
CREATE INDEX IF NOT EXISTS event_by_event_id ON event (event_id, at) WHERE event_id <> '';
-- What the history counts; a store of the version before also has heartbeats and documents.
CREATE INDEX IF NOT EXISTS event_by_kind ON event (kind, at, reason) WHERE kind NOT IN ('bridge.heartbeat', 'document.changed');
CREATE INDEX IF NOT EXISTS event_by_age ON event (received_at);
-- An open event's last report, if it is current only for a day after that: `current` has the same expression. With every
-- column by which its state is decided.
CREATE INDEX IF NOT EXISTS scheduled_current ON scheduled (
    iif(event_type IN ('Preempt', 'Terminate'), max(last_change_at, ifnull(not_before, 0)), 9e99),
    event_type, status, not_before, started_at, last_change_at, heard, is_open
) WHERE is_open;
-- With every column that the history counts by.
CREATE INDEX IF NOT EXISTS scheduled_by_time ON scheduled (first_seen_at, event_type, is_open, status, notice_seconds);
CREATE INDEX IF NOT EXISTS scheduled_by_end ON scheduled (ended_at) WHERE ended_at IS NOT NULL;
-- With every column that the VMs are counted by.
CREATE INDEX IF NOT EXISTS vm_by_leaving ON vm (left_at, alive_at, heartbeat_at, is_stopped, unreachable_since, expected,
    waiting, place, scope, tags);
-- With every column by which it is decided who watches the VMs that an event names.
CREATE INDEX IF NOT EXISTS vm_by_place ON vm (place, left_at, alive_at, heartbeat_at, is_stopped, unreachable_since, expected,
    scope);
CREATE INDEX IF NOT EXISTS vm_by_name ON vm (folded);
CREATE INDEX IF NOT EXISTS vm_by_scope ON vm (scope, natural);
CREATE INDEX IF NOT EXISTS vm_expected ON vm (left_at) WHERE expected = 1;
CREATE INDEX IF NOT EXISTS run_by_vm ON run (vm, reporter, at);
CREATE INDEX IF NOT EXISTS run_missing ON run (vm, missing) WHERE missing > 0;
-- A VM that Preempt or Terminate names may not be there to report the end: `over_at` is when that should have begun.
CREATE VIEW IF NOT EXISTS deletion AS
SELECT key, is_open, max(ifnull(not_before, started_at), ifnull(started_at, not_before)) AS over_at
FROM scheduled WHERE event_type IN ('Preempt', 'Terminate') AND status <> 'Canceled';
-- A list of expected VMs counts if it is newer than what it contradicts.
CREATE VIEW IF NOT EXISTS leaving AS
SELECT id, place, min(
    ifnull((SELECT max(over_at) + 86400 FROM affected WHERE affected.place = vm.place AND alive_at > 0
        AND over_at >= alive_at - 300 AND NOT (expected = 1 AND over_at < listed_at)), 9e99),
    iif(EXISTS (SELECT 1 FROM away WHERE what = vm.id AND covers >= heard AND seen >= alive_at AND until > 0
        AND NOT (expected = 1 AND number < listed_number)), 0, 9e99),
    iif(expected = -1, alive_at + iif(is_stopped AND alive_at <= heartbeat_at, 0, 3900), 9e99)
) AS at
FROM vm, (SELECT max(CAST(iif(name = 'listed_at', value, NULL) AS REAL)) AS listed_at,
    max(CAST(iif(name = 'listed_number', value, NULL) AS REAL)) AS listed_number FROM meta WHERE name LIKE 'listed_%');
CREATE TRIGGER IF NOT EXISTS vm_is_new AFTER INSERT ON vm BEGIN
    UPDATE vm SET left_at = (SELECT at FROM leaving WHERE leaving.id = vm.id) WHERE id = new.id;
END;
CREATE TRIGGER IF NOT EXISTS vm_is_changed AFTER UPDATE OF alive_at, is_stopped, expected ON vm
WHEN new.left_at < 9e99 OR new.expected <> old.expected BEGIN
    UPDATE vm SET left_at = (SELECT at FROM leaving WHERE leaving.id = vm.id) WHERE id = new.id;
END;
CREATE TRIGGER IF NOT EXISTS vm_is_deleted AFTER DELETE ON vm BEGIN
    DELETE FROM hole WHERE run IN (SELECT id FROM run WHERE vm = old.id);
    DELETE FROM run WHERE vm = old.id;
    DELETE FROM work WHERE vm = old.id;
    DELETE FROM away WHERE what = old.id;
    DELETE FROM scope WHERE id = old.scope AND NOT EXISTS (SELECT 1 FROM vm WHERE scope = old.scope);
END;
CREATE TRIGGER IF NOT EXISTS scheduled_is_deleted AFTER DELETE ON scheduled BEGIN
    DELETE FROM affected WHERE key = old.key;
    DELETE FROM preparation WHERE key = old.key;
    DELETE FROM away WHERE what = old.key;
END;
CREATE TRIGGER IF NOT EXISTS vm_is_named AFTER INSERT ON affected WHEN new.over_at IS NOT NULL BEGIN
    UPDATE vm SET left_at = (SELECT at FROM leaving WHERE leaving.id = vm.id) WHERE place = new.place;
END;
CREATE TRIGGER IF NOT EXISTS vm_is_not_named AFTER DELETE ON affected WHEN old.over_at IS NOT NULL BEGIN
    UPDATE vm SET left_at = (SELECT at FROM leaving WHERE leaving.id = vm.id) WHERE place = old.place;
END;
