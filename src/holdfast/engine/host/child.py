"""Take the measurements that may hang, as the child process of bounded.py.

    python -m holdfast.engine.host.child once|watch NAME PARENT_PID

The first line of its input is a JSON object of arguments. `once` prints one JSON line; `watch`
prints one for every further line of input, until there are no more.
"""

from __future__ import annotations

import functools
import importlib
import signal
import sys
from typing import Any

import msgspec

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.host.ending_signals import leave_ending_signals
from holdfast.engine.host.lifetime import die_with_parent
from holdfast.engine.net.standard_streams import print_plain

# Modules and functions that measure; imported only in the child, since some need numpy.
MEASUREMENTS = {
    "arithmetic": ("compute", "try_arithmetic"),
    "memory": ("compute", "try_memory"),
    "disk": ("disk_speed", "try_disk"),
    "gpu": ("gpu", "gpu_looker"),  # opens the driver once and returns what looks again and again
    "kernel-log": ("kernel_log", "read_log"),
    "peer": ("network_speed", "try_peer"),
    "external": ("command", "run_command"),
}


def main(argv: list[str]) -> int:
    how, name, parent = argv
    # By SIGTERM an external command's keeper can still end the command.
    if name == "external":
        die_with_parent(int(parent), signal.SIGTERM)
    else:
        die_with_parent(int(parent))
        leave_ending_signals()
    arguments = msgspec.json.decode(sys.stdin.buffer.readline(), type=dict[str, Any])
    module, function = MEASUREMENTS[name]
    try:
        found = getattr(importlib.import_module(f"holdfast.engine.host.{module}"), function)
        look = found(**arguments) if name == "gpu" else functools.partial(found, **arguments)
        if how == "once":
            _tell(look())
            return 0
        while sys.stdin.buffer.readline():
            _tell(look())
    except (HoldfastError, OSError, MemoryError) as error:
        print_plain(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _tell(sample: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(sample) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
