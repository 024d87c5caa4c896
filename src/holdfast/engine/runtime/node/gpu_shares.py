"""Gives each process of a node GPUs of its own, by the variable that CUDA heeds.

So `cuda` means the right device in every script. Where there are fewer GPUs than processes, they
take turns; where there are none, no variable is set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")  # with an entry for each GPU


def visible_gpus(environ: Mapping[str, str], driver: Path = DRIVER) -> tuple[str, ...]:
    """Return the GPUs that this process may use, as the variable names them: numbers, or UUIDs.

    As CUDA does, it ends at a negative number, or at a word that is no GPU.
    """
    if VARIABLE not in environ:
        count = len(list(driver.iterdir())) if driver.is_dir() else 0
        return tuple(str(number) for number in range(count))
    found: list[str] = []
    for each in environ[VARIABLE].split(","):
        if not each.strip() or each.strip().startswith("-"):
            break
        found.append(each.strip())
    return tuple(found)


def free_place(taken: Collection[int]) -> int:
    """Return the first place on the node that no process has."""
    return next(place for place in range(len(taken) + 1) if place not in taken)


def share_of_gpus(gpus: Sequence[str], place: int, procs: int) -> tuple[str, ...]:
    """Return the GPUs of the worker in a place, one for each of its `procs` processes."""
    first = place * procs
    return tuple(gpus[(first + shard) % len(gpus)] for shard in range(procs)) if gpus else ()
