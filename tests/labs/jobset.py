"""Runs a real JobSet controller beside the control plane of a test.

The folder that HOLDFAST_JOBSET names has its program and manifests, as `build_controller.sh` leaves
them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from labs.controller import Controller

FOLDER = "HOLDFAST_JOBSET"


def missing() -> str:
    """Return why JobSet cannot run here; empty if it can."""
    folder = os.environ.get(FOLDER, "")
    if not folder or not os.access(Path(folder, "jobset"), os.X_OK):
        return f"{FOLDER} names no folder with JobSet: `make kubernetes-lab` builds it"
    return "" if shutil.which("kubectl") else "kubectl is not installed"


@contextlib.contextmanager
def open_jobset(folder: Path, config: Path) -> Iterator[Controller]:
    """Run the controller. `config`: a kubeconfig file of an administrator."""
    made = Controller("jobset", folder, config, Path(os.environ[FOLDER]))
    try:
        made.start({"apiVersion": "config.jobset.x-k8s.io/v1alpha1", "kind": "Configuration"})
        yield made
    finally:
        made.stop()
