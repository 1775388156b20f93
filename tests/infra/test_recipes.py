"""What can be read of infra/recipes without the programs; tests/systemd/test_recipes.py runs them."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "infra/recipes"
RECIPES = sorted(path.parent for path in FOLDER.glob("*/README.md"))
INSTALLED = "/usr/local/lib/imds-bridge/"


def programs(recipe: Path) -> set[Path]:
    """Return the programs that the settings of a recipe name, in this checkout."""
    settings = tomllib.loads(next(iter(recipe.glob("*.toml"))).read_text())
    rules = settings.get("approvals", {}).get("auto", []) + list(settings.get("sinks", {}).values())
    return {
        FOLDER / rule[key][0].removeprefix(INSTALLED)
        for rule in rules
        for key in ("run", "recover")
        if key in rule
    }


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_names_its_own_programs_which_are_short(recipe: Path) -> None:
    named = programs(recipe)
    executable = {path for path in recipe.iterdir() if os.access(path, os.X_OK)}
    assert named == executable
    assert sum(len(path.read_text().splitlines()) for path in named) <= 60
    assert len((recipe / "README.md").read_text().splitlines()) <= 20
    assert f"[{recipe.name}]({recipe.name}/README.md)" in (FOLDER / "README.md").read_text()
