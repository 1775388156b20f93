"""The units as checked by systemd, and an installation into a folder, run against the lab."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from bridge.cli.main import COMMANDS
from bridge.config.in_service import InServiceSettings
from bridge.config.loader import load
from bridge.runtime.threads import STALL_SECONDS
from tests.support.only import only
from tests.support.paths import ROOT
from tests.support.process import completed, environment, run
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
    return str(only(re.findall(rf"^{name}=(.*)$", unit(role).read_text(), re.MULTILINE)))


def do(*command: str | Path, cwd: str | Path = "/") -> subprocess.CompletedProcess[str]:
    given = {**environment(), "PYTHON": sys.executable, "PIP_NO_COMPILE": "1"}
    given.pop("PYTHONPATH", None)  # what is installed runs by itself
    return completed(*command, env=given, cwd=cwd, limit_seconds=INSTALL_SECONDS)


# --- the units ---


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    for role in ROLES:
        text = unit(role).read_text().replace("/opt/imds-bridge/bin/imds-bridge", sys.executable)
        (tmp_path / unit(role).name).write_text(text)
    done = do(analyze, "verify", "--recursive-errors=yes", "--man=no", *tmp_path.iterdir())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("role", ["console", "listen", "relay"])
def test_the_units_differ_in_nothing_but_their_role_and_their_ports(role: str) -> None:
    def settings(of: str) -> list[str]:
        lines = re.sub(rf"(?<=[ /-]){of}\b", "ROLE", unit(of).read_text()).splitlines()
        return [line for line in lines if not line.startswith(("#", "Description=", "SocketBindAllow="))]

    assert settings(role) == settings("forward")


def test_a_load_balancer_reaches_the_listener_where_it_answers_by_default() -> None:
    port = InServiceSettings().listen.rpartition(":")[2]
    assert f"\nSocketBindAllow=tcp:{port}\n" in unit("listen").read_text()


def test_a_unit_exposes_little_runs_a_command_and_waits_longer_than_a_loop_may_be_silent() -> None:
    """All are as that of forward, whose names are those of commands."""
    done = do(tool("systemd-analyze"), "security", "--offline=true", "--no-pager", unit("forward"))
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert exposure, done
    assert float(exposure[1]) <= MAX_EXPOSURE, done.stdout
    assert run(*setting("forward", "ExecStart").split()[1:], "--help").returncode == 0
    assert {*ROLES} <= {*COMMANDS}
    assert float(setting("forward", "WatchdogSec")) >= 2 * STALL_SECONDS


def test_a_program_at_the_limit_of_memory_does_not_restart_the_unit() -> None:
    assert (setting("listen", "MemoryMax"), setting("listen", "OOMPolicy")) == ("512M", "continue")


# --- the script's options ---

TEXT = (FOLDER / "install.sh").read_text()
SYSTEMS = (FOLDER / "systems.txt").read_text()


def test_the_usage_lists_the_options_that_are_parsed_and_the_page_names_no_other() -> None:
    shown = set(re.findall(r"--[a-z-]+", do(FOLDER / "install.sh", "--help").stdout))
    parsed = set(re.findall(r"^ {8}(?:-h \| )?(--[a-z-]+)\)", TEXT, re.MULTILINE)) - {"--help"}
    assert shown == parsed
    page = (FOLDER / "README.md").read_text()
    named = re.findall(r"install\.sh((?: --[a-z]+(?: [A-Za-z]\w*)?)+)|`(--[a-z]+)(?: [A-Z]+)?`", page)
    assert {option for pair in named for option in re.findall(r"--[a-z]+", " ".join(pair))} <= shown


# --- the installation ---


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tree with everything installed, shared by all test processes of a run."""
    base = tmp_path_factory.getbasetemp()
    tree = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tree"
    with (tree.parent / "installing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.exists():
            checkout = tree.parent / "checkout"
            for name in ("bridge", "schemas", "tools/packaging", "infra/systemd", "requirements"):
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
            for name in ("pyproject.toml", "README.md", "LICENSE"):
                shutil.copy(ROOT / name, checkout)
            built = do(sys.executable, "-m", "hatchling", "build", "--target", "wheel", cwd=checkout)
            assert built.returncode == 0, built
            tree.mkdir()
            install(tree)
    return tree


def install(tree: Path) -> str:
    """Install the wheel of the copy of the checkout beside a tree, by its script; return the output."""
    checkout = tree.parent / "checkout"
    wheel = only(checkout.glob("dist/*.whl"))
    done = do(checkout / "infra/systemd/install.sh", "--root", tree, "--wheel", wheel)
    assert done.returncode == 0, done
    return done.stdout


def entries(tree: Path) -> dict[str, tuple[int, int, int]]:
    """Return every path below a tree with its mode, time of change and size."""
    found = {str(path): path.lstat() for path in tree.rglob("*")}
    return {path: (stat.st_mode, stat.st_mtime_ns, stat.st_size) for path, stat in found.items()}


def test_the_scripts_are_clean() -> None:
    found = do("git", "grep", "-lE", "^#! ?/(usr/)?bin/(env )?(ba|da)?sh", cwd=ROOT).stdout.split()
    assert "infra/systemd/install.sh" in found
    done = do(tool("shellcheck"), *found, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_to_install_again_changes_nothing(installed: Path) -> None:
    before = entries(installed)
    *_, nothing, start = install(installed).splitlines()
    assert nothing == "imds-bridge: nothing has changed"
    assert start.endswith(": systemctl enable --now imds-bridge-forward")
    assert entries(installed) == before


def test_the_installed_program_runs_with_its_own_packages_typed_and_no_others(
    installed: Path, tmp_path: Path
) -> None:
    home = installed / "opt/imds-bridge"
    # -B: another test process may be comparing the tree with what it was.
    done = do(home / "bin/python", "-B", home / "bin/imds-bridge", "schema", "--write", tmp_path / "new")
    assert done.returncode == 0, done
    written = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert written == {path.name: path.read_text() for path in (ROOT / "schemas").glob("*.json")}
    packages = only(home.glob("lib/*/site-packages"))
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
    assert (
        (home / "bin/imds-bridge").read_text().startswith("#!/opt/imds-bridge/bin/python -IXfaulthandler\n")
    )
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


def write_newer(folder: Path) -> Path:
    """Write a newer version that does nothing: a wheel, and its script with changed units; return the script."""
    shutil.copytree(FOLDER, folder / "systemd")
    (folder / "systemd/runtime.lock").touch()  # it needs no packages
    for role in ROLES:
        (folder / "systemd" / unit(role).name).write_text("# newer\n")
    about = "imds_bridge-99.dist-info"
    with zipfile.ZipFile(folder / "imds_bridge-99-py3-none-any.whl", "w") as wheel:
        wheel.writestr("bridge/__main__.py", "")
        wheel.writestr("bridge/version.txt", "99")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: imds-bridge\nVersion: 99\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return folder / "systemd/install.sh"


def test_an_upgrade_keeps_own_configurations_and_the_version_before_and_a_rollback_exchanges_the_two(
    copy: Path, tmp_path: Path
) -> None:
    own = copy / "etc/imds-bridge/listen.toml"  # of a process with its own identity
    own.unlink()
    own.write_text("# its own\n")

    def newer() -> list[bool]:
        """Return for the program, the one before it, and the unit that systemd reads, whether it is the newer."""
        found = []
        for home in ("imds-bridge", "imds-bridge.previous"):
            version = [*copy.glob(f"opt/{home}/lib/*/site-packages/bridge/version.txt")]
            found.append("newer" in (copy / f"opt/{home}/systemd" / unit("forward").name).read_text())
            assert bool(version) == found[-1]
        return [*found, "newer" in (copy / "etc/systemd/system" / unit("forward").name).read_text()]

    script = write_newer(tmp_path)
    done = do(script, "--root", copy, "--wheel", tmp_path / "imds_bridge-99-py3-none-any.whl")
    assert (done.returncode, newer()) == (0, [True, False, True]), done
    assert own.read_text() == "# its own\n"
    for expected in ([False, True, False], [True, False, True]):
        kept_script = copy / "opt/imds-bridge/systemd/install.sh"  # no checkout is needed
        assert do(kept_script, "--rollback", "--root", copy).returncode == 0
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


# --- secrets; `make units` adds a channel as the page says, under a real systemd ---


def test_a_missing_folder_of_secrets_stops_no_unit() -> None:
    """By systemd.exec(5), what SetCredential has is taken if LoadCredential finds nothing."""
    assert "LoadCredential=secrets:/etc/imds-bridge/forward.secrets\n" in unit("forward").read_text()
    assert setting("forward", "SetCredential") == "secrets:none"


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
        ("--root /proc --start listen", "--start and --manage: not with --root, where nothing runs"),
        ("--root /proc --manage shop.service", "--start and --manage: not with --root, where nothing runs"),
        ("--manage shop", "--manage: given shop, expected a unit such as shop.service"),
        ("--manage shop.service'+'", "expected a unit such as shop.service"),
        ("--uninstall --manage shop.service", "--uninstall: not with --wheel, --start or --manage"),
        ("--purge", "--purge: only with --uninstall"),
        ("--rollback --start listen", "--rollback: not with --wheel, --start or --manage"),
        ("--instal", "unknown option --instal"),
        ("--dry-run", "systemd 247 or newer; here it is 246"),
    ],
)
def test_what_cannot_be_installed_is_named_and_nothing_is_done(
    tmp_path: Path, arguments: str, fault: str
) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text("#!/bin/sh\necho 'systemd 246 (246.15)'\n")
    systemctl.chmod(0o755)
    done = do("env", f"PATH={tmp_path}:{os.environ['PATH']}", FOLDER / "install.sh", *arguments.split())
    assert done.returncode == 2
    assert fault in done.stderr


def test_the_page_lists_the_systems_and_the_versions_that_install_sh_goes_by() -> None:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in SYSTEMS.splitlines() if not line.startswith("#")]
    shown = re.findall(r"^\| (.*) \|$", page.partition("## Systems")[2].partition("\n## ")[0], re.MULTILINE)
    expected = [(name, command, tried) for _, name, command, _, tried in rows if name != "others"]
    told = [line.split(" | ") for line in shown[2:]]
    assert [(name, command.strip("`"), tried) for name, command, tried in told] == expected
    limit = dict(re.findall(r"\b(\w+)=([\d.]+)", TEXT.partition("oldest_python")[2].partition("home=")[0]))
    limit["oldest_python"] = only(re.findall(r"oldest_python=([\d.]+)", TEXT))
    needed = "systemd {oldest_systemd}, SQLite {oldest_sqlite} and Python {oldest_python} to {newest_python}"
    assert needed.format(**limit) in page
    assert f"Below systemd {limit['with_credentials']} it adds" in page
    assert f"polkit before 0.{limit['oldest_polkit']} " in page
    minors = only(re.findall(r"for minor in ([\d ]+);", (ROOT / "tools/packaging/release.sh").read_text()))
    assert [f"3.{minor}" for minor in (minors.split()[0], minors.split()[-1])] == [
        limit["oldest_python"],
        limit["newest_python"],
    ]


PIP_CONF = """[global]
user = true
target = /nowhere
require-virtualenv = true
index-url = https://file.example/simple
extra-index-url = https://one.example/simple
    https://two.example/simple
"""


def test_of_pips_settings_only_the_index_counts(tmp_path: Path) -> None:
    """The function is run alone: the index is this machine's in the other tests."""
    function = re.search(r"^find_index\(\) \{.*?^\}", TEXT, re.MULTILINE | re.DOTALL)
    assert function
    (tmp_path / "pip.conf").write_text(PIP_CONF)
    variables = {
        "PIP_USER": "1",
        "PIP_CERT": "/etc/own.crt",
        "PIP_INDEX_URL": "https://variable.example/simple",
    }
    given = {**environment(), **variables, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    script = f"with={sys.executable}\n{function[0]}\nfind_index"
    found = [*completed("sh", "-c", script, env=given).stdout.split()]
    assert {
        "--cert=/etc/own.crt",
        "--extra-index-url=https://one.example/simple",
        "--extra-index-url=https://two.example/simple",
    } <= {*found}
    assert [one for one in found if one.startswith("--index-url")][-1].endswith("//variable.example/simple")
    assert not re.search("user|target|virtualenv", " ".join(found))


@pytest.mark.parametrize(
    ("system", "is_release", "command"),
    [
        ('ID=debian\nVERSION_ID="12"', False, "apt-get install python3-venv"),
        ('ID=debian\nVERSION_ID="12"', True, "apt-get install python3"),
        ('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="22.04"', True, "apt-get install python3.12"),
        ('ID="rhel"\nVERSION_ID="9.4"', True, "dnf install python3.12"),
        ('ID="rocky"\nVERSION_ID="8.10"', True, "none: its SQLite is too old"),
        ('ID=azurelinux\nVERSION_ID="3.0"', True, "tdnf install python3"),
        ('ID="sles"\nVERSION_ID="15.6"', False, "zypper install python311"),
        ("ID=debian", False, "apt-get install python3-venv"),
        ("", False, "apt-get install python3-venv"),
    ],
)
def test_a_missing_python_is_named_with_the_command_that_installs_it_before_anything_is_done(
    tmp_path: Path, system: str, is_release: bool, command: str
) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "release")
    (tmp_path / "os-release").write_text(system)
    (folder / "install.sh").write_text(TEXT.replace("/etc/os-release", str(tmp_path / "os-release")))
    if is_release:
        (folder / "wheels").mkdir()
    (tmp_path / "apt-get").touch(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    tree = tmp_path / "tree"
    tree.mkdir()
    done = do("env", f"PATH={path}", "PYTHON=/bin/false", folder / "install.sh", "--root", tree)
    *_, shown, _ = done.stderr.splitlines()
    assert (done.returncode, shown.endswith(command)) == (2, True), done
    assert [*tree.iterdir()] == []


def test_a_python_that_is_not_finished_is_used_with_a_warning(tmp_path: Path) -> None:
    python = tmp_path / "python"
    text = f"""#!/bin/sh
first=$1 code=$2; shift 2
exec {sys.executable} "$first" "import sys, collections
sys.version_info = collections.namedtuple('V', 'major minor micro releaselevel')(3, 11, 0, 'candidate')
$code" "$@"
"""
    python.write_text(text)
    python.chmod(0o755)
    done = do("env", f"PYTHON={python}", FOLDER / "install.sh", "--root", tmp_path, "--dry-run")
    assert done.returncode == 0, done
    assert "is no finished version" in done.stdout


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
    path = only(only(given["runcmd"]))
    assert files[path]["permissions"] == "0755"
    extension = json.loads((FOLDER / "vmss-extension.json").read_text())["properties"]
    command = extension["protectedSettings"]["commandToExecute"]
    for script in (files[path]["content"], f"#!/bin/sh\n{command}\n"):
        (tmp_path / "install.sh").write_text(script)
        done = do(tool("shellcheck"), tmp_path / "install.sh")
        assert done.returncode == 0, done.stdout
        options = re.findall(r"\bsh (?:release/)?install\.sh ([^;\n]*)", script)
        assert options == ["--start forward --start listen"]
