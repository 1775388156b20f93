-- From version 3: what is derived is made again. What the store holds of events stays where it is; heartbeats and documents
-- are read and deleted while the console runs.
DROP VIEW IF EXISTS leaving;
DROP VIEW IF EXISTS deletion;
DROP TRIGGER IF EXISTS vm_is_new;
DROP TRIGGER IF EXISTS vm_is_back;
DROP TRIGGER IF EXISTS vm_is_named;
DROP TRIGGER IF EXISTS vm_is_not_named;
DROP INDEX IF EXISTS event_of_start;
DROP INDEX IF EXISTS scheduled_open;
DROP INDEX IF EXISTS scheduled_current;
DROP TABLE affected;
ALTER TABLE scheduled ADD COLUMN heard DEFAULT 0;
ALTER TABLE vm RENAME TO old_vm;
DROP INDEX vm_by_name;
DROP INDEX vm_by_scope;
DROP INDEX IF EXISTS vm_by_leaving;
