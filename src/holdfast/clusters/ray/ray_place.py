"""Keeps one agent in an actor of Ray, whose life is the agent's.

    python -m holdfast.clusters.ray.ray_place ACTOR_PID COMMAND ...

Ray imports the class on the nodes; this module does not need Ray. When an actor ends, Ray kills its
children and not theirs. So the process that keeps the agent (local_place.py) is no child of the
actor: it outlives the actor until it has ended everything.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from holdfast.clusters.local import local_place
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.state.store.regular_files import append_regular


class RayPlace:
    """Runs a command until either ends: the actor that this is, or the command."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: str) -> None:
        keeper = start(command, environment, Path(output))
        threading.Thread(target=end_with, args=(keeper,), daemon=True).start()


def start(command: Sequence[str], environment: Mapping[str, str], output: Path) -> int:
    """Start a command that ends with this process; return the pid of its keeper.

    Its output is added to the file `output`.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    module = (sys.executable, "-m", "holdfast.clusters.ray.ray_place", str(os.getpid()))
    with open(append_regular(output), "ab") as file:
        starter = subprocess.run(
            [*module, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            env={**os.environ, **environment},
            check=True,
        )
    return int(starter.stdout)


def end_with(pid: int) -> NoReturn:
    """End this process when another one has ended."""
    with contextlib.suppress(ProcessLookupError):
        wait_readable([os.pidfd_open(pid)])
    os._exit(0)


def main(argv: list[str]) -> int:
    pid = os.fork()
    if pid:
        print_plain(pid, flush=True)
        return 0
    os.setsid()
    os.dup2(
        sys.stderr.fileno(), sys.stdout.fileno()
    )  # else our starter is waited for until the end
    return local_place.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
