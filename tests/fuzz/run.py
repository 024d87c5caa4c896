"""Fuzz the code that reads what strangers send: `python tests/fuzz/run.py coverage|plain COUNT`.

`coverage` is guided by which lines an input reaches (needs atheris: pip install 'holdfast[fuzz]');
`plain` changes good inputs at random, and runs everywhere. Prints how many inputs were run; an
input that fails ends it with status 1 (or atheris' own) and is shown. `--seed N` for another run,
`--plant` to see a planted bug found.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

INPUT_BYTES_MAX = 2048
RSS_MB_MAX = 1024


class Counted:
    """Runs inputs; ends the process after `count` of them, since atheris would never return."""

    def __init__(self, count: int, plant: bool) -> None:
        from fuzz import targets

        self._one_input = targets.one_input
        self._count = count
        self._plant = plant
        self._done = 0
        self._began = time.perf_counter()

    def run(self, data: bytes) -> None:
        self._done += 1
        self._one_input(data)
        if self._plant and data[:1] == b"\0" and data[3:4] == b"\x09" and data[4:5] > b"\x81":
            raise ZeroDivisionError("planted: a message of kind 9 with several fields")
        if self._done == self._count:
            took_s = time.perf_counter() - self._began
            print(
                f"fuzz: {self._done} inputs in {took_s:.1f} s, {self._done / took_s:,.0f} a second",
                flush=True,
            )
            os._exit(0)


def coverage(count: int, seed: int, plant: bool, folder: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["holdfast.engine.wire"]):
        counted = Counted(count, plant)
        from fuzz import targets
    for number, data in enumerate(targets.seeds()):
        (folder / f"seed{number}").write_bytes(data)
    options = [
        f"-runs={2 * count + 1000}",  # more than are needed: Counted ends it
        f"-seed={seed}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-rss_limit_mb={RSS_MB_MAX}",
        "-timeout=10",
        f"-artifact_prefix={folder}/failed-",
        "-verbosity=0",
        str(folder),
    ]
    atheris.Setup([sys.argv[0], *options], counted.run)
    atheris.Fuzz()


def plain(count: int, seed: int, plant: bool) -> None:
    counted = Counted(count, plant)
    from fuzz import targets

    chance, good = random.Random(seed), list(targets.seeds())
    while True:
        data = bytearray(chance.choice(good))
        for _ in range(chance.randrange(4)):
            at = chance.randrange(len(data) + 1)
            junk = chance.randbytes(chance.choice((0, 1, 1, 1, 2, 4, 16)))
            data[at : at + chance.choice((0, 1, 1, 2, 8))] = junk
        try:
            counted.run(bytes(data))
        except BaseException:
            print(f"fuzz: failed on {bytes(data)!r}", file=sys.stderr, flush=True)
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["coverage", "plain"])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kits"))
    if options.how == "plain":
        plain(options.count, options.seed, options.plant)
    with tempfile.TemporaryDirectory() as folder:
        coverage(options.count, options.seed, options.plant, Path(folder))


if __name__ == "__main__":
    main()
