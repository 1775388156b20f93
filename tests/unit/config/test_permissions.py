"""What everybody may write is found: the configuration, the files that it names, and the state."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bridge.config.loader import load
from bridge.config.models import find_exposed
from tests.support.settings import webhook

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="permissions are lists there, of which stat shows nothing"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a configuration and its files, which only their owner may write."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "url").write_text("https://example.org/?secret")
    (tmp_path / "state" / "forward").mkdir(parents=True)
    (tmp_path / "config.toml").write_text(
        f'state_dir = "{tmp_path}/state"\n{webhook(url=None, url_file=tmp_path / "secrets" / "url")}'
    )
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return tmp_path


def exposed(folder: Path) -> set[str]:
    config = load(folder / "config.toml", {})
    return {str(path.relative_to(folder)) for path in find_exposed(config, "forward")}


@pytest.mark.parametrize("name", ["config.toml", ".", "secrets/url", "secrets", "state", "state/forward"])
def test_what_everybody_may_write_is_exposed(folder: Path, name: str) -> None:
    assert exposed(folder) == set()
    path = folder / name
    path.chmod(path.stat().st_mode | 0o002)
    assert exposed(folder) == {name}


def test_a_group_may_write_and_so_may_everybody_in_a_folder_with_the_sticky_bit(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode | 0o020)
    folder.chmod(0o1777)
    assert exposed(folder) == set()


def test_the_folder_that_a_link_leads_to_counts_as_well(folder: Path) -> None:
    target = folder / "target"
    target.mkdir()
    (folder / "secrets" / "url").rename(target / "url")
    (folder / "secrets" / "url").symlink_to(target / "url")
    target.chmod(0o777)
    assert exposed(folder) == {"target"}
