#!/usr/bin/env bash
# Build the release files into dist/ and check them (make dist).
#
# The sdist is built from the checkout, the wheel from the sdist, the release with all wheels by release.sh, and all again
# from the unpacked sdist in another folder, umask and time zone: they must be the same, byte for byte. The wheel is installed with the versions of the runtime lock
# into a new environment, where the demo without a Service Bus must pass, with no other program on PATH. Its packages
# become the SBOM, and their licences must be on the list of licences.py. Only then are the files moved to dist/.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$(cd "${VENV:-.venv}/bin" && pwd)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH PIP_DISABLE_PIP_VERSION_CHECK=1

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fail() { echo "dist: $*" >&2; exit 1; }
build() { "$bin/python" -m build --no-isolation --outdir "$@" >"$scratch/log" 2>&1 || { cat "$scratch/log"; fail "the build failed"; }; }

umask 022
build "$scratch/first" .
mkdir "$scratch/elsewhere"
tar --extract --file "$scratch"/first/*.tar.gz --directory "$scratch/elsewhere"
(umask 077; TZ=Asia/Tokyo LC_ALL=C build "$scratch/second" "$scratch"/elsewhere/*)
wheel=$(basename "$scratch"/first/*.whl)
tools/packaging/release.sh "$scratch/first/$wheel" "$scratch/first"
(umask 077; TZ=Asia/Tokyo LC_ALL=C VENV=$bin/.. bash "$scratch"/elsewhere/*/tools/packaging/release.sh "$scratch/second/$wheel" "$scratch/second")
diff --recursive "$scratch/first" "$scratch/second" || fail "the second build differs"
version=$(cut --delimiter=- --fields=2 <<<"$wheel")
"$bin/twine" check --strict "$scratch"/first/*.{tar.gz,whl}
"$bin/check-wheel-contents" "$scratch/first/$wheel"

new=$scratch/environment
"$bin/python" -m venv --without-pip "$new"
pip() { "$bin/python" -m pip --python "$new/bin/python" install --quiet --no-deps "$@"; }
pip --require-hashes --only-binary :all: --requirement requirements/runtime.lock
# By its name: an installation by path is recorded, and the SBOM would have the path.
pip --no-index --find-links "$scratch/first" "imds-bridge==$version"
alone() { (cd "$new" && env --ignore-environment PATH="$new/bin" HOME="$new" "$new/bin/$1" "${@:2}"); }
alone python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("proton") is not None)'
[ "$(alone imds-bridge --version)" = "imds-bridge $version" ] || fail "$(alone imds-bridge --version) was built as $version"
for name in completion.bash completion.zsh; do
    alone imds-bridge completion "${name#*.}" | cmp --silent - "bridge/cli/share/$name" || fail "there is no $name"
done
[ -s "$new/share/man/man1/imds-bridge.1" ] || fail "there is no man page"
alone imds-bridge demo --no-bus --fast | tail -n 1

pip --require-hashes --only-binary :all: --requirement requirements/pip.lock # which a release has, too
sbom=$scratch/first/imds-bridge.cdx.json
"$bin/cyclonedx-py" environment --output-reproducible --output-file "$sbom" "$new/bin/python" 2>/dev/null
"$bin/python" -m tools.packaging.licences "$sbom"
"$bin/python" -m tools.packaging.sbom "$sbom" "$scratch"/first/*.tar
rm -rf dist
mkdir dist
cp "$scratch"/first/* dist
(cd dist && sha256sum -- * >"$scratch/SHA256SUMS" && mv "$scratch/SHA256SUMS" .)
echo "dist: ok, $wheel"
