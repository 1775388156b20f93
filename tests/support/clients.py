"""Microsoft's Service Bus clients for other languages, each in a small program that tests call."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.support.npm import node_modules
from tests.support.paths import DATA
from tests.support.programs import build, run_program, tool

SOURCES = DATA / "servicebus"

# Calls a program with an action, a connection string and perhaps standard input; returns the JSON that it prints.
Client = Callable[..., Any]


def client(language: str) -> Client:
    """Return the program in "node", "go" or "java"; skip if it cannot be built here."""
    command, environment = {"node": _node, "go": _go, "java": _java}[language]()

    def call(action: str, connection_string: str, given: Any = None) -> Any:
        return run_program([*command, action, connection_string], given=given, **environment)

    return call


def _node() -> tuple[list[str], dict[str, str]]:
    modules = node_modules("@azure/service-bus")
    return [tool("node"), str(SOURCES / "client.js")], {"NODE_PATH": str(modules)}


def _go() -> tuple[list[str], dict[str, str]]:
    return [str(go_program(SOURCES / "go" / "main.go"))], {}


def go_program(source: Path) -> Path:
    """Return the program that a file in Go makes with the modules of the client; skip if it cannot be built here."""
    go, modules = tool("go"), [SOURCES / "go" / name for name in ("go.mod", "go.sum")]

    def compile_it(place: Path) -> list[list[str]]:
        for file in (*modules, source):
            shutil.copy(file, place)
        return [[go, "build", "-o", "client", source.name]]

    return build("go", _digest(*modules, source), compile_it) / "client"


def _java() -> tuple[list[str], dict[str, str]]:
    java, javac, mvn, source = tool("java"), tool("javac"), tool("mvn"), SOURCES / "java"

    def compile_it(place: Path) -> list[list[str]]:
        pom, libraries = str(source / "pom.xml"), str(place / "lib")
        copy = [mvn, "-q", "-B", "-f", pom, "dependency:copy-dependencies", f"-DoutputDirectory={libraries}"]
        classes = ["-cp", f"{libraries}/*", "-d", str(place / "classes"), str(source / "Client.java")]
        return [copy, [javac, "-proc:none", *classes]]

    place = build("java", _digest(*source.iterdir()), compile_it)
    fast_start = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    return [java, *fast_start, "-cp", f"{place}/lib/*:{place}/classes", "Client"], {}


def _digest(*files: Path) -> str:
    """Name the content of files."""
    return sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]
