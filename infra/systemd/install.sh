#!/bin/sh
# Install imds-bridge with its systemd units, go back to the version before, or remove it.
# A second run changes only what differs.
set -eu

usage() {
    cat <<'EOF'
usage: install.sh [--wheel FILE] [--start ROLE]... [--root DIR] [--dry-run]
       install.sh --rollback [--root DIR] [--dry-run]
       install.sh --uninstall [--purge] [--root DIR] [--dry-run]

  --wheel FILE   install this wheel (default: build one from the checkout that this script is in)
  --start ROLE   enable and start forward, listen, relay or console; may be repeated
  --root DIR     install into this tree, for an image; nothing is started there
  --rollback     exchange the program and its units with the version before, and restart what runs
  --uninstall    stop and remove the program; configuration, secrets and state stay
  --purge        with --uninstall: also remove configuration, secrets and state
  --dry-run      only print what would be done

PYTHON chooses the interpreter (3.11 or newer, with venv; on Debian: apt-get install python3-venv).
EOF
}

home=/opt/imds-bridge etc=/etc/imds-bridge units=/etc/systemd/system local=/usr/local
# The command, its man page and its completion, each a link to the program's own.
links="bin/imds-bridge share/man/man1/imds-bridge.1
    share/bash-completion/completions/imds-bridge share/zsh/site-functions/_imds-bridge"
roles="console forward listen relay"
min_systemd=252

here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
root="" wheel="" start="" action=install purge=no dry_run=no changed=no

fail() { echo "install.sh: $*" >&2; exit 2; }
say() { echo "imds-bridge: $*"; }
run() { if [ $dry_run = yes ]; then echo "would run: $*"; else "$@"; fi; }
# Units in another root are loaded when that system boots.
notify_systemd() { if [ -z "$root" ] && [ -d /run/systemd/system ]; then run systemctl "$@"; fi; }

while [ $# -gt 0 ]; do
    case $1 in --wheel | --start | --root) [ $# -gt 1 ] || fail "$1 needs a value; see --help" ;; esac
    case $1 in
        --wheel)
            [ -f "$2" ] || fail "--wheel: there is no file $2"
            wheel=$(cd "$(dirname "$2")" && pwd)/$(basename "$2"); shift ;;
        --start)
            case " $roles " in *" $2 "*) start="$start $2" ;; *) fail "--start: given $2, expected one of: $roles" ;; esac
            shift ;;
        --root)
            [ -d "$2" ] || fail "--root: there is no folder $2"
            root=$(cd "$2" && pwd); root=${root%/}; shift ;;
        --rollback) action=rollback ;;
        --uninstall) action=uninstall ;;
        --purge) purge=yes ;;
        --dry-run) dry_run=yes ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; fail "unknown option $1" ;;
    esac
    shift
done
[ $purge = no ] || [ $action = uninstall ] || fail "--purge: only with --uninstall"
[ -z "$wheel$start" ] || [ $action = install ] || fail "--$action: neither with --wheel nor with --start"
[ -z "$root" ] || [ -z "$start" ] || fail "--start: nothing runs in $root; enable the units there with systemctl --root"

put() { # put MODE SOURCE TARGET: copy a file that differs
    if cmp -s "$2" "$root$3"; then return; fi
    changed=yes
    say "writes $3"
    run install -D -m "$1" "$2" "$root$3"
}

link() { # link TARGET NAME: make a link where there is nothing
    if [ -e "$root$2" ] || [ -L "$root$2" ]; then return; fi
    changed=yes
    say "links $2 to $1"
    run mkdir -p "$(dirname "$root$2")"
    run ln -s "$1" "$root$2"
}

check_systemd() {
    if [ -n "$root" ]; then return; fi
    version=$(systemctl --version 2>/dev/null | sed -n '1s/^systemd \([0-9]*\).*/\1/p')
    [ "${version:-0}" -ge $min_systemd ] ||
        fail "the units need systemd $min_systemd or newer; here it is ${version:-not installed}"
}

find_python() {
    for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            return
        fi
    done
    fail "no Python 3.11 or newer with venv; on Debian: apt-get install python3-venv; PYTHON=... chooses one"
}

pip() { "$tools/venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
hashed() { pip "$@" --require-hashes --no-deps --only-binary :all:; } # every package is checked against its hash

fingerprint() { # identify the set of files to install
    "$python" --version
    "$python" -c 'import sys; print(sys.base_prefix)'
    if [ -f "$source" ]; then cat "$source"; else
        git -C "$source" describe --tags --always --dirty 2>/dev/null || true
        find "$source/bridge" "$source/tools/packaging" "$source/pyproject.toml" "$source"/.git_archival.txt \
            \( -name __pycache__ -o -name share \) -prune -o -name version.txt -o -type f -print 2>/dev/null |
            LC_ALL=C sort | tr '\n' '\0' | xargs -0 cat
    fi | cat - "$lock" "$here/install.sh" "$here"/*.service | sha256sum
}

install_program() {
    find_python
    lock=$here/runtime.lock
    [ -f "$lock" ] || { lock=$checkout/requirements/runtime.lock; [ -f "$lock" ]; } || fail "there is no runtime.lock here, and no requirements/runtime.lock in a checkout around"
    source=${wheel:-$checkout}
    [ -f "$source" ] || [ -f "$source/pyproject.toml" ] || fail "there is no $source; expected a wheel, or a checkout"
    case $("$python" -c 'import sys; print(sys.base_prefix)') in
        "${HOME:-/home}"/* | /home/*) say "warning: $python is in a home folder, which the services cannot read; set PYTHON" ;;
    esac
    stamp=$(fingerprint)
    if [ "$(cat "$root$home/.installed" 2>/dev/null)" = "$stamp" ]; then return; fi
    changed=yes
    say "installing $source into $home (a minute or two) ..."
    if [ $dry_run = yes ]; then return; fi
    tools=$(mktemp -d)
    trap 'rm -rf "$tools"' EXIT
    "$python" -m venv "$tools/venv"
    if [ -d "$source" ]; then
        # The build reads the parsers of the commands, which import the program's packages.
        hashed install --requirement "$source/requirements/build.lock" --requirement "$lock"
        pip wheel --no-deps --no-build-isolation --wheel-dir "$tools" "$source"
        # The build writes these files, which the owner of the checkout must be able to replace.
        chown -R --reference="$source/pyproject.toml" "$source/bridge/version.txt" "$source/bridge/cli/share"
    else
        cp "$source" "$tools"
    fi
    # Installed beside the old program, so that an interruption leaves the old one intact.
    new=$root$home.new
    rm -rf "$new"
    "$python" -m venv --without-pip "$new"
    hashed --python "$new/bin/python" install --requirement "$lock"
    pip --python "$new/bin/python" install --no-deps --no-index --find-links "$tools" imds-bridge
    for file in "$new"/bin/* "$new/pyvenv.cfg"; do
        if [ ! -L "$file" ]; then sed -i "s|$new|$home|g" "$file"; fi
    done
    chmod -R a+rX,go-w "$new"
    mkdir -p "$new/share/bash-completion/completions" "$new/share/zsh/site-functions"
    "$new/bin/python" -P -m bridge completion bash >"$new/share/bash-completion/completions/imds-bridge"
    "$new/bin/python" -P -m bridge completion zsh >"$new/share/zsh/site-functions/_imds-bridge"
    # With them, a later rollback or removal needs no checkout.
    mkdir "$new/systemd"
    cp "$here/install.sh" "$here"/*.service "$here/config.toml" "$new/systemd"
    echo "$stamp" >"$new/.installed"
    rm -rf "$root$home.back"
    if [ -d "$root$home" ]; then
        rm -rf "$root$home.previous"
        mv "$root$home" "$root$home.previous"
    fi
    mv "$new" "$root$home"
}

put_units() { # write the program's own units, and restart what runs if anything has changed
    for role in $roles; do
        put 0644 "$root$home/systemd/imds-bridge-$role.service" $units/imds-bridge-"$role".service
    done
    if [ $changed = yes ]; then
        notify_systemd daemon-reload
        for role in $roles; do notify_systemd try-restart imds-bridge-"$role".service; done
    fi
}

install_all() {
    umask 022
    check_systemd
    [ $dry_run = yes ] || mkdir -p "$root/opt"
    install_program
    for name in $links; do link "$home/$name" "$local/$name"; done
    run install -d -m 0700 "$root$etc" "$root$etc/secrets"
    if [ ! -e "$root$etc/config.toml" ]; then put 0600 "$here/config.toml" $etc/config.toml; fi
    # Each unit loads the file and the folder of its name: all have the same until a link is replaced.
    for role in $roles; do
        link config.toml "$etc/$role.toml"
        link secrets "$etc/$role.secrets"
    done
    put_units
    for role in $start; do notify_systemd enable --now imds-bridge-"$role".service; done
    if [ $changed = yes ]; then say "installed; configure it in $etc/config.toml"; else say "nothing has changed"; fi
    set -- "$root$units"/multi-user.target.wants/imds-bridge-*.service
    if [ -z "$start" ] && [ ! -L "$1" ]; then
        say "nothing is enabled yet; to start it, now and at each boot: systemctl enable --now imds-bridge-forward"
    fi
}

rollback_all() {
    now=$root$home before=$root$home.previous back=$root$home.back changed=yes
    # An interrupted rollback has left $back, and is finished; an interrupted upgrade has left no $now.
    [ -d "$before" ] || [ -d "$back" ] || fail "--rollback: there is no $home.previous, only one version was installed"
    [ -d "$back" ] || run mv "$before" "$back"
    [ -d "$before" ] || [ ! -d "$now" ] || run mv "$now" "$before"
    run mv "$back" "$now"
    put_units
    version=$(cat "$now"/lib/python3*/site-packages/bridge/version.txt 2>/dev/null || true)
    [ $dry_run = yes ] || say "exchanged: ${version:-the version before} is installed; a second --rollback returns to the other one"
}

uninstall_all() {
    for role in $roles; do
        name=imds-bridge-$role.service
        if [ -e "$root$units/$name" ]; then notify_systemd disable --now "$name"; fi
        run rm -f "$root$units/$name" "$root$units/multi-user.target.wants/$name"
    done
    notify_systemd daemon-reload
    run rm -rf "$root$home" "$root$home.new" "$root$home.previous" "$root$home.back"
    for name in $links; do run rm -f "$root$local/$name"; done
    if [ $purge = yes ]; then
        run rm -rf "$root$etc" "$root/var/lib/imds-bridge" "$root/var/lib/private/imds-bridge" \
            "$root$units"/imds-bridge-*.service.d "$root$units/imds-bridge-.service.d"
        say "is removed with its configuration and state"
    else
        say "is removed; $etc and /var/lib/imds-bridge stay (--purge removes them)"
    fi
}

[ -n "$root" ] || [ $dry_run = yes ] || [ "$(id -u)" = 0 ] || fail "only root may do that (or --root DIR, --dry-run)"
"${action}_all"
