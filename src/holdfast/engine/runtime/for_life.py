"""Runs a module as a program whose life is bound to the thread that started it.

python -m holdfast.engine.runtime.for_life PARENT_PID MODULE ARGS...
"""

from __future__ import annotations

import runpy
import sys

from holdfast.engine.host.lifetime import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
