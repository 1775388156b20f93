-- What follows from the tables: made with them, and after an upgrade of them.
CREATE INDEX IF NOT EXISTS event_by_event_id ON event (event_id, at) WHERE event_id <> '';
-- What the history counts; heartbeats and documents are the most frequent, and not counted.
CREATE INDEX IF NOT EXISTS event_by_kind ON event (kind, at, reason) WHERE kind NOT IN ('bridge.heartbeat', 'document.changed');
CREATE INDEX IF NOT EXISTS event_by_age ON event (received_at);
-- When a VM's forwarder started.
CREATE INDEX IF NOT EXISTS event_of_start ON event (vm, at) WHERE kind = 'bridge.heartbeat' AND reason = 'Started';
-- An open event's last report, if it is current only for a day after that: `event_now` has the same expression.
CREATE INDEX IF NOT EXISTS scheduled_current ON scheduled (
    iif(event_type IN ('Preempt', 'Terminate'), max(last_change_at, ifnull(not_before, 0)), 9e99)
) WHERE is_open;
-- With every column that the history counts by.
CREATE INDEX IF NOT EXISTS scheduled_by_time ON scheduled (first_seen_at, event_type, is_open, status, notice_seconds);
CREATE INDEX IF NOT EXISTS scheduled_by_end ON scheduled (ended_at) WHERE ended_at IS NOT NULL;
-- A VM that Preempt or Terminate names may not be there to report the end: `over_at` is when that should have begun.
CREATE VIEW IF NOT EXISTS deletion AS
SELECT key, is_open, max(ifnull(not_before, started_at), ifnull(started_at, not_before)) AS over_at
FROM scheduled WHERE event_type IN ('Preempt', 'Terminate') AND status <> 'Canceled';
CREATE INDEX IF NOT EXISTS affected_open ON affected (scope, folded) WHERE event_open;
CREATE INDEX IF NOT EXISTS affected_deletion ON affected (scope, folded, over_at) WHERE over_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS vm_by_name ON vm (folded, scope);
CREATE INDEX IF NOT EXISTS vm_by_scope ON vm (scope, "group", subscription);
CREATE INDEX IF NOT EXISTS vm_by_leaving ON vm (left_at);
CREATE VIEW IF NOT EXISTS leaving AS
SELECT id, scope, folded, ifnull((SELECT max(over_at) FROM affected WHERE affected.scope = vm.scope
    AND affected.folded = vm.folded AND over_at >= alive_at - 300 AND alive_at > 0), 9e99) AS at
FROM vm;
CREATE TRIGGER IF NOT EXISTS vm_is_new AFTER INSERT ON vm BEGIN
    UPDATE vm SET left_at = (SELECT at FROM leaving WHERE leaving.id = vm.id) WHERE id = new.id;
END;
CREATE TRIGGER IF NOT EXISTS vm_is_back AFTER UPDATE OF alive_at ON vm WHEN new.left_at < new.alive_at - 300 BEGIN
    UPDATE vm SET left_at = 9e99 WHERE id = new.id;
END;
CREATE TRIGGER IF NOT EXISTS vm_is_named AFTER INSERT ON affected WHEN new.over_at IS NOT NULL BEGIN
    UPDATE vm SET left_at = (SELECT at FROM leaving WHERE leaving.id = vm.id)
    WHERE folded = new.folded AND scope = new.scope;
END;
CREATE TRIGGER IF NOT EXISTS vm_is_not_named AFTER DELETE ON affected WHEN old.over_at IS NOT NULL BEGIN
    UPDATE vm SET left_at = (SELECT at FROM leaving WHERE leaving.id = vm.id)
    WHERE folded = old.folded AND scope = old.scope;
END;
CREATE INDEX IF NOT EXISTS reporter_gaps ON reporter (vm) WHERE last > received;
