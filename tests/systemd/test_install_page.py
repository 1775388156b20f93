"""docs/install.md, word by word, with the simulator, under a real systemd: `make units`."""

from __future__ import annotations

import json
import re
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from tests.support.pages import blocks, section
from tests.support.paths import ROOT
from tests.support.process import wait_until
from tests.systemd.machine import Machine, System, add_host_files, booted

PAGE = "docs/install.md"
BLOCKS = [one.text for one in blocks(ROOT / PAGE)]
ROLES = ("forward", "listen")
SHOP = "[Service]\nExecStart=/bin/sleep infinity\n"
WELL = "nothing needs a person"
RECEIVED = "http://127.0.0.1:8800/lab/received"

pytestmark = [
    pytest.mark.units,
    pytest.mark.skipif(sys.platform != "linux", reason="systemd is not there"),
    pytest.mark.timeout(600),  # the first test waits for a new root and the installation
]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with booted(System(suite="bookworm", packages=("polkitd", "python3"))) as started:
        add_host_files(started.root)
        yield started


def block(start: str) -> str:
    """Return the only block of the page that has this text."""
    found = [text for text in BLOCKS if start in text]
    assert len(found) == 1, (start, found)
    return found[0]


def line(start: str) -> str:
    """Return the line of a block that begins so."""
    found = [line for text in BLOCKS for line in text.splitlines() if line.startswith(start)]
    assert len(found) == 1, (start, found)
    return found[0]


def comment(start: str) -> str:
    """Return what the page says behind a line."""
    return line(start).partition(" # ")[2].strip()


def is_well(machine: Machine) -> bool:
    """Return whether both processes say that nothing needs a person."""
    said = [machine.try_to_do(f"imds-bridge status --check --role {role}").stdout for role in ROLES]
    return said == [f"{WELL}\n"] * len(ROLES)


def received() -> list[str]:
    """Return the first text of each message that the simulator has received, none before it runs."""
    try:
        with urllib.request.urlopen(RECEIVED) as answer:
            requests: list[dict[str, Any]] = json.load(answer)
    except URLError:
        return ["nothing runs there"]
    return [re.findall(r'"text": ?"(.*?)"', one["body"])[0] for one in requests]


def has_received(words: str) -> bool:
    """Return whether a message begins with a text that has these words."""
    return any(words in text for text in received())


def test_1_it_is_installed_and_nothing_is_started(machine: Machine, release: Path) -> None:
    packages, unpack, install = block("tar -xf").splitlines()
    machine.do(
        packages.replace("apt-get", "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qqy")
    )
    shutil.copy(release, machine.root / "srv")
    machine.do(f"cd /srv\n{unpack}\n{install}")
    running = "systemctl list-units --no-legend --state=running 'imds-bridge-*'"
    assert machine.do(running) == ""


def test_2_the_configuration_is_that_of_the_page(machine: Machine) -> None:
    machine.do(line("(umask 077"), URL="https://example.org/hook")
    machine.write("/etc/imds-bridge/config.toml", block("[sinks.chat]"), 0o600)
    machine.do("imds-bridge config check /etc/imds-bridge/config.toml")


def test_3_the_listener_may_stop_and_start_the_service(machine: Machine) -> None:
    machine.write("/etc/systemd/system/shop.service", SHOP)
    machine.do("systemctl daemon-reload && systemctl start shop")
    for wanted, command in zip(("inactive", "active"), block("systemd-run").splitlines(), strict=True):
        machine.do(command)
        assert machine.try_to_do("systemctl is-active shop").stdout.strip() == wanted


def test_4_check_and_status_say_what_the_page_says(machine: Machine) -> None:
    lab, *settings = block("imds-bridge lab --vm").splitlines()
    machine.do(f"systemd-run --unit lab /usr/local/bin/{lab}")
    machine.do("\n".join(settings))
    wait_until(lambda: received() == [], describe=lambda: machine.do("journalctl -u lab -n 20"))
    done = machine.try_to_do(f"{line('imds-bridge check --send')[:24]} --json")
    found = json.loads(done.stdout)
    assert {row["check"] for row in found if row["result"] == "warn"} == {"unit"}
    assert (done.returncode, {row["result"] for row in found if row["check"] != "unit"}) == (0, {"ok"})
    assert "the two units do not run yet (warn)" in comment("imds-bridge check --send")
    wait_until(lambda: has_received("TEST"))
    machine.do(line("systemctl enable --now"))
    assert WELL in comment("imds-bridge status --check")
    wait_until(lambda: is_well(machine))


def test_5_a_redeploy_is_announced_drained_approved_and_put_back(machine: Machine) -> None:
    schedule, status, complete = block("imds-bridge lab schedule").splitlines()
    event = machine.do(f"{schedule}\necho $id").split()[-1]
    wait_until(lambda: event in machine.try_to_do(status).stdout)
    wait_until(lambda: has_received("Approved"), describe=received)
    assert machine.try_to_do("systemctl is-active shop").stdout.strip() == "inactive"
    assert comment("imds-bridge lab complete").startswith("ten seconds after")
    wait_until(lambda: has_received("has started"))
    machine.do(f"id={event}; {complete}")
    table = re.findall(r"(?m)^\| ([^|]+?) \|", section(PAGE, "5. See it happen"))
    expected = [text for text in table if text not in ("message", "---")]
    wait_until(lambda: len(received()) > len(expected), describe=received)
    texts = received()[1:]
    assert len(expected) == len(texts) == 6, texts
    assert [said for said, text in zip(expected, texts, strict=True) if said not in text] == [], texts
    assert machine.do("systemctl is-active shop").strip() == "active"


def test_6_it_starts_again_without_the_state_of_the_trial(machine: Machine) -> None:
    machine.do(block("rm -r /var/lib/private/imds-bridge"))
    wait_until(lambda: is_well(machine))
