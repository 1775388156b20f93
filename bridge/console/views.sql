-- What is derived from the store and from the time, in `moment`: the state of an event and of a VM are decided here.
-- `away` is when what was not heard of since is put away.
CREATE TEMP TABLE moment (at REAL NOT NULL, version INTEGER NOT NULL, listed_at REAL NOT NULL, away REAL NOT NULL);
INSERT INTO moment VALUES (0, -1, 0, 0);
-- The events that are open and current, and the most urgent one of each place that they name, with what its VM's program
-- has done for it: both are made again for each moment by moment.sql. A stranger is named, and has never published anything.
CREATE TEMP TABLE current (
    key TEXT PRIMARY KEY,
    urgency INTEGER NOT NULL,
    starts_at REAL,
    event TEXT NOT NULL,
    vms INTEGER NOT NULL,
    prepared INTEGER,
    due TEXT AS (CASE urgency WHEN 0 THEN 'overdue' WHEN 1 THEN 'started' WHEN 2 THEN '1h' WHEN 3 THEN 'later' ELSE 'gone' END)
) WITHOUT ROWID;
CREATE TEMP TABLE named (
    place INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    urgency INTEGER NOT NULL,
    event TEXT NOT NULL,
    preparation TEXT NOT NULL,
    name TEXT NOT NULL,
    folded TEXT NOT NULL,
    scope INTEGER,
    is_stranger INTEGER NOT NULL
);
-- What programs did for an event since it came back, or since ever: not what is older than the end before that.
CREATE TEMP VIEW readiness AS
SELECT key, folded, state, detail, iif(prepared_at > ended_at, prepared_at, (SELECT min(event.at) FROM event JOIN vm ON vm.id = event.vm
    WHERE event_id = stay.key AND event_id <> '' AND event.at > ended_at AND kind = 'approval.prepared' AND vm.folded = stay.folded)) AS prepared_at
FROM (SELECT preparation.*, ifnull((SELECT max(event.at) FROM event WHERE event_id = preparation.key AND event_id <> ''
    AND kind IN ('scheduledevent.completed', 'scheduledevent.ended', 'scheduledevent.canceled')
    AND event.at < (SELECT first_seen_at FROM scheduled WHERE scheduled.key = preparation.key)), 0) AS ended_at FROM preparation) AS stay
WHERE at > ended_at;
-- Which VM saw which Scheduled Event.
CREATE TEMP VIEW witness AS
SELECT event_id AS key, event.at, vm.folded FROM event JOIN sighting ON sighting.id = event.sighting JOIN vm ON vm.id = sighting.vm
WHERE event_id <> '' AND kind LIKE 'scheduledevent.%';
CREATE TEMP VIEW start AS
SELECT *, iif(status = 'Started', ifnull(started_at, not_before), not_before) AS starts_at,
    event_type IN ('Preempt', 'Terminate') AS is_deletion FROM scheduled;
-- The events that were put away, and nothing has brought back.
CREATE TEMP VIEW hidden AS
SELECT what AS key FROM moment CROSS JOIN away CROSS JOIN scheduled ON scheduled.key = what
WHERE covers >= heard AND seen >= last_change_at AND until > moment.at;
CREATE TEMP VIEW open_now AS
SELECT scheduled.*, starts_at, due, urgency, event, vms, prepared FROM current CROSS JOIN scheduled USING (key);
CREATE TEMP VIEW event_now AS
SELECT scheduled.*,
    iif(is_open, ifnull((SELECT due FROM current WHERE current.key = scheduled.key),
        iif(EXISTS (SELECT 1 FROM hidden WHERE hidden.key = scheduled.key), 'away', 'left')), 'ended') AS due,
    (SELECT count(*) FROM affected WHERE affected.key = scheduled.key
        AND folded IN (SELECT folded FROM witness WHERE witness.key = scheduled.key AND at >= first_seen_at)) AS seen,
    (SELECT count(DISTINCT folded) FROM witness WHERE witness.key = scheduled.key AND at >= first_seen_at
        AND folded NOT IN (SELECT folded FROM affected WHERE affected.key = scheduled.key)) AS seen_by_others,
    -- Azure may answer a VM's first question after two minutes, and show events five minutes later.
    (SELECT EXISTS (SELECT 1 FROM run WHERE run.vm = first.vm AND started_at BETWEEN first.at - 420 AND first.at + 60)
        FROM event AS first WHERE first.event_id = scheduled.key AND first.event_id <> ''
        AND first.kind LIKE 'scheduledevent.%' AND first.at >= first_seen_at ORDER BY first.at LIMIT 1) AS seen_late,
    -- Of an event that has ended, who was prepared before its start.
    iif(event_type IN program, ifnull((SELECT prepared FROM current WHERE current.key = scheduled.key), (SELECT count(*)
        FROM readiness JOIN affected USING (key, folded) WHERE readiness.key = scheduled.key
        AND prepared_at <= ifnull(started_at, 9e99))), NULL) AS prepared
FROM start AS scheduled;
-- Who watches each VM that is on some list, or has left them. A VM that was not identified for a while is left out once an
-- identified one of its name has reported.
CREATE TEMP VIEW sign AS
SELECT vm.id, place, scope, tags, waiting, alive_at, left_at, moment.at AS now, CASE
    WHEN left_at <= moment.at OR alive_at < away AND expected <> 1 THEN 'left'
    WHEN alive_at = 0 THEN 'unheard'
    WHEN alive_at >= moment.at - 3900 AND NOT (is_stopped AND alive_at <= heartbeat_at)
        THEN iif(unreachable_since IS NULL, 'watched', 'unreachable')
    WHEN left_at < 9e99 AND EXISTS (SELECT 1 FROM affected WHERE affected.place = vm.place AND over_at < moment.at - 300
        AND over_at >= alive_at - 300 AND NOT (expected = 1 AND over_at < listed_at)) THEN 'gone'
    WHEN is_stopped AND alive_at <= heartbeat_at
        AND NOT (expected = 1 AND alive_at < min(moment.at - 3900, listed_at)) THEN 'stopped'
    ELSE 'silent'
END AS watch
FROM moment CROSS JOIN vm WHERE (alive_at > 0 OR expected = 1) AND (scope <> 0 OR NOT EXISTS (
    SELECT 1 FROM vm AS own JOIN vm AS identified USING (folded)
    WHERE own.id = vm.id AND identified.resource_id <> '' AND identified.alive_at >= own.alive_at));
-- Of numbers that jump by more than a million none is missing.
CREATE TEMP VIEW vm_state AS
WITH gap AS MATERIALIZED (
    SELECT vm, sum(missing) AS missing FROM run INDEXED BY run_missing WHERE missing > 0 AND missing <= 1000000 GROUP BY vm
)
SELECT sign.id, sign.place, sign.scope, tags, waiting, ifnull((SELECT gap.missing FROM gap WHERE vm = sign.id), 0) AS missing, since, ifnull(event, '') AS event,
    ifnull(preparation, '') AS preparation, ifnull(urgency, 9) AS urgency, watch
FROM sign LEFT JOIN named USING (place) LEFT JOIN work ON work.vm = sign.id AND since IS NOT NULL
WHERE left_at > now AND watch <> 'left'
UNION ALL SELECT NULL, place, scope, NULL, 0, 0, NULL, event, preparation, urgency, iif(urgency = 4, 'gone', 'unknown')
FROM named WHERE is_stranger;
CREATE TEMP VIEW vm_now AS
SELECT state.*, CAST(ifnull(state.id, state.place) AS TEXT) AS key, ifnull(vm.name, named.name) AS name, ifnull(vm.folded, named.folded) AS folded,
    ifnull(vm.natural, named.folded) AS natural, coalesce(scope.subscription, scheduled.subscription, '') AS subscription,
    coalesce(scope."group", scheduled."group", '') AS "group", ifnull(zone, '') AS zone, ifnull(location, '') AS location,
    ifnull(resource_id, '') AS resource_id, ifnull(vm.heard, 0) AS heard, nullif(doubled_at, 0) AS doubled_at, ifnull(version, '') AS version, nullif(alive_at, 0) AS alive_at, unreachable_since,
    scheduled.event_id, ifnull(event_type, '') AS event_type, ifnull(status, '') AS event_status, current.starts_at,
    ifnull(due, '') AS due
FROM vm_state AS state LEFT JOIN vm ON vm.id = state.id LEFT JOIN named ON named.place = state.place
    LEFT JOIN current ON current.key = named.key LEFT JOIN scheduled ON scheduled.key = named.key
    LEFT JOIN scope ON scope.id = state.scope;
-- By how much the VMs' clocks are ahead of the console's: the median of the newest reports of the last ten minutes, if most agree
-- with it and did not arrive at once. What arrives late looks like a clock that is behind, but seldom equally late for minutes.
CREATE TEMP VIEW clock_now AS
WITH newest AS MATERIALIZED (
    SELECT clock, received_at, row_number() OVER (ORDER BY clock) AS place, count(*) OVER () AS vms
    FROM (SELECT clock, received_at FROM moment CROSS JOIN vm WHERE received_at > moment.at - 600 AND alive_at > 0 LIMIT 100)
)
SELECT iif(count(*) >= 3 AND count(*) * 2 > max(newest.vms) AND abs(median.clock) > 120
    AND max(newest.received_at) >= min(newest.received_at) + 60, median.clock, NULL) AS ahead
FROM newest AS median JOIN newest ON abs(newest.clock - median.clock) < 30 WHERE median.place = (median.vms + 1) / 2;
