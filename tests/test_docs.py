"""Pages that are drawn from the code must be up to date, and the public surface is pinned."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import holdfast

ROOT = Path(__file__).parent.parent


def test_the_protocol_page_is_drawn_from_this_code() -> None:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw_protocol.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    page = (ROOT / "docs" / "protocol.md").read_text()
    assert draw.drawn(page) == page, "run: python docs/draw_protocol.py"
    planted = page.replace("| `Commit` | step, voted |", "| `Commit` | nothing |")
    assert draw.drawn(planted) != planted


def test_the_public_surface() -> None:
    assert sorted(holdfast.__all__) == [
        "Batches",
        "Epoch",
        "HoldfastError",
        "InvariantError",
        "Job",
        "RankState",
        "StateMismatch",
        "Step",
        "Stream",
        "Task",
        "UserError",
        "VerifiedFiles",
        "WorldError",
        "join",
        "servers",
    ]
    public = [n for n in dir(holdfast.Job) if not n.startswith("_")]
    assert public == [
        "agree",
        "batches",
        "begin_at",
        "begin_from",
        "epochs",
        "evaluate",
        "is_leader",
        "mesh",
        "on_step_end",
        "protect",
        "rank_state",
        "run_dir",
        "scratch",
        "steps",
        "stop",
        "stopped",
        "stream",
        "values",
        "virtual_ranks",
        "worker",
    ]
    step = [n for n in dir(holdfast.Step) if not n.startswith("_")]
    assert step == ["backward", "complete", "gather", "round", "virtual_rank"]


def test_every_health_check_is_on_its_page() -> None:
    """What a table or a drained node names can be looked up: checks, and the names of speeds."""
    page = (ROOT / "docs" / "doctor.md").read_text()
    health = ROOT / "src/holdfast/health"
    paths = [*health.glob("checks_*.py"), health / "examination.py", health / "measure/light.py"]
    names = set()
    for node in (n for path in paths for n in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.keyword) and node.arg == "check":
            names |= {node.value.value} if isinstance(node.value, ast.Constant) else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"^[a-z]+(?:-[a-z]+)+$", node.value))
    assert {"disk", "cpu-pressure", "gpu-ecc", "arithmetic-gpu"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
