#!/usr/bin/python3
"""Take a server of HAProxy out of work, or put it back: drain.py run|recover SOCKET BACKEND SERVER."""

import csv
import os
import socket
import sys
import time
from pathlib import Path

verb, path, backend, server = sys.argv[1:]
mark = Path(os.environ["STATE_DIRECTORY"], f"drained-{backend}-{server}")
DRAIN, MAINT = 0x18, 0x63  # bits of srv_admin_state


def ask(line: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(f"{line}\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode().strip()


def state() -> str:
    for fields in map(str.split, ask(f"show servers state {backend}").splitlines()):
        if fields[3:4] == [server]:
            bits = int(fields[6])
            return "maint" if bits & MAINT else "drain" if bits & DRAIN else "ready"
    sys.exit(f"there is no server {backend}/{server}")


def set_state(new: str) -> None:
    print(f"{backend}/{server}: {new}", flush=True)
    if refusal := ask(f"set server {backend}/{server} state {new}"):
        sys.exit(refusal)


def sessions() -> int:
    rows = csv.DictReader(ask("show stat").lstrip("# ").splitlines())
    return next(int(row["scur"]) for row in rows if (row["pxname"], row["svname"]) == (backend, server))


try:
    while verb == "run" and (state() == "ready" or sessions()):
        if state() != "ready":
            time.sleep(1)
        else:  # at first, and when a reload of HAProxy has forgotten it
            mark.touch()
            os.sync()  # the power may go
            set_state("drain")
    if verb == "recover" and mark.exists() and state() == "drain":
        set_state("ready")
    if verb == "recover":
        mark.unlink(missing_ok=True)
    print(f"{backend}/{server} is {state()}")
except OSError as error:
    sys.exit(f"{path}: {error}")
