"""Ends a wait of PyTorch's gloo from another thread.

When a connection ends, gloo wakes everyone who waits for a message on it, except the one whose
message is half read: its buffer has left every queue by then, and its wait would last for ever
(gloo's tcp/pair.cc: `signalException` passes over `rx_`). PyTorch has the remedy, `Work.abort`, but
not in Python. So it is called by its exported name, on the object that the Python one holds.
"""

from __future__ import annotations

import ctypes
import os

import torch
import torch.distributed as dist

from holdfast.core.errors import UserError

_CLASSES = ("N4c10d16ProcessGroupGloo8RecvWork", "N4c10d16ProcessGroupGloo8SendWork")
_HEADER_BYTES = object.__basicsize__  # after it: pybind11's pointer to the C++ object
_VTABLE_HEAD = 2 * ctypes.sizeof(ctypes.c_void_p)


class Aborter:
    """Aborts what gloo still waits for; made once for a process.

    UserError if this build of PyTorch lacks what it needs.
    """

    def __init__(self) -> None:
        path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
        try:
            library = ctypes.CDLL(path)
            self._abort_of = {
                ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name}E")) + _VTABLE_HEAD: (
                    _method(library, f"_Z{name}5abortEv")
                )
                for name in _CLASSES
            }
        except (OSError, AttributeError, ValueError):
            raise _unsupported() from None

    def check(self, work: dist.Work) -> None:
        """Raise UserError unless `abort` can end this work."""
        if _vtable(work) not in self._abort_of:
            raise _unsupported()

    def abort(self, work: dist.Work) -> None:
        """Make the wait for it, under way or else the next one, return False."""
        abort = self._abort_of.get(_vtable(work))
        if abort is not None:  # otherwise `check` has raised
            abort(ctypes.c_void_p.from_address(_address(work)))


def _method(library: ctypes.CDLL, name: str) -> ctypes._FuncPointer:
    found = getattr(library, name)
    found.argtypes, found.restype = [ctypes.c_void_p], None
    return found


def _address(work: dist.Work) -> int:
    return id(work) + _HEADER_BYTES


def _vtable(work: dist.Work) -> int:
    """Return what identifies its class: the first word of a C++ object with virtual methods."""
    held = ctypes.c_void_p.from_address(_address(work)).value
    return (ctypes.c_void_p.from_address(held).value or 0) if held else 0


def _unsupported() -> UserError:
    return UserError(
        f"this build of PyTorch, {torch.__version__}, does not let Holdfast end the waits of gloo: "
        "use one of PyTorch's own builds for Linux"
    )
