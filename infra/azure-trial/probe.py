"""Measure on a VM of the trial; trial.sh runs it there with imds-bridge's own interpreter."""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SETTINGS = Path("/etc/imds-trial.json")
FOLDER = Path("/var/lib/imds-trial")
INSTALL_LOG = Path("/var/log/cloud-init-output.log")
IMDS = "http://169.254.169.254/metadata"
PREFIX = "io.imdsbridge."
PART_CHARACTERS = 3000  # Azure returns the last 4 KB of what a command prints
KEPT = (
    "EventId",
    "EventType",
    "EventSource",
    "Resources",
    "NoticeSeconds",
    "Outcome",
    "Reason",
    "DocumentIncarnation",
)


def settings() -> dict[str, str]:
    """Return what cloud-init wrote."""
    found: dict[str, str] = json.loads(SETTINGS.read_text())
    return found


def record(name: str, envelope: dict[str, Any], at: float) -> None:
    """Append what arrived to a log: only what the report needs, on one line."""
    data = envelope.get("data")
    kept = {key: data[key] for key in KEPT if key in data} if isinstance(data, dict) else {}
    line = {"at": round(at, 3), "type": str(envelope["type"]).removeprefix(PREFIX), "id": envelope["id"]}
    line |= {"time": envelope.get("time"), **kept}
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def log(name: str) -> list[dict[str, Any]]:
    """Return what a log has; a line that is being written is left out."""
    path = FOLDER / f"{name}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


class Receiver(BaseHTTPRequestHandler):
    """Record each event that the webhook sink sends."""

    def do_POST(self) -> None:
        """Record it, and accept it."""
        at = time.time()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        record("hook", body, at)
        self.send_response(204)
        self.end_headers()

    def do_OPTIONS(self) -> None:
        """Answer `imds-bridge check`."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def receiver() -> None:
    """Receive webhooks until the process ends."""
    ThreadingHTTPServer(("127.0.0.1", 8099), Receiver).serve_forever()


def observer() -> None:
    """Record what the topic stores and what Event Grid delivers, until the process ends."""
    threads = [threading.Thread(target=_observe, args=(name,)) for name in ("bus", "grid")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _observe(name: str) -> None:
    from azure.identity import ManagedIdentityCredential  # noqa: PLC0415 - the receiver starts without them
    from azure.servicebus import ServiceBusClient  # noqa: PLC0415

    given = settings()
    credential = ManagedIdentityCredential(client_id=given["observer"])
    while True:
        try:
            with ServiceBusClient(given["namespace"], credential) as client:
                source = (
                    client.get_subscription_receiver("scheduled-events", "audit")
                    if name == "bus"
                    else client.get_queue_receiver("grid")
                )
                with source:
                    for message in source:
                        # The broker's own time: this VM may have received it later.
                        at = message.enqueued_time_utc or datetime.now(UTC)
                        record(name, json.loads(str(message)), at.timestamp())
                        source.complete_message(message)
        except Exception as error:  # noqa: BLE001 - roles become effective minutes later
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            time.sleep(5)


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call took."""
    began = time.monotonic()
    call()
    return round(time.monotonic() - began, 4)


def metadata(path: str) -> tuple[int, Any]:
    """Ask IMDS; return the status and the answer."""
    request = urllib.request.Request(f"{IMDS}/{path}", headers={"Metadata": "true"})  # noqa: S310 - IMDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=130) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None


def wait(what: str, seconds: float, find: Callable[[], Any], pause: float = 1.0) -> Any:
    """Return the first result that is true, or exit after a time."""
    end = time.monotonic() + seconds
    while not (found := find()):
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {seconds:g} s")
        time.sleep(pause)
    return found


def shell(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    return subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 - constant words


def is_active(name: str) -> bool:
    """Return whether a unit runs."""
    return shell("systemctl", "is-active", "--quiet", name).returncode == 0


def ready(arguments: argparse.Namespace) -> dict[str, Any]:
    """Wait until everything is installed and has sent its first heartbeat; say what this VM is."""
    names = ("imds-bridge-forward", "imds-bridge-listen", "imds-trial-receiver")
    try:
        wait("the installation", arguments.seconds, lambda: all(map(is_active, names)), 5)
    except SystemExit as error:
        raise SystemExit(f"{error}: {INSTALL_LOG.read_text()[-350:]}") from None
    wait("the first heartbeat", 300, lambda: log("hook"))
    if arguments.observe:
        shell("systemctl", "start", "imds-trial-observer")
        wait("the first message of the topic", 600, lambda: log("bus"))
    status, compute = metadata("instance/compute?api-version=2021-02-01")
    keys = ("name", "zone", "platformFaultDomain", "location", "vmSize")
    shown = {key: compute[key] for key in keys} if compute else {"status": status}
    return {**shown, "version": shell("/usr/local/bin/imds-bridge", "--version").stdout.strip()}


def sends(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time sends of the Service Bus sink: over a new connection each, and over one that is open."""
    from bridge.config.bus import ServiceBusSettings  # noqa: PLC0415
    from bridge.formats.samples import make_test_event  # noqa: PLC0415
    from bridge.sinks.servicebus import ServiceBusSink  # noqa: PLC0415

    given = settings()
    to = {"namespace": given["namespace"], "topic": "scheduled-events", "client_id": given["forward"]}
    parsed = ServiceBusSettings.model_validate({"kind": "servicebus", **to})

    def send(sink: ServiceBusSink) -> float:
        event = make_test_event(datetime.now(UTC), vm="imds-trial")
        return seconds_of(lambda: sink.send([event]))

    def cold() -> Iterator[float]:
        for _ in range(arguments.cold):
            sink = ServiceBusSink(parsed)
            yield send(sink)
            sink.close()

    first = [*cold()]
    sink = ServiceBusSink(parsed)
    send(sink)
    warm = [send(sink) for _ in range(arguments.warm)]
    sink.close()
    return {"cold": first, "warm": warm}


def identity(_: argparse.Namespace) -> dict[str, Any]:
    """Ask for tokens with and without `client_id`; they are counted and not kept."""
    path = "identity/oauth2/token?api-version=2018-02-01&resource=https://servicebus.azure.net/"
    named = {
        name: metadata(f"{path}&client_id={settings()[name]}")[0]
        for name in ("forward", "listen", "observer")
    }
    return {"named": named, "unnamed": metadata(path)[0]}


def drill(arguments: argparse.Namespace) -> dict[str, Any]:
    """Wait for the notice of a redeploy, approve it over the queue, and wait for its end."""

    def of_it(*steps: str) -> dict[str, Any] | None:
        wanted = {f"scheduledevent.{step}.v1" for step in steps}
        return next(
            (one for one in log("hook") if one["type"] in wanted and arguments.vm in one["Resources"]), None
        )

    notice = wait("the notice", 900, lambda: of_it("scheduled", "started"))
    found: dict[str, Any] = {"notice": notice}
    if notice["type"] == "scheduledevent.scheduled.v1":
        began = time.monotonic()
        words = ("--vm", arguments.vm, "--resource-group", arguments.group, "--reason", "trial", "--wait")
        done = shell(
            *("/usr/local/bin/imds-bridge", "approve", notice["EventId"], *words),
            *("--config", "/etc/imds-bridge/approve.toml"),
        )
        text = (done.stderr or done.stdout).strip()[-300:]
        found["approve"] = {
            "code": done.returncode,
            "seconds": round(time.monotonic() - began, 2),
            "text": text,
        }
    found["end"] = wait("the end of the event", 2400, lambda: of_it("completed", "ended", "canceled"))
    return found


def restart(_: argparse.Namespace) -> dict[str, Any]:
    """Restart and kill the forwarder."""
    unit = "imds-bridge-forward"

    def first() -> str:
        return shell("systemctl", "show", "--property=MainPID", "--value", unit).stdout.strip()

    def has_returned(old: str) -> bool:
        return is_active(unit) and first() not in ("0", "", old)

    stopped = seconds_of(lambda: shell("systemctl", "restart", unit))
    old = first()
    shell("systemctl", "kill", "--signal=KILL", unit)
    killed = seconds_of(lambda: wait("the restart after the kill", 120, lambda: has_returned(old), 0.1))
    return {"restart": stopped, "kill": killed}


def collect(_: argparse.Namespace) -> dict[str, Any]:
    """Return what arrived here."""
    time.sleep(20)  # what was sent last may be on its way
    status, document = metadata("scheduledevents?api-version=2020-07-01")
    incarnation = document and document.get("DocumentIncarnation")
    logs = {name: log(name) for name in ("hook", "bus", "grid")}
    return {"imds": status, "incarnation": incarnation, "logs": logs}


def pack(name: str, found: object) -> None:
    """Keep a result, and print its first part."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = base64.b64encode(gzip.compress(json.dumps(found).encode(), 9)).decode()
    (FOLDER / f"{name}.out").write_text(text)
    part(name, 1)


def part(name: str, number: int) -> None:
    """Print a part of a result."""
    text = (FOLDER / f"{name}.out").read_text()
    parts = [text[at : at + PART_CHARACTERS] for at in range(0, len(text), PART_CHARACTERS)]
    print(f"imds-trial {number}/{len(parts)} {parts[number - 1]}")


MEASURES = {one.__name__: one for one in (ready, sends, identity, drill, restart, collect)}


def main() -> None:
    """Run one measure, or a service."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=[*MEASURES, "part", "receiver", "observer"])
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("number", nargs="?", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--observe", action="store_true")
    parser.add_argument("--cold", type=int, default=20)
    parser.add_argument("--warm", type=int, default=200)
    parser.add_argument("--vm", default="")
    parser.add_argument("--group", default="")
    arguments = parser.parse_args()
    if arguments.what == "part":
        part(arguments.name, arguments.number)
    elif arguments.what in MEASURES:
        pack(arguments.what, MEASURES[arguments.what](arguments))
    else:
        {"receiver": receiver, "observer": observer}[arguments.what]()


if __name__ == "__main__":
    main()
