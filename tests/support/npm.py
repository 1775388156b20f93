"""Shared by tests with npm clients: the package, installed outside the project, and scripts that use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.programs import build, run_program, tool


def node_modules(*packages: str) -> Path:
    """Return the folder of the npm packages, which are installed once for all runs; skip if that fails."""
    tool("node")
    npm = tool("npm")

    def install(place: Path) -> list[list[str]]:
        return [[npm, "install", "--no-save", "--no-audit", "--no-fund", "--prefix", str(place), *packages]]

    # a folder for each call: npm removes other packages
    return build("npm", " ".join(packages).replace("/", "-"), install) / "node_modules"


def run_script(script: Path, *arguments: str, modules: Path, given: Any = None) -> Any:
    """Run a script that finds `modules` and reads `given` as JSON from standard input; return the JSON it prints."""
    return run_program(["node", str(script), *arguments], given=given, NODE_PATH=str(modules))
