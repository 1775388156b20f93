"""Build the release files and check them: `python -m infra.packaging.dist` (`make dist`).

The sdist is built from the checkout, the wheel from the sdist, and both again from the unpacked sdist in another
folder, umask and time zone: the files must be the same, byte for byte. The wheel is installed with the versions of
the runtime lock into a new environment, where the demo without a Service Bus must pass, with no other program on
PATH. Its packages become the SBOM, and their licences must be on the list below. Only then are the files moved to
`dist/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
LIMIT_SECONDS = 300.0
SBOM = "imds-bridge.cdx.json"
SUMS = "SHA256SUMS"
# What may be installed with an MIT-licensed program. cyclonedx-py names older metadata by its classifier.
LICENCES = {
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "License :: OSI Approved :: Apache Software License",
    "License :: OSI Approved :: BSD License",
    "License :: OSI Approved :: MIT License",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)",
    "MIT",
    "MIT-0",
    "MPL-2.0",
    "PSF-2.0",
}


def main() -> int:
    """Build, compare, check and try; return the exit code."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_seconds())
    with tempfile.TemporaryDirectory(prefix="imds-bridge-dist-") as folder:
        scratch = Path(folder)
        sdist, wheel = build_twice(scratch)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
        run(sys.executable, "-m", "check_wheel_contents", wheel)
        bin_folder = install(wheel, scratch / "environment")
        try_demo(bin_folder, version(wheel))
        licences = licences_of(write_sbom(bin_folder, scratch / SBOM))
        expect(not refused(licences), f"licences that are not on the list: {refused(licences)}")
        publish([sdist, wheel, scratch / SBOM])
    print("\n".join(f"{name}: {', '.join(names)}" for name, names in licences.items()))
    print(f"dist: ok, {wheel.name}, {len(licences)} packages in the SBOM")
    return 0


def commit_seconds() -> str:
    """Return the time of the last commit; outside git, the earliest that a zip file can hold."""
    try:
        return run("git", "log", "-1", "--format=%ct").strip()
    except (SystemExit, FileNotFoundError):
        return "315532800"


def build_twice(scratch: Path) -> tuple[Path, Path]:
    """Return the sdist and the wheel, which a second build elsewhere has reproduced.

    Raises:
        SystemExit: the second build differs.
    """
    sdist = build("sdist", ROOT, scratch / "first")
    wheel = build("wheel", unpack(sdist, scratch / "copy"), scratch / "first")
    copy = unpack(sdist, scratch / "elsewhere" / "copy")
    for target, expected in (("sdist", sdist), ("wheel", wheel)):
        again = build(target, copy, scratch / "second", umask=0o077, TZ="Asia/Tokyo", LC_ALL="C")
        expect(again.name == expected.name, f"built {expected.name}, then {again.name}")
        expect(again.read_bytes() == expected.read_bytes(), f"the second build of {expected.name} differs")
    return sdist, wheel


def build(target: str, source: Path, output: Path, *, umask: int = 0o022, **environ: str) -> Path:
    """Return the file that hatchling builds.

    Args:
        target: sdist or wheel.
        source: the folder with pyproject.toml.
        output: where the file is written.
        umask: of the build.
        environ: added to the environment.
    """
    before = set(output.glob("*"))
    command = (sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", output)
    run(*command, cwd=source, umask=umask, environ={**os.environ, **environ})
    (file,) = set(output.glob("*")) - before
    return file


def unpack(sdist: Path, target: Path) -> Path:
    """Unpack an sdist; return its only folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    (folder,) = target.iterdir()
    return folder


def install(wheel: Path, environment: Path) -> Path:
    """Install the wheel with the versions of the runtime lock; return the folder of its commands."""
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin/python", "--disable-pip-version-check")
    lock = ROOT / "requirements/runtime.lock"
    hashed = ("--require-hashes", "--only-binary", ":all:", "--requirement", lock)
    run(*pip, "install", "--no-deps", *hashed)
    # By its name: an installation by path is recorded, and the SBOM would have the path.
    built = ("--no-index", "--find-links", wheel.parent, f"imds-bridge=={version(wheel)}")
    run(*pip, "install", "--no-deps", *built)
    return environment / "bin"


def try_demo(bin_folder: Path, expected_version: str) -> None:
    """Run the installed command outside the checkout, with no other program on PATH."""
    cwd = bin_folder.parent
    alone = {"PATH": str(bin_folder), "HOME": str(cwd)}
    no_proton = "import importlib.util, sys; sys.exit(importlib.util.find_spec('proton') is not None)"
    run(bin_folder / "python", "-c", no_proton, cwd=cwd, environ=alone)
    shown = run(bin_folder / "imds-bridge", "--version", cwd=cwd, environ=alone)
    expect(shown == f"imds-bridge {expected_version}\n", f"expected {expected_version}, given {shown}")
    print(
        run(bin_folder / "imds-bridge", "demo", "--no-bus", "--fast", cwd=cwd, environ=alone).splitlines()[-1]
    )


def version(wheel: Path) -> str:
    """Return the version in a wheel's name."""
    return wheel.name.split("-")[1]


def write_sbom(bin_folder: Path, file: Path) -> dict[str, Any]:
    """Write the packages of an environment as CycloneDX; return the document."""
    command = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible")
    run(*command, "-o", file, bin_folder / "python")
    bom: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return bom


def licences_of(bom: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the licences that each package declares."""
    return {
        f"{package['name']} {package['version']}": [_licence(entry) for entry in package.get("licenses", [])]
        for package in bom["components"]
    }


def _licence(entry: Mapping[str, Any]) -> str:
    details = entry.get("license", {})
    return str(entry.get("expression") or details.get("id") or details.get("name"))


def refused(licences: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the packages that declare no licence, or one with a part that is not on the list."""
    return {
        name: given for name, given in licences.items() if not given or not LICENCES.issuperset(_parts(given))
    }


def _parts(expressions: Iterable[str]) -> set[str]:
    return {part for expression in expressions for part in re.split(r" (?:AND|OR) ", expression)}


def publish(files: Iterable[Path]) -> None:
    """Replace the content of `dist/` by these files and their checksums."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    copies = [Path(shutil.copy(file, DIST)) for file in sorted(files)]
    lines = (f"{hashlib.sha256(copy.read_bytes()).hexdigest()}  {copy.name}\n" for copy in copies)
    (DIST / SUMS).write_text("".join(lines), encoding="ascii")


def run(
    *command: str | Path, cwd: Path = ROOT, environ: Mapping[str, str] | None = None, umask: int = -1
) -> str:
    """Run a command; return its output.

    Args:
        command: the program and its arguments.
        cwd: its working folder.
        environ: its environment; without it, this one.
        umask: its umask; without it, this one.

    Raises:
        SystemExit: it failed, with its output.
    """
    done = subprocess.run(  # noqa: S603 - the commands of this file
        list(map(str, command)),
        cwd=cwd,
        env=environ,
        umask=umask,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    expect(done.returncode == 0, f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(holds: bool, otherwise: str) -> None:
    """End with this text unless the condition holds."""
    if not holds:
        raise SystemExit(f"dist: {otherwise}")


if __name__ == "__main__":
    sys.exit(main())
