"""Names what in a script may make its workers compute different results, for messages."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator

from holdfast.engine.train.script.carried_variables import (
    describe_carried,
    find_loop,
    join_names,
    names_of_batch,
    parse_file,
)
from holdfast.engine.train.script.kept_variables import find_leader_state, find_step_state
from holdfast.engine.train.script.script_memory import ScriptMemory, script_frames
from holdfast.engine.train.script.script_sources import SOURCES_MAX, find_sources
from holdfast.engine.train.script.task_sources import find_task_sources
from holdfast.engine.train.step.script_lines import is_script

NAMES_MAX = 4
COMPUTES = (
    "steps compute with {names}: if a weight follows from it, the result depends on the workers "
    "or on the time, which comparing tasks may not show; draw from the global random generators, "
    "which are keyed by the task, or keep the value in job.values"
)

KEEPS = (
    "one worker alone sets {names}, and later steps decide by it: a worker that takes over has its "
    "first value, and may for instance replace the best model by a worse one; keep it in "
    "job.values, and change it there on all workers alike, outside of the condition (docs: "
    "scripts.md, Save the best model)"
)

NEEDS = (
    "steps change {names} on all workers, and later steps compute or decide by it: a worker that "
    "joins begins with its first value, and the job ends or has other bits; keep it in job.values "
    "(docs: scripts.md, Numbers that the script keeps)"
)


class Suspects:
    """Describes what a script changes, and uses, that may differ between workers."""

    def __init__(self, memory: ScriptMemory) -> None:
        self._memory = memory

    def describe_repeated(self) -> str:
        """Describe why the results of a worker may differ each time; empty: nothing is found."""
        carried = describe_carried()
        moving, settled = self._find_changes()
        found = [name for name in moving or settled if name not in carried]
        changes = f"; tasks change {join_names(found, NAMES_MAX)}" if found else ""
        return f"{carried}{changes}{_describe_sources()}"

    def describe_steady(self) -> str:
        """Describe why workers may differ from each other, each of them steadily."""
        moving, settled = self._find_changes()
        since = (
            f"; since its first task it has set {join_names(settled, NAMES_MAX)}" if settled else ""
        )
        changes = f"; tasks change {join_names(moving, NAMES_MAX)}" if moving else ""
        return f"{since}{changes}{_describe_sources()}"

    @staticmethod
    def describe_source(classes: Iterable[type]) -> Iterator[str]:
        """Describe what the result of the script seems to depend on, in a sentence for each kind.

        Looks at the files of the script, and at those of these classes, as far as they are its own:
        for clocks and coins that steps compute with, for what only one worker keeps from step to
        step, and for what steps change and a worker that joins lacks.
        """
        coins, alone, needed = list[str](), list[str](), list[str]()
        for path, module in _parse_files(classes):
            loop = find_loop(path)
            coins += find_task_sources(module, loop)
            kept = find_leader_state(module)
            alone += kept
            needed += [
                name
                for name in find_step_state(module, loop)
                if not any(text.startswith(f"{name} only if ") for text in kept)
            ]
        for text, names in ((COMPUTES, coins), (KEEPS, alone), (NEEDS, needed)):
            if names:
                yield text.format(names=join_names(names, NAMES_MAX))

    def _find_changes(self) -> tuple[list[str], list[str]]:
        """Return the names that tasks change, and settled ones, without variables of the loop."""
        passing = names_of_batch()
        moving, settled = (
            _merge(name for name in names if re.split(r"[.\[ ']", name)[0] not in passing)
            for names in self._memory.changes()
        )
        return moving, [name for name in settled if name not in moving]


def _parse_files(classes: Iterable[type]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the script's files on the stack, and the files of these classes, with their syntax."""
    files = [frame.f_code.co_filename for frame in script_frames()]
    modules = (sys.modules.get(each.__module__) for each in classes)
    files += [path for each in modules if (path := getattr(each, "__file__", None))]
    for path in dict.fromkeys(filter(is_script, files)):
        if (module := parse_file(path)) is not None:
            yield path, module


def _describe_sources() -> str:
    files = list(dict.fromkeys(frame.f_code.co_filename for frame in script_frames()))
    uses = find_sources(files)
    return f"; it uses {join_names(uses[:SOURCES_MAX], NAMES_MAX)}" if uses else ""


def _merge(names: Iterable[str]) -> list[str]:
    """Return the names, the plainest first: an item's, or its container's if several have changed.

    Files come last.
    """
    parts: dict[str, int] = {}  # the number of items that have changed, by container
    every = list(dict.fromkeys(names))
    for name in every:
        if name.endswith("]"):
            parts[_whole_name(name)] = parts.get(_whole_name(name), 0) + 1
    found: dict[str, None] = {}
    for name in every:
        if name.endswith("]") and parts[_whole_name(name)] > 1:
            found[_whole_name(name)] = None
        elif parts.get(name, 0) != 1:
            found[name] = None
    return sorted(found, key=lambda name: (name.startswith("the file "), _depth(name)))


def _whole_name(name: str) -> str:
    return name.rpartition("[")[0]


def _depth(name: str) -> int:
    return len(re.findall(r"[.\[]|'s ", name))
