"""Names the parts of a script that may make its workers compute different results, for messages.

It walks over the values that the script's functions and modules hold: variables, attributes, items,
closures, defaults, generators, tensors, small files that a path names. A look costs some
milliseconds, so it is taken once as a worker begins, and again only where something is wrong
already. The result is a hint for a person, never a verdict; protected parameters, buffers and
optimizers are left out.
"""

from __future__ import annotations

import ast
import collections
import contextvars
import functools
import itertools
import os
import random
import re
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.engine.train.script.kept_variables import find_leader_state, find_step_state
from holdfast.engine.train.script.script_source import (
    SOURCES_MAX,
    describe_carried,
    find_loop,
    find_sources,
    find_task_sources,
    is_script,
    join_names,
    names_of_batch,
    parse_file,
)
from holdfast.engine.train.step.table_parameters import AbsentWeight

LEAVES_MAX = 2000  # values in one look
VISITS_MAX = 4000  # values and their holders in one look; those nearest to the script come first
ITEMS_MAX = 64  # items of a list or dictionary, or entries of a folder
DEPTH_MAX = 6
NUMBERS_MAX = 256  # numbers of a tensor or array
TEXT_CHARS_MAX = 200
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))
_OPEN = (
    "collections",
    "types",
    "functools",
    "__main__",
)  # parts of the standard library with values of scripts
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?").fullmatch
Found = dict[str, str]  # a text that stands for the value, by path
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


class ScriptMemory:
    """Remembers a script's own values at two moments; see the module.

    `protected`: tensors that are a part of the job's state are not looked at. `values`: what the
    script has given to the job, by the names that it uses.
    """

    def __init__(
        self,
        protected: Callable[[], Iterable[torch.Tensor]],
        values: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._protected = protected
        self._values = values
        self._first: Found | None = None
        self._marked: Found | None = None
        self._thread = 0  # the script's

    def begin(self) -> None:
        """Remember all values, the first time; the script's thread calls it before each step."""
        if self._first is None:
            self._thread = threading.get_ident()
            self._first = self._look()

    def mark(self) -> None:
        """Remember all values before tasks are repeated because something differs."""
        self._marked = self._look()

    def changes(self) -> tuple[list[str], list[str]]:
        """Return the paths that tasks change, and the ones set since `begin` that stay so."""
        now = self._look()
        moving = _changed_paths(self._marked, now)
        return moving, [path for path in _changed_paths(self._first, now) if path not in moving]

    def numbers(self) -> list[tuple[str, str, bool]]:
        """Return the paths and texts of all numbers, and whether each has changed since `begin`.

        Any thread may call it while the script waits.
        """
        first, now = self._first or {}, self._look(sys._current_frames().get(self._thread))
        return [(p, text, first.get(p) != text) for p, text in now.items() if _NUMBER(text)]

    def _look(self, frame: types.FrameType | None = None) -> Found:
        """Look at all values that are seen from a frame, by default the caller's."""
        walk = _Walk({id(each) for each in self._protected()})
        try:
            for path, value in (*self._values().items(), *_roots(frame)):
                walk.visit(path, value, 0)
        except RuntimeError:  # another thread of the script changes a dictionary
            pass
        return walk.found


def _changed_paths(before: Found | None, now: Found) -> list[str]:
    if before is None:
        return []
    return [path for path, text in now.items() if before.get(path, "") != text]


def script_frames(frame: types.FrameType | None = None) -> list[types.FrameType]:
    """Return the frames from files in the script's folder, the innermost first.

    `frame`: of the thread in question; None: the calling one.
    """
    found: list[types.FrameType] = []
    each: types.FrameType | None = frame or sys._getframe()
    while each is not None:
        if is_script(each.f_code.co_filename) and (
            not found or _is_beside(each.f_code, found[0].f_code)
        ):
            found.append(each)
        each = each.f_back
    return found


def _is_beside(one: types.CodeType, other: types.CodeType) -> bool:
    folders = {os.path.dirname(os.path.abspath(each.co_filename)) for each in (one, other)}
    return len(folders) == 1


def _roots(frame: types.FrameType | None = None) -> Iterator[tuple[str, Any]]:
    frames = script_frames(frame)
    spaces: dict[int, Mapping[str, Any]] = {}
    for each in frames:
        spaces.setdefault(id(each.f_globals), each.f_globals)
        if each.f_locals is not each.f_globals:
            yield from _named_values(each.f_locals)
    folders = {os.path.dirname(os.path.abspath(f.f_code.co_filename)) for f in frames}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and os.path.dirname(path) in folders and is_script(path):
            spaces.setdefault(id(vars(module)), vars(module))
    for space in spaces.values():
        yield from _named_values(space)
    yield "os.environ", dict(os.environ)


def _named_values(space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(space.items()):
        if not name.startswith("__") and not isinstance(value, types.ModuleType):
            yield name, value


class _Walk:
    """Walks over values once, and keeps a text for each leaf."""

    def __init__(self, left_out: Collection[int]) -> None:
        self.found: Found = {}
        self._seen = set(left_out)
        self._visits = 0

    def visit(self, path: str, value: Any, depth: int) -> None:
        self._visits += 1
        if depth > DEPTH_MAX or self._visits > VISITS_MAX or len(self.found) >= LEAVES_MAX:
            return
        if type(value) in _SCALARS:
            self.found.setdefault(path, _scalar(value))
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        try:
            text, parts = _leaf(value), list(_parts(path, value))
        except Exception:  # noqa: BLE001 - objects of any library may fail when they are looked at
            return
        if text is not None:
            self.found[path] = text
        for name, part in parts:
            self.visit(name, part, depth + 1)


def _leaf(value: Any) -> str | None:
    """Return a text for a value that counts as a whole; None if only its parts do."""
    match value:
        case torch.Tensor():
            return _numbers(value)
        case np.ndarray():
            return _shorten(repr(value.ravel()[:NUMBERS_MAX].tolist()))
        case random.Random():
            return str(hash(value.getstate()))
        case np.random.Generator():
            return _shorten(repr(value.bit_generator.state))
        case np.random.RandomState():
            return _shorten(repr(value.get_state()))
        case torch.Generator():
            return xxhash.xxh3_64_hexdigest(value.get_state().numpy().data)
        case contextvars.ContextVar():
            return _shorten(repr(value.get(None)))
        case itertools.count():
            return repr(value)
        case itertools.cycle():
            return str(value.__reduce__()[1][0].__length_hint__())  # type: ignore[union-attr]
        case _BaseDataLoaderIter():
            return f"{value._num_yielded} batches"
        case types.GeneratorType():
            return str(-1 if value.gi_frame is None else value.gi_frame.f_lasti)
        case Path():
            return _of_file(value)
        case dict() | list() | set() | collections.deque():
            return f"{len(value)} items"
    if hasattr(value, "cache_info"):
        return f"{value.cache_info().currsize} entries"
    return None


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a value consists of, with the names that a person would write."""
    match value:
        case dict():
            for key, each in itertools.islice(value.items(), ITEMS_MAX):
                yield f"{path}[{key!r}]", each
        case list() | tuple() | collections.deque():
            for i, each in enumerate(itertools.islice(value, ITEMS_MAX)):
                yield f"{path}[{i}]", each
        case types.FunctionType():
            yield from _of_function(path, value)
        case types.MethodType():
            yield path.rpartition(".")[0] or path, value.__self__
        case functools.partial():
            yield path, [value.func, value.args, value.keywords]
        case types.GeneratorType() if value.gi_frame is not None:
            for name, each in value.gi_frame.f_locals.items():
                yield f"{path}'s {name}", each
        case type():
            if is_script(getattr(sys.modules.get(value.__module__), "__file__", None) or "script"):
                yield from _named_values(
                    {f"{path}.{k}": v for k, v in vars(value).items() if k[:2] != "__"}
                )
        case torch.Tensor():
            yield from ((f"{path}.{name}", each) for name, each in vars(value).items())
        case torch.nn.Module():
            yield from _of_module(path, value)
        case torch.optim.Optimizer():
            own = {name: each for name, each in vars(value).items() if name != "state"}
            yield from ((f"{path}.{name}", each) for name, each in own.items())
        case Path():
            yield from _of_folder(path, value)
        case _ if _is_open(type(value)):
            for name, each in list(getattr(value, "__dict__", {}).items()):
                yield f"{path}.{name}", each


def _is_open(kind: type) -> bool:
    """Return whether a value of this type is one of the script's own objects."""
    root = kind.__module__.partition(".")[0]
    if kind.__module__ == "holdfast.engine.train.data.sources" or issubclass(
        kind, torch.utils.data.Dataset | torch.optim.Optimizer
    ):
        return True
    library = root in sys.stdlib_module_names or root in ("torch", "numpy", "holdfast")
    return not library or root in _OPEN


def _of_function(path: str, value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    frames = script_frames()
    if not frames or not _is_beside(value.__code__, frames[0].f_code):
        return
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f"{name} (in {path})", cell.cell_contents
        except ValueError:  # it is not set yet
            continue
    names = value.__code__.co_varnames[: value.__code__.co_argcount]
    defaults = value.__defaults__ or ()
    yield from (
        (f"{n} (a default of {path})", each)
        for n, each in zip(names[-len(defaults) :], defaults, strict=False)
    )
    yield from ((f"{n} (a default of {path})", e) for n, e in (value.__kwdefaults__ or {}).items())
    yield from ((f"{path}.{name}", each) for name, each in vars(value).items())


def _of_module(path: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, each in vars(module).items():
        if name == "training" or name not in _MODULE_INTERNALS:
            yield f"{path}.{name}", each
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    yield f"the hooks of {path}", list(hooks)
    for kept in (module._modules, module._parameters, module._buffers):
        for name, each in list(kept.items()):
            yield f"{path}.{name}", each
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield from ((f"{path}.{name}.{key}", e) for key, e in vars(parameter).items())
            yield f"{path}.{name}.grad", None if parameter.requires_grad else parameter.grad


def _numbers(value: torch.Tensor) -> str:
    if isinstance(value, AbsentWeight):
        return "no numbers"
    if value.layout != torch.strided or value.device.type == "meta" or not value.is_contiguous():
        return f"version {value._version}"
    flat = value.detach().reshape(-1)
    stride = max(1, flat.numel() // NUMBERS_MAX)
    return _shorten(repr(flat[::stride][:NUMBERS_MAX].tolist()))


def _of_file(path: Path) -> str | None:
    try:
        found = path.stat()
    except OSError:
        return "missing"
    return None if path.is_dir() else f"{found.st_size} bytes of {found.st_mtime_ns}"


def _of_folder(path: str, folder: Path) -> Iterator[tuple[str, Any]]:
    try:
        entries = list(itertools.islice(folder.iterdir(), ITEMS_MAX)) if folder.is_dir() else []
    except OSError:
        return
    yield from ((f"the file {each.name}", each) for each in entries if each.is_file())


def _scalar(value: Any) -> str:
    """Return a text for a scalar; of a long string or bytes the ends, so that it costs little."""
    if isinstance(value, str | bytes) and len(value) > 2 * TEXT_CHARS_MAX:
        ends = value[:TEXT_CHARS_MAX], value[-TEXT_CHARS_MAX:]
        return _shorten(f"{len(value)} {ends!r}")
    return _shorten(repr(value))


def _shorten(text: str) -> str:
    if len(text) <= TEXT_CHARS_MAX:
        return text
    return xxhash.xxh3_64_hexdigest(text.encode(errors="replace"))


class Suspects:
    """Describes what a script changes, and uses, that may differ between workers."""

    def __init__(self, memory: ScriptMemory) -> None:
        self._memory = memory

    def describe_repeated(self) -> str:
        """Describe why the results of a worker may differ each time; empty: unknown."""
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
