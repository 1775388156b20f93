"""What holds for every test, and the fixtures that several folders share.

Simulators are imported when a test asks for one, so that unit tests start without them.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from bridge.runtime import text, threads
from bridge.runtime.threads import PAUSE_SECONDS
from tests.support.skips import pytest_runtest_makereport, pytest_terminal_summary  # noqa: F401 - pytest calls them

if TYPE_CHECKING:
    from tests.support.cli import Call, Cli
    from tests.support.http_client import MakeClient
    from tests.support.imds_lab import ImdsLab
    from tests.support.inbox import Inbox
    from tests.support.listener import MakeListener
    from tests.support.servicebus import ServiceBusLab
    from tests.support.sinks import Connect, MakeWebhook
    from tests.support.tls import Authority

TESTS = Path(__file__).parent
# What only Windows has is left out elsewhere: a test that never runs there is no skipped one.
collect_ignore_glob = [] if sys.platform == "win32" else ["process/test_*windows*.py"]
# The files of tests are in memory where there is room for them, and for programs: an outbox syncs all that it writes.
MEMORY = Path("/dev/shm")  # noqa: S108 - pytest makes a folder of its own in it
ROOM_BYTES = 2 * 2**30
WITH_SDK = ("contract", "infra", "integration")  # suites in whose process the SDK of Service Bus runs
# What it sleeps, and what tests let it sleep: between two looks of its keep-alive thread, the rest of which every
# close waits for, and between two looks at a link that is being opened.
SDK_PAUSES_SECONDS = {1: 0.02, 0.05: 0.001}


def pytest_configure() -> None:
    """Choose where `tmp_path` is, unless that is given."""
    if sys.platform == "linux" and os.access(MEMORY, os.W_OK) and "TMPDIR" not in os.environ:
        room = os.statvfs(MEMORY)
        if room.f_bavail * room.f_frsize > ROOM_BYTES and not room.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On Windows, skip what is marked to need POSIX."""
    for item in items if sys.platform == "win32" else ():
        if mark := item.get_closest_marker("posix"):
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))


@pytest.fixture(autouse=True)
def forget_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test hide texts from the next: what is redacted is searched for each of them."""
    monkeypatch.setattr(text, "_secrets", set(text._secrets))


@pytest.fixture(autouse=True)
def rules_of_the_suite(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a unit test that reaches out of its own process; give the others their time, without the SDK's pauses."""
    suite = request.path.relative_to(TESTS).parts[0]
    if suite in WITH_SDK:
        request.getfixturevalue("sdk_without_pauses")
        from bridge.imds import client  # noqa: PLC0415 - not for unit tests

        # A request that a busy machine answers late is not sent again: tests count them, and give each its fault.
        monkeypatch.setattr(client, "LATE_SECONDS", client.CALL_SECONDS)
        monkeypatch.setattr(client.ImdsClient.instance, "__defaults__", (client.CALL_SECONDS,))
    if suite == "unit":
        monkeypatch.setattr(socket.socket, "__init__", _refuse)
        monkeypatch.setattr(subprocess.Popen, "__init__", _refuse)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no pause of this machine count, which lets clients connect again: a test that is about one makes it."""
    monkeypatch.setattr(threads, "PAUSE_SECONDS", math.inf)


@pytest.fixture
def hold_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which this process was held up for ten seconds."""

    def hold_up() -> None:
        after = time.time() + 10 - time.monotonic()
        monkeypatch.setattr(time, "time", lambda: time.monotonic() + after)
        monkeypatch.setattr(threads.pauses, "_count", threads.pauses() + 1)
        monkeypatch.setattr(threads, "PAUSE_SECONDS", PAUSE_SECONDS)

    return hold_up


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Collect no garbage of earlier tests in the depth of a recursion: its finalizers would fail there."""
    gc.disable()
    yield
    gc.enable()


platform.processor()  # starts `uname` once; Azure's SDK asks for it in unit tests, too


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a unit test opens no socket and starts no process")


@pytest.fixture(scope="session")
def sdk_without_pauses() -> Iterator[None]:
    """Let the Service Bus SDK open and close without its fixed pauses, which most of a test's time went to."""
    from azure.servicebus import _servicebus_receiver, _servicebus_sender  # noqa: PLC0415 - 42 MiB
    from azure.servicebus._pyamqp import client  # noqa: PLC0415

    def sleep(seconds: float) -> None:
        time.sleep(SDK_PAUSES_SECONDS.get(seconds, seconds))

    with pytest.MonkeyPatch.context() as patch:
        for module in (client, _servicebus_receiver, _servicebus_sender):
            patch.setattr(module, "time", SimpleNamespace(**{**vars(time), "sleep": sleep}))
        yield


@pytest.fixture
def without_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes that are not measured: one that is killed with SIGKILL saves no measurement anyway."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    monkeypatch.delenv("COVERAGE_PROCESS_START", raising=False)


@pytest.fixture
def imds() -> Iterator[ImdsLab]:
    """Return IMDS for two VMs of a group, without the limit on requests."""
    from tests.support.imds_lab import ImdsLab  # noqa: PLC0415

    with ImdsLab(vms=["web-0", "web-1"], rate_limit=None) as started:
        yield started


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    """Return an inbox that refuses what is not a valid CloudEvent."""
    from tests.support.inbox import Inbox  # noqa: PLC0415

    with Inbox(strict=True) as started:
        yield started


@pytest.fixture
def any_inbox() -> Iterator[Inbox]:
    """Return an inbox that takes anything."""
    from tests.support.inbox import Inbox  # noqa: PLC0415

    with Inbox() as started:
        yield started


@pytest.fixture
def bus() -> Iterator[ServiceBusLab]:
    """Return a Service Bus with the entities of tests.support.bus; it must not fail itself."""
    from tests.support.bus import bus_config  # noqa: PLC0415
    from tests.support.servicebus import ServiceBusLab  # noqa: PLC0415

    with ServiceBusLab(bus_config()) as started:
        yield started
        assert started.failures == ()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return a certificate authority that nothing trusts yet."""
    from tests.support.tls import Authority  # noqa: PLC0415

    return Authority(tmp_path)


def made(build: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield a function that builds things, and close them at the end."""
    with ExitStack() as stack:
        yield lambda *given, **named: stack.enter_context(closing(build(*given, **named)))


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    """Make HTTP clients with these settings."""
    from tests.support.http_client import http_client  # noqa: PLC0415

    yield from made(http_client)


@pytest.fixture
def webhook(inbox: Inbox, tmp_path: Path) -> Iterator[MakeWebhook]:
    """Make webhook sinks with these settings, for the inbox or another URL."""
    from tests.support.sinks import webhook_sink  # noqa: PLC0415

    yield from made(lambda url=inbox.url, **settings: webhook_sink(tmp_path, url, **settings))


@pytest.fixture
def connect(bus: ServiceBusLab) -> Iterator[Connect]:
    """Make Service Bus sinks with these settings for `bus`, which the test's file gives what it needs."""
    from bridge.sinks.servicebus import ServiceBusSink  # noqa: PLC0415
    from tests.support.sinks import bus_settings  # noqa: PLC0415

    yield from made(lambda clock=None, **more: ServiceBusSink(bus_settings(bus, **more), clock=clock))


@pytest.fixture
def make_listener(tmp_path: Path) -> Iterator[MakeListener]:
    """Make listeners on doubles, each with a state of its own."""
    from tests.support.listener import ListenerRig  # noqa: PLC0415

    numbers = itertools.count()
    yield from made(lambda **options: ListenerRig(tmp_path / f"state-{next(numbers)}", **options))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a configuration that names a state folder and nothing else."""
    from tests.support.process import toml  # noqa: PLC0415

    file = tmp_path / "config.toml"
    file.write_text(toml({"state_dir": tmp_path / "state"}))
    return file


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command in this process, without settings of the environment."""
    from bridge.cli.main import main  # noqa: PLC0415
    from tests.support.cli import CommandResult  # noqa: PLC0415

    for name in os.environ:
        if name.upper().startswith("IMDS_BRIDGE__") or name.lower() == "https_proxy":
            monkeypatch.delenv(name)

    def call(*arguments: str | Path) -> CommandResult:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        return CommandResult(code, *capfd.readouterr())

    return call


@pytest.fixture
def cli(call: Call, config: Path, request: pytest.FixtureRequest) -> Cli:
    """Run commands in this process with a configuration, for which `imds` is started when it is needed."""
    from tests.support.cli import Cli  # noqa: PLC0415

    return Cli(call, config, lambda: request.getfixturevalue("imds"))
