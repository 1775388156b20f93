-- A page of the VMs for which a condition is true, by group: only the scopes that the page is of are read.
WITH counted AS MATERIALIZED (SELECT scope, count(*) AS vms FROM vm_state WHERE {where} GROUP BY 1),
ranked AS MATERIALIZED (
    SELECT counted.scope, vms, sum(vms) OVER (ORDER BY "group", subscription, counted.scope) AS upto
    FROM counted LEFT JOIN scope ON scope.id = counted.scope
)
SELECT {columns} FROM vm_now WHERE {where}
    AND scope IN (SELECT scope FROM ranked WHERE upto > {offset} AND upto - vms < {offset} + {limit})
ORDER BY (SELECT upto FROM ranked WHERE ranked.scope = vm_now.scope), {order}
LIMIT {limit} OFFSET {offset} - ifnull((SELECT min(upto - vms) FROM ranked WHERE upto > {offset}), 0);
