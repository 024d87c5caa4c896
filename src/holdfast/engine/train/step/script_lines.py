"""Names the line of the user's script at which a thread stands, for messages to people."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = str(Path(__file__).resolve().parents[3])
_TRAIN = str(Path(__file__).resolve().parents[1])
_LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)))
LINE_CHARS_MAX = 200


@functools.lru_cache(maxsize=4096)  # asked for in every step
def is_script(path: str) -> bool:
    """Return whether a source file is the user's: no library's, and not Holdfast's."""
    full = os.path.abspath(path)
    inside = (_PACKAGE, *_LIBRARIES)
    return not path.startswith("<") and not any(full.startswith(each + os.sep) for each in inside)


def find_caller() -> FrameType | None:
    """Return the innermost frame of the calling thread that is not of this package."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(_TRAIN):
        frame = frame.f_back
    return frame


def name_line(thread: int | None = None) -> str:
    """Return the script's line at which a thread stands: `train.py, line 12`; empty if in none.

    `thread`: its identifier; None: the calling one.
    """
    frame = sys._getframe() if thread is None else sys._current_frames().get(thread)
    each: FrameType | None = frame
    while each is not None:
        if is_script(each.f_code.co_filename):
            file = os.path.basename(each.f_code.co_filename)
            return f"{file}, line {each.f_lineno}"[:LINE_CHARS_MAX]
        each = each.f_back
    return ""
