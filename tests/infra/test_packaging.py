"""The version from git, and the checks of the release files."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bridge import __version__
from tests.support.paths import ROOT
from tools.packaging import licences, sbom

BUILD_FILES = (".git_archival.txt", ".gitattributes", ".gitignore", "LICENSE", "README.md", "pyproject.toml")


def run(*command: str, cwd: Path) -> str:
    """Run a command that must succeed; return its output."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


def git(repository: Path, *arguments: str) -> str:
    author = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    return run("git", *author, *arguments, cwd=repository)


def version_of(source: Path) -> str:
    return run(sys.executable, "-m", "hatchling", "version", cwd=source)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with what the build reads, at the tag v1.2.3."""
    folder = tmp_path / "repository"
    built = shutil.ignore_patterns("__pycache__", "share", "version.txt")
    for name in ("bridge", "tools/packaging", "schemas"):
        shutil.copytree(ROOT / name, folder / name, ignore=built)
    for name in BUILD_FILES:
        (folder / name).write_bytes((ROOT / name).read_bytes())
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=First")
    git(folder, "tag", "v1.2.3")
    return folder


def archive(repository: Path, target: Path) -> Path:
    """Unpack what `git archive` makes of the last commit, without git's data."""
    git(repository, "archive", f"--output={target}.zip", "HEAD")
    with zipfile.ZipFile(f"{target}.zip") as file:
        file.extractall(target)
    return target


def test_the_version_is_the_tag_and_after_it_the_distance_the_commit_and_what_was_changed(
    repository: Path, tmp_path: Path
) -> None:
    assert version_of(repository) == "1.2.3"
    git(repository, "commit", "--quiet", "--allow-empty", "--message=Second")
    commit = git(repository, "rev-parse", "--short=7", "HEAD")
    copy = archive(repository, tmp_path / "archive")
    for source in (repository, copy):
        assert version_of(source).startswith(f"1.3.0.dev1+g{commit}")
    (repository / "LICENSE").write_text("changed")
    assert version_of(repository).startswith(f"1.3.0.dev1+g{commit}")
    assert ".d" in version_of(repository).partition("+")[2]
    (copy / ".git_archival.txt").unlink()  # a copy without the data of git can be built
    assert version_of(copy) == "0.0.0"


def test_a_built_package_knows_its_version_and_a_bare_source_has_none(repository: Path) -> None:
    show = (sys.executable, "-c", "import bridge; print(bridge.__version__)")
    assert run(*show, cwd=repository) == "0.0.0"
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", cwd=repository)
    assert run(*show, cwd=repository) == "1.2.3"
    assert __version__


def test_what_the_build_writes_is_not_committed() -> None:
    assert git(ROOT, "ls-files", "bridge/version.txt", "bridge/cli/share") == ""
    assert git(ROOT, "check-ignore", "bridge/version.txt", "bridge/cli/share/imds-bridge.1").count("\n") == 1


@pytest.mark.parametrize(
    ("given", "is_allowed"),
    [
        ([{"license": {"id": "MIT"}}, {"expression": "Apache-2.0 AND BSD-2-Clause"}], True),
        ([{"expression": "MIT AND AGPL-3.0-only"}], False),
        ([{"expression": "AGPL-3.0-only"}], False),
        ([{"license": {"id": "MIT"}}, {"license": {"name": "License :: Other/Proprietary License"}}], False),
        ([], False),
    ],
)
def test_licences_that_are_missing_or_not_listed_are_refused(
    tmp_path: Path, given: list[dict[str, object]], is_allowed: bool
) -> None:
    sbom = tmp_path / "sbom.json"
    sbom.write_text(json.dumps({"components": [{"name": "one", "version": "1", "licenses": given}]}))
    assert licences.main(sbom) == (0 if is_allowed else 1)


def test_the_sbom_names_the_file_that_its_components_are_in(tmp_path: Path) -> None:
    file, written = tmp_path / "imds-bridge-1.2.3.tar", tmp_path / "sbom.json"
    file.write_bytes(b"")
    written.write_text('{"components": [], "metadata": {"timestamp": "now"}}')
    sbom.add(written, file)
    named = json.loads(written.read_text())["metadata"]
    assert (named["timestamp"], named["component"]["name"]) == ("now", file.name)
    assert named["component"]["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256().hexdigest()}]
