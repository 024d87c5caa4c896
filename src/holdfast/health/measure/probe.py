"""The child process that measures what may hang.

    python -m holdfast.health.measure.probe once|watch NAME PARENT_PID

The first line of its input is a JSON object of arguments. `once` prints one JSON line; `watch`
prints one for every further line of input, until there are no more.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.core.errors import HoldfastError
from holdfast.health.measure.lifetime import die_with_parent

Look = Callable[[], object]


def _arithmetic(args: dict[str, Any]) -> Look:
    from holdfast.health.measure.compute import try_arithmetic

    return lambda: try_arithmetic(args["budget_s"])


def _memory(args: dict[str, Any]) -> Look:
    from holdfast.health.measure.compute import try_memory

    return lambda: try_memory(args["budget_s"], args["available_bytes"], args["threads"])


def _disk(args: dict[str, Any]) -> Look:
    from holdfast.health.measure.disk_speed import try_disk

    return lambda: try_disk(args["directory"], syncs=args["syncs"], write_s=args["write_s"])


def _gpu(args: dict[str, Any]) -> Look:
    from holdfast.health.measure.gpu import gpu_looker

    return gpu_looker(args["present"])


def _kernel_log(args: dict[str, Any]) -> Look:
    from holdfast.health.measure.kernel_log import read_log

    return read_log


def _peer(args: dict[str, Any]) -> Look:
    from holdfast.health.measure.network_speed import measure_peer

    def look() -> object:
        secret = bytes.fromhex(args["secret"])
        budget_s = args["bandwidth_s"]
        return asyncio.run(measure_peer(args["host"], args["port"], secret, bandwidth_s=budget_s))

    return look


PROBES: dict[str, Callable[[dict[str, Any]], Look]] = {
    "arithmetic": _arithmetic,
    "memory": _memory,
    "disk": _disk,
    "gpu": _gpu,
    "kernel-log": _kernel_log,
    "peer": _peer,
}


def main(argv: list[str]) -> int:
    how, name, parent = argv
    die_with_parent(int(parent))
    arguments = msgspec.json.decode(sys.stdin.buffer.readline(), type=dict[str, Any])
    try:
        look = PROBES[name](arguments)
        if how == "once":
            _tell(look())
            return 0
        while sys.stdin.buffer.readline():
            _tell(look())
    except (HoldfastError, OSError, MemoryError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _tell(sample: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(sample) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
