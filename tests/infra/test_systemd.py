"""The units as checked by systemd, and an installation into a folder, run against the lab."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from bridge.config.loader import load
from bridge.runtime.threads import STALL_SECONDS
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS, environment, run, toml, wait_until
from tests.support.programs import tool

FOLDER = ROOT / "infra" / "systemd"
ROLES = ["console", "forward", "listen", "relay"]
MAX_EXPOSURE = 2.0
INSTALL_SECONDS = 600.0

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="systemd is not there"),
    pytest.mark.timeout(900),  # the first test installs everything, and the others wait for it
]


def unit(role: str) -> Path:
    return FOLDER / f"imds-bridge-{role}.service"


def setting(role: str, name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", unit(role).read_text(), re.MULTILINE)
    return str(value)


def do(*command: str | Path, timeout_seconds: float = LIMIT_SECONDS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env={**environment(), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


# --- the units ---


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    copies = [tmp_path / unit(role).name for role in ROLES]
    for role, copy in zip(ROLES, copies, strict=True):
        text = unit(role).read_text().replace("/opt/imds-bridge/bin/imds-bridge", sys.executable)
        copy.write_text(text)
    done = do(analyze, "verify", "--recursive-errors=yes", "--man=no", *copies)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("role", ["console", "listen", "relay"])
def test_the_units_differ_in_nothing_but_their_role_and_the_consoles_port(role: str) -> None:
    def settings(of: str) -> list[str]:
        lines = unit(of).read_text().replace(f" {of} ", " ROLE ").replace(f"-{of}", "-ROLE").splitlines()
        lines = [line.replace(f"/{of}", "/ROLE") for line in lines]
        return [
            line for line in lines if line and not line.startswith(("#", "Description=", "SocketBindAllow="))
        ]

    assert settings(role) == settings("forward")


@pytest.mark.parametrize("role", ROLES)
def test_a_unit_exposes_little_runs_a_command_and_waits_longer_than_a_loop_may_be_silent(role: str) -> None:
    done = do(tool("systemd-analyze"), "security", "--offline=true", "--no-pager", unit(role))
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert exposure, done
    assert float(exposure[1]) <= MAX_EXPOSURE, done.stdout
    assert run(*setting(role, "ExecStart").split()[1:], "--help").returncode == 0
    assert float(setting(role, "WatchdogSec")) >= 2 * STALL_SECONDS


# --- the script's options ---

TEXT = (FOLDER / "install.sh").read_text()


def test_the_usage_lists_the_options_that_are_parsed_and_the_page_names_no_other() -> None:
    shown = set(re.findall(r"--[a-z-]+", do(FOLDER / "install.sh", "--help").stdout))
    parsed = set(re.findall(r"^ {8}(?:-h \| )?(--[a-z-]+)\)", TEXT, re.MULTILINE)) - {"--help"}
    assert shown == parsed
    page = (FOLDER / "README.md").read_text()
    named = re.findall(r"install\.sh((?: --[a-z]+(?: [A-Za-z]\w*)?)+)|`(--[a-z]+)(?: [A-Z]+)?`", page)
    assert {option for pair in named for option in re.findall(r"--[a-z]+", " ".join(pair))} <= shown


# --- the installation ---


FOLDERS = ("bridge", "schemas", "tools/packaging", "infra/systemd", "requirements")  # of a checkout
FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tree with everything installed, shared by all test processes of a run."""
    base = tmp_path_factory.getbasetemp()
    tree = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tree"
    with (tree.parent / "installing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.exists():
            tree.mkdir()
            copy_checkout(tree.parent / "checkout")
            install(tree)
    return tree


def install(tree: Path, *options: str) -> str:
    """Run install.sh of the copy of the checkout beside a tree; return its output."""
    script = tree.parent / "checkout/infra/systemd/install.sh"
    done = do(script, "--root", tree, *options, timeout_seconds=INSTALL_SECONDS)
    assert done.returncode == 0, done
    return done.stdout


def copy_checkout(target: Path) -> None:
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, target)


def entries(tree: Path) -> dict[str, tuple[int, int, int]]:
    """Return every path below a tree with its mode, time of change and size."""
    found = {str(path): path.lstat() for path in tree.rglob("*")}
    return {path: (stat.st_mode, stat.st_mtime_ns, stat.st_size) for path, stat in found.items()}


@pytest.mark.parametrize(
    "name",
    [
        *("infra/systemd/install.sh", "infra/container/trial.sh", "tools/packaging/dist.sh", ".ci/run"),
        *("tests/windows/prepare", "tests/windows/python", "tests/windows/run", "tests/systemd/boot"),
        *("tests/support/debian", "tests/newcomer/run", "tools/packaging/pip_settings.sh"),
        "infra/consumers/dotnet/try.sh",
    ],
)
def test_a_script_is_clean(name: str) -> None:
    done = do(tool("shellcheck"), ROOT / name)
    assert done.returncode == 0, done.stdout


def test_to_install_again_changes_nothing(installed: Path) -> None:
    before = entries(installed)
    *_, nothing, start = install(installed).splitlines()
    assert (nothing, start.endswith(": systemctl enable --now imds-bridge-forward")) == (
        "imds-bridge: nothing has changed",
        True,
    )
    assert entries(installed) == before


def test_the_installed_program_runs_with_its_own_packages_typed_and_no_others(
    installed: Path, tmp_path: Path
) -> None:
    home = installed / "opt/imds-bridge"
    done = do(home / "bin/python", home / "bin/imds-bridge", "schema", "--write", tmp_path / "new")
    assert done.returncode == 0, done
    written = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert written == {path.name: path.read_text() for path in (ROOT / "schemas").glob("*.json")}
    (packages,) = home.glob("lib/*/site-packages")
    names = {path.name for path in packages.iterdir()}
    assert {"bridge", "azure", "requests", "uvicorn", "websocket"} <= names
    assert not names & {"pytest", "hypothesis", "mypy", "ruff", "hatchling", "shtab", "pip", "proton"}
    assert (packages / "bridge/py.typed").exists()


def test_what_is_installed_is_found_named_as_it_runs_later_and_only_root_can_read_the_configuration(
    installed: Path,
) -> None:
    home, etc = installed / "opt/imds-bridge", installed / "etc/imds-bridge"
    for path in [*home.glob("bin/*"), home / "pyvenv.cfg"]:
        if not path.is_symlink():
            assert str(installed).encode() not in path.read_bytes(), path
    assert (home / "bin/imds-bridge").read_text().startswith("#!/opt/imds-bridge/bin/python\n")
    for link in (
        *("bin/imds-bridge", "share/man/man1/imds-bridge.1"),
        *("share/bash-completion/completions/imds-bridge", "share/zsh/site-functions/_imds-bridge"),
    ):
        target = (installed / "usr/local" / link).readlink()
        assert target == Path("/opt/imds-bridge") / link
        assert (installed / str(target)[1:]).stat().st_size
    modes = [oct(path.stat().st_mode & 0o777) for path in (etc, etc / "secrets", etc / "config.toml")]
    assert modes == ["0o700", "0o700", "0o600"]
    for role in ROLES:
        assert (etc / f"{role}.toml").readlink() == Path("config.toml")
        assert (etc / f"{role}.secrets").readlink() == Path("secrets")


@pytest.fixture
def copy(installed: Path, tmp_path: Path) -> Path:
    """Return a separate tree, with everything but the packages."""
    tree = tmp_path / "tree"
    shutil.copytree(installed, tree, symlinks=True, ignore=shutil.ignore_patterns("site-packages"))
    state = tree / "var/lib/private/imds-bridge/forward"
    state.mkdir(parents=True)
    (state / "outbox.db").touch()
    return tree


def test_an_upgrade_keeps_own_configurations_and_the_version_before_and_a_rollback_exchanges_the_two(
    installed: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(installed, tree, symlinks=True)
    shutil.copytree(installed.parent / "checkout", tmp_path / "checkout")
    changed = tmp_path / "checkout/infra/systemd" / unit("forward").name
    changed.write_text(changed.read_text() + "# a newer unit\n")
    (tmp_path / "checkout/bridge/added.py").touch()
    own = tree / "etc/imds-bridge/listen.toml"  # of a process with its own identity
    own.unlink()
    own.write_text("# its own\n")

    def newer() -> list[bool]:
        """Return for the program, the one before it, and the unit that systemd reads, whether it is the newer."""
        found = []
        for home in ("imds-bridge", "imds-bridge.previous"):
            added = [*tree.glob(f"opt/{home}/lib/*/site-packages/bridge/added.py")]
            assert bool(added) == ("newer" in (tree / f"opt/{home}/systemd" / changed.name).read_text())
            found.append(bool(added))
        return [*found, "newer" in (tree / "etc/systemd/system" / changed.name).read_text()]

    install(tree)
    assert newer() == [True, False, True]
    assert own.read_text() == "# its own\n"
    for expected in ([False, True, False], [True, False, True]):
        kept_script = tree / "opt/imds-bridge/systemd/install.sh"  # no checkout is needed
        assert do(kept_script, "--rollback", "--root", tree).returncode == 0
        assert newer() == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"": "newer", ".back": "older"}, {"": "older", ".previous": "newer"}),
        ({".previous": "newer", ".back": "older"}, {"": "older", ".previous": "newer"}),
        ({".previous": "older"}, {"": "older"}),
    ],
    ids=["first step of a rollback", "second step of a rollback", "upgrade"],
)
def test_a_rollback_finishes_what_was_interrupted(
    before: dict[str, str], after: dict[str, str], copy: Path
) -> None:
    program = copy / "opt/imds-bridge"
    complete = program.rename(copy / "complete")
    for suffix, name in before.items():
        target = shutil.copytree(complete, f"{program}{suffix}", symlinks=True)
        Path(target, "name").write_text(name)
    assert do(FOLDER / "install.sh", "--rollback", "--root", copy).returncode == 0
    found = {path.name: (path / "name").read_text() for path in program.parent.iterdir()}
    assert found == {f"imds-bridge{suffix}": name for suffix, name in after.items()}


def test_a_rollback_without_a_version_before_is_refused_and_changes_nothing(copy: Path) -> None:
    before = left(copy)
    done = do(FOLDER / "install.sh", "--rollback", "--root", copy)
    assert done.returncode == 2
    assert "only one version was installed" in done.stderr
    assert left(copy) == before


def left(tree: Path) -> list[str]:
    return sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if not path.is_dir())


def test_uninstalling_keeps_configuration_and_state_and_purging_leaves_nothing(copy: Path) -> None:
    drop_in = copy / "etc/systemd/system/imds-bridge-.service.d/secrets.conf"
    drop_in.parent.mkdir()
    drop_in.touch()
    before = left(copy)
    kept = [f"etc/imds-bridge/{name}.toml" for name in ("config", *ROLES)]
    kept += [str(drop_in.relative_to(copy)), "var/lib/private/imds-bridge/forward/outbox.db"]
    for options, expected in (
        (["--purge", "--dry-run"], before),
        ([], kept),
        ([], kept),
        (["--purge"], []),
    ):
        done = do(FOLDER / "install.sh", "--uninstall", *options, "--root", copy)
        assert (done.returncode, left(copy)) == (0, expected), done


# --- the task "Add a channel" of docs/operations.md ---

NOBODY = 65534


def find_python() -> Path:
    """Return an interpreter of the installed version that another user can run, unlike one in a home folder."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for place in (Path(sys.executable).resolve(), Path("/usr/bin", version), Path("/usr/local/bin", version)):
        with suppress(OSError):
            done = subprocess.run(
                [place, "-c", "import ssl, sqlite3"],
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                check=False,
                cwd="/",
            )
            if done.returncode == 0:
                return place
    pytest.skip(f"another user can run no {version}")


@pytest.fixture
def machine(installed: Path, imds: ImdsLab) -> Iterator[Path]:
    """Return a tree whose program everybody may run and whose configuration only root may read."""
    if os.getuid():
        pytest.skip("only root can start a process as another user")
    python = find_python()
    with TemporaryDirectory(dir="/tmp") as folder:
        tree = Path(folder)
        tree.chmod(0o755)
        for name in ("etc/imds-bridge", "etc/systemd", "opt"):
            shutil.copytree(installed / name, tree / name, symlinks=True)
        home = tree / "opt/imds-bridge"
        (home / "bin/python").unlink()
        (home / "bin/python").symlink_to(python)
        settings_of_home = re.sub(
            r"(?m)^home = .*", f"home = {python.parent}", (home / "pyvenv.cfg").read_text()
        )
        (home / "pyvenv.cfg").write_text(settings_of_home)
        state = tree / "state"
        state.mkdir()
        settings = {"state_dir": str(state), "imds": {"endpoint": imds.url("web-0")}}
        (tree / "etc/imds-bridge/config.toml").write_text(toml(settings))
        yield tree


def as_root(tree: Path, command: str, **variables: str) -> None:
    """Run a command of the page, in a tree in the place of the machine."""
    command = re.sub(r"/etc/imds-bridge\b", f"{tree}/etc/imds-bridge", command)
    program = f"{tree}/opt/imds-bridge/bin/python {tree}/opt/imds-bridge/bin/imds-bridge"
    if command.startswith("imds-bridge ") and not command.startswith("imds-bridge config "):
        command += f" --config {tree}/etc/imds-bridge/config.toml"
    command = re.sub(r"^imds-bridge\b", program, command)
    done = subprocess.run(
        [tool("sh"), "-c", command],
        env=environment(variables),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def copy_credentials(tree: Path, role: str) -> Path:
    """Return a folder with what systemd copies for a unit, for its user alone.

    systemd.exec(5): of a folder each file that is no link, as ID_NAME; a folder that is missing has a default.
    """
    folder = tree / f"run-{role}"
    folder.mkdir()
    for name, source in re.findall(r"^LoadCredential=(.+):(.+)$", unit(role).read_text(), re.MULTILINE):
        path = tree / source[1:]
        if path.is_dir():
            for file in path.iterdir():
                shutil.copy(file, folder / f"{name}_{file.name}")
        elif path.exists() or f"SetCredential={name}:" not in unit(role).read_text():
            shutil.copy(path, folder / name)
    for file in [*folder.iterdir(), folder]:
        os.chown(file, NOBODY, NOBODY)
        file.chmod(0o500 if file == folder else 0o400)
    return folder


@contextmanager
def unit_started(tree: Path, role: str) -> Iterator[subprocess.Popen[str]]:
    """Start what a unit starts, as another user, with its credentials."""
    credentials = copy_credentials(tree, role)
    os.chown(tree / "state", NOBODY, NOBODY)
    program, *arguments = setting(role, "ExecStart").replace("%d", str(credentials)).split()
    process = subprocess.Popen(
        [str(tree / "opt/imds-bridge/bin/python"), f"{tree}{program}", *arguments],
        env=environment(),
        cwd=credentials,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def add_a_channel(tree: Path, url: str, *, named: str = "chat-url") -> None:
    """Do what the page says, before the restart."""
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    steps = page.partition("### Add a channel\n")[2].partition("\n### ")[0]
    (settings,) = re.findall(r"```toml\n(.*?)```", steps, re.DOTALL)
    first, *commands = re.findall(r"`((?:\(umask|imds-bridge ).*?)`", re.sub(r"(?s)```.*?```", "", steps))
    assert [command.split()[1] for command in commands] == ["config", "render", "check", "status"]
    as_root(tree, first, URL=url)
    with (tree / "etc/imds-bridge/config.toml").open("a") as config:
        config.write(textwrap.dedent(f"   {settings}").replace('"chat-url"', json.dumps(named)))
    for command in commands[:3]:
        as_root(tree, command)


@pytest.mark.parametrize("named", ["chat-url", "/etc/imds-bridge/secrets/chat-url"])
def test_a_channel_that_is_added_as_the_page_says_gets_events_from_a_service_of_another_user(
    machine: Path, imds: ImdsLab, any_inbox: Inbox, named: str
) -> None:
    given = named.replace("/etc", f"{machine}/etc")
    add_a_channel(machine, any_inbox.url, named=given)
    assert len(any_inbox.accepted) == 1
    with unit_started(machine, "forward"):
        imds.schedule(event_type="Reboot", resources=["web-0"])
        any_inbox.wait_for(2)


def test_a_secret_where_only_root_can_read_it_fails_the_check_and_would_stop_the_service(
    machine: Path, any_inbox: Inbox
) -> None:
    (machine / "etc/imds-bridge/other-url").write_text(any_inbox.url)
    with pytest.raises(AssertionError, match=r"imds-bridge-forward.service cannot read \S+other-url"):
        add_a_channel(machine, any_inbox.url, named=f"{machine}/etc/imds-bridge/other-url")
    with unit_started(machine, "forward") as process:
        assert process.wait(LIMIT_SECONDS) == 2


def test_a_missing_folder_of_secrets_stops_no_unit(machine: Path) -> None:
    shutil.rmtree(machine / "etc/imds-bridge/secrets")
    with unit_started(machine, "forward"):
        wait_until((machine / "state/forward/status.json").exists)


def test_a_dry_run_of_an_installation_changes_nothing(tmp_path: Path) -> None:
    done = do(FOLDER / "install.sh", "--dry-run", "--root", tmp_path)
    assert done.returncode == 0, done
    assert "imds-bridge-listen.service" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ("--start no", "--start: given no, expected one of: console forward listen relay"),
        ("--wheel", "--wheel needs a value"),
        ("--wheel /nowhere.whl", "--wheel: there is no file /nowhere.whl"),
        ("--root /nowhere", "--root: there is no folder /nowhere"),
        ("--root /proc --start listen", "--start: nothing runs in /proc"),
        ("--purge", "--purge: only with --uninstall"),
        ("--rollback --start listen", "--rollback: neither with --wheel nor with --start"),
        ("--instal", "unknown option --instal"),
        ("--dry-run", "systemd 252 or newer; here it is 251"),
    ],
)
def test_what_cannot_be_installed_is_named_and_nothing_is_done(
    tmp_path: Path, arguments: str, fault: str
) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text("#!/bin/sh\necho 'systemd 251 (251.4-1ubuntu7)'\n")
    systemctl.chmod(0o755)
    done = do("env", f"PATH={tmp_path}:{os.environ['PATH']}", FOLDER / "install.sh", *arguments.split())
    assert done.returncode == 2
    assert fault in done.stderr


# --- cloud-init and the extension; tests/infra/test_docs.py loads their configurations ---


def test_the_skeleton_of_the_configuration_is_valid_with_its_examples(tmp_path: Path) -> None:
    text = (FOLDER / "config.toml").read_text()
    (tmp_path / "ops-url").write_text("https://example.org/hook")
    lines = [line.removeprefix("# ") for line in text.partition("# [sinks.ops]")[2].splitlines()]
    full = "[sinks.ops]\n" + "\n".join(line for line in lines if not line.startswith(("For ", "#")))
    config = tmp_path / "config.toml"
    config.write_text(full.replace('"ops-url"', json.dumps(str(tmp_path / "ops-url"))))
    loaded = load(config, {})
    assert set(loaded.sinks) == {"ops", "audit"}
    assert loaded.approvals is not None


def test_cloud_init_and_the_extension_run_a_clean_script_with_an_identity_for_each_process(
    tmp_path: Path,
) -> None:
    text = (FOLDER / "cloud-init.yaml").read_text()
    assert text.startswith("#cloud-config\n")
    given = yaml.safe_load(text)
    files = {file["path"]: file for file in given["write_files"]}
    for name, identity in (("config", "imds-forward"), ("listen", "imds-listen")):
        content = files[f"/etc/imds-bridge/{name}.toml"]["content"]
        assert {*re.findall(r'client_id = "(.*)"', content)} == {f"CLIENT ID OF {identity}"}
    ((path,),) = given["runcmd"]
    assert files[path]["permissions"] == "0755"
    extension = json.loads((FOLDER / "vmss-extension.json").read_text())["properties"]
    command = extension["protectedSettings"]["commandToExecute"]
    for script in (files[path]["content"], f"#!/bin/sh\n{command}\n"):
        (tmp_path / "install.sh").write_text(script)
        done = do(tool("shellcheck"), tmp_path / "install.sh")
        assert done.returncode == 0, done.stdout
        (options,) = re.findall(r"imds-bridge/infra/systemd/install\.sh ([^;\n]*)", script)
        assert options == "--start forward --start listen"
