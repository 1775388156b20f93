-- After an upgrade, with the tables, indexes and views of this version.
INSERT INTO meta SELECT 'upgraded_at', json_quote(max(received_at)) FROM event HAVING max(received_at) IS NOT NULL;
INSERT INTO meta SELECT 'last_at', value FROM meta WHERE name = 'upgraded_at';
INSERT INTO meta SELECT 'first_at', json_quote(min(received_at)) FROM event HAVING min(received_at) IS NOT NULL;
INSERT INTO meta SELECT 'old_until', json_quote(max(n)) FROM event HAVING max(n) IS NOT NULL;
INSERT OR REPLACE INTO affected SELECT scheduled.key, fold_name(one.value), one.value, place_of(scope, fold_name(one.value)),
    (SELECT over_at FROM deletion WHERE deletion.key = scheduled.key) FROM scheduled, json_each(resources) AS one;
INSERT OR IGNORE INTO scope SELECT scope_id(scope), scope, subscription, "group", scale_set FROM old_vm GROUP BY scope;
INSERT OR IGNORE INTO tagged SELECT hash_text(tags), tags FROM old_vm GROUP BY tags;
INSERT INTO run (id, vm, reporter, began_at, at, first, last, missing)
SELECT run_of(reporter, epoch), vm, reporter, at, at, first, last, max(0, last - first + 1 - received) FROM reporter;
-- Which numbers are missing was not kept: the last ones are taken to be, so that their number stays the same.
INSERT INTO hole SELECT id, max(first, last - missing + 1), last FROM run WHERE missing > 0;
UPDATE run SET missing = missing + first - 1 WHERE first > 1 AND EXISTS (SELECT 1 FROM run AS earlier
    WHERE earlier.vm = run.vm AND earlier.reporter = run.reporter AND earlier.at < run.at AND earlier.first <= earlier.last);
INSERT INTO preparation SELECT event_id, fold_name(vm.name), event.at, iif(kind = 'approval.prepared', 'prepared', 'failed'), '',
    iif(kind = 'approval.prepared', event.at, NULL)
FROM event JOIN old_vm AS vm ON vm.id = event.vm
WHERE kind IN ('approval.prepared', 'approval.rejected') AND kind NOT IN ('bridge.heartbeat', 'document.changed')
    AND (kind = 'approval.prepared' OR instr(CAST(body AS TEXT), '"auto:')) ORDER BY event.at
ON CONFLICT DO UPDATE SET at = excluded.at, state = excluded.state, prepared_at = ifnull(prepared_at, excluded.prepared_at);
INSERT OR IGNORE INTO program SELECT event_type FROM preparation JOIN scheduled USING (key);
-- A list of expected VMs left only those that had not reported.
INSERT INTO away SELECT vm, max(received_at), max(received_at), max(received_at), max(received_at), 9e99, '', max(reason) FROM event
WHERE kind = 'console.forgotten' AND kind NOT IN ('bridge.heartbeat', 'document.changed') AND vm IS NOT NULL GROUP BY vm;
INSERT INTO vm (id, place, scope, tags, name, folded, natural, zone, location, resource_id, alive_at, received_at,
    heartbeat_at, is_stopped, version, waiting, imds_at, unreachable_since, expected, heard)
SELECT id, place_of(scope, folded), scope_id(scope), hash_text(tags), name, folded, natural, zone, location, resource_id,
    alive_at, received_at, heartbeat_at, is_stopped, version, waiting, imds_at, unreachable_since, alive_at = 0,
    received_at FROM old_vm;
DROP TABLE old_vm;
DROP TABLE reporter;
