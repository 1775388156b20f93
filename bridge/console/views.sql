-- What is derived from the store and from the time, in `moment`: the state of an event and of a VM are decided here.
CREATE TEMP TABLE moment (at REAL NOT NULL);
INSERT INTO moment VALUES (0);
-- An event with unknown NotBefore may start at any time. One that deletes its VM may never be reported as ended.
CREATE TEMP VIEW event_now AS
SELECT scheduled.*,
    iif(status = 'Started', ifnull(started_at, not_before), not_before) AS starts_at,
    CASE
        WHEN NOT is_open THEN 'ended'
        WHEN status = 'Started' THEN 'started'
        WHEN not_before < (SELECT at FROM moment) - 300 THEN 'overdue'
        WHEN not_before >= (SELECT at FROM moment) + 3600 THEN 'later'
        ELSE '1h'
    END AS due,
    is_open AND (event_type NOT IN ('Preempt', 'Terminate')
        OR max(last_change_at, ifnull(not_before, 0)) > (SELECT at FROM moment) - 86400) AS is_current
FROM scheduled;
-- A VM that was not identified for a while is left out once an identified one of its name has reported. Of numbers that
-- jump by more than a million no gap is counted.
CREATE TEMP VIEW vm_now AS
WITH gap AS (
    SELECT vm, sum(last - first + 1 - received) AS missing FROM reporter
    WHERE last - first + 1 > received AND last - first < received + 1000000 GROUP BY vm
), place AS (
    SELECT id, name, folded, natural, scope, subscription, "group", scale_set, zone, location, resource_id, tags, version,
        waiting, alive_at, unreachable_since,
        ifnull(missing, 0) AS missing,
        CASE
            WHEN is_stopped AND alive_at <= heartbeat_at THEN 'stopped'
            WHEN (SELECT at FROM moment) - alive_at > 3900 THEN 'silent'
            WHEN unreachable_since IS NOT NULL THEN 'unreachable'
            ELSE 'watched'
        END AS watch
    FROM vm LEFT JOIN gap ON gap.vm = vm.id
    WHERE resource_id <> '' OR NOT EXISTS (SELECT 1 FROM vm AS identified
        WHERE identified.folded = vm.folded AND identified.resource_id <> '' AND identified.alive_at >= vm.alive_at)
    UNION ALL
    SELECT NULL, min(affected.name), affected.folded, affected.folded, affected.scope, subscription, "group", scale_set, '', '',
        '', '', '', 0, NULL, NULL, 0, 'unknown'
    FROM affected JOIN event_now USING (key)
    WHERE is_current AND NOT EXISTS (SELECT 1 FROM vm WHERE vm.folded = affected.folded AND vm.scope = affected.scope)
    GROUP BY affected.scope, affected.folded
), urgent AS (
    SELECT place.*, (SELECT key FROM affected JOIN event_now AS one USING (key)
        WHERE affected.scope = place.scope AND affected.folded = place.folded AND one.is_current
        ORDER BY one.due <> 'overdue', one.due <> 'started', ifnull(one.starts_at, 0), key LIMIT 1) AS event_key
    FROM place
)
SELECT urgent.*, event_now.event_id, ifnull(event_type, '') AS event_type, ifnull(status, '') AS event_status,
    starts_at, ifnull(due, '') AS due
FROM urgent LEFT JOIN event_now ON event_now.key = event_key;
