"""Measures and tests Holdfast on a machine with one GPU, in parts of at most 9 minutes.

    python benchmarks/gpu_evidence.py --list
    python benchmarks/gpu_evidence.py --needs                         list the missing packages
    python benchmarks/gpu_evidence.py --wheels wheels --part bits     install it first, if needed
    python benchmarks/gpu_evidence.py --sheet                         write benchmarks/GPU.md

Each result is written to --out at once, so a part that is cut off keeps its earlier results.
Without a GPU, `--device cpu` runs the same parts with small sizes. This file needs only Python,
because it must be able to name the missing packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "out" / "gpu"
SHEET = ROOT / "benchmarks" / "GPU.md"
PART_S = 540.0
INSTALLED = "HOLDFAST_GPU_EVIDENCE"  # set in the process that finds the wheels installed

# Import name: (package, its user).
NEEDED = {
    "msgspec": ("msgspec", "Holdfast"),
    "xxhash": ("xxhash", "Holdfast"),
    "zstandard": ("zstandard", "Holdfast"),
    "numpy": ("numpy", "Holdfast"),
    "rich": ("rich", "Holdfast"),
    "markdown_it": ("markdown-it-py", "rich"),
    "mdurl": ("mdurl", "rich"),
    "pygments": ("pygments", "rich"),
}
USEFUL = {
    "pyeclib": ("pyeclib", "coding, and the tests of it"),
    "pynvml": ("nvidia-ml-py", "the GPU's health"),
    "pytest": ("pytest", "tests"),
    "pytest_timeout": ("pytest-timeout", "tests"),
    "pluggy": ("pluggy", "tests"),
    "iniconfig": ("iniconfig", "tests"),
    "packaging": ("packaging", "tests"),
    "hypothesis": ("hypothesis", "tests"),
    "sortedcontainers": ("sortedcontainers", "tests"),
}
# Name: title of its section.
PARTS = {
    "machine": "What the machine is, what torch can do on it, how fast it copies",
    "tests": "The tests that need a GPU",
    "bits": "Equal bits with 1, 2 and 4 workers on one GPU, and under kills and freezes",
    "bits_compiled": "The same with torch.compile",
    "bits_bf16": "The same with bf16 autocast",
    "bits_compiled_bf16": "The same with both",
    "cost": "What a step costs beside DistributedDataParallel on the same transport",
    "snapshot": "How long a checkpoint holds training up",
    "recovery": "From a kill to the next step with a hot, a warm and no spare",
    "coding": "Erasure coding on the GPU",
    "sharded": "fully_shard with one process on NCCL",
    "audits": "Bits that flip on the device are found",
}


def missing(wanted: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the packages that cannot be imported here."""
    return [name for module, (name, _) in wanted.items() if not _is_there(module)]


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def download_command(packages: Sequence[str]) -> str:
    """Return the command that fetches wheels for this Python, on a machine with a network."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    tag = version.replace(".", "")
    machine = platform.machine()
    return (
        f"python -m pip download --no-deps --only-binary=:all: --python-version {version} "
        f"--implementation cp --abi cp{tag} --abi abi3 --abi none "
        f"--platform manylinux2014_{machine} --platform manylinux_2_28_{machine} "
        f"-d wheels {' '.join(packages)}"
    )


def needs() -> tuple[str, bool]:
    """Describe the missing packages and how to fetch them; return whether parts can run."""
    lines, needed, useful = [], missing(NEEDED), missing(USEFUL)
    runs = not needed and _is_there("torch")
    if not _is_there("torch"):
        lines.append("torch is missing: install a build for this machine's GPU first")
    for names, wanted, what in ((needed, NEEDED, "nothing runs"), (useful, USEFUL, "less runs")):
        if names:
            why = dict(wanted.values())
            told = ", ".join(f"{name} (for {why[name]})" for name in names)
            lines.append(f"missing, so that {what}: {told}")
    if needed or useful:
        lines.append("on a machine with a network:")
        lines.append(f"  {download_command([*needed, *useful])}")
        lines.append("then carry the folder here and add: --wheels wheels")
    return "\n".join(lines) or "nothing is missing", runs


def install(wheels: Path, target: Path) -> list[str]:
    """Unpack the wheels of a folder that are needed here into `target`; needs no pip.

    Returns the packages for which the folder has no wheel. Packages that can be imported already
    are left alone.
    """
    found = {_plain(path.name.split("-")[0]): path for path in sorted(wheels.glob("*.whl"))}
    lacking = []
    for name in [*missing(NEEDED), *missing(USEFUL)]:
        wheel = found.get(_plain(name))
        if wheel is None:
            lacking.append(name)
            continue
        target.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as file:
            file.extractall(target)
    return lacking


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def paths(out: Path) -> dict[str, str]:
    """Return the environment variables that make this checkout and the wheels importable."""
    added = [out / "site"] if (out / "site").is_dir() else []
    added += [] if _is_there("holdfast") else [ROOT / "src"]
    before = os.environ.get("PYTHONPATH", "")
    every = [*map(str, added), *([before] if before else [])]
    return {"PYTHONPATH": os.pathsep.join(every)} if added else {}


# ---------------------------------------------------------------- the sheet


def sheet(out: Path) -> str:
    """Return the sheet: a section with a table for each part that has left results."""
    lines = ["# What one GPU shows", ""]
    lines += [
        "Made by `python benchmarks/gpu_evidence.py --sheet` from the results of its parts.",
        "",
    ]
    for part, title in PARTS.items():
        try:
            told = json.loads((out / f"{part}.json").read_text())
        except FileNotFoundError:
            lines += [f"## {title}", "", f"Not run (`--part {part}`).", ""]
            continue
        lines += [f"## {title}", "", f"`--part {part}`, {told['at']}, on {told['device']}."]
        if not told["ended"]:
            lines.append("It was cut off.")
        lines += ["", *table(told["rows"]), ""]
    return "\n".join(lines)


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table with a row for each result, and a column for each figure."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"| {' | '.join(['', *columns])} |", f"|{'---|' * (len(columns) + 1)}"]
    for name, row in rows.items():
        cells = [_cell(row.get(column)) for column in columns]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return lines if rows else ["No results."]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


# ---------------------------------------------------------------- the command


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name the parts")
    parser.add_argument("--needs", action="store_true", help="say what is missing here")
    parser.add_argument("--part", action="append", choices=PARTS, help="run this one; repeatable")
    parser.add_argument("--sheet", action="store_true", help="write the sheet from the results")
    parser.add_argument("--to", type=Path, default=SHEET, help="where the sheet goes")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install what is missing")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit-s", type=float, default=PART_S, help="for each part")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.list:
        print("\n".join(f"{name:20} {what}" for name, what in PARTS.items()))
        return 0
    if options.wheels is not None and not options.wheels.is_dir():
        print(f"--wheels {options.wheels}: no such folder", file=sys.stderr)
        return 2
    if options.wheels is not None:
        install(options.wheels, options.out / "site")
    more = paths(options.out)
    if more and INSTALLED not in os.environ:  # Python reads PYTHONPATH only as it starts
        command = [sys.executable, str(Path(__file__).resolve()), *arguments]
        return subprocess.run(
            command, env={**os.environ, **more, INSTALLED: "1"}, check=False
        ).returncode
    told, runs = needs()
    if options.needs:
        print(told)
        return 0 if runs else 1
    code = 0
    if options.part:
        if not runs:
            print(told, file=sys.stderr)
            return 2
        import gpu_parts

        for part in options.part:
            code |= gpu_parts.run(part, options.device, options.out, options.limit_s)
    if options.sheet:
        options.to.write_text(sheet(options.out))
        print(f"{options.to} is written")
    if not (options.part or options.sheet):
        print("nothing to do: give --list, --needs, --part NAME or --sheet", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
