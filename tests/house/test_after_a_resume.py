"""The recipes of docs/after-a-resume.md are scripts that run, and keep their bits."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT

PAGE = ROOT / "docs" / "after-a-resume.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN_S = 300.0


def recipes() -> dict[str, str]:
    """Return each recipe's heading, and its script: the shared beginning and its own lines."""
    begin, *parts = PAGE.read_text().partition("\n## Recipes\n")[2].split("\n### ")
    (shared,) = BLOCK.findall(begin)
    return {part.partition("\n")[0]: shared + "\n" + "".join(BLOCK.findall(part)) for part in parts}


RECIPES = recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_script_that_protects_its_model(name: str) -> None:
    ast.parse(RECIPES[name])
    assert "job.protect(model=model, optimizer=optimizer" in RECIPES[name]
    assert len(RECIPES) >= 6


@pytest.mark.slow
@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_keeps_its_bits(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RECIPES[name])
    command = [sys.executable, "-m", "holdfast.cli.main", "check", "train.py"]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "This script keeps the promise" in found.stdout
