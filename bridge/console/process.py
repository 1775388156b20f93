"""The console as a process: its parts, its threads, and its stop."""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from bridge import __version__
from bridge.config.console import ConsoleSettings
from bridge.config.models import Config, find_exposed
from bridge.config.values import socket_address
from bridge.console.app import application
from bridge.console.approve import Approvals, Sessions
from bridge.console.base import Web
from bridge.console.bus import BusInput
from bridge.console.ingest import Ingest
from bridge.console.live import Live
from bridge.console.metrics import Figures, new_registry
from bridge.console.rows import DAY
from bridge.console.store import Store
from bridge.console.writer import Writer
from bridge.contract.status import ConsoleStatus, Status
from bridge.errors import StateError, UsageError
from bridge.imds.instance import Vm
from bridge.outbox.state_dir import StateFolder
from bridge.process.metrics import MetricsServer
from bridge.runtime import log as logs
from bridge.runtime.sd_notify import Supervisor
from bridge.runtime.threads import Signals, Stop, stalled_threads, start_thread
from bridge.runtime.time import Clock, iso_utc

log = logging.getLogger(__name__)

DATABASE = "console.db"
TICK_SECONDS = 1.0
MAX_CONNECTIONS = 500
MAX_HEADER_BYTES = 32 * 1024
KEEP_ALIVE_SECONDS = 15
STOP_SECONDS = 10.0


def run_console(config: Config) -> int:
    """Run the console until it is stopped; return the exit code.

    Raises:
        UsageError: it cannot listen on its address.
        StateError: the state is locked by another process, or cannot be used.
    """
    os.umask(0o077)
    logs.set_up(level=config.log_level, style=config.log_format)
    for name in ("uvicorn", "asyncio"):  # clients decide how many warnings there are
        logging.getLogger(name).setLevel(logging.ERROR)
    for path in find_exposed(config, "console"):
        log.error(
            "everybody may write %s, and so change what this process does; remove that permission", path
        )
    with Signals() as signals:
        return Console(config).run(signals)


class Console:
    """The parts of the console, and their life."""

    def __init__(self, config: Config, *, clock: Clock | None = None) -> None:
        """Open the store and the port.

        Args:
            config: the whole configuration.
            clock: for all parts.

        Raises:
            UsageError, StateError: see `run_console`.
        """
        self.settings = config.console or ConsoleSettings()
        self._clock = clock or Clock()
        self._folder = StateFolder(Path(config.state_dir) / "console")
        away_seconds = (self.settings.put_away_days or 1e6) * DAY
        self._store = open_store(self._folder, self._clock, away_seconds)
        self._socket = listen_on(self.settings.listen)
        host, port = self._socket.getsockname()[:2]  # asked now: the server closes it before its last answers
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.stop, self._settled, self._drained = Stop(), Stop(), Stop()
        self.live = Live(lambda: self.writer.version)
        self.writer = Writer(
            self._store,
            clock=self._clock,
            stop=self._drained,
            retain_seconds=self.settings.retain_days * DAY,
            on_change=self.live.notify,
        )
        self.bus = self._bus_input()
        registry = new_registry(Figures(self.status, self._store), self._folder.read_status())
        self._metrics = self._metrics_server(config, registry)
        key = self.settings.form_key.read() if self.settings.form_key else ""
        approvals = self._approvals(config, key)
        web = Web(
            settings=self.settings,
            store=self._store,
            clock=self._clock,
            live=self.live,
            ingest=Ingest(self.settings, writer=self.writer, clock=self._clock),
            registry=registry,
            status=self.status,
            address=self.address,
            approvals=approvals,
            sessions=approvals or Sessions(key),
        )
        self._server = _server(application(web))
        self._started_at = self._clock.now()

    def run(self, signals: Signals) -> int:
        """Run until a signal comes, or a thread ends; return the exit code."""
        supervisor = Supervisor()
        loops = self.loops()
        threads = [start_thread(name, loop) for name, loop in loops.items()]
        log.info(
            "imds-bridge %s: console started on %s", __version__, self.address, extra={"url": self.address}
        )
        supervisor.ready()
        if self._metrics:
            self._metrics.start(self.status)
        signal = None
        while signal is None and all(thread.is_alive() for thread in threads):
            if not stalled_threads():
                supervisor.alive()
            self._write_status()
            signal = signals.wait(TICK_SECONDS)
        log.info("stopping", extra={"why": signal})
        supervisor.stopping(STOP_SECONDS)
        self.end()
        for thread in threads:
            thread.join(STOP_SECONDS)
        self._write_status(running=not signal)
        if self._metrics:
            self._metrics.close()
        self.close()
        log.info("stopped")
        return 0 if signal else 1

    def loops(self) -> dict[str, Callable[[], None]]:
        """Return what has to run, by the names of the threads."""
        loops: dict[str, Callable[[], None]] = {"web": self._serve, "write": self.writer.run}
        if self.bus:
            loops |= {"bus": self.bus.run, "events": self._receiver.run}
        return loops

    def end(self) -> None:
        """Have the loops end: first what takes events, then what commits them."""
        self.stop.set()
        self.live.close()  # otherwise the streams of open pages would hold it up
        self._server.should_exit = True
        if not self.bus:
            self._settled.set()

    def close(self) -> None:
        """Let another process have the state folder, once the loops have ended."""
        self._store.close()
        self._folder.release()

    def status(self, *, running: bool = True) -> Status:
        """Return what the status file shows."""
        last_event_at = self.writer.last_received_at
        return Status(
            version=__version__,
            role="console",
            pid=os.getpid(),
            running=running,
            written_at=iso_utc(self._clock.now()),
            storage_error=self.writer.error or None,
            metrics=getattr(self._metrics, "address", ""),
            metrics_error=getattr(self._metrics, "error", None),
            kept_log=None,
            config="",
            program_faults=(),
            identity_error=None,
            left_sinks={},
            sinks={},
            flow=ConsoleStatus(
                url=self.address,
                started_at=iso_utc(self._started_at),
                received=self.writer.received,
                repeated=self.writer.repeated,
                last_event_at=iso_utc(last_event_at) if last_event_at else None,
                bus=self.bus.status() if self.bus else None,
            ),
        )

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._settled.wait(STOP_SECONDS)
            self._drained.set()

    def _metrics_server(self, config: Config, registry: CollectorRegistry) -> MetricsServer | None:
        if not config.metrics.listen:
            return None
        return MetricsServer(
            config.metrics.listen,
            role="console",
            registry=registry,
            clock=self._clock,
            next_port=config.metrics.next_port,
        )

    def _bus_input(self) -> BusInput | None:
        if self.settings.bus is None:
            return None
        from bridge.azure.bus_receiver import BusReceiver  # noqa: PLC0415 - it loads the Azure packages

        self._receiver = BusReceiver(self.settings.bus, what="events", clock=self._clock, stop=self._settled)
        return BusInput(
            receiver=self._receiver,
            writer=self.writer,
            clock=self._clock,
            stop=self.stop,
            settled=self._settled,
        )

    def _approvals(self, config: Config, key: str) -> Approvals | None:
        if config.approvals is None or not config.approvals.has_bus:
            return None
        from bridge.approvals.sender import ApproveCommand, send_command  # noqa: PLC0415 - it loads the Azure packages
        from bridge.imds.instance import approval_session  # noqa: PLC0415

        settings = config.approvals

        def send(event_id: str, vm: Vm, reason: str, person: str) -> str:
            command = ApproveCommand(event_ids=[event_id], vm=vm.name, reason=reason)
            session = approval_session(settings.session, vm)
            if session is None:
                raise UsageError(f"no VM of the event has reported what the session {settings.session} needs")
            return send_command(settings, command, session=session, requested_by=person)

        return Approvals(send=send, clock=self._clock, key=key)

    def _write_status(self, *, running: bool = True) -> None:
        try:
            self._folder.write_status(self.status(running=running))
        except OSError as error:
            log.debug("the status file cannot be written: %s", error)


def open_store(folder: StateFolder, clock: Clock, away_seconds: float = 1e11) -> Store:
    """Open the store of a state folder, which nobody else may have.

    Raises:
        StateError: another process has it, or it cannot be used.
    """
    try:
        folder.acquire()
        return Store(folder.path / DATABASE, clock=clock, away_seconds=away_seconds)
    except (OSError, sqlite3.Error) as error:
        raise StateError(
            f"{folder.path} cannot be used: {error}; set state_dir to a folder of your own"
        ) from error


def listen_on(address: str) -> socket.socket:
    """Return a socket that listens on an address and port.

    Raises:
        UsageError: this machine does not have the address, or another process has the port.
    """
    family, place = socket_address(address)
    try:
        listener = socket.create_server(place, family=family)
    except OSError as error:
        raise UsageError(f"console: {address} cannot be listened on: {error.strerror}") from None
    # asyncio does it only for a socket that names its protocol, and this one does not.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _server(app: ASGIApp) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=3,
        )
    )
