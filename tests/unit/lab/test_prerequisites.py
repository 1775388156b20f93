"""What the simulated Service Bus needs is named before anything is built."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from bridge.cli.main import parse
from bridge.errors import UsageError
from bridge.lab import demo, prerequisites


def test_a_missing_compiler_and_missing_headers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert prerequisites.missing() == ["gcc", "python3-dev"]
    assert "apt-get install gcc python3-dev" in prerequisites.explain(prerequisites.missing())


def test_the_demo_without_proton_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "proton", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"needs: gcc .*pip install 'imds-bridge\[lab\]'; .*demo --no-bus"):
        demo.run(parse(["demo"]))
