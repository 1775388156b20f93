#!/bin/sh
# Install imds-bridge with its systemd units, go back to the version before, or remove it.
# A second run changes only what differs.
set -eu

usage() {
    cat <<'EOF'
usage: install.sh [--wheel FILE] [--start ROLE]... [--manage UNIT]... [--root DIR] [--dry-run]
       install.sh --rollback | --uninstall [--purge]  [--root DIR] [--dry-run]

  --wheel FILE   install this wheel (default: the release's, or one built from the checkout that this script is in)
  --start ROLE   enable and start forward, listen, relay or console; may be repeated
  --manage UNIT  let the programs of listen start, stop and restart this unit, such as shop.service; may be repeated
  --root DIR     install into this tree, for an image; nothing is started there
  --rollback     exchange the program and its units with the version before, and restart what runs
  --uninstall    stop and remove the program and what --manage allows; configuration, secrets and state stay
  --purge        with --uninstall: also remove configuration, secrets, state and the user of --manage
  --dry-run      only print what would be done

A release needs Python and no network; a checkout also needs Python's venv and a package index. PYTHON chooses a Python.
EOF
}

oldest_python=3.11 newest_python=3.14 oldest_sqlite=3.34 oldest_systemd=247 oldest_polkit=106 # of 0.106
with_credentials=252 # systemd loads a folder of them: an older one gets older-systemd.conf
home=/opt/imds-bridge etc=/etc/imds-bridge units=/etc/systemd/system local=/usr/local
rules=/etc/polkit-1/rules.d/50-imds-bridge.rules
# The command, its man page and its completion, each a link to the program's own.
links="bin/imds-bridge share/man/man1/imds-bridge.1
    share/bash-completion/completions/imds-bridge share/zsh/site-functions/_imds-bridge"
roles="console forward listen relay" user=imds-bridge-listen

here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd) wheels=$here/wheels # of a release
unset PYTHONPATH PYTHONHOME # meant for other programs
root="" wheel="" start="" manage="" action=install purge=no dry_run=no changed=no

fail() { echo "install.sh: $*" >&2; exit 2; }
say() { echo "imds-bridge: $*"; }
run() { if [ $dry_run = yes ]; then echo "would run: $*"; else "$@"; fi; }
# A tree's units are loaded when it boots.
notify_systemd() { if [ -z "$root" ] && [ -d /run/systemd/system ]; then run systemctl "$@"; fi; }

while [ $# -gt 0 ]; do
    case $1 in --wheel | --start | --manage | --root) [ $# -gt 1 ] || fail "$1 needs a value; see --help" ;; esac
    case $1 in
        --wheel) [ -f "$2" ] || fail "--wheel: there is no file $2"; wheel=$(realpath "$2"); shift ;;
        --start)
            case " $roles " in *" $2 "*) start="$start $2" ;; *) fail "--start: given $2, expected one of: $roles" ;; esac
            shift ;;
        --manage)
            case $2 in *[!A-Za-z0-9:_.@-]* | "${2%.*}") fail "--manage: given $2, expected a unit such as shop.service" ;; esac
            manage="$manage, \"$2\""; shift ;;
        --root) [ -d "$2" ] || fail "--root: there is no folder $2"; root=$(realpath "$2"); root=${root%/}; shift ;;
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
[ -z "$wheel$start$manage" ] || [ $action = install ] || fail "--$action: not with --wheel, --start or --manage"
[ -z "$root" ] || [ -z "$start$manage" ] || fail "--start and --manage: not with --root, where nothing runs; run the script in $root again"

change() { changed=yes; say "$*"; }
put() { # put MODE SOURCE TARGET: copy a file that differs
    if cmp -s "$2" "$root$3"; then return; fi
    change "writes $3"
    run install -D -m "$1" "$2" "$root$3"
}
link() { # link TARGET NAME: make a link where there is nothing
    if [ -e "$root$2" ] || [ -L "$root$2" ]; then return; fi
    change "links $2 to $1"
    run mkdir -p "$(dirname "$root$2")"
    run ln -s "$1" "$root$2"
}

find_systemd() { # in a tree, where it cannot be run, by the name of its library
    systemd=$({ [ -n "$root" ] || systemctl --version; find "$root/lib/" "$root/usr/" -maxdepth 4 -name 'libsystemd-shared-*'; } \
        2>/dev/null | sed -n '1s/^\(systemd \|.*-shared-\)\([0-9]*\).*/\2/p')
    systemd=${systemd:-${root:+$with_credentials}}
    [ "${systemd:-0}" -ge $oldest_systemd ] ||
        fail "the units need systemd $oldest_systemd or newer; here it is ${systemd:-not installed}"
}
find_polkit() { # 0.120 was followed by 121
    polkit=$(pkaction --version 2>/dev/null | sed 's/[^0-9]*//')
    [ "$(echo "${polkit:-0}" | sed 's/^0\.//')" -ge $oldest_polkit ] ||
        fail "--manage needs polkit 0.$oldest_polkit or newer, whose rules name units; here it is ${polkit:-not installed (package polkitd, or polkit)}"
}
show_command() { # print how to get a Python on this system, or with its package manager
    # shellcheck source=/dev/null
    . /etc/os-release 2>/dev/null || true
    for manager in tdnf dnf zypper apt-get none; do if command -v $manager >/dev/null; then break; fi; done
    row=$(awk -v it="${ID:-} ${VERSION_ID:-} $manager" -F ' [|] ' 'it ~ "^(" $1 ")" { print $3 " | " $4; exit }' "$here/systems.txt")
    if [ -d "$wheels" ]; then echo "${row% | *}"; else echo "${row#* | }"; fi
}
find_python() {
    needed="venv, sqlite3, ssl, ctypes"
    [ -d "$wheels" ] || needed="$needed, ensurepip"
    for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$python" -Ic "import sys, $needed
oldest, newest, sqlite = (tuple(map(int, one.split('.'))) for one in sys.argv[1:4])
if not oldest <= sys.version_info[:2] <= newest or sqlite3.sqlite_version_info < sqlite: sys.exit(1)
name, advice = f'imds-bridge: warning: {sys.executable} is', '; set PYTHON to another one'
if sys.version_info.releaselevel != 'final': print(name, 'no finished version,', sys.version.split()[0] + advice)
if sys.base_prefix.startswith(('/home/', sys.argv[4] + '/')): print(name, 'in a home folder, which no service can read' + advice)
" $oldest_python $newest_python $oldest_sqlite "${HOME:-/home}" 2>/dev/null; then return; fi
    done
    fail "there is no Python $oldest_python to $newest_python with $needed, and SQLite $oldest_sqlite or newer:
  $(show_command)
PYTHON=... names one that is elsewhere"
}

pip() { # it sees no settings; a release's is a wheel that runs as it is
    if [ -d "$wheels" ]; then set -- "$(echo wheels/pip-*.whl)/pip" "$@"; else set -- -m pip "$@"; fi
    PIP_CONFIG_FILE=/dev/null "$with" -I "$@" --isolated --quiet --disable-pip-version-check
}
hashed() { # every package is checked against its hash
    # shellcheck disable=SC2086 # several options
    pip "$@" --require-hashes --no-deps --only-binary :all: $index
}
find_index() { # print as options those of pip's settings that say where packages are; PIP_USER=1 would hide some
    PIP_USER=0 "$with" -Im pip config list | sort -r | sed -nE -e "s/^.*\.((extra-)?index-url|find-links|trusted-host|proxy\
|(client-)?cert|(default-)?timeout)='(.*)'\$/--\1=\5/" -e ':next' -e 's/^(--[a-z-]*=)(.*)\\n/\1\2 \1/' -e 't next' -e '/^--/p'
}
fingerprint() { # identify the set of files to install
    "$python" -Ic 'import sys; print(sys.version, sys.base_prefix)'
    if [ -f "$source" ]; then cat "$source"; else
        git -C "$source" describe --tags --always --dirty 2>/dev/null || true
        find "$source/bridge" "$source/tools/packaging" "$source/pyproject.toml" "$source"/.git_archival.txt \
            \( -name __pycache__ -o -name share \) -prune -o -name version.txt -o -type f -print 2>/dev/null |
            LC_ALL=C sort | tr '\n' '\0' | xargs -0 cat
    fi | cat - "$lock" "$here/install.sh" "$here"/*.service "$here"/*.conf "$here"/*.rules | sha256sum
}

install_program() {
    for lock in "$here/runtime.lock" "$checkout/requirements/runtime.lock"; do [ ! -f "$lock" ] || break; done
    [ -f "$lock" ] || fail "there is no runtime.lock here, and no $lock"
    for source in "$wheel" "$wheels"/imds_bridge-*.whl "$checkout"; do [ ! -f "$source" ] || break; done
    [ -f "$source" ] || [ -f "$source/pyproject.toml" ] || fail "there is no $source; expected a wheel, or a checkout"
    stamp=$(fingerprint)
    if [ "$(cat "$root$home/.installed" 2>/dev/null)" = "$stamp" ]; then return; fi
    change "installing $source into $home (up to two minutes) ..."
    if [ $dry_run = yes ]; then return; fi
    # Installed beside the old program, so that an interruption leaves the old one intact.
    new=$root$home.new tools=$root$home.tools # a hardened system executes nothing in /tmp
    rm -rf "$new" "$tools"
    trap 'rm -rf "$tools"' EXIT
    "$python" -Im venv --without-pip "$new"
    if [ -d "$wheels" ]; then cd "$here"; with=$new/bin/python index="--no-index --find-links wheels"; else
        "$python" -Im venv "$tools"
        with=$tools/bin/python
        index=$(find_index)
    fi
    if [ -d "$source" ]; then
        # The build reads the parsers of the commands, which import the program's packages.
        hashed install --requirement "$source/requirements/build.lock" --requirement "$lock"
        pip wheel --no-deps --no-build-isolation --wheel-dir "$tools" "$source"
        # The build writes these files, which the owner of the checkout must be able to replace.
        chown -R --reference="$source/pyproject.toml" "$source/bridge/version.txt" "$source/bridge/cli/share"
        source=$(echo "$tools"/*.whl)
    fi
    hashed --python "$new/bin/python" install --requirement "$lock"
    pip --python "$new/bin/python" install --no-deps --no-index "$source"
    # Isolated from variables such as PYTHONPATH; when the watchdog kills it, it logs the stack of every thread.
    find "$new/bin" "$new/pyvenv.cfg" -type f -exec sed -i -e "s|$new|$home|g" -e '1s|^#!.*/python[0-9.]*$|& -IXfaulthandler|' {} +
    chmod -R a+rX,go-w "$new"
    mkdir -p "$new/share/bash-completion/completions" "$new/share/zsh/site-functions" "$new/systemd"
    "$new/bin/python" -Im bridge completion bash >"$new/share/bash-completion/completions/imds-bridge"
    "$new/bin/python" -Im bridge completion zsh >"$new/share/zsh/site-functions/_imds-bridge"
    # With them, a later rollback or removal needs no checkout.
    cp "$here/install.sh" "$here"/*.service "$here"/*.conf "$here"/*.rules "$here/systems.txt" "$here/config.toml" "$new/systemd"
    echo "$stamp" >"$new/.installed"
    rm -rf "$root$home.back"
    [ ! -d "$root$home" ] || { rm -rf "$root$home.previous"; mv "$root$home" "$root$home.previous"; }
    mv "$new" "$root$home"
    # SELinux's policy has a label for /opt/*/bin, without which no unit may execute it.
    if [ -z "$root" ] && command -v restorecon >/dev/null; then restorecon -R "$home"; fi
}

put_units() { # write the program's own units, and restart what runs if anything has changed
    for role in $roles; do
        put 0644 "$root$home/systemd/imds-bridge-$role.service" $units/imds-bridge-"$role".service
        older=$units/imds-bridge-$role.service.d/00-older-systemd.conf
        if [ "$systemd" -lt $with_credentials ] && [ -f "$root$home/systemd/older-systemd.conf" ]; then
            put 0644 "$root$home/systemd/older-systemd.conf" "$older"
        elif [ -e "$root$older" ]; then change "removes $older"; run rm "$root$older"; fi
    done
    if [ $changed = yes ]; then
        notify_systemd daemon-reload
        for role in $roles; do notify_systemd try-restart imds-bridge-"$role".service; done
    fi
}
put_rule() { # for a user that exists: D-Bus refuses those that systemd makes up, up to Debian 12
    id $user >/dev/null 2>&1 || run useradd --system --no-create-home --home-dir / --shell /usr/sbin/nologin --comment imds-bridge $user
    [ $dry_run = yes ] || sed "s/UNITS/${manage#, }/" "$here/polkit.rules" >"$home/polkit.rules"
    put 0644 "$home/polkit.rules" $rules
}

install_all() {
    umask 022
    find_systemd
    find_python
    [ -z "$manage" ] || find_polkit
    install_program
    for name in $links; do link "$home/$name" "$local/$name"; done
    run install -d -m 0700 "$root$etc" "$root$etc/secrets"
    if [ ! -e "$root$etc/config.toml" ]; then put 0600 "$here/config.toml" $etc/config.toml; fi
    # Each unit loads the file and the folder of its name: all have the same until a link is replaced.
    for role in $roles; do
        link config.toml "$etc/$role.toml"
        link secrets "$etc/$role.secrets"
    done
    [ -z "$manage" ] || put_rule
    put_units
    for role in $start; do notify_systemd enable --now imds-bridge-"$role".service; done
    if [ $changed = yes ]; then say "installed; configure it in $etc/config.toml"; else say "nothing has changed"; fi
    set -- "$root$units"/multi-user.target.wants/imds-bridge-*.service
    if [ -z "$start" ] && [ ! -L "$1" ]; then
        say "nothing is enabled yet; to start it, now and at each boot: systemctl enable --now imds-bridge-forward"
    fi
}

rollback_all() {
    find_systemd
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
        run rm -f "$root$units/$name" "$root$units/multi-user.target.wants/$name" "$root$units/$name.d/00-older-systemd.conf"
    done
    for name in $links; do run rm -f "$root$local/$name"; done
    run rm -rf "$root$home" "$root$home.new" "$root$home.tools" "$root$home.previous" "$root$home.back" "$root$rules"
    notify_systemd daemon-reload
    if [ $purge = yes ]; then
        run rm -rf "$root$etc" "$root/var/lib/imds-bridge" "$root/var/lib/private/imds-bridge" \
            "$root$units"/imds-bridge-*.service.d "$root$units/imds-bridge-.service.d"
        case "$root$(getent passwd $user)" in $user:*:imds-bridge:*) run userdel $user ;; esac
        say "is removed with its configuration and state"
    else
        say "is removed; $etc and /var/lib/imds-bridge stay (--purge removes them)"
    fi
}

[ -n "$root" ] || [ $dry_run = yes ] || [ "$(id -u)" = 0 ] || fail "only root may do that (or --root DIR, --dry-run)"
"${action}_all"
