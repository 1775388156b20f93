#!/usr/bin/env bash
# Create imds-bridge's resources and three VMs in a new resource group on Azure, measure, write a report, remove everything.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)

usage() {
    cat <<'EOF'
usage: trial.sh [--group NAME] [--location REGION] [--size VM_SIZE] [--report DIR] [--yes] [--keep] [--dry-run]
       trial.sh --remove --group NAME [--yes]

  --group NAME       a resource group that does not exist yet; asked for if it is not given
  --location REGION  where (default: westeurope)
  --size VM_SIZE     size of the three VMs (default: Standard_D2s_v5)
  --report DIR       where report.md and report.json go (default: imds-bridge-trial-TIME)
  --yes              ask nothing
  --keep             leave everything in place, which costs money until you run --remove
  --dry-run          show the plan and compile the Bicep; create nothing
  --remove           remove what a trial left behind; succeeds as well if nothing is there

It takes 60 to 90 minutes. Everything is created in one new group, and removed with it: also after an error, Ctrl-C, SIGTERM or a
closed terminal. Only a kill -9 or a loss of power leaves it in place: then run --remove.

You need: az (signed in with `az login`; `az account set` chooses the subscription), git, ssh-keygen, python3, this checkout, and the
role Owner of the subscription (or Contributor with Role Based Access Control Administrator).

exit codes: 0 measured and removed, 1 something failed (the report has it), 2 wrong use, 129, 130 or 143 interrupted

examples:
  infra/azure-trial/trial.sh --dry-run --group imds-trial
  infra/azure-trial/trial.sh --group imds-trial --location northeurope
  infra/azure-trial/trial.sh --group imds-trial --yes --report trial-1
  infra/azure-trial/trial.sh --remove --group imds-trial
EOF
}

group="" location=westeurope size=Standard_D2s_v5 report="" action=trial yes=no keep=no
pause_seconds=${IMDS_TRIAL_PAUSE:-15} # tests set it to 0
tag=imds-bridge-trial
run_id=$(date -u +%Y%m%dT%H%M%SZ)-$$
suffix=t$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')
child="" may_exist=no failed=no scratch=""

say() { echo "trial: $*" >&2; }
fail() { say "$*"; exit 2; }

while [ $# -gt 0 ]; do
    case $1 in --group | --location | --size | --report) [ $# -gt 1 ] || fail "$1 needs a value; see --help" ;; esac
    case $1 in
        --group) group=$2; shift ;;
        --location) location=$2; shift ;;
        --size) size=$2; shift ;;
        --report) report=$2; shift ;;
        --yes) yes=yes ;;
        --keep) keep=yes ;;
        --dry-run) action=plan ;;
        --remove) action=remove ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; fail "unknown option $1" ;;
    esac
    shift
done

# --- processes: each in a group of its own, so that Ctrl-C reaches only this script, which then ends them ---

run() { # run COMMAND...: its output is in $scratch/out and $scratch/err
    guarded "$@" >"$scratch/out" 2>"$scratch/err" </dev/null
}
guarded() {
    local code=0
    set -m
    "$@" &
    child=$!
    set +m
    wait "$child" || code=$?
    child=""
    return $code
}
azure() { run az "$@" --subscription "$subscription"; } # also if somebody chooses another subscription meanwhile
answer() { tr -d '\r' <"$scratch/out"; }
why() { tail -c 600 "$scratch/err" | tr '\n\t' '  '; }
pause() { guarded sleep "$1"; }

retry() { # retry TIMES COMMAND...
    local left=$1
    shift
    until "$@"; do
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        pause "$pause_seconds"
    done
}

# --- removal ---

run_of_group() { # print the run that created the group
    azure group show --name "$group" --query "tags.\"$tag\"" --output tsv && answer
}

remove_group() { # remove_group RUN: RUN created it; "any": any trial did
    local looks=0 found tries
    for tries in 1 2 3 4 5 6; do
        if azure group exists --name "$group"; then
            if [ "$(answer)" = false ]; then
                looks=$((looks + 1))
                # What was asked for just before the interruption may appear a moment later.
                if [ "$1" = any ] || [ $looks -ge 2 ]; then return 0; fi
            elif found=$(run_of_group); then
                if [ -z "$found" ] || [ "$found" = None ]; then
                    say "$group was not created by a trial, and is left alone: it has no tag $tag"
                    return 2
                elif [ "$1" != any ] && [ "$found" != "$1" ]; then
                    say "$group belongs to another trial ($found), and is left alone"
                    return 2
                fi
                looks=2
                say "removing the group $group, which takes minutes (try $tries)"
                azure group delete --name "$group" --yes || say "it could not be removed: $(why)"
            else
                say "the tags of $group could not be read: $(why)"
            fi
        else
            say "az does not say whether $group exists: $(why)"
        fi
        pause "$pause_seconds"
    done
    say "$group IS STILL THERE AND COSTS MONEY. Remove it: $here/trial.sh --remove --group $group"
    return 1
}

stop_child() {
    if [ -n "$child" ]; then
        kill -TERM -- "-$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
        child=""
    fi
}

finish() {
    local code=$?
    trap '' INT TERM HUP PIPE # the removal must not be interrupted, also if nobody reads its messages any more
    trap - EXIT
    set +e
    stop_child
    if [ $may_exist = yes ]; then
        [ $code = 0 ] && [ $failed = yes ] && code=1
        [ $code -gt 128 ] && note interrupted failed 0 "by a signal, exit code $code"
        write_report # a first one, since the removal takes minutes
        if [ $keep = yes ] && [ $code -le 1 ]; then
            say "everything stays in $group and costs money; remove it: $here/trial.sh --remove --group $group"
            note remove skipped 0 --keep
        elif remove_group "$run_id"; then
            note remove ok 0 ""
            say "$group is removed"
        else
            note remove failed 0 "it may still be there"
            [ $code -gt 128 ] || code=1
        fi
        if write_report; then say "the report is in $report: report.md and report.json"; else
            say "no report could be written; what was measured is in $scratch"
            scratch=""
        fi
    fi
    [ -z "$scratch" ] || rm -rf "$scratch"
    exit $code
}

write_report() { python3 "$here/report.py" --raw "$scratch/raw" --out "$report"; }

# --- steps ---

note() { printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" >>"$scratch/raw/steps.tsv"; }

step() { # step NAME COMMAND...: record how it went; the failure of a measurement does not stop the trial
    local name=$1 began=$SECONDS
    shift
    say "$name ..."
    if "$@"; then
        note "$name" ok $((SECONDS - began)) ""
    else
        note "$name" failed $((SECONDS - began)) "$(why)"
        say "$name failed: $(why)"
        failed=yes
        return 1
    fi
}
must() { step "$@" || exit 1; }
try() { step "$@" || true; }

preflight() {
    local tool missing=""
    for tool in az git ssh-keygen python3 sha256sum; do command -v $tool >/dev/null || fail "$tool is not installed"; done
    run az account show --query '[id, user.type, user.name, name]' --output tsv || fail "az is not signed in; run: az login ($(why))"
    mapfile -t account < <(answer)
    subscription=${account[0]}
    if [ $action = remove ]; then return; fi
    git -C "$checkout" rev-parse --verify --quiet HEAD >/dev/null || fail "$checkout is not a git checkout, which the VMs install"
    azure group exists --name "$group" || fail "az cannot look for the group $group: $(why)"
    [ "$(answer)" = false ] || fail "the group $group exists: give a new name, since the whole group is removed in the end.
trial: If an earlier trial left it behind: $here/trial.sh --remove --group $group"
    azure provider list --query "[?registrationState=='Registered'].namespace" --output tsv || fail "az cannot list providers: $(why)"
    for tool in Compute EventGrid Insights ManagedIdentity Network ServiceBus Storage; do
        grep -qix "microsoft.$tool" "$scratch/out" || missing="$missing Microsoft.$tool"
    done
    [ -z "$missing" ] || fail "not registered in this subscription:$missing. For each: az provider register --wait --namespace NAME"
    azure vm list-skus --location "$location" --size "$size" --resource-type virtualMachines \
        --query "[?name=='$size' && !(restrictions[?type=='Location'])].[name, join(' ', sort(locationInfo[0].zones || \`[]\`)), join(' ', restrictions[?type=='Zone'].restrictionInfo.zones[])]" \
        --output tsv || fail "az cannot list the sizes of $location: $(why)"
    [ -s "$scratch/out" ] || fail "the size $size is not available to you in $location; give --size or --location"
    # Two zones that the region has and this subscription may use.
    zones=$(comm -23 <(cut -f 2 "$scratch/out" | tr ' ' '\n' | sort) <(cut -f 3 "$scratch/out" | tr ' ' '\n' | sort) |
        head -n 2 | paste -sd ' ')
    case $zones in *' '*) spread="in the zones $zones" ;; *) zones="" spread="in the fault domains of $location, which offers no two zones for it" ;; esac
    for tool in "$here/base.bicep" "$here/grid.bicep" "$checkout/infra/bicep/modules/scaleset.bicep"; do
        run az bicep build --file "$tool" --stdout || fail "the Bicep compiler refuses $tool: $(why)"
    done
}

plan() {
    cat <<EOF
This creates, in the subscription "${account[3]:-}" (${subscription:0:8}...), the new resource group $group in $location:

  Service Bus namespace (Standard), topic, queues, roles      0.02 \$ an hour
  Event Grid topic, storage account, three identities         cents
  virtual network, NAT gateway, public address                0.05 \$ an hour
  scale set of three $size with disks,
    $spread            0.40 \$ an hour with the default size

It takes 60 to 90 minutes and costs roughly 0.50 \$ an hour (list prices of West Europe, 2026; yours may differ): about one dollar.
One VM is redeployed, another one's forwarder is restarted and killed. In the end the whole group is removed.
EOF
}

confirm() { # confirm QUESTION
    local reply
    if [ $yes = yes ]; then return; fi
    [ -t 0 ] || fail "there is no terminal to ask on: give --yes"
    read -r -p "$1 [y/N] " reply
    case $reply in y | Y | yes) ;; *) fail "nothing was done" ;; esac
}

deploy() { # deploy NAME FILE PARAMETER...
    azure deployment group create --resource-group "$group" --name "$1" --template-file "$2" --parameters "${@:3}" \
        --query "$outputs" --output tsv
}

upload() {
    azure storage blob upload --auth-mode login --account-name "imdstrial$suffix" --container-name releases \
        --name imds-bridge.tar.gz --file "$scratch/imds-bridge.tar.gz" --overwrite --no-progress
}

instances() {
    azure vmss list-instances --resource-group "$group" --name trial --query "[?provisioningState=='Succeeded'].[instanceId, name]" --output tsv || return 1
    mapfile -t vms < <(answer | sort -n)
    [ ${#vms[@]} -ge 3 ] || { echo "given ${#vms[@]} instances, expected 3" >"$scratch/err"; return 1; }
}
id_of() { cut -f 1 <<<"${vms[$1]}"; }
name_of() { cut -f 2 <<<"${vms[$1]}"; }

on_vm() { # on_vm INDEX ARGUMENT...: run probe.py on an instance
    azure vmss run-command invoke --resource-group "$group" --name trial --instance-id "$(id_of "$1")" \
        --command-id RunShellScript --scripts "/opt/imds-bridge/bin/python /opt/imds-trial/probe.py ${*:2}" \
        --query 'value[0].message' --output tsv || return 1
    line=$(grep -o 'imds-trial [0-9]*/[0-9]* [A-Za-z0-9+/=]*' "$scratch/out" || true)
    if [ -z "$line" ]; then
        tail -c 500 "$scratch/out" >"$scratch/err"
        return 1
    fi
}

measure() { # measure INDEX NAME ARGUMENT...: keep a result, which arrives in parts
    local number=1 data="" file
    file=$scratch/raw/$2-$1.b64
    on_vm "$1" "${@:2}" || return 1
    while :; do
        data+=${line##* }
        local parts=${line#*/}
        if [ $number -ge "${parts%% *}" ]; then break; fi
        number=$((number + 1))
        on_vm "$1" part "$2" $number || return 1
    done
    echo "$data" >"$file"
}

ready() { # the agent of a new VM may not answer at once
    local options=""
    if [ "$1" = 0 ]; then options=--observe; fi
    retry 3 measure "$1" ready "--seconds 1500" $options
}

redeploy() { # az vmss has no such command
    run az rest --method post --url "/subscriptions/$subscription/resourceGroups/$group/providers/Microsoft.Compute/virtualMachineScaleSets/trial/virtualMachines/$(id_of 1)/redeploy?api-version=2024-11-01"
}

metrics() {
    azure monitor metrics list --metrics ThrottledRequests IncomingRequests IncomingMessages OutgoingMessages UserErrors \
        --resource "/subscriptions/$subscription/resourceGroups/$group/providers/Microsoft.ServiceBus/namespaces/imds-trial-$suffix" \
        --interval PT1M --aggregation Total --start-time "$began_at" --output json || return 1
    cp "$scratch/out" "$scratch/raw/metrics.json"
}

uploader() {
    if [ "${account[1]}" = user ]; then
        run az ad signed-in-user show --query id --output tsv
    else
        run az ad sp show --id "${account[2]}" --query id --output tsv
    fi
}

create() {
    local id type=User identities values custom ids zone_list=""
    must "archive" run git -C "$checkout" archive --format tar.gz --prefix imds-bridge/ --output "$scratch/imds-bridge.tar.gz" HEAD
    must "who uploads" uploader
    id=$(answer)
    if [ "${account[1]}" != user ]; then type=ServicePrincipal; fi
    may_exist=yes # from here on, the end removes it
    must "group" azure group create --name "$group" --location "$location" --tags "$tag=$run_id"
    outputs='properties.outputs.[namespace.value, eventGridEndpoint.value, subnetId.value, forwardId.value, listenId.value, observerId.value, forwardClientId.value, listenClientId.value, observerClientId.value, observerPrincipalId.value]'
    must "bus, Event Grid, network" deploy base "$here/base.bicep" location="$location" suffix="$suffix" \
        uploaderId="$id" uploaderType=$type
    mapfile -t values < <(answer)
    [ ${#values[@]} = 10 ] || { say "given ${#values[@]} outputs of base.bicep, expected 10"; failed=yes; exit 1; }
    must "upload" retry 30 upload # its role is not effective at once
    outputs=properties.provisioningState
    try "Event Grid's subscription" retry 10 deploy grid "$here/grid.bicep" namespaceName="imds-trial-$suffix" \
        topicName="imds-trial-$suffix" observerPrincipalId="${values[9]}"
    must "key" run ssh-keygen -q -t ed25519 -N "" -C imds-trial -f "$scratch/key" # nobody uses it
    custom=$(sed -e "s|@NAMESPACE@|${values[0]}|; s|@GRID@|${values[1]}|; s|@FORWARD@|${values[6]}|; s|@LISTEN@|${values[7]}|" \
        -e "s|@OBSERVER@|${values[8]}|; s|@ACCOUNT@|imdstrial$suffix|" \
        -e "s|@SHA256@|$(sha256sum "$scratch/imds-bridge.tar.gz" | cut -d ' ' -f 1)|" "$here/cloud-init.yaml" | base64 | tr -d '\n')
    ids=$(printf '"%s",' "${values[@]:3:3}")
    identities="[${ids%,}]"
    for one in $zones; do zone_list="$zone_list,\"$one\""; done
    must "scale set" deploy vms "$checkout/infra/bicep/modules/scaleset.bicep" name=trial location="$location" \
        subnetId="${values[2]}" sshPublicKey="$(cat "$scratch/key.pub")" identityIds="$identities" vmSize="$size" \
        instanceCount=3 zones="[${zone_list#,}]" customData="$custom"
    must "instances" retry 10 instances
}

measure_all() {
    local index
    for index in 0 1 2; do must "install on $(name_of $index)" ready $index; done
    local since=$SECONDS
    try "managed identity" measure 0 identity
    try "sends" measure 0 sends
    try "restart and kill" measure 2 restart
    # IMDS's events need up to five minutes after the first request.
    local left=$((pause_seconds * 24 - (SECONDS - since)))
    if [ $left -gt 0 ]; then pause $left; fi
    if step "redeploy" redeploy; then
        try "notice, approval, end" measure 0 drill --vm "$(name_of 1)" --group "$group"
    fi
    for index in 0 1 2; do try "what arrived at $(name_of $index)" retry 3 measure $index collect; done
    try "Azure Monitor" metrics
}

scratch=$(mktemp -d)
mkdir "$scratch/raw"
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 141' PIPE

if [ -z "$group" ]; then
    if [ $yes = yes ] || [ ! -t 0 ] || [ $action = remove ]; then fail "--group is missing; see --help"; fi
    read -r -p "Name of a new resource group [imds-bridge-trial]: " group
    group=${group:-imds-bridge-trial}
fi
[[ $group =~ ^[A-Za-z0-9_-]{1,64}$ ]] || fail "--group: given $group, expected up to 64 letters, digits, - and _"
preflight
case $action in
    remove)
        confirm "Remove the group $group and everything in it?"
        remove_group any || exit $?
        say "$group is not there"
        ;;
    plan) plan; echo "Nothing was created: this is a dry run. The Bicep compiles." ;;
    trial)
        plan
        confirm "Create it?"
        report=${report:-imds-bridge-trial-$run_id}
        mkdir -p "$report"
        report=$(cd "$report" && pwd)
        began_at=$(date -u +%Y-%m-%dT%H:%M:%SZ)
        printf '%s=%s\n' started "$began_at" location "$location" size "$size" zones "${zones:-fault domains}" \
            commit "$(git -C "$checkout" rev-parse HEAD)" subscription "$subscription" >"$scratch/raw/facts"
        create
        measure_all
        ;;
esac
