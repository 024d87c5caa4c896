"""Trains as paced.py does; a worker whose number the file FILE.eat holds uses up its memory, once.

hungry.py FILE [STEPS]
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import paced

LOOK_S = 0.1
PIECE_BYTES = 16 * 2**20
PIECES_MAX = 256  # more than any limit of the tests, and less than a machine has


def eat(path: Path) -> None:
    """Wait for the file with this worker's number, and then use memory until the kernel kills."""
    while not (path.exists() and path.read_text() == os.environ["HOLDFAST_WORKER"]):
        time.sleep(LOOK_S)
    path.rename(path.with_suffix(".eaten"))
    held = [b"x" * PIECE_BYTES for _ in range(PIECES_MAX)]
    raise SystemExit(f"nothing has ended a worker with {len(held) * PIECE_BYTES >> 20} MB more")


if __name__ == "__main__":
    go = sys.argv[1]
    threading.Thread(target=eat, args=(Path(f"{go}.eat"),), daemon=True).start()
    paced.main(go, int(sys.argv[2]) if len(sys.argv) > 2 else 300)
