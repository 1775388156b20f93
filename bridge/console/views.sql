-- What is derived from the store and from the time, in `moment`: the state of an event and of a VM are decided here.
CREATE TEMP TABLE moment (at REAL NOT NULL);
INSERT INTO moment VALUES (0);
-- Which VM saw which Scheduled Event.
CREATE TEMP VIEW witness AS
SELECT event_id AS key, vm.folded FROM event JOIN sighting ON sighting.id = event.sighting JOIN vm ON vm.id = sighting.vm
WHERE event_id <> '' AND kind LIKE 'scheduledevent.%';
-- An event with unknown NotBefore may start at any time. One that deletes its VM may never be reported as ended.
CREATE TEMP VIEW event_now AS
SELECT scheduled.*,
    iif(status = 'Started', ifnull(started_at, not_before), not_before) AS starts_at,
    CASE
        WHEN NOT is_open THEN 'ended'
        WHEN EXISTS (SELECT 1 FROM deletion WHERE deletion.key = scheduled.key
            AND over_at < (SELECT at FROM moment) - 300
            AND NOT EXISTS (SELECT 1 FROM affected JOIN vm ON vm.folded = affected.folded AND vm.scope = affected.scope
                WHERE affected.key = deletion.key AND vm.alive_at > over_at + 300)) THEN 'gone'
        WHEN status = 'Started' THEN 'started'
        WHEN not_before < (SELECT at FROM moment) - 300 THEN 'overdue'
        WHEN not_before >= (SELECT at FROM moment) + 3600 THEN 'later'
        ELSE '1h'
    END AS due,
    is_open AND iif(event_type IN ('Preempt', 'Terminate'), max(last_change_at, ifnull(not_before, 0)), 9e99)
        > (SELECT at FROM moment) - 86400 AS is_current,
    (SELECT count(*) FROM affected WHERE affected.key = scheduled.key
        AND folded IN (SELECT folded FROM witness WHERE witness.key = scheduled.key)) AS seen,
    (SELECT count(DISTINCT folded) FROM witness WHERE witness.key = scheduled.key
        AND folded NOT IN (SELECT folded FROM affected WHERE affected.key = scheduled.key)) AS seen_by_others,
    -- Azure may answer a VM's first question after two minutes, and show events five minutes later.
    (SELECT EXISTS (SELECT 1 FROM event AS start INDEXED BY event_of_start
            WHERE start.vm = first.vm AND start.kind = 'bridge.heartbeat' AND start.reason = 'Started'
            AND start.at BETWEEN first.at - 420 AND first.at + 60)
        FROM event AS first WHERE first.event_id = scheduled.key AND first.event_id <> ''
        AND first.kind LIKE 'scheduledevent.%' ORDER BY first.at LIMIT 1) AS seen_late
FROM scheduled;
-- A VM that was not identified for a while is left out once an identified one of its name has reported, and one that was
-- put away until it reports. Of numbers that jump by more than a million no gap is counted.
CREATE TEMP VIEW vm_now AS
WITH gap AS (
    SELECT vm, sum(missing) AS missing FROM (SELECT vm, last - received - iif(EXISTS (
            SELECT 1 FROM reporter AS earlier WHERE earlier.reporter = run.reporter
            AND earlier.received > 0 AND earlier.at < run.at), 0, first - 1) AS missing
        FROM reporter AS run INDEXED BY reporter_gaps WHERE last > received)
    WHERE missing BETWEEN 1 AND 1000000 GROUP BY vm
), forgotten AS (
    SELECT vm, max(received_at) AS at FROM event
    WHERE kind = 'console.forgotten' AND kind NOT IN ('bridge.heartbeat', 'document.changed') GROUP BY vm
), heard AS (
    SELECT vm.*, ifnull(missing, 0) AS missing,
        CASE
            WHEN alive_at = 0 THEN 'unheard'
            WHEN is_stopped AND alive_at <= heartbeat_at THEN 'stopped'
            WHEN (SELECT at FROM moment) - alive_at > 3900 THEN 'silent'
            WHEN unreachable_since IS NOT NULL THEN 'unreachable'
            ELSE 'watched'
        END AS sign
    FROM vm LEFT JOIN gap ON gap.vm = vm.id LEFT JOIN forgotten ON forgotten.vm = vm.id
    WHERE left_at > (SELECT at FROM moment) - 86400 AND ifnull(forgotten.at, 0) <= vm.received_at
        AND (resource_id <> '' OR NOT EXISTS (SELECT 1 FROM vm AS identified
            WHERE identified.folded = vm.folded AND identified.resource_id <> '' AND identified.alive_at >= vm.alive_at))
), left_behind AS (
    SELECT heard.*, iif(sign IN ('silent', 'stopped'), (SELECT max(over_at) FROM affected
        WHERE affected.scope = heard.scope AND affected.folded = heard.folded
        AND over_at < (SELECT at FROM moment) - 300 AND over_at >= heard.alive_at - 300), NULL) AS gone_at
    FROM heard
), place AS (
    SELECT id, name, folded, natural, scope, subscription, "group", scale_set, zone, location, resource_id, tags, version,
        waiting, nullif(alive_at, 0) AS alive_at, unreachable_since, missing, iif(gone_at IS NULL, sign, 'gone') AS watch
    FROM left_behind WHERE ifnull(gone_at > (SELECT at FROM moment) - 86400, 1)
    UNION ALL
    SELECT NULL, min(affected.name), affected.folded, affected.folded, affected.scope, subscription, "group", scale_set, '', '',
        '', '', '', 0, NULL, NULL, 0, iif(min(due = 'gone'), 'gone', 'unknown')
    FROM affected JOIN event_now USING (key)
    WHERE is_current AND NOT EXISTS (SELECT 1 FROM vm WHERE vm.folded = affected.folded AND vm.scope = affected.scope)
    GROUP BY affected.scope, affected.folded
), urgent AS (
    SELECT place.*, (SELECT key FROM affected JOIN event_now AS one USING (key)
        WHERE affected.scope = place.scope AND affected.folded = place.folded AND event_open AND one.is_current
        ORDER BY one.due = 'gone', one.due <> 'overdue', one.due <> 'started', ifnull(one.starts_at, 0), key LIMIT 1) AS event_key
    FROM place
)
SELECT urgent.*, event_now.event_id, ifnull(event_type, '') AS event_type, ifnull(status, '') AS event_status,
    starts_at, ifnull(due, '') AS due,
    CASE WHEN event_id IS NULL THEN '' WHEN status = 'Started' THEN 'Started' ELSE 'Scheduled' END AS event
FROM urgent LEFT JOIN event_now ON event_now.key = event_key;
