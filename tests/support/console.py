"""What the console's tests share: the events of a fleet as its forwarders build them, and the console on threads."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from html import unescape
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from uuid import NAMESPACE_URL, uuid5

import httpx
import pytest
import requests

from bridge.config.approvals import ApprovalSettings
from bridge.config.console import ConsoleSettings
from bridge.config.models import Config
from bridge.console import rows
from bridge.console.app import application
from bridge.console.base import Web
from bridge.console.ingest import Ingest
from bridge.console.live import Live
from bridge.console.metrics import Figures, new_registry
from bridge.console.process import Console
from bridge.console.received import Received, receive
from bridge.console.rows import EventRow, Filter, VmRow
from bridge.console.store import Store
from bridge.console.writer import Writer
from bridge.events.builder import Reporter
from bridge.events.envelope import decode_event
from bridge.events.model import structured
from bridge.imds.diff import Change, ChangeKind
from bridge.imds.document import Document, ScheduledEvent
from bridge.imds.instance import Vm
from bridge.runtime.threads import Stop, start_thread
from bridge.runtime.time import Clock
from tests.support.bus import QUEUE
from tests.support.clock import MovedClock
from tests.support.only import only
from tests.support.ports import free_address
from tests.support.process import LIMIT_SECONDS, Forward, wait_until
from tests.support.samples import http_date, scheduled_event
from tests.support.status import process_status

NOW = datetime(2026, 11, 20, 13, 0, tzinfo=UTC)
SUBSCRIPTION = "8d10da13-8125-4ba9-a717-bf7490507b3d"
TOKEN = "the-token"  # noqa: S105 - of a test
PROXY_SECRET = "a secret that proves the proxy"  # noqa: S105 - of a test
ORIGIN = "https://console.contoso.example"
ANA = {"X-Proxy-Secret": PROXY_SECRET, "X-Forwarded-User": "ana@contoso.example", "X-Forwarded-Groups": "ops"}
STRUCTURED = {"Content-Type": "application/cloudevents+json"}
T = TypeVar("T")
BATCH = {"Content-Type": "application/cloudevents-batch+json"}


def event_id(name: str) -> str:
    """Return an EventId that is the same for the same name."""
    return str(uuid5(NAMESPACE_URL, name)).upper()


@dataclass
class FleetVm:
    """A VM whose forwarder publishes; its counter advances as the forwarder's."""

    name: str
    group: str = "shop"
    zone: str = "1"
    epoch: str = "1b9d6bcd"
    subscription: str = SUBSCRIPTION
    scale_set: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    sequence: int = 0
    receipts: int = 0
    _vm: Vm = field(init=False)

    def __post_init__(self) -> None:
        resource_id = (
            f"/subscriptions/{self.subscription}/resourceGroups/{self.group}/providers/Microsoft.Compute"
            f"/virtualMachines/{self.name}"
        )
        self._vm = Vm(
            name=self.name,
            vm_id=str(uuid5(NAMESPACE_URL, resource_id)),
            resource_id=resource_id,
            location="westeurope",
            zone=self.zone,
            subscription_id=self.subscription,
            resource_group=self.group,
            scale_set=self.scale_set,
            tags=self.tags,
        )

    def reporter(self, at: datetime, role: str = "forward") -> Reporter:
        return Reporter(
            name=self.name,
            role=role,
            epoch=self.epoch,
            at=at,
            next_number=self.next_receipt if role == "listen" else self.next,
            vm=self._vm,
            session="{resource_group}.{vm}",
        )

    def next(self) -> int:
        self.sequence += 1
        return self.sequence

    def next_receipt(self) -> int:
        self.receipts += 1
        return self.receipts

    def heartbeat(self, at: datetime = NOW, *, role: str = "forward", backlog: int = 0, **more: Any) -> bytes:
        given = {"reason": "Hourly", "version": "0.3.0", "backlog": {"audit": backlog}, "previous": None}
        return structured(self.reporter(at, role).heartbeat(**{**given, **more}))

    def unreachable(self, at: datetime = NOW, *, since: datetime) -> bytes:
        event = self.reporter(at).unreachable(since=since, reason="no answer within 10 s", cause="NoAnswer")
        return structured(event)

    def recovered(self, at: datetime = NOW, *, since: datetime) -> bytes:
        return structured(self.reporter(at).recovered(since=since, cause="NoAnswer"))

    def loss(self, at: datetime = NOW) -> bytes:
        period = {"oldest": at.timestamp(), "newest": at.timestamp()}
        return structured(self.reporter(at).loss(reason="SizeLimit", count=20, sink="audit", **period))

    def change(
        self,
        kind: ChangeKind,
        event: ScheduledEvent,
        at: datetime = NOW,
        *,
        previous: ScheduledEvent | None = None,
        changed: Sequence[str] = (),
        seen_before: int = 0,
    ) -> bytes:
        """Return the event that this VM publishes for a change."""
        change = Change(kind=kind, event=event, previous=previous, changed=tuple(changed))
        reporter = self.reporter(at)
        return structured(reporter.scheduled_event(change, seen_before=seen_before, incarnation=2))

    def document(self, event: ScheduledEvent, ids: Sequence[str], at: datetime = NOW) -> bytes:
        raw = {"DocumentIncarnation": 2, "Events": [event.raw]}
        document = Document(raw=raw, incarnation=2, events={event.key: event})
        return structured(self.reporter(at).document(document, previous=None, event_ids=ids))

    def receipt(
        self,
        event: ScheduledEvent,
        at: datetime = NOW,
        *,
        outcome: str = "accepted",
        reason: str = "approved",
        command_id: str = "order-17",
    ) -> bytes:
        command = {"Id": command_id, "RequestedBy": "ana@contoso.example", "Reason": "drained"}
        of_event = {"EventType": "Reboot", "NotBeforeUtc": None, "DryRun": False}
        receipt = self.reporter(at, "listen").receipt(
            outcome=outcome,
            key=f"order-{at}",
            command_id=command_id,
            event_id=event.event_id,
            resources=list(event.resources),
            data={"Reason": reason, "Detail": "", "Command": command, **of_event},
        )
        return structured(receipt)

    def prepared(self, event: ScheduledEvent, at: datetime = NOW) -> bytes:
        """Return the event that says that this VM's program has succeeded."""
        return structured(self.reporter(at, "listen").prepared(event, key=f"stay-{at}", seconds=12.0))

    def of_work(
        self,
        kind: Literal["recovered", "outofwork"],
        at: datetime,
        *,
        since: datetime,
        event: ScheduledEvent | None = None,
    ) -> bytes:
        """Return the event that says whether this VM's program has put it back."""
        return structured(self.reporter(at, "listen").of_work(kind, event, since, {}))


def event(
    name: str = "E",
    *,
    at: datetime = NOW,
    minutes: float = 15,
    vms: Sequence[str] = ("web-0",),
    type: str = "Reboot",  # noqa: A002 - IMDS's word
    **more: Any,
) -> ScheduledEvent:
    """Return a scheduled event that starts some minutes after `at`."""
    given = {
        "EventId": event_id(name),
        "EventType": type,
        "Resources": list(vms),
        "NotBefore": http_date(at + timedelta(minutes=minutes)),
    }
    return scheduled_event(at, **{**given, **more})


APPROVABLE = event("approve", vms=["web-0", "web-1"])


def maintenance(at: datetime = NOW) -> list[bytes]:
    """Return what 300 VMs of three groups publish, each of which reboots some minutes after another one."""
    bodies = []
    for number in range(300):
        group = ("shop-web", "shop-db", "batch")[number % 3]
        vm = FleetVm(f"{group}-{number // 3}", group=group)
        one = event(vm.name, at=at, vms=[vm.name], minutes=20 + number // 6)
        bodies += [vm.heartbeat(at), vm.change("scheduled", one, at)]
        if group == "shop-web" and number < 180:
            bodies.append(vm.prepared(one, at))
    return bodies


def received(*bodies: bytes, now: datetime = NOW) -> list[Received]:
    """Read events as the console does."""
    found = [receive(decode_event(body), body, now=now.timestamp()) for body in bodies]
    return [one for one in found if one]


class Shown:
    """A store on a moved clock, and what its pages read."""

    def __init__(self, folder: Path, now: datetime = NOW) -> None:
        self.path = folder / "console.db"
        self.clock = MovedClock(now.timestamp())
        self.store = Store(self.path, clock=self.clock)

    def add(self, *bodies: bytes, at: datetime = NOW) -> None:
        """Commit events that arrive at a time."""
        self.store.add(received(*bodies, now=at), received_at=at.timestamp())

    def read(self, query: Callable[..., T], *arguments: Any, **more: Any) -> T:
        """Return what a query of `rows` finds at this moment."""
        with self.store.reading() as connection:
            return query(connection, *arguments, **more)

    def sql(self, query: str) -> Any:
        """Return the first value that SQL finds."""
        return self.read(lambda connection: connection.execute(query).fetchone()[0])

    def events(self, **wanted: Any) -> list[EventRow]:
        """Return the open events that a filter chooses."""
        return self.read(rows.open_events, Filter(**wanted))

    def event(self, name: str = "E") -> EventRow:
        """Return one event."""
        found = self.read(rows.find_event, event_id(name))
        assert found is not None
        return found

    def vms(self, **wanted: Any) -> list[VmRow]:
        """Return the VMs that a filter chooses."""
        return self.read(rows.vms, Filter(**wanted))

    def vm(self) -> VmRow:
        """Return the only VM."""
        return only(self.vms())

    def writer(self, **more: Any) -> Writer:
        """Return a writer of the store."""
        return Writer(self.store, clock=self.clock, stop=Stop(), **{"retain_seconds": 1e9, **more})

    def ask(self, *paths: str, shown: str | None = None) -> list[httpx.Response]:
        """Return the answers at some addresses, for an open page that shows some parts; an error is raised."""
        return [*asyncio.run(ask(web_of(self.store, self.clock), paths, shown)).values()]

    def page(self, path: str, shown: str | None = None) -> str:
        """Return a page's HTML, of an error's too."""
        return only(self.ask(path, shown=shown)).text


@contextmanager
def shown(folder: Path, now: datetime = NOW) -> Iterator[Shown]:
    """Open a store, and close it."""
    found = Shown(folder, now)
    try:
        yield found
    finally:
        found.store.close()


def web_of(store: Store, clock: Clock) -> Web:
    """Return the application of a store, without a server."""
    settings, status = ConsoleSettings(), process_status(clock.now(), "console")
    writer = Writer(store, clock=clock, stop=Stop(), retain_seconds=1e9)
    return Web(
        settings=settings,
        store=store,
        clock=clock,
        live=Live(int),
        ingest=Ingest(settings, writer=writer, clock=clock),
        registry=new_registry(Figures(lambda: status, store)),
        status=lambda: status,
    )


async def ask(web: Web, paths: Sequence[str], shown: str | None = None) -> dict[str, httpx.Response]:
    """Return the answers at some addresses, for an open page that shows some parts; an error is raised."""
    headers = {} if shown is None else {"X-Shown": shown}
    transport = httpx.ASGITransport(application(web))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return {path: await client.get(path, headers=headers) for path in paths}


def text_of(page: str) -> str:
    """Return what a page's HTML says, without its tags."""
    return " ".join(unescape(re.sub("<[^>]+>", "", page)).split())


def batch(bodies: Sequence[bytes]) -> bytes:
    """Write events as a batch."""
    return b"[" + b",".join(bodies) + b"]"


class RunningConsole:
    """The console on threads of this process, with requests to it."""

    def __init__(self, console: Console, clock: Clock | None) -> None:
        self.console = console
        self.url = console.address
        self._clock = clock

    def advance(self, seconds: float) -> None:
        """Let time pass, for a console at a moment that stays."""
        assert isinstance(self._clock, MovedClock)
        self._clock.advance(seconds)

    def post(self, body: bytes, headers: dict[str, str] | None = None) -> requests.Response:
        return requests.post(
            f"{self.url}/ingest", data=body, headers=headers or STRUCTURED, timeout=LIMIT_SECONDS
        )

    def send(self, *bodies: bytes) -> None:
        """Have events committed."""
        assert self.post(batch(bodies), {**BATCH, "Authorization": f"Bearer {TOKEN}"}).status_code == 200

    def get(self, path: str, headers: dict[str, str] | None = None) -> requests.Response:
        return requests.get(f"{self.url}{path}", headers=headers, timeout=LIMIT_SECONDS)

    def send_json(
        self, method: str, path: str, body: object, headers: dict[str, str] | None = None
    ) -> requests.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.url}{path}"
        return requests.request(method, url, data=data, headers=headers, timeout=LIMIT_SECONDS)

    def page(self, path: str, headers: dict[str, str] | None = None) -> str:
        """Return a page's HTML."""
        response = self.get(path, headers)
        assert response.status_code == 200, response.text
        return response.text

    def connect(self) -> socket.socket:
        """Return a connection, for requests that no client sends."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        return socket.create_connection((host, int(port)), LIMIT_SECONDS)


@contextmanager
def running_console(
    folder: Path, *, clock: Clock | None = None, approvals: ApprovalSettings | None = None, **settings: Any
) -> Iterator[RunningConsole]:
    """Run the console with settings of its section."""
    section = ConsoleSettings.model_validate({"listen": "127.0.0.1:0", **settings})
    with running(Config(state_dir=folder, console=section, approvals=approvals), clock=clock) as found:
        yield found


@contextmanager
def console_at(folder: Path, at: datetime = NOW, **settings: Any) -> Iterator[RunningConsole]:
    """Run the console at a moment that stays."""
    with running_console(folder, clock=MovedClock(at.timestamp()), **settings) as found:
        yield found


@contextmanager
def running(config: Config, *, clock: Clock | None = None) -> Iterator[RunningConsole]:
    """Run the console with a whole configuration."""
    console = Console(config, clock=clock)
    threads = [start_thread(name, loop) for name, loop in console.loops().items()]
    try:
        yield RunningConsole(console, clock)
    finally:
        console.end()
        for thread in threads:
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive(), f"{thread.name} does not stop"
        console.close()


def break_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk fail whoever reads the VMs."""

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(rows, "count_vms", fail)


def behind_proxy(**more: Any) -> dict[str, Any]:
    """Return the settings of a console behind a proxy, which takes events with a token."""
    return {
        "auth": "proxy",
        "public_url": ORIGIN,
        "proxy": {"secret": PROXY_SECRET},
        "ingest": {"bearer_token": TOKEN},
        **more,
    }


def signed_in(name: str) -> dict[str, str]:
    """Return the headers with which the proxy says who is signed in."""
    return {"X-Proxy-Secret": PROXY_SECRET, "X-Forwarded-User": name}


class FormOf:
    """A form of a page that a person has opened; `fields` are the hidden ones, {} where the page shows no form."""

    def __init__(
        self, console: RunningConsole, path: str, action: str, person: Mapping[str, str] = ANA
    ) -> None:
        self.console, self._person = console, person
        page, _, query = path.partition("?")
        self.action = f"{page}/{action}{'?' if query else ''}{query}"
        answer = console.get(path, {**person})
        # requests keeps no secure cookie of plain http
        self.cookie = answer.headers.get("Set-Cookie", "").partition(";")[0]
        self.page = answer.text
        form = self.page.partition(f"/{action}")[2].partition("</form>")[0]
        found = re.findall('name="(token|shown|away|wave)" value="([^"]*)"', form)
        self.fields = {name: unescape(value) for name, value in found}

    def post(self, headers: Mapping[str, str | None] | None = None, /, **fields: str) -> requests.Response:
        """Send the form, filled in; a header that is None is left out."""
        given = {**self._person, "Origin": ORIGIN, "Cookie": self.cookie, **(headers or {})}
        return requests.post(
            f"{self.console.url}{self.action}",
            data={**self.fields, **fields},
            headers=given,
            timeout=LIMIT_SECONDS,
            allow_redirects=False,
        )


@contextmanager
def approval_console(folder: Path, connection_string: str, **more: Any) -> Iterator[RunningConsole]:
    """Run a console at NOW behind a proxy, with approvals for the group `ops` and the event APPROVABLE."""
    approvals = ApprovalSettings(connection_string=connection_string, queue=QUEUE)  # type: ignore[arg-type] # as in TOML
    settings = behind_proxy(approver_groups=["ops"], **more)
    with console_at(folder, approvals=approvals, **settings) as running:
        vm = FleetVm("web-0")
        running.send(vm.heartbeat(), vm.change("scheduled", APPROVABLE))
        yield running


class ConsoleProcess(Forward):
    """`imds-bridge console` as a process of its own, on a port that stays the same when it is started again."""

    def __init__(self, folder: Path, *, metrics: str = "", **settings: Any) -> None:
        console = {"listen": free_address(), **settings}
        super().__init__(folder, {"console": console, "metrics": {"listen": metrics}})
        self.url = f"http://{console['listen']}"
        self.state = folder / "state" / "console"
        self._command[self._command.index("forward")] = "console"

    def start(self) -> Self:
        """Start it, and wait until it answers."""
        super().start()
        wait_until(self._answers, describe=lambda: self)
        return self

    def _answers(self) -> bool:
        try:
            return requests.get(f"{self.url}/livez", timeout=LIMIT_SECONDS).status_code == HTTPStatus.OK
        except requests.ConnectionError:
            return False
