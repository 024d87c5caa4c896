"""Documents are drawn from this code, their links work, and the public surface is pinned."""

from __future__ import annotations

import ast
import html
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import yaml

import holdfast
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


#: What people type into a search, and the page whose title has these words.
TITLES = {
    "resume training after a crash": "after-a-resume",
    "elastic training": "clusters",
    "spot instances": "clusters",
    "stragglers": "stragglers",
    "silent data corruption": "silent-errors",
    "async checkpoints": "checkpoints",
    "in-memory checkpoints": "memory",
    "fault tolerance": "failures",
    "embedding tables": "tables",
    "fsdp2": "sharding",
    "reproducibility": "replay",
}


@pytest.mark.parametrize("words", TITLES)
def test_titles_have_the_words_that_people_search_for(words: str) -> None:
    title, _, _ = (ROOT / "docs" / f"{TITLES[words]}.md").read_text().partition("\n")
    assert words in title.lower()


def test_the_options_page_is_drawn_from_the_settings() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert load_script("draw_options.py").draw_page() == page, "run: python docs/draw_options.py"


def test_the_lines_of_the_readme_are_of_the_recorded_run() -> None:
    shown = load_script("draw_pictures.py").DRAWN.search((ROOT / "README.md").read_text())
    assert shown is not None
    lines = [line.strip() for line in shown[0].splitlines() if line[:4] == "    "]
    recorded = html.unescape((ROOT / "docs" / "kill.svg").read_text())
    assert len(lines) > 8
    assert [line for line in lines if line not in recorded] == [], "run: make pictures"


PRINTED = """\
1. A small GPT, with faults
   1.0 s  view 1: workers 0-3; the job starts
   2.0 s  step 3: killed worker 2 (SIGKILL)
   2.1 s  worker 2 was lost: ended by SIGKILL
   2.2 s  step 3, loss 2.7, 3 workers
   2.3 s  step 3 is committed, 0.20 s after the fault was seen
   2.9 s  worker 2 joins at the next step boundary
   3.0 s  step 9: froze worker 1 (SIGSTOP)
   3.1 s  worker 1 was lost: frozen
   3.2 s  step 9 is committed, 1.10 s after the fault was seen
2. The same steps undisturbed

3. What the faults cost
4. What the faults changed
                      faulty    undisturbed
 workers lost         2         0
 last loss            2.5       2.5          equal
 SHA-256 of the state 01...     01...        equal

faulty run: demo/faulty
2 workers were lost, and the model is the same, bit for bit.
"""


def test_a_recording_has_one_fault_whole_and_the_proof() -> None:
    draw = load_script("draw_pictures.py")
    printed = PRINTED.splitlines()
    assert draw.choose_lines(printed, faults=2) == [
        "$ holdfast demo",
        printed[0],
        draw.GAP,
        *(printed[n] for n in (2, 3, 5)),
        draw.GAP,
        *(printed[n] for n in (7, 9)),
        printed[10],
        "",
        *(printed[n] for n in (14, 15, 17)),
        "",
        printed[-1],
    ]
    assert draw.choose_transcript(printed) == [
        *(printed[n] for n in (2, 3, 5)),
        "",
        *(printed[n] for n in (14, 15, 17)),
    ]


def test_a_terminal_is_drawn_without_animation_for_those_who_want_none() -> None:
    draw = load_script("draw_pictures.py")
    picture = draw.draw_terminal(["$ holdfast demo", " a < b", "  2.0 s  step 3: killed worker 2"])
    root = ElementTree.fromstring(picture)
    texts = [each for each in root if each.tag.endswith("text")]
    assert [each.text for each in texts][1] == " a < b"
    assert [each.get("class") for each in texts] == ["line command", "line plain", "line strike"]
    assert "prefers-reduced-motion" in picture
    assert "opacity" not in re.sub("<style>.*</style>", "", picture, flags=re.DOTALL)


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
        "Launched",
        "RankState",
        "StateMismatch",
        "Step",
        "Stream",
        "Task",
        "UserError",
        "VerifiedFiles",
        "WorldError",
        "join",
        "launch",
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
