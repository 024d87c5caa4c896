"""`holdfast data` writes digests of training data, and finds later changes."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.progress import Progress

from holdfast.engine.commands.plain_console import PlainConsole
from holdfast.engine.core.errors import UserError, first_line
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.state.store.data_index import (
    BLOCK_BYTES,
    FileIndex,
    SampleIndex,
    files_below,
    index_files,
    open_index,
    verify_files,
    write_index,
)

SUFFIX = ".hfindex"
SHOWN_MAX = 20  # differences, without --json
DATA_HELP = "a file, a directory, or MODULE:FUNCTION, where the function returns a dataset"


def main(argv: list[str]) -> int:
    """Return 0; 1 if something differs; 2 for bad arguments."""
    options = parser().parse_args(argv)
    try:
        return int(options.command(options))
    except KeyboardInterrupt:
        print_plain("interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="holdfast data", description="Guard training data.")
    commands = found.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Callable[..., int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(command=command)
        sub.add_argument("data", metavar="DATA", help=DATA_HELP)
        return sub

    sub = add("index", index, "write the digests of data that are known to be sound")
    sub.add_argument("--out", type=Path, metavar="FILE", help=f"default: DATA{SUFFIX}")
    sub.add_argument(
        "--block",
        type=int,
        default=BLOCK_BYTES >> 10,
        metavar="KIB",
        help="size of the blocks of files that are verified at once (default: %(default)s)",
    )
    sub.add_argument("--json", action="store_true", help="print JSON, for scripts")
    sub = add("verify", verify, "compare data with their digests; exit status 1 if any differ")
    sub.add_argument("index", type=Path, metavar="INDEX", nargs="?", help=f"default: DATA{SUFFIX}")
    sub.add_argument("--json", action="store_true", help="print JSON, for scripts")
    return found


def index(options: argparse.Namespace) -> int:
    data, out = options.data, options.out or _default_index(options.data)
    if _is_function(data):
        from holdfast.engine.train.data.sample_digest import index_samples

        dataset = _dataset(data)
        with _progress(len(dataset), "samples") as seen:
            found: SampleIndex | FileIndex = index_samples(dataset, seen)
    else:
        root = Path(data)
        with _progress(_size(root), "bytes") as seen:
            found = index_files(root, options.block << 10, seen, leave_out=out)
    write_index(found, out)
    if isinstance(found, SampleIndex):
        told: dict[str, Any] = {"index": str(out), "samples": len(found)}
    else:
        size = sum(file.size for file in found.files)
        told = {"index": str(out), "files": len(found.files), "bytes": size}
    text = ", ".join(f"{value} {name}" for name, value in told.items() if name != "index")
    print_plain(json.dumps(told) if options.json else f"{out}: digests of {text}")
    return 0


def verify(options: argparse.Namespace) -> int:
    path = options.index or _default_index(options.data)
    known = open_index(path)
    differing: list[dict[str, Any]]
    if _is_function(options.data):
        if not isinstance(known, SampleIndex):
            raise UserError(f"{path} is an index of files: give one of a dataset's samples")
        differing = _differing_samples(_dataset(options.data), known)
    else:
        if not isinstance(known, FileIndex):
            raise UserError(f"{path} is an index of a dataset: give MODULE:FUNCTION that makes it")
        root = Path(options.data)
        with _progress(_size(root), "bytes") as seen:
            found = verify_files(root, known, seen)
            differing = [
                {"file": each.name, "block": each.block, "problem": each.problem} for each in found
            ]
    if options.json:
        print_plain(json.dumps({"ok": not differing, "differing": differing}))
    else:
        for each in differing[:SHOWN_MAX]:
            print_plain(_describe_bad_record(each, options.data))
        if len(differing) > SHOWN_MAX:
            print_plain(f"and {len(differing) - SHOWN_MAX} more: --json lists them all")
        print_plain(f"{len(differing)} differ" if differing else "everything is as the index says")
    return 1 if differing else 0


def _describe_bad_record(each: dict[str, Any], data: str) -> str:
    if "record" in each:
        return f"record {each['record']} {each['problem']}"
    where = os.path.join(data, each["file"]) if each["file"] else data
    block = "" if each["block"] is None else f"block {each['block']} of "
    return f"{block}{where} {each['problem']}"


def _differing_samples(dataset: Any, known: SampleIndex) -> list[dict[str, Any]]:
    from holdfast.engine.train.data.sample_digest import read_sample, sample_digest

    if len(dataset) != len(known):
        raise UserError(
            f"the dataset has {len(dataset)} samples and its index {len(known)}: give the index of "
            "this dataset"
        )
    found = []
    with _progress(len(dataset), "samples") as seen:
        for record in range(len(dataset)):
            try:
                same = sample_digest(read_sample(dataset, record)) == known.digest(record)
                problem = "" if same else "differs"
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the dataset raises is told
                problem = f"raises {type(error).__name__}: {first_line(error)}"
            if problem:
                found.append({"record": record, "problem": problem})
            seen(1)
    return found


def _is_function(data: str) -> bool:
    return ":" in data and not os.path.exists(data)


def _default_index(data: str) -> Path:
    if _is_function(data):
        return Path(data.replace(":", ".") + SUFFIX)
    path = Path(os.path.abspath(data))
    return path.with_name(path.name + SUFFIX)


def _dataset(data: str) -> Any:
    """Make the dataset that MODULE:FUNCTION names. UserError."""
    from holdfast.engine.train.data.datasets import dataset_length

    name, _, function = data.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{data} cannot be found ({first_line(error)}): give a file, a directory, or "
            "MODULE:FUNCTION of a module that can be imported from here"
        ) from None
    dataset = make()
    dataset_length(dataset)
    return dataset


def _size(root: Path) -> int:
    paths = [root / name if name else root for name in files_below(root)]
    return sum(path.stat().st_size for path in paths if path.exists())


@contextlib.contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Show on the terminal's standard error how far a long work is."""
    console = PlainConsole(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(what, total=total)
        yield lambda count: bars.advance(bar, count)
