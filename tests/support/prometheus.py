"""A real Prometheus, of Debian's package, that scrapes processes on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from tests.support.ports import free_address
from tests.support.process import environment, wait_until


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is scraped: its port on this machine, its `instance`, and labels of its own."""

    port: int
    instance: str
    labels: Mapping[str, str] = field(default_factory=dict)


class Prometheus:
    """Where a running Prometheus answers, and what it scrapes."""

    def __init__(self, folder: Path) -> None:
        self.address = free_address()
        self._folder = folder

    def file(self, name: str) -> Path:
        """Return the file with the targets of a job."""
        return self._folder / f"targets-{name.replace('/', '-')}.json"

    def scrape(self, name: str, *targets: Target) -> None:
        """Scrape these in the job of a target from now on, within seconds."""
        found = [
            {"targets": [f"127.0.0.1:{one.port}"], "labels": {"instance": one.instance, **one.labels}}
            for one in targets
        ]
        new = self.file(name).with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(self.file(name))

    def ask(self, api: str, **parameters: Any) -> list[dict[str, Any]]:
        """Return the result of `query` or `query_range`."""
        answer = requests.get(f"http://{self.address}/api/v1/{api}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", (parameters, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def has(self, query: str, count: int) -> bool:
        """Return whether a query has so many results; False while nothing answers."""
        try:
            return len(self.ask("query", query=query)) == count
        except (requests.RequestException, ValueError):
            return False


@contextmanager
def prometheus(
    folder: Path, targets: Mapping[str, int], *, every_seconds: int, rules: str = ""
) -> Iterator[Prometheus]:
    """Scrape and evaluate every few seconds.

    Args:
        folder: for its files.
        targets: the ports, by instance; the job is named after what stands behind a slash in it, if anything does.
        every_seconds: between two scrapes.
        rules: a file of alerts.
    """
    program = shutil.which("prometheus") or sys.exit("install Debian's package prometheus")
    running = Prometheus(folder)
    for name, port in targets.items():
        running.scrape(name, Target(port=port, instance=name))
    jobs = "".join(
        f"  - job_name: imds-bridge-{name.partition('/')[2] or name}\n    file_sd_configs:\n"
        f"      - files: ['{running.file(name)}']\n        refresh_interval: 5s\n"
        for name in targets
    )
    every = f"{{scrape_interval: {every_seconds}s, evaluation_interval: {every_seconds}s}}"
    config = folder / "prometheus.yml"
    config.write_text(f"global: {every}\nrule_files: [{rules}]\nscrape_configs:\n{jobs}")
    words = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    words.append(f"--web.listen-address={running.address}")
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(words, env=environment(), stdout=log, stderr=log)
        try:
            wait_until(lambda: running.has("vector(1)", 1))
            yield running
        finally:
            process.terminate()
            process.wait()
