"""Notices effects of tasks besides their results: changed parameters, and files read back.

A task may only read parameters. PyTorch counts writes to a tensor, but not those through `data`,
`set_` or NumPy, and a parameter may be replaced. So three facts are compared: which tensor a name
stands for, how often it was written to, and its bytes. The bytes of all parameters are compared
while a job or a member is new, later a rotating share of them, so that watching costs hardly
any time. Where only bytes differ, memory may have failed, which does not happen twice in the same
parameter.

A task that writes to a file and reads it at once is a pure function on one worker. Two workers of
one machine share the file, so one may read the other's bytes. Python's audit hooks give the name of
each opened file. No hook can be removed, so the whole process has one hook, and it asks the task of
the calling thread. It sees no files of C code except databases of sqlite3.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.step.audits import EARLY_STEPS
from holdfast.engine.train.checkpoint.local_tensors import local_of
from holdfast.engine.train.exchange.tensor_bytes import memory_of
from holdfast.engine.train.step.table_parameters import AbsentWeight

CHUNK_ELEMENTS = 1 << 14  # elements of one parameter that are compared in a step
#: Elements all over a parameter that are compared as well as its chunk.
SAMPLE_ELEMENTS = 64
_CURE = (
    " while tasks were computed (in forward or in the loop over batches, as a momentum encoder, an "
    "embedding with max_norm or an optimizer may do), so that the result depends on which worker "
    "computes what: change parameters after the loop over a step's batches only"
)
FILES_MAX = 256  # the newest ones are remembered
TOLD_MAX = 4  # messages of one worker
_WRITES = os.O_WRONLY | os.O_RDWR
# The name of a file in a cache decides its content.
_CACHES = ("__pycache__", "torchinductor", ".triton")
Mark = tuple[int, int, int]  # the size, the time of the last change and the inode of a file


@dataclass(slots=True, kw_only=True)
class _Place:
    """Names a parameter of a module, with its tensor, version and digest before the tasks."""

    name: str
    #: The module's parameters.
    home: dict[str, Any]
    key: str
    tensor: torch.nn.Parameter
    version: int = 0
    #: A digest; None: not compared in this step.
    content: int | None = None


class ParameterWatch:
    """Compares the parameters of protected modules before and after the tasks of a step.

    `cycle`: the bytes of every parameter are compared once in this many steps.
    """

    def __init__(self, modules: Sequence[tuple[str, torch.nn.Module]], cycle: int) -> None:
        self._modules = modules
        self._cycle = cycle
        self._places: list[_Place] = []
        self._odd: set[str] = set()  # parameters that have only changed their bytes
        self._step = 0
        self._is_whole = False
        self._is_open = False

    def begin(self, step: int, *, whole: bool) -> None:
        """Record the parameters before the tasks of a step; `whole`: every bit of them."""
        self._step, self._is_whole, self._is_open = step, whole, True
        if whole or not self._places or step % self._cycle == 0:
            self._places = _places(self._modules)
        turns = min(self._cycle, len(self._places))
        for i, each in enumerate(self._places):
            each.tensor = each.home[each.key]
            each.version = each.tensor._version
            looks = whole or i % turns == step % turns
            each.content = self._digest(each.tensor) if looks else None

    def check(self) -> None:
        """Raise UserError if a parameter has changed since `begin`; ends the step's watch."""
        if not self._is_open:
            return
        self._is_open = False
        for each in self._places:
            tensor = each.home.get(each.key)
            if tensor is None:
                raise UserError(f"parameter {each.name} was removed{_CURE}")
            if tensor is not each.tensor or tensor._version != each.version:
                raise UserError(f"parameter {each.name} was changed{_CURE}")
            if each.content is not None and self._digest(tensor) != each.content:
                if self._step < EARLY_STEPS or each.name in self._odd:
                    raise UserError(f"parameter {each.name} was changed{_CURE}")
                self._odd.add(each.name)  # other workers compare the state, and find a wrong one
        if self._is_whole:
            known = {each.name for each in self._places}
            for each in _places(self._modules):
                if each.name not in known:
                    raise UserError(f"parameter {each.name} was added{_CURE}")

    def _digest(self, tensor: torch.Tensor) -> int:
        """Return 64 bits of the contents, or of this step's share of them."""
        if isinstance(tensor, AbsentWeight):
            return 0
        held = local_of(tensor).detach()
        if held.layout != torch.strided:
            return 0
        if held.device.type == "cpu" and self._is_whole:
            return _fingerprint(held)
        flat = held.reshape(-1)
        chunks = max(1, -(-flat.numel() // CHUNK_ELEMENTS))
        start = self._step // self._cycle % chunks * CHUNK_ELEMENTS
        stride = max(1, flat.numel() // SAMPLE_ELEMENTS)
        return _fingerprint(flat[start : start + CHUNK_ELEMENTS]) ^ _fingerprint(flat[::stride])


def _places(modules: Sequence[tuple[str, torch.nn.Module]]) -> list[_Place]:
    """List all parameters except FSDP's, which are replaced while a module computes."""
    found: list[_Place] = []
    for name, module in modules:
        if any(_is_fsdp(each) for each in module.modules()):
            continue
        for path, each in module.named_modules(prefix=name):
            home = each._parameters
            found += [
                _Place(name=f"{path}.{key}", home=home, key=key, tensor=p)
                for key, p in home.items()
                if p is not None
            ]
    return found


def _is_fsdp(module: torch.nn.Module) -> bool:
    return any(each.__name__ == "FSDPModule" for each in type(module).__mro__)


def _fingerprint(held: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(memory_of(held.cpu().contiguous()))


class TaskFiles:
    """Remembers which files this worker's tasks write. `tell` is given a sentence for people."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._left: dict[str, Mark] = {}  # the marks of written files at the end of the last task
        self._written: set[str] = set()  # the present task writes to these files
        self._foreign: set[str] = set()  # another worker or thread has changed these files since
        self._told: set[str] = set()

    def begin_task(self) -> None:
        """Record that a task begins on the calling thread."""
        _listen()
        _present.files = self

    def end_task(self) -> None:
        """Record that the task has ended, and mark the files that it has written."""
        _present.files = None
        for path in self._written:
            self._left.pop(path, None)  # the newest file stands last
            if (mark := _mark(path)) is not None:
                self._left[path] = mark
        self._written.clear()
        while len(self._left) > FILES_MAX:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._foreign.discard(oldest)

    def open(self, name: Any, *, reads: bool, writes: bool) -> None:
        """Record that the present task is about to open a file."""
        if not (writes or self._left):
            return
        path = _full_path(name)
        if path is None:
            return
        if path not in self._written and path in self._left:
            now = _mark(path)
            if now is not None and now != self._left[path]:
                self._foreign.add(path)
        if reads and path in self._foreign:
            self._note(path)
        if writes:
            self._written.add(path)

    def _note(self, path: str) -> None:
        self._foreign.discard(path)
        known = path in self._told or len(self._told) == TOLD_MAX
        if known or any(part in path for part in _CACHES):
            return
        self._told.add(path)
        self._log(
            f"tasks write to the file {os.path.basename(path)} and read it, and something else has "
            f"changed it meanwhile ({path}): if a task reads what another worker has written, the "
            "result depends on the workers; keep what tasks read in the job's state (job.protect, "
            "job.values, job.rank_state), or write to a file of the task's own (tempfile)"
        )


class _Present(threading.local):
    files: TaskFiles | None = None


_present = _Present()


@functools.cache
def _listen() -> None:
    sys.addaudithook(_note_open)


def _note_open(event: str, args: tuple[Any, ...]) -> None:
    if event not in ("open", "sqlite3.connect", "os.rename"):
        return
    files = _present.files
    if files is None:
        return
    _present.files = None  # `_mark` opens no file, but a message may
    try:
        if event == "open":
            flags = args[2]
            files.open(args[0], reads=not flags & os.O_WRONLY, writes=bool(flags & _WRITES))
        elif event == "os.rename":
            files.open(args[1], reads=False, writes=True)
        else:
            files.open(args[0], reads=True, writes=True)
    finally:
        _present.files = files


def _full_path(name: Any) -> str | None:
    """Return the path of a file; None for a descriptor or a name that is no path."""
    if isinstance(name, int):
        return None
    try:
        return os.path.abspath(os.fsdecode(name))
    except (TypeError, OSError):  # the present folder may be gone
        return None


def _mark(path: str) -> Mark | None:
    """Return the mark of a file; None if the file is missing or empty."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    if not found.st_size:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino
