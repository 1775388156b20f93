#!/bin/bash
# try.sh PORT_BASE BRIDGE: the worker, against the lab of imds-bridge. PORT_BASE: the first of 15 free ports; BRIDGE: the program
# imds-bridge. Needs dotnet (SDK 10); takes 40 s, 85 s at most; exits with 0 if every line is told as often as it should be.
# shellcheck disable=SC2015,SC2018,SC2019,SC2094 # ids are ASCII; "dead" is an argument and a file
set -euo pipefail
[ -n "${BOUNDED:-}" ] || BOUNDED=1 exec timeout --kill-after=5 "${TRY_SECONDS:-85}" bash "$0" "$@"
port=$1 bridge=$2 here=$(cd "$(dirname "$0")" && pwd) work=$(mktemp -d) worker=
control=(--control "http://127.0.0.1:$((port + 10))")
export ConnectionStrings__ServiceBus="Endpoint=sb://127.0.0.1:$((port + 5));SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true;"
export Worker__Vm=web-0 Worker__Subscription=worker Worker__State=$work/worker.jsonl Worker__Run=$work/tell
export DOTNET_CLI_TELEMETRY_OPTOUT=1 DOTNET_NOLOGO=1
cd "$work"
trap 'code=$?; { kill -9 $(jobs -p) || true; wait; } 2>/dev/null; [ $code = 0 ] && rm -rf "$work" || tail -n 40 "$work"/*.log "$work/told" 2>/dev/null; exit $code' EXIT

fail() { echo "FAILED: $*" >&2; exit 1; }
start() { dotnet "$work/out/bin/worker/release/worker.dll" >>"$work/told" 2>>"$work/worker.log" & worker=$!; }
stop() { kill "-$1" "$worker"; local code=0; wait "$worker" 2>/dev/null || code=$?; [ "$code" = "$2" ] || fail "after SIG$1: exit code $code, not $2"; }
both_see() { for log in forward.log forward-1.log; do until_seen "$1" $log; done; } # before the next change: they look once a second
schedule() { local id; id=$("$bridge" lab schedule "${control[@]}" --notice 600 "$@" | tr A-Z a-z); both_see "$id"; echo "$id"; }
change() { "$bridge" lab "$1" "${control[@]}" "$3" >/dev/null; both_see " $2[,\"].*$3"; }
until_seen() { for _ in $(seq 100); do grep -qi -- "$1" "$work/$2" 2>/dev/null && return; sleep 0.2; done; fail "not seen in $2: $1"; }
told() { local n; n=$(grep -c -- "$2" "$work/told" || true); [ "$n" = "$1" ] || fail "told $n times, not $1: $2"; }

# No duplicate detection, so that the copies of both VMs arrive; a short lock, so that it has to be renewed.
subscription='"Properties": {"LockDuration": "PT5S", "MaxDeliveryCount": 10, "DefaultMessageTimeToLive": "PT1H"}'
cat >bus.json <<END
{"UserConfig": {"Namespaces": [{"Name": "sbemulatorns", "Queues": [{"Name": "approvals", "Properties": {"RequiresSession": true}}],
 "Topics": [{"Name": "scheduled-events", "Properties": {"DefaultMessageTimeToLive": "PT1H"}, "Subscriptions": [
  {"Name": "worker", $subscription}, {"Name": "all", $subscription}]}]}]}}
END
cat >tell <<'END'
#!/bin/bash
echo "$1" >>"$(dirname "$0")/ran"
if [ -e "$(dirname "$0")/slow" ]; then sleep 7; fi
END
chmod +x tell
"$bridge" lab --port-base "$port" --vm web-0 --vm web-1 --bus-config bus.json --write lab.toml >lab.log 2>&1 &
dotnet build "$here/worker" -c Release --artifacts-path "$work/out" -v quiet >build.log
dotnet build "$here/try/notices" --artifacts-path "$work/out" -v quiet >>build.log
dotnet build "$here/try/bus.cs" -o "$work/bus" -v quiet >>build.log
until_seen "Ctrl-C stops the lab" lab.log
sed -i '/^\[sinks.inbox\]/,/^\[sinks.bus\]/{/^\[sinks.bus\]/!d}' lab.toml
sed -e "s/:$((port + 11))/:$((port + 12))/" -e 's/lab-state/lab-state-1/' lab.toml >lab-1.toml
"$bridge" forward --config lab.toml >forward.log 2>&1 &
"$bridge" forward --config lab-1.toml >forward-1.log 2>&1 &
start

first=$(schedule --type Reboot --vm web-0)
until_seen "DOWN web-0 at .*Reboot $first" told
stop KILL 137 # it is killed between the event's announcement and its end
change start started "$first"; change complete completed "$first"
start
until_seen "BACK web-0: Reboot $first completed" told

canceled=$(schedule --type Redeploy --vm web-0 --vm web-1)
until_seen "DOWN web-0 at .*Redeploy $canceled" told
change cancel canceled "$canceled"
until_seen "BACK web-0: Redeploy $canceled canceled" told

for poison in 'not JSON' '{"specversion": "1.0"}' '[]' 'null'; do dotnet bus/bus.dll send <<<"$poison"; done
other=$(schedule --type Reboot --vm web-1)
sudden=$(schedule --type Freeze --vm web-0 --status Started)
nobody=$(schedule --type Reboot --no-vm)
until_seen "DOWN web-0 now: Freeze $sudden" told
until_seen "DOWN web-0 at .*Reboot $nobody (perhaps" told

touch slow # each line takes longer than the lock
killed=$(schedule --type Preempt --vm web-0)
until_seen "Preempt $killed" ran
stop KILL 137 # it is killed before the line is told
start
until_seen "DOWN web-0 at .*Preempt $killed" told
stopped=$(schedule --type Terminate --vm web-0)
until_seen "Terminate $stopped" ran
stop TERM 0 # it is stopped before the line is told, and tells it
rm slow
told 1 "DOWN web-0 at .*Terminate $stopped"
change start started "$stopped"; change complete completed "$stopped"
start
until_seen "GONE web-0: Terminate $stopped completed" told
last=$(schedule --type Freeze --vm web-0) # behind everything else
until_seen "DOWN web-0 at .*Freeze $last" told

for line in "DOWN .* $first" "BACK .* $first" "DOWN .* $canceled" "BACK .* $canceled" "DOWN .* $sudden" "DOWN .* $nobody" \
    "DOWN .* $killed" "DOWN .* $stopped" "GONE .* $stopped" "DOWN .* $last"; do told 1 "$line"; done
told 0 "$other"
told 10 web-0
[ "$(grep -c "Preempt $killed" ran)" = 2 ] || fail "the program of the killed worker has not run again"
stop TERM 0
! grep "Complete: " worker.log || fail "a lock was not renewed"
dotnet bus/bus.dll dead worker >dead
[ "$(grep -c '^NotAnEvent: ' dead)" = 4 ] && [ "$(wc -l <dead)" = 4 ] || fail "dead letters: $(cat dead)"
dotnet bus/bus.dll left worker >left
[ ! -s left ] || fail "messages are left: $(cat left)"
dotnet bus/bus.dll copies all >copies
[ "$(grep . copies | sort | uniq -d | wc -l)" -ge 10 ] || fail "the events did not arrive as duplicates"
dotnet out/bin/notices/debug/notices.dll all >notices
for word in DOWN BACK POISON; do echo "$word $(grep -c "^$word" notices)"; done >counts
[ "$(grep -c "^DOWN .* $killed" notices)" = 1 ] && [ "$(grep -c "^BACK .* $stopped" notices)" = 1 ] && grep -q "POISON 8" counts \
    && [ "$(sort notices | grep -v POISON | uniq -d | wc -l)" = 0 ] || fail "the function's class told: $(cat notices)"
echo "10 lines told once each, of $(wc -l <copies) messages; 4 dead letters; the function's class: $(tr '\n' ' ' <counts)"
