-- What is current at a moment.
UPDATE moment SET at = ?1, version = ?2,
    away = ?1 - ?3, listed_at = ifnull((SELECT CAST(value AS REAL) FROM meta WHERE name = 'listed_at'), 0);
DELETE FROM current;
DELETE FROM named;
-- An event that deletes its VM may never be reported as ended, one whose VMs are all gone or put away neither. One with
-- unknown NotBefore may start at any time.
INSERT INTO current (key, urgency, starts_at, event, vms, prepared)
SELECT key, CASE
        WHEN is_deletion AND EXISTS (SELECT 1 FROM deletion WHERE deletion.key = start.key AND over_at < moment.at - 300
            AND over_at >= ifnull((SELECT max(alive_at) FROM affected CROSS JOIN sign USING (place)
                WHERE affected.key = start.key), 0) - 300) THEN 4
        WHEN status = 'Started' THEN 1
        WHEN not_before < moment.at - 300 THEN 0
        WHEN not_before >= moment.at + 3600 THEN 3
        ELSE 2 END,
    starts_at, iif(status = 'Started', status, 'Scheduled'), (SELECT count(*) FROM affected WHERE affected.key = start.key) AS vms,
    iif(event_type IN program, (SELECT count(*) FROM readiness JOIN affected USING (key, folded)
        WHERE readiness.key = start.key AND state = 'prepared'
        AND (status <> 'Started' OR prepared_at <= ifnull(started_at, 9e99))), NULL)
FROM moment CROSS JOIN start WHERE is_open AND NOT EXISTS (SELECT 1 FROM hidden WHERE hidden.key = start.key)
AND max(last_change_at, ifnull(not_before, 0)) > away
AND iif(event_type IN ('Preempt', 'Terminate'), max(last_change_at, ifnull(not_before, 0)), 9e99) > moment.at - 86400
AND (vms = 0 OR EXISTS (SELECT 1 FROM affected WHERE affected.key = start.key AND ifnull(
    (SELECT max(watch <> 'left' AND (is_deletion OR watch <> 'gone')) FROM sign WHERE sign.place = affected.place), 1)));
INSERT OR IGNORE INTO named
SELECT affected.place, key, urgency, event, CASE
        WHEN prepared IS NULL THEN ''
        WHEN state = 'prepared' AND prepared THEN state
        WHEN state = 'failed' AND event <> 'Started' AND starts_at >= (SELECT at FROM moment) + 900 THEN state
        ELSE iif(event = 'Started' OR ifnull(starts_at, 0) < (SELECT at FROM moment) + 900, 'unprepared', 'waiting') END,
    affected.name, affected.folded, iif(vm.id IS NULL, ifnull((SELECT scope.id FROM scheduled JOIN scope USING ("group", scope)
        WHERE scheduled.key = current.key), 0), 0), vm.id IS NULL
FROM current CROSS JOIN affected USING (key) LEFT JOIN readiness USING (key, folded)
    LEFT JOIN vm ON vm.place = affected.place AND (alive_at > 0 OR expected = 1)
ORDER BY urgency, ifnull(starts_at, 0), key;
