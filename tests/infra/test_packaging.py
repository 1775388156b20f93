"""The version from git, and the checks of the release files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bridge import __version__
from infra.packaging import dist
from tests.support.paths import ROOT

BUILD_FILES = (".git_archival.txt", ".gitattributes", ".gitignore", "LICENSE", "README.md", "pyproject.toml")


def git(repository: Path, *arguments: str) -> str:
    author = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    return dist.run("git", *author, *arguments, cwd=repository).strip()


def version_of(source: Path) -> str:
    return dist.run(sys.executable, "-m", "hatchling", "version", cwd=source).strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with what the build reads, at the tag v1.2.3."""
    folder = tmp_path / "repository"
    (folder / "bridge").mkdir(parents=True)
    shutil.copytree(ROOT / "bridge/cli/share", folder / "bridge/cli/share")
    for name in (*BUILD_FILES, "bridge/__init__.py"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=First")
    git(folder, "tag", "v1.2.3")
    return folder


def archive(repository: Path, target: Path) -> Path:
    """Unpack what `git archive` makes of the last commit, without git's data."""
    git(repository, "archive", f"--output={target}.tar", "HEAD")
    with tarfile.open(f"{target}.tar") as file:
        file.extractall(target, filter="data")
    return target


def test_a_tag_is_the_version(repository: Path) -> None:
    assert version_of(repository) == "1.2.3"


def test_a_commit_after_a_tag_shows_the_distance_and_the_commit(repository: Path, tmp_path: Path) -> None:
    git(repository, "commit", "--quiet", "--allow-empty", "--message=Second")
    commit = git(repository, "rev-parse", "HEAD")
    for source in (repository, archive(repository, tmp_path / "archive")):
        public, _, local = version_of(source).partition("+g")
        assert public == "1.3.0.dev1"
        assert commit.startswith(local)


def test_a_changed_file_marks_the_version(repository: Path) -> None:
    commit = git(repository, "rev-parse", "--short=9", "HEAD")
    (repository / "LICENSE").write_text("changed")
    assert version_of(repository).startswith(f"1.3.0.dev0+g{commit}.d")


def test_a_copy_without_the_data_of_git_can_be_built(repository: Path, tmp_path: Path) -> None:
    copy = archive(repository, tmp_path / "archive")
    (copy / ".git_archival.txt").unlink()
    assert version_of(copy) == "0.0.0"


def test_a_built_package_knows_its_version_and_a_bare_source_has_none(repository: Path) -> None:
    show = (sys.executable, "-c", "import bridge; print(bridge.__version__)")
    assert dist.run(*show, cwd=repository) == "0.0.0\n"
    dist.build("wheel", repository, repository / "dist")
    assert dist.run(*show, cwd=repository) == "1.2.3\n"
    assert __version__


def test_the_version_file_is_not_committed() -> None:
    ignored = subprocess.run(
        ["git", "check-ignore", "--quiet", "bridge/version.txt"],  # noqa: S607 - git itself
        cwd=ROOT,
        check=False,
    )
    assert ignored.returncode == 0


def test_a_second_build_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[Path] = []

    def build(target: str, _source: Path, output: Path, **_: object) -> Path:
        output.mkdir(exist_ok=True)
        built.append(output / f"imds_bridge-1.{target}")
        built[-1].write_text(str(len(built)))
        return built[-1]

    monkeypatch.setattr(dist, "build", build)
    monkeypatch.setattr(dist, "unpack", lambda _sdist, target: target)
    with pytest.raises(SystemExit, match=r"the second build of imds_bridge-1\.sdist differs"):
        dist.build_twice(tmp_path)


def component(name: str, *licences: dict[str, object]) -> dict[str, object]:
    return {"name": name, "version": "1", "licenses": list(licences)}


def test_licences_that_are_missing_or_not_listed_are_refused() -> None:
    mit: dict[str, object] = {"license": {"id": "MIT"}}
    agpl: dict[str, object] = {"expression": "AGPL-3.0-only"}
    classifier: dict[str, object] = {"license": {"name": "License :: Other/Proprietary License"}}
    both: dict[str, object] = {"expression": "Apache-2.0 AND BSD-2-Clause"}
    mixed: dict[str, object] = {"expression": "MIT AND AGPL-3.0-only"}
    components = [
        component("good", mit, both),
        component("mixed", mixed),
        component("bad", agpl),
        component("half", mit, classifier),
        component("none"),
    ]
    assert dist.refused(dist.licences_of({"components": components})) == {
        "bad 1": ["AGPL-3.0-only"],
        "mixed 1": ["MIT AND AGPL-3.0-only"],
        "half 1": ["MIT", "License :: Other/Proprietary License"],
        "none 1": [],
    }
