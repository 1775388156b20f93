-- From version 2: a run has the time at which it was last there; what is looked for at each VM is with its events.
ALTER TABLE reporter ADD COLUMN at REAL NOT NULL DEFAULT 0;
UPDATE reporter SET at = received_at;
ALTER TABLE affected ADD COLUMN event_open INTEGER NOT NULL DEFAULT 1;
ALTER TABLE affected ADD COLUMN over_at REAL;
ALTER TABLE vm ADD COLUMN left_at REAL NOT NULL DEFAULT 9e99;
DROP INDEX IF EXISTS reporter_gaps;
DROP INDEX IF EXISTS vm_by_scope;
DROP INDEX IF EXISTS affected_by_vm;
DROP INDEX IF EXISTS scheduled_open;
DROP VIEW IF EXISTS deletion;
