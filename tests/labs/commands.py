"""Runs programs that clusters of the tests consist of, and kubectl."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.engine.core.errors import HoldfastError

ASK_S = 60.0


def start_server(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that the kernel ends with this process, even if that is killed."""
    with open(log, "ab") as lines:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
        )


def run_kubectl(config: Path, *words: str, given: str = "") -> str:
    """Return the output of kubectl. `given`: its standard input. HoldfastError: it failed."""
    command = ["kubectl", f"--kubeconfig={config}", *words]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=ASK_S, check=False
    )
    if done.returncode:
        raise HoldfastError(f"kubectl {' '.join(words)}: {done.stderr}")
    return done.stdout
