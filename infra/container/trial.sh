#!/usr/bin/env bash
# Build the image and run `imds-bridge forward` and the console from it, read-only and not as root, against the lab.
#
#   ENGINE=docker|podman|buildah    the engine; without it, the first that works
#   BASE=IMAGE                      the base image; without it, that of the Dockerfile, or for Buildah one by mmdebstrap
#
# Buildah needs root, mmdebstrap and neither a daemon nor a registry. The first failed check ends the trial with exit
# code 1, the last line has the result, and everything that was created is removed.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$(cd "${VENV:-.venv}/bin" && pwd)
scratch=$(mktemp -d)
chmod 755 "$scratch"
name=imds-bridge-trial-$$
state=/var/lib/imds-bridge
lab="" first=""

fail() { echo "container: $*" >&2; exit 1; }
quietly() { "$@" >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; fail "failed: $*"; }; }
within_a_minute() { # repeat a command until it succeeds
    local end=$((SECONDS + 60))
    until "$@" >"$scratch/log" 2>&1; do
        [ $SECONDS -lt $end ] || { cat "$scratch/log" >&2; fail "not within a minute: $*"; }
        sleep 0.1
    done
}

# --- the engines: each has build_image, config, size, start, inside, stop and remove ---

docker_build_image() {
    if [ "$ENGINE" = podman ]; then set -- --format docker "$@"; fi # OCI images have no health check
    quietly "$ENGINE" build ${BASE:+--build-arg "BASE=$BASE"} "$@" --tag "$name" .
}
docker_config() { "$ENGINE" image inspect --format '{{json .Config}}' "$name"; }
docker_size() { "$ENGINE" images --format '{{.Size}}' "$name"; }
docker_start() {
    quietly "$ENGINE" run --detach --name "$name" --network host --read-only --cap-drop ALL \
        --security-opt no-new-privileges --tmpfs /tmp "${settings[@]/#/--env=}" "$name"
}
docker_inside() { "$ENGINE" exec "$name" "$@"; }
docker_stop() {
    "$ENGINE" kill --signal TERM "$name" >/dev/null
    return "$(timeout 35 "$ENGINE" wait "$name")"
}
docker_remove() {
    "$ENGINE" rm --force --volumes "$name"
    "$ENGINE" rmi --force "$name"
}

bud() { buildah --root "$scratch/storage" --runroot "$scratch/run" --storage-driver "$driver" "$@"; }
buildah_build_image() {
    driver=overlay
    if [ "$(stat --file-system --format %T "$scratch")" = overlayfs ]; then driver=vfs; fi # not on itself
    if [ -z "${BASE:-}" ]; then
        local container
        container=$(bud from scratch)
        quietly mmdebstrap --variant=minbase --dpkgopt=force-unsafe-io \
            --include=python3,python3-venv,ca-certificates bookworm "$(bud mount "$container")"
        BASE=$(bud commit --quiet --rm "$container")
    fi
    quietly bud build --isolation chroot --format docker --layers=false --timestamp 0 "$@" \
        --build-arg "BASE=$BASE" --tag "$name" .
}
buildah_config() { bud inspect --type image "$name"; }
buildah_size() { bud images --format '{{.Size}}' "$name"; }
# The root is mounted read-only, with a separate state folder; with a new /proc, the process sees itself as number 1.
enter="root=\$1 state=\$2; shift 2
mount --bind \"\$root\" \"\$root\" && mount -o remount,bind,ro \"\$root\" && mount --bind \"\$state\" \"\$root$state\"
mount --rbind /dev \"\$root/dev\" && mount -t proc proc \"\$root/proc\" && mount -t tmpfs tmpfs \"\$root/tmp\"
exec chroot \"\$root\" \"\$@\""
buildah_start() {
    local root
    root=$(bud mount "$(bud from "$name")")
    cp --archive "$root$state" "$scratch/state"
    as_user=(setpriv --reuid="${user%:*}" --regid="${user#*:}" --clear-groups --no-new-privs --inh-caps=-all
        --bounding-set=-all env --ignore-environment "${environ[@]}" "${settings[@]}")
    unshare --mount --pid --fork --kill-child sh -ec "$enter" sh "$root" "$scratch/state" "${as_user[@]}" "${run[@]}" &
    unshared=$!
    within_a_minute pgrep --parent $unshared
    first=$(pgrep --parent $unshared)
}
buildah_inside() { nsenter --target="$first" --mount --pid --root --wd "${as_user[@]}" "$@"; }
buildah_stop() {
    kill -TERM "$first"
    timeout 35 tail --pid="$unshared" --follow /dev/null
    wait "$unshared"
}
buildah_remove() {
    if [ -n "$first" ]; then kill -KILL "$first"; wait "$unshared"; fi
    bud rm --all
    umount "$scratch/storage/overlay" # Buildah leaves it
}

# --- the trial ---

clean_up() {
    if [ -n "$lab" ]; then kill "$lab"; wait "$lab"; fi
    "${kind}_remove"
    rm -rf "$scratch"
}

works() {
    case $1 in
        buildah) [ "$(id -u)" = 0 ] && command -v buildah && command -v mmdebstrap ;;
        *) command -v "$1" && "$1" info ;; # a client may be installed without its daemon
    esac >/dev/null 2>&1
}
for candidate in ${ENGINE:-docker podman buildah}; do
    if works "$candidate"; then ENGINE=$candidate kind=${candidate/podman/docker}; break; fi
done
[ -n "${kind:-}" ] || fail "nothing works here: expected Docker, Podman, or Buildah with mmdebstrap and root's rights"
trap 'clean_up >/dev/null 2>&1 || true' EXIT
trap 'exit 1' TERM INT

# The local pip's index and certificate authorities are used, and are not part of the image.
tools/packaging/pip_settings.sh "$bin/python" "$scratch"
version=$("$bin/python" -c 'import bridge; print(bridge.__version__)')
secrets=("--secret=id=pip.conf,src=$scratch/pip.conf")
if [ -f "$scratch/pip.crt" ]; then secrets+=("--secret=id=ca.crt,src=$scratch/pip.crt"); fi
"${kind}_build_image" "${secrets[@]}" --build-arg "VERSION=$version"
built=$SECONDS

run=() health=() environ=() user=""
eval "$("${kind}_config" | "$bin/python" -c '
import json, shlex, sys
config = json.load(sys.stdin)
config = config.get("Docker", {}).get("config", config)
lists = {"environ": config["Env"], "run": config["Entrypoint"] + config["Cmd"], "health": config["Healthcheck"]["Test"][1:]}
for name, words in lists.items():
    print(f"{name}=({shlex.join(words)})")
print("user=" + shlex.quote(config["User"]))
')"

"$bin/imds-bridge" lab --port-base 0 >"$scratch/lab" 2>&1 &
lab=$!
within_a_minute grep --quiet "What happens:" "$scratch/lab"
of_lab() { sed -n "s|^ *$1 *\(http[^ ]*\)\$|\1|p" "$scratch/lab" | head -n 1; }
inbox=$(of_lab "webhook inbox:")
event=$("$bin/imds-bridge" lab schedule --type Reboot --vm web-0 --notice 86400 --control "$(of_lab "control API:")")
settings=("IMDS_BRIDGE__IMDS__ENDPOINT=$(of_lab web-0)" "IMDS_BRIDGE__SINKS__OPS={\"kind\":\"webhook\",\"url\":\"$inbox\"}")

has_arrived() { "$bin/python" -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())' \
    "${inbox%/hook}/lab/received" | grep "scheduledevent.scheduled.v1[^{}]*subject[^{}]*$event"; }
inside() { "${kind}_inside" "$@"; }
"${kind}_start"
within_a_minute has_arrived
within_a_minute inside "${health[@]}" --ready
quietly inside "${health[@]}"
quietly inside imds-bridge status
quietly inside python -c '
import os, azure.identity, azure.servicebus, jinja2, websocket
assert os.getuid() and os.getgid(), "runs as root"
assert os.statvfs("/").f_flag & os.ST_RDONLY, "the root can be written"
'
shown=$(inside imds-bridge --version)
[ "$shown" = "imds-bridge $version" ] || fail "built $version, runs $shown"
shown=$(inside python /opt/imds-bridge/drain.py recover || true)
[[ "$shown" = *"runs in a pod"* ]] || fail "drain.py does not run: $shown"
if inside "${health[@]}" --role listen >/dev/null; then fail "healthy without a listener"; fi

# The console runs beside the forwarder, and ends with the container.
port=$("$bin/python" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
console=(env "IMDS_BRIDGE__CONSOLE__LISTEN=127.0.0.1:$port")
inside "${console[@]}" imds-bridge console >/dev/null 2>&1 &
within_a_minute inside "${console[@]}" "${health[@]}" --role console --ready
"$bin/python" -c 'import sys, urllib.request as u; sys.exit(b"imds-bridge" not in u.urlopen(sys.argv[1]).read())' \
    "http://127.0.0.1:$port/" || fail "the console shows no page"

code=0
"${kind}_stop" || code=$?
first=""
[ $code = 0 ] || fail "SIGTERM ended it with exit code $code"
echo "container: ok, $ENGINE, $("${kind}_size"), built in $built s, all in $SECONDS s"
