-- What is current at a moment.
UPDATE moment SET at = ?1, version = ?2,
    away = ?1 - ?3, listed_at = ifnull((SELECT CAST(value AS REAL) FROM meta WHERE name = 'listed_at'), 0);
DELETE FROM current;
DELETE FROM named;
-- An event that deletes its VM may never be reported as ended, one whose VMs are all gone or put away neither. One with
-- unknown NotBefore may start at any time.
INSERT INTO current (key, urgency, starts_at, event, vms, prepared)
WITH open AS MATERIALIZED (
    SELECT key, event_type IN ('Preempt', 'Terminate') AS is_deletion, event_type IN program AS has_programs, status, started_at, not_before, starts_at, moment.at AS now,
        max(ifnull(not_before, started_at), ifnull(started_at, not_before)) AS over_at,
        (SELECT count(*) FROM affected WHERE affected.key = start.key) AS vms
    FROM moment CROSS JOIN start WHERE is_open AND NOT EXISTS (
        SELECT 1 FROM away WHERE what = key AND covers >= heard AND seen >= last_change_at AND until > moment.at)
    AND max(last_change_at, ifnull(not_before, 0)) > away
    AND iif(event_type IN ('Preempt', 'Terminate'), max(last_change_at, ifnull(not_before, 0)), 9e99) > moment.at - 86400
)
SELECT key, CASE
        WHEN is_deletion AND over_at < now - 300 AND ifnull((SELECT max(alive_at) FROM affected CROSS JOIN sign USING (place)
            WHERE affected.key = open.key), 0) <= over_at + 300 THEN 4
        WHEN status = 'Started' THEN 1
        WHEN not_before < now - 300 THEN 0
        WHEN not_before >= now + 3600 THEN 3
        ELSE 2 END AS urgency,
    starts_at, iif(status = 'Started', status, 'Scheduled'), vms,
    iif(has_programs, (SELECT count(*) FROM readiness JOIN affected USING (key, folded)
        WHERE readiness.key = open.key AND state = 'prepared'
        AND (status <> 'Started' OR prepared_at <= ifnull(started_at, 9e99))), NULL)
FROM open WHERE vms = 0 OR EXISTS (SELECT 1 FROM affected WHERE affected.key = open.key AND ifnull(
    (SELECT max(watch <> 'left' AND (is_deletion OR watch <> 'gone')) FROM sign WHERE sign.place = affected.place), 1));
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
