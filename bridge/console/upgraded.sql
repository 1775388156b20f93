-- After an upgrade, and with the views: fill the new columns.
UPDATE affected SET event_open = ifnull((SELECT is_open FROM scheduled WHERE scheduled.key = affected.key), 0),
    over_at = (SELECT over_at FROM deletion WHERE deletion.key = affected.key);
UPDATE vm SET left_at = (SELECT at FROM leaving WHERE leaving.id = vm.id);
