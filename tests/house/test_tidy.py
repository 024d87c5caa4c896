"""The house rules hold, and every one of them is able to fail.

The rules and their reasons are in tidy.py. Each is shown planted bad snippets that it must refuse
and good ones that it must let pass: a rule that cannot fail protects nothing.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import tidy
import tidy_layers
import tidy_prose

CORE = "src/holdfast/engine/core/x.py"
TABLES_CORE = "src/holdfast/tables/core/x.py"
RUNTIME = "src/holdfast/engine/runtime/x.py"
SIM = "src/holdfast/lab/sim/x.py"
TRAIN = "src/holdfast/engine/train/x.py"
EXCHANGE = "src/holdfast/engine/train/exchange/x.py"
STEP = "src/holdfast/engine/train/step/x.py"
UNHEARD_OF = "src/holdfast/engine/train/unheard_of/x.py"
ROOT = "src/holdfast/__init__.py"
LABS = "tests/labs/x.py"
CLI = "src/holdfast/cli/main.py"

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 70
CONSTRUCTOR = "class C:\n    def __init__(self, a, b, c, d, e, f, *, g{more}): ..."
METHODS = "class C:\n" + "".join(f"    def m{i}(self): self.a = 1\n" for i in range(20))
ATTRIBUTES = "class C:\n    def f(self):\n" + "".join(f"        self.a{i} = 1\n" for i in range(15))
CODING = "src/holdfast/engine/state/coding/x.py"
SENTENCE = "Returns how many bytes have come."
FIELD_SET = "class C:\n    seen: set[int]\n    def f(self):\n        return [x for x in self.seen]"

# rule, path, source
BAD = [
    ("layers", CORE, "from holdfast.engine.wire import codec"),
    ("layers", CORE, "def f():\n    import holdfast.engine.train"),
    ("layers", CORE, "from ..wire import codec"),
    ("layers", CORE, "from holdfast.engine import runtime"),
    ("layers", RUNTIME, "import holdfast"),
    ("layers", RUNTIME, "from holdfast import join"),
    ("layers", RUNTIME, "from holdfast.lab.sim.world import World"),
    ("layers", SIM, "from holdfast.engine.runtime.node.agent_process import Agent"),
    ("layers", SIM, "from holdfast.engine.train import job"),
    ("layers", "src/holdfast/engine/records/x.py", "import holdfast.engine.train.job"),
    ("layers", CLI, "from holdfast.lab.contracts import faults"),
    ("layers", "src/holdfast/lab/contracts/x.py", "from holdfast.clusters.ray import link"),
    ("layers", "src/holdfast/tables/x.py", "from holdfast.reports import charts"),
    ("layers", TABLES_CORE, "from holdfast.tables import serving"),
    ("layers", TABLES_CORE, "from holdfast.engine.wire import codec"),
    ("layers", SIM, "from holdfast.tables import serving"),
    ("layers", "src/holdfast/engine/runtime/x.py", "from holdfast.tables import serving"),
    ("layers", "src/holdfast/engine/state/memory/x.py", "import holdfast.engine.state.store.open"),
    ("layers", "src/holdfast/unheard_of/x.py", "from holdfast.engine.core import types"),
    ("train-layers", EXCHANGE, "from holdfast.engine.train.x import f"),
    (
        "train-layers",
        STEP,
        "from holdfast.engine.train.exchange import x\nimport holdfast.engine.train.x",
    ),
    ("train-layers", UNHEARD_OF, "from holdfast.engine.train.exchange.x import f"),
    ("torch-only-in-train", RUNTIME, "import torch.distributed as dist"),
    ("torch-only-in-train", CLI, "def f():\n    from torch import nn"),
    ("pure-core", CORE, "import time"),
    ("pure-core", TABLES_CORE, "import torch"),
    ("pure-core", CORE, "from os import urandom"),
    ("pure-core", CORE, "import numpy as np"),
    ("pure-core", CORE, "x = hash('a')"),
    ("no-code-from-data", RUNTIME, "import pickle"),
    ("no-code-from-data", RUNTIME, "from marshal import loads"),
    ("no-code-from-data", RUNTIME, "import shelve"),
    ("no-code-from-data", RUNTIME, "eval('1')"),
    ("no-code-from-data", RUNTIME, "exec('x = 1')"),
    ("no-code-from-data", TRAIN, "import torch\ntorch.load(f)"),
    ("no-code-from-data", TRAIN, "import torch\ntorch.load(f, weights_only=False)"),
    ("no-code-from-data", TRAIN, "np.load(f, allow_pickle=True)"),
    ("no-code-from-data", TRAIN, "dist.broadcast_object_list(xs)"),
    ("python-3.10", CORE, "from typing import assert_never"),
    ("python-3.10", RUNTIME, "import asyncio\nasyncio.timeout(1)"),
    ("function-size", CORE, LONG_FUNCTION),
    ("function-size", "tests/test_x.py", LONG_FUNCTION),
    ("file-size", CORE, "x = 1\n" * 601),
    ("line-size", CORE, "x = '" + "a" * 95 + "'"),
    ("constructor-size", CORE, CONSTRUCTOR.format(more=", h")),
    ("constructor-size", CORE, CONSTRUCTOR.format(more=", **h")),
    ("class-size", CORE, METHODS + "    def n(self): ..."),
    ("class-size", CORE, ATTRIBUTES + "        self.a, self.b = 1, 2"),
    ("short-file", CORE, "x = 1\n" * 39),
    ("module-docstring", CORE, "x = 1"),
    ("module-docstring", LABS, "x = 1"),
    ("module-docstring", "src/holdfast/engine/core/__init__.py", ""),
    ("docstring-sentence", CODING, "'Of all loops. Without a directory there is no ledger.'"),
    ("docstring-sentence", CODING, "'Whether it holds for this one.'"),
    ("docstring-sentence", CODING, "'See the docstring of the module.'"),
    ("docstring-sentence", CODING, "'The newest view.'"),
    ("docstring-sentence", CODING, "'One line.'"),
    ("docstring-sentence", CODING, "'Counts the bytes that have come'"),
    ("docstring-sentence", CODING, "'seconds since it began to run.'"),
    ("docstring-sentence", CODING, "'`size`: bytes of each block.'"),
    ("docstring-sentence", CODING, "'UserError where there is no such file.'"),
    ("docstring-sentence", CODING, "'Compared in constant time.'"),
    ("docstring-sentence", CODING, "'Finding sockets of a library.'"),
    ("docstring-sentence", CODING, "class C:\n    def f(self):\n        'When it ends.'"),
    ("plain-prose", CORE, "def f():\n    'Tell whether what is kept can be read.'"),
    ("plain-prose", CORE, "x = 1  # that it takes, of those who have one\ny = 2  # of which"),
    ("plain-prose", "tests/test_x.py", "# begin anew, if\n# so many come to the end"),
    ("unique-name", CORE, "class C: ...\nclass D:\n    class C: ..."),
    ("verb-in-name", CORE, "def told(): ..."),
    ("verb-in-name", RUNTIME, "class C:\n    async def _after(self): ..."),
    ("public-docstring", ROOT, "__all__ = ['f']\ndef f(): ..."),
    ("public-docstring", ROOT, "__all__ = ['C']\nclass C:\n    'C.'\n    def f(self): ..."),
    ("public-docstring", ROOT, "__all__ = ['nowhere']"),
    ("public-docstring", ROOT, "from holdfast.engine.train.x import f\n__all__ = [*LAZY]"),
    ("unused-module", RUNTIME, "x = 1"),
    ("unit-in-name", RUNTIME, "def f(timeout): ..."),
    ("unit-in-name", RUNTIME, "async def f(*, poll_interval=1.0): ..."),
    ("unit-in-name", RUNTIME, "class Policy:\n    delay_max: float = 1.0"),
    ("no-sleep-in-tests", "tests/test_x.py", "import time\ntime.sleep(1)"),
    ("no-sleep-in-tests", "tests/test_x.py", "from time import sleep"),
    ("no-set-order", CORE, "for x in {1, 2}: ..."),
    ("no-set-order", CORE, "for x in set(xs): ..."),
    ("no-set-order", CORE, "ys = [x for x in {y for y in xs}]"),
    ("no-set-order", CORE, "ys = list(frozenset(xs))"),
    ("no-set-order", CORE, "ys = tuple(a.keys() & b.keys())"),
    ("no-set-order", CORE, "def f(xs: set[int]):\n    return [*xs]"),
    ("no-set-order", CORE, "def f():\n    xs = set()\n    return next(iter(xs))"),
    ("no-set-order", CORE, "def f():\n    xs = {1}\n    ys = xs - {2}\n    return ys.pop()"),
    ("no-set-order", CORE, FIELD_SET),
]
GOOD = [
    ("layers", CORE, "from holdfast.engine.core.types import View\nfrom . import tree"),
    ("layers", RUNTIME, "from holdfast.engine.train import job\nfrom holdfast.engine import wire"),
    ("layers", CLI, "import holdfast\nfrom holdfast.engine import plugins"),
    ("layers", ROOT, "from holdfast.engine.train.job import join"),
    (
        "layers",
        "src/holdfast/lab/contracts/x.py",
        "import holdfast\nfrom holdfast.engine.runtime import rundir",
    ),
    (
        "train-layers",
        TRAIN,
        "from holdfast.engine.train.exchange import x\nimport holdfast.engine.train.step.x",
    ),
    (
        "train-layers",
        STEP,
        "from holdfast.engine.train.exchange.x import f\nimport holdfast.engine.core.types",
    ),
    ("torch-only-in-train", TRAIN, "import torch"),
    ("torch-only-in-train", "src/holdfast/lab/contracts/x.py", "import torch"),
    ("torch-only-in-train", "examples/x.py", "import torch"),
    ("pure-core", CORE, "import enum, math\nfrom holdfast.engine.core import tree\nx = tree.id(1)"),
    ("no-code-from-data", TRAIN, "model.eval()\ntorch.load(f, weights_only=True)\njson.load(f)"),
    ("python-3.10", CORE, "from typing import NoReturn\nasyncio.wait_for(x, 1)"),
    ("function-size", CORE, LONG_FUNCTION.removesuffix("    x = 1\n")),
    ("file-size", CORE, "x = 1\n" * 600),
    ("line-size", CORE, "x = '" + "a" * 94 + "'"),
    ("constructor-size", CORE, CONSTRUCTOR.format(more="")),
    ("class-size", CORE, METHODS),
    ("class-size", CORE, ATTRIBUTES + "        other.b, self.a0 = 1, 2"),
    ("class-size", CORE, "class C:\n" + "".join(f"    f{i}: int = 0\n" for i in range(30))),
    ("short-file", CORE, "x = 1\n" * 40),
    ("short-file", "src/holdfast/engine/core/__init__.py", ""),
    ("module-docstring", CORE, '"""What it is for."""'),
    ("docstring-sentence", CODING, f"{SENTENCE!r}\ndef f():\n    'Read all of it: no byte less.'"),
    ("docstring-sentence", CODING, "'`feed` takes bytes; it never blocks.'"),
    ("docstring-sentence", CODING, "'The newest view is the one that counts.'"),
    ("docstring-sentence", CODING, "'Bring a chunk to its place.'"),
    ("docstring-sentence", CODING, "def f(): ...\nclass C: ..."),
    ("docstring-sentence", "tests/test_x.py", "'Of all loops.'"),
    ("plain-prose", CORE, "def f():\n    'Return whether the kept pieces can be read.'"),
    ("plain-prose", CORE, "x = 1  # bytes used by those pieces\ns = 'what is'\nwhat = 'anew'"),
    ("unique-name", CORE, "class C: ...\nclass D:\n    class _C: ...\nclass _C: ..."),
    ("unique-name", "tests/test_x.py", "class C: ...\nclass D:\n    class C: ..."),
    (
        "verb-in-name",
        CORE,
        "class C:\n    @property\n    def left(self): ...\n    def is_left(self): ...",
    ),
    ("public-docstring", ROOT, "__all__ = ['f', 'V']\nV = 1\ndef f():\n    'What it does.'"),
    ("public-docstring", ROOT, "__all__ = ['C']\nclass C:\n    'C.'\n    def _f(self): ..."),
    ("unused-module", CLI, "x = 1"),
    ("unit-in-name", RUNTIME, "def f(timeout_s, delay_max_s, on_timeout_call): ..."),
    ("unit-in-name", RUNTIME, "def wait(timeout: timedelta): sock.recv(timeout=1)"),
    ("no-sleep-in-tests", "tests/test_x.py", "clock.sleep(1)"),
    ("no-sleep-in-tests", RUNTIME, "import time\ntime.sleep(1)"),
    ("no-sleep-in-tests", "tests/scripts/slow_job.py", "import time\ntime.sleep(1)"),
    ("no-sleep-in-tests", LABS, "import time\ntime.sleep(1)"),
    ("no-set-order", CORE, "for x in sorted({1, 2}): ...\ny = 1 in {1, 2}"),
    ("no-set-order", CORE, "def f(xs):\n    xs = set(xs)\n    xs = sorted(xs)\n    return [*xs]"),
    ("no-set-order", CORE, "def f(xs: set): ...\ndef g(xs: list):\n    return [x for x in xs]"),
    ("no-set-order", RUNTIME, "for x in {1, 2}: ..."),
]


def rule_named(name: str) -> tidy.Rule:
    return next(r for r in tidy.RULES if r.name == name)


@pytest.fixture(scope="module")
def modules() -> list[tidy.Module]:
    return tidy.repository()


@pytest.mark.parametrize("rule", tidy.RULES, ids=lambda rule: rule.name)
def test_the_repository_keeps_the_rule(rule, modules):
    found = tidy.broken(rule, modules)
    if found:
        lines = "\n  ".join(found)
        pytest.fail(f"rule {rule.name}: {rule.why}.\n  {lines}", pytrace=False)


@pytest.mark.parametrize(("name", "path", "source"), BAD)
def test_a_planted_breach_is_found(name, path, source):
    assert tidy.broken(rule_named(name), [tidy.parse(path, source)])


@pytest.mark.parametrize(("back", "count"), [("holdfast.lab.a.x", 1), ("holdfast.lab.c.z", 0)])
def test_two_packages_that_import_each_other_are_found(back: str, count: int) -> None:
    sources = {"a/x": "import holdfast.lab.b.y", "b/y": f"from {back} import f", "c/z": ""}
    parsed = [tidy.parse(f"src/holdfast/lab/{path}.py", text) for path, text in sources.items()]
    assert len(tidy.broken(rule_named("no-two-way"), parsed)) == count


@pytest.mark.parametrize(("name", "path", "source"), GOOD)
def test_code_that_the_rule_allows_passes(name, path, source):
    assert tidy.broken(rule_named(name), [tidy.parse(path, source)]) == []


def test_every_rule_is_shown_to_fail_and_to_pass():
    names = [r.name for r in tidy.RULES]
    assert len(names) == len(set(names))
    one_file = {*names} - {"no-two-way"}
    assert one_file == {name for name, _, _ in BAD} == {name for name, _, _ in GOOD}


def test_a_breach_is_excused_only_with_its_rule_and_a_reason():
    rule = rule_named("pure-core")
    for comment, count in [
        ("# tidy: allow pure-core because it is only planted", 0),
        ("# tidy: allow pure-core", 1),
        ("# tidy: allow layers because it is only planted", 1),
    ]:
        assert len(tidy.broken(rule, [tidy.parse(CORE, f"import time  {comment}")])) == count


def test_modules_are_used_through_imports_and_through_names_in_strings():
    files = {
        CLI: "NAMES = ['go']\nimport_module(f'holdfast.engine.commands.{name}_command')",
        "src/holdfast/engine/commands/go_command.py": "from holdfast.lab.sim import world",
        "src/holdfast/engine/commands/stray.py": "",
        "src/holdfast/lab/sim/world.py": "AGENT = 'holdfast.engine.runtime.x'",
        RUNTIME: "from holdfast.engine.core.x import f",
        CORE: "",
        "src/holdfast/engine/core/lonely.py": "import holdfast.engine.core.pair",
        "src/holdfast/engine/core/pair.py": "import holdfast.engine.core.lonely",
    }
    found = tidy.broken(rule_named("unused-module"), [tidy.parse(p, s) for p, s in files.items()])
    assert [line.split(":")[0] for line in found] == [
        "src/holdfast/engine/commands/stray.py",
        "src/holdfast/engine/core/lonely.py",
        "src/holdfast/engine/core/pair.py",
    ]


def test_names_are_compared_across_files_and_exceptions_are_known_by_their_bases():
    files = {
        CORE: "class Kept: ...\nclass Broken(HoldfastError): ...",
        "src/holdfast/engine/core/__init__.py": "",
        "src/holdfast/engine/state/store/__init__.py": "",
        "src/holdfast/engine/state/store/x.py": "x = 1\nclass Kept: ...\nclass _Kept: ...",
        CODING: "class Worse(Broken): ...\ndef f():\n    'Worse as soon as the file ends.'",
    }
    found = {
        rule: tidy.broken(rule_named(rule), [tidy.parse(p, s) for p, s in files.items()])
        for rule in ("unique-name", "docstring-sentence")
    }
    assert found == {
        "unique-name": [
            f"{CODING}:1: `x.py` is also in {CORE}",
            f"src/holdfast/engine/state/store/x.py:1: `x.py` is also in {CORE}",
            f"src/holdfast/engine/state/store/x.py:2: `Kept` is also in {CORE}",
        ],
        "docstring-sentence": [
            f"{CODING}:3: the docstring of f: `Worse` begins a part of a sentence",
        ],
    }


def test_public_names_are_followed_to_where_they_are_defined():
    files = {
        ROOT: "if TYPE_CHECKING:\n    from holdfast.engine.train.x import f as g\n__all__ = ['g']",
        TRAIN: "def f(): ...",
    }
    found = tidy.broken(
        rule_named("public-docstring"), [tidy.parse(p, s) for p, s in files.items()]
    )
    assert [line.split(":")[0] for line in found] == [TRAIN]


def test_documents_are_written_in_plain_english():
    baseline = tidy_prose.read_baseline()
    files = {p: s for p, s in tidy_prose.repository().items() if p.endswith(".md")}
    assert "docs/testing.md" in files
    assert {p: why for p, s in files.items() if (why := tidy_prose.judge(p, s, baseline))} == {}


def test_the_baseline_of_prose_is_as_low_as_the_files_are():
    assert tidy_prose.find_loose(tidy_prose.read_baseline()) == []


def test_old_files_may_keep_their_phrases_and_must_not_gain_any():
    source = "# what is kept, what is sent, what is lost\nx = 1\n"
    path = "src/holdfast/engine/core/old.py"
    assert tidy_prose.judge(path, source, {"old.py": 3}) is None
    assert "more than 2" in (tidy_prose.judge(path, source, {"old.py": 2}) or "")
    assert "--lower" in (tidy_prose.judge(path, source, {"old.py": 4}) or "")
    moved = path.replace("core", "train")
    assert tidy_prose.judge(moved, source, {"old.py": 3}) is None
    assert tidy_prose.judge("docs/old.md", source, {"old.py": 3}) is not None


def test_code_in_documents_is_no_prose():
    text = "Call it.\n\n    what is = who has\n\n```\nof which anew\n```\n\nSo many `of which`.\n"
    found = tidy_prose.find(tidy_prose.pieces("docs/x.md", text))
    assert [(f.line, f.text) for f in found] == [(9, "So many `...`.")]


def test_the_rules_judge_the_source_and_the_tests_of_the_repository(modules):
    names = {m.name for m in modules}
    coordinator = "holdfast.engine.core.membership.coordinator"
    assert {"holdfast", coordinator, "tests/house/test_tidy.py"} <= names


def test_only_the_training_process_needs_torch(modules):
    names = [
        m.name
        for m in modules
        if m.path.startswith("src/")
        and tidy_layers.find_room(m.name) not in tidy.TORCH_USERS
        and not m.name.endswith("__main__")
    ]
    script = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None  # as if it were not installed\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError as error: print(f'{name}: {error}')\n"
    )
    command = [sys.executable, "-c", script, *names]
    environment = {"PYTHONPATH": str(tidy.ROOT / "src"), "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "", rule_named("torch-only-in-train").why
