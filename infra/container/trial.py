"""Build the image and run `imds-bridge forward` and the console from it, read-only and not as root, against the lab.

    python -m infra.container.trial                     with Docker or Podman where one works, else Buildah (as root)
    python -m infra.container.trial --base IMAGE        on another base image
    python -m infra.container.trial --engine buildah    with this one

Buildah uses a base made by mmdebstrap, unless --base is set. The last line has the result; the first failed check
ends the trial with exit code 1. Everything that was created is removed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

from bridge import __version__
from bridge.lab.imds import ImdsLab
from bridge.lab.inbox import Inbox, problem
from infra.container.engines import ROOT, Buildah, Client, choose

LIMIT_SECONDS = 60.0
STOP_SECONDS = 5.0  # the default of stop_seconds
SLACK_SECONDS = 30.0
SYSTEM_CA = "/etc/ssl/certs/ca-certificates.crt"
INDEX_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "default-timeout", "timeout")
SCHEDULED = "io.imdsbridge.scheduledevent.scheduled.v1"
LOOK = """
import os, azure.identity, azure.servicebus, jinja2, standardwebhooks, websocket
assert os.getuid() and os.getgid(), "runs as root"
assert os.statvfs("/").f_flag & os.ST_RDONLY, "the root can be written"
"""


def main() -> int:
    """Build, run, check, stop and clean up; return the exit code."""
    parser = argparse.ArgumentParser(description="Build the image and run it against the lab.")
    parser.add_argument("--engine", choices=("docker", "podman", "buildah"), default=None)
    parser.add_argument("--base", metavar="IMAGE", default=None)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("container: stopped"))
    with closing(choose(arguments.engine)) as engine:
        started_at = time.monotonic()
        build(engine, arguments.base)
        built_seconds = time.monotonic() - started_at
        delivered_seconds, stop_seconds = try_forward(engine)
        print(
            f"container: ok, {engine.name}, {engine.size()}, built in {built_seconds:.0f} s, event at the inbox "
            f"{delivered_seconds:.1f} s after the start, stopped in {stop_seconds:.1f} s"
        )
    return 0


def build(engine: Client | Buildah, base: str | None) -> None:
    """Build the image with the local pip's index and certificate authorities, which are not part of the image."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        settings = pip_settings()
        file.write("[global]\n")
        file.writelines(f"{name} = {settings[name]}\n" for name in INDEX_SETTINGS if name in settings)
        file.flush()
        authorities = settings.get("cert", os.environ.get("SSL_CERT_FILE", SYSTEM_CA))
        secrets = {"pip.conf": file.name, "ca.crt": authorities}
        engine.build(
            base,
            [f"--secret=id={name},src={path}" for name, path in secrets.items() if Path(path).is_file()]
            + [f"--build-arg=VERSION={__version__}"],
        )


def pip_settings() -> dict[str, str]:
    """Return pip's settings, from its file and the environment."""
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    pairs = (line.partition("=") for line in settings.stdout.splitlines())
    return {name.rpartition(".")[2]: str(ast.literal_eval(value)) for name, _, value in pairs}


def try_forward(engine: Client | Buildah) -> tuple[float, float]:
    """Run the forwarder from the image; return when its event arrived and how long it took to stop, in seconds."""
    health = engine.config()["Healthcheck"]["Test"][1:]
    with ImdsLab() as imds, Inbox(strict=True) as inbox:
        event_id = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)
        started_at = time.monotonic()
        engine.start(
            {
                "IMDS_BRIDGE__IMDS__ENDPOINT": imds.url("web-0"),
                "IMDS_BRIDGE__SINKS__OPS": json.dumps({"kind": "webhook", "url": inbox.url}),
            }
        )
        wait_until(lambda: (SCHEDULED, event_id) in [(e["type"], e["subject"]) for e in inbox.events()])
        delivered_seconds = time.monotonic() - started_at
        wait_until(lambda: engine.call(*health, "--ready").returncode == 0)
        for command in (health, ["imds-bridge", "status"], ["python", "-c", LOOK]):
            done = engine.call(*command)
            expect(done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}")
        shown = engine.call("imds-bridge", "--version").stdout
        expect(shown == f"imds-bridge {__version__}\n", f"built {__version__}, runs {shown}")
        listening = engine.call(*health, "--role", "listen")
        expect(listening.returncode == 1, f"healthy without a listener: {listening.stdout}")
        try_console(engine, health)
        stopped_at = time.monotonic()
        code = engine.stop(STOP_SECONDS + SLACK_SECONDS)
        expect(code == 0, f"SIGTERM ended it with exit code {code}")
        problems = [*filter(None, map(problem, inbox.accepted))]
        expect(not problems, f"the inbox refuses: {problems}")
    return delivered_seconds, time.monotonic() - stopped_at


def try_console(engine: Client | Buildah, health: list[str]) -> None:
    """Run the console beside the forwarder, and look at its page; it ends with the container."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    setting = ["env", f"IMDS_BRIDGE__CONSOLE__LISTEN={listen}"]
    Thread(target=engine.call, args=(*setting, "imds-bridge", "console"), daemon=True).start()
    wait_until(lambda: engine.call(*setting, *health, "--role", "console", "--ready").returncode == 0)
    with urlopen(f"http://{listen}/") as page:
        expect(b"imds-bridge" in page.read(), "the console shows no page")


def wait_until(predicate: Callable[[], bool]) -> None:
    """Wait until the predicate holds.

    Raises:
        SystemExit: it does not in time.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    while not predicate():
        expect(time.monotonic() < deadline, f"not within {LIMIT_SECONDS:g} s")
        time.sleep(0.1)


def expect(holds: bool, otherwise: str) -> None:
    """End the trial with this text unless the condition holds."""
    if not holds:
        raise SystemExit(f"container: {otherwise}")


if __name__ == "__main__":
    sys.exit(main())
