"""What everybody may write is found, and so are secrets that are named without their path."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.config.loader import load
from bridge.config.models import find_exposed
from bridge.errors import ConfigError
from tests.support.only import only
from tests.support.settings import webhook

pytestmark = pytest.mark.posix("permissions are lists on Windows, of which stat shows nothing")


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


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """Return the folder of the configuration of an installed tree."""
    etc = tmp_path / "etc/imds-bridge"
    (etc / "secrets").mkdir(parents=True)
    for name in ("secrets/ops-url", "ops-url"):
        (etc / name).write_text("https://example.org/hook")
    return etc


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("ops-url", "secrets/ops-url"),
        ("/etc/imds-bridge/secrets/ops-url", "secrets/ops-url"),
        ("own", "config.secrets/own"),
        ("copied", "secrets_copied"),
        ("/etc/imds-bridge/secrets/copied", "secrets_copied"),
    ],
)
def test_a_secret_is_found_beside_the_configuration_and_among_systemds_copies(
    etc: Path, given: str, found: str
) -> None:
    (etc / "config.secrets").mkdir()
    for name in ("config.secrets/own", "secrets_copied"):
        (etc / name).write_text("https://example.org/hook")
    (etc / "config.toml").write_text(webhook(url=None, url_file=given))
    sink = only(load(etc / "config.toml", {}).sinks.values())
    assert sink.model_dump()["url"]["file"] == etc / found


@pytest.mark.parametrize("given", ["ops-url", "/etc/imds-bridge/secrets/ops-url"])
def test_what_a_drop_in_loads_comes_before_the_folder_wherever_the_configuration_is(
    etc: Path, given: str
) -> None:
    credentials = etc.parent / "credentials"
    credentials.mkdir()
    (etc / "config.toml").write_text(webhook(url=None, url_file=given))
    for folder, place in ((etc, "secrets_ops-url"), (credentials, "ops-url")):
        (folder / place).write_text("https://example.org/hook")
        sink = only(load(etc / "config.toml", {"CREDENTIALS_DIRECTORY": str(credentials)}).sinks.values())
        assert sink.model_dump()["url"]["file"] == folder / place


@pytest.mark.parametrize("given", ["missing", "/etc/elsewhere/ops-url", "a\0b"])
def test_another_name_stays_as_it_is_given(etc: Path, given: str) -> None:
    (etc / "config.toml").write_text(webhook(url=None, url_file=given))
    with pytest.raises(ConfigError, match=r"expected a file that can be read|null byte"):
        load(etc / "config.toml", {})
