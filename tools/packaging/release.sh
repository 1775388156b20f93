#!/usr/bin/env bash
# Make one file that installs without a network on each system of infra/systemd/systems.txt: release.sh WHEEL FOLDER
#
# FOLDER/imds-bridge-VERSION.tar has install.sh with what it installs, and as wheels the product, pip, and every package of
# the lock for Python 3.11 to 3.14 on two kinds of machine with glibc 2.28 or newer. The same wheel gives the same bytes.
set -euo pipefail
python=$(cd "${VENV:-.venv}/bin" && pwd)/python
wheel=$(realpath "$1") target=$(realpath "$2")
cd "$(dirname "$0")/../.."
name=imds-bridge-$(basename "$wheel" | cut --delimiter=- --fields=2)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/$name/wheels"
fetch() {
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
        --dest "$scratch/$name/wheels" "$@"
}
for machine in x86_64 aarch64; do
    for minor in 11 12 13 14; do
        fetch --requirement requirements/runtime.lock --implementation cp --python-version "3.$minor" \
            --abi "cp3$minor" --abi abi3 --abi none \
            --platform "manylinux_2_17_$machine" --platform "manylinux2014_$machine" --platform "manylinux_2_28_$machine"
    done
done
fetch --requirement requirements/pip.lock
cp "$wheel" "$scratch/$name/wheels"
cp requirements/runtime.lock LICENSE infra/systemd/{install.sh,config.toml,systems.txt,older-systemd.conf,polkit.rules} \
    infra/systemd/*.service "$scratch/$name"
# Not compressed: wheels are.
tar --create --file "$target/$name.tar" --directory "$scratch" --format=gnu --sort=name --owner=0 --group=0 --numeric-owner \
    --mode='u+rwX,go+rX,go-w' --mtime="@${SOURCE_DATE_EPOCH:-315532800}" "$name"
