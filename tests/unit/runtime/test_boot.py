"""The boot id."""

from __future__ import annotations

from pathlib import Path

from bridge.runtime.boot import read_boot_id


def test_the_boot_id_is_read_without_its_line_break(tmp_path: Path) -> None:
    path = tmp_path / "boot_id"
    path.write_text("5c9a0b2e-9d5f-4c5e-8d0e-1d1f4d6f0d3a\n")
    assert read_boot_id(path) == "5c9a0b2e-9d5f-4c5e-8d0e-1d1f4d6f0d3a"


def test_a_system_without_boot_ids_has_an_empty_one(tmp_path: Path) -> None:
    assert read_boot_id(tmp_path / "absent") == ""
    (tmp_path / "odd").write_bytes(b"\xff")
    assert read_boot_id(tmp_path / "odd") == ""
