-- What is missing, by the rules of audit.py: no row if the events are complete. First read them with a load-*.sql.
WITH settings AS (
  SELECT CAST(NULL AS DOUBLE) AS checked_at, -- check heartbeats at this time in seconds since 1970; NULL: the latest that two VMs have reached
    4200 AS silent_seconds -- heartbeats are hourly
), own AS (
  SELECT *, type = 'io.imdsbridge.bridge.heartbeat.v1' AS is_heartbeat
  FROM events WHERE reporter IS NOT NULL AND type NOT LIKE 'io.imdsbridge.scheduledevent.%'
), starts AS (
  SELECT * FROM own WHERE is_heartbeat AND reason = 'Started' AND previous IS NOT NULL
), known AS ( -- of each run the last number that arrived, or that a heartbeat of it or of the next run names
  SELECT epoch, max(number) AS last_number, max(reporter) AS reporter
  FROM (
    SELECT epoch, number, reporter FROM own
    UNION ALL SELECT epoch, claimed, reporter FROM own WHERE is_heartbeat
    UNION ALL SELECT previous, previous_last, reporter FROM starts
  ) AS named
  GROUP BY epoch
), bounds AS ( -- a gap lies between two of them
  SELECT epoch, number FROM own
  UNION SELECT epoch, 0 FROM known
  UNION SELECT epoch, last_number + 1 FROM known
), gaps AS (
  SELECT epoch, number + 1 AS low, lead(number) OVER (PARTITION BY epoch ORDER BY number) - 1 AS high FROM bounds
), runs AS (
  SELECT epoch, min(reporter) AS reporter, split_part(min(reporter), '/', -1) AS role, lower(min(source)) AS vm,
    max(coalesce(lower(vm_id), '')) AS vm_id, lower(min(reporter)) AS name,
    max(number) AS last_number, max_by(seconds, number) AS last_at, -- a clock may have been wrong meanwhile
    max(CASE WHEN is_heartbeat AND reason = 'Stopping' THEN number ELSE 0 END) AS stopped,
    coalesce(max_by(CASE WHEN is_heartbeat THEN seconds END, CASE WHEN is_heartbeat THEN number END), min(seconds)) AS alive_at
  FROM own GROUP BY epoch
), last_runs AS ( -- of each process the latest run that no other follows; one without a VM's id belongs to a later one's of its name
  SELECT *, CASE WHEN vm_id = '' THEN regexp_replace(name, '/[^/]*$', '') ELSE vm_id END AS known_as,
    row_number() OVER (PARTITION BY vm, role, vm_id ORDER BY last_at DESC, epoch DESC) AS place,
    row_number() OVER (PARTITION BY vm, role, name ORDER BY last_at DESC, epoch DESC) AS place_of_name
  FROM runs WHERE NOT EXISTS (SELECT 1 FROM starts WHERE starts.previous = runs.epoch)
), processes AS (
  SELECT * FROM last_runs WHERE CASE WHEN vm_id = '' THEN place_of_name ELSE place END = 1
), vms AS (
  SELECT row_number() OVER (ORDER BY max(last_at) DESC) AS place, max(last_at) AS reached
  FROM processes WHERE role <> 'relay' GROUP BY vm, known_as
), judged AS ( -- one VM's clock may be ahead; two are a fleet that goes on
  SELECT silent_seconds, coalesce(checked_at, (SELECT max(reached) FROM vms WHERE place = 2)) AS now FROM settings
)
SELECT CASE WHEN runs.epoch IS NULL THEN 'run' ELSE 'numbers' END AS kind,
  CASE WHEN runs.epoch IS NULL THEN gaps.epoch ELSE concat(gaps.epoch, ':', low, '-', high) END AS id,
  known.reporter, gaps.epoch
FROM gaps JOIN known ON known.epoch = gaps.epoch LEFT JOIN runs ON runs.epoch = gaps.epoch
WHERE high >= low
UNION ALL
SELECT 'silent', vm, reporter, epoch FROM processes CROSS JOIN judged
WHERE role <> 'relay' AND stopped <> last_number AND now - alive_at > silent_seconds
UNION ALL
SELECT 'event', listed.id, min(listed.reporter), min(listed.epoch)
FROM listed LEFT JOIN events ON events.id = listed.id AND events.type LIKE 'io.imdsbridge.scheduledevent.%'
WHERE events.id IS NULL GROUP BY listed.id
UNION ALL
SELECT DISTINCT 'loss', id, reporter, epoch FROM own
WHERE type = 'io.imdsbridge.bridge.loss.v1' AND coalesce(lost, 1) <> 0
UNION ALL
SELECT 'unreadable', id, reporter, epoch FROM events
WHERE type IS NULL OR id IS NULL OR (
  reporter IS NOT NULL AND type NOT LIKE 'io.imdsbridge.scheduledevent.%' AND (
    source IS NULL OR epoch IS NULL OR number IS NULL OR number < 1 OR seconds IS NULL OR NOT has_data OR (
      type = 'io.imdsbridge.bridge.heartbeat.v1' AND (
        reason IS NULL OR claimed IS NULL OR claimed < 0
        OR (reason = 'Started' AND previous IS NOT NULL AND coalesce(previous_last, -1) < 0)))));
