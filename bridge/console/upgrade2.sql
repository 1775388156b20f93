-- From version 2: a run has the time at which it was last there.
ALTER TABLE reporter ADD COLUMN at REAL NOT NULL DEFAULT 0;
UPDATE reporter SET at = received_at;
