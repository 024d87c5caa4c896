"""Documents are drawn from this code, their links work, and the public surface is pinned."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import holdfast
import holdfast.tables
from places import ROOT

DOCUMENTS = sorted(
    path
    for folder in (".", "docs", "benchmarks", ".github")
    for path in (ROOT / folder).glob("*.md")
)
FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors_of(document: str) -> set[str]:
    """Return the anchors that a code host makes of the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def find_dead_links(path: Path, document: str) -> Iterator[str]:
    for link in LINK.findall(FENCE.sub("", document)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        text = document if not file else ""
        if target.is_file() and target.suffix == ".md" and file:
            text = target.read_text()
        if (file and not target.exists()) or (anchor and anchor not in anchors_of(text)):
            yield link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_anchors_lead_somewhere(path: Path) -> None:
    assert list(find_dead_links(path, path.read_text())) == []


def test_dead_links_and_anchors_are_found() -> None:
    page = "# Here\n[a](none.md) [b](events.md#none) [c](events.md#kinds) [d](#here) [e](#there)"
    dead = find_dead_links(ROOT / "docs" / "planted.md", page)
    assert list(dead) == ["none.md", "events.md#none", "#there"]


def test_the_site_has_every_page() -> None:
    """MkDocs is not needed for this: `make docs` itself refuses pages and links that it lacks."""
    text = re.sub(r"!!python/\S+ ", "", (ROOT / "mkdocs.yml").read_text())
    config = yaml.safe_load(text)
    assert config["theme"]["font"] is False, "fonts would be asked for at another server"
    pages = set(re.findall(r": ([\w./-]+\.md)$", text, re.MULTILINE))
    missing = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} - pages
    assert missing == set()


def test_the_options_page_is_drawn_from_the_settings() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert load_script("draw_options.py").draw_page() == page, "run: python docs/draw_options.py"


def test_the_python_page_names_everything_public() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    public = [f"holdfast.{name}" for name in holdfast.__all__ if name not in ("servers", "tables")]
    public += [f"holdfast.tables.{name}" for name in holdfast.tables.__all__]
    shown = re.findall(r"^<!-- docstring: ([\w.]+) -->$", page, re.MULTILINE)
    assert sorted(shown) == sorted(public)
    assert [name for name in public if f"| `{name}` |" not in page] == []


def test_the_protocol_page_is_drawn_from_this_code() -> None:
    draw = load_script("draw_protocol.py")
    page = (ROOT / "docs" / "protocol.md").read_text()
    assert draw.drawn(page) == page, "run: python docs/draw_protocol.py"
    planted = page.replace("| `Commit` | step, voted |", "| `Commit` | nothing |")
    assert draw.drawn(planted) != planted


def test_the_protocol_page_names_what_the_core_has() -> None:
    core = "".join(p.read_text() for p in sorted((ROOT / "src/holdfast/engine/core").rglob("*.py")))
    page = (ROOT / "docs" / "protocol.md").read_text()
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", page))
    assert len(named) > 50
    assert [name for name in sorted(named) if f"class {name}" not in core] == []


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
        "tables",
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
    assert step == ["backward", "complete", "gather", "round", "skip", "virtual_rank"]


def test_every_health_check_is_on_its_page() -> None:
    """What a table or a drained node names can be looked up: checks, and the names of speeds."""
    page = (ROOT / "docs" / "doctor.md").read_text()
    host = ROOT / "src/holdfast/engine/host"
    examination = ROOT / "src/holdfast/doctor/examination.py"
    paths = [*host.glob("checks_*.py"), examination, host / "light.py"]
    names = set()
    for node in (n for path in paths for n in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.keyword) and node.arg == "check":
            names |= {node.value.value} if isinstance(node.value, ast.Constant) else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"^[a-z]+(?:-[a-z]+)+$", node.value))
    assert {"disk", "cpu-pressure", "gpu-ecc", "arithmetic-gpu"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
