"""`holdfast ckpt` lists checkpoints, verifies and repairs them, and converts them to files."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from holdfast.engine.commands.plain_console import PlainConsole
from holdfast.engine.core.errors import Damaged, UserError, WorldError
from holdfast.engine.core.replica.retention import Retention
from holdfast.engine.net.standard_streams import print_line, print_plain
from holdfast.engine.records.summary import DATE_AND_TIME, format_clock
from holdfast.engine.state.store.checkpoint_reading import Bad
from holdfast.engine.state.store.checkpoints import Checkpoints, Pacer
from holdfast.engine.state.store.manifest import DIGEST_BYTES, ITEM_BYTES, Entry, Manifest
from holdfast.engine.state.store.open import FORM, check_exists, open_storage
from holdfast.engine.state.store.volumes import VolumeStorage

Command = Callable[[argparse.Namespace], int]


def main(argv: list[str]) -> int:
    """Return 0; 1 if something is damaged or differs; 2 for bad arguments."""
    options = parser().parse_args(argv)
    command: Command = options.command
    try:
        return command(options)
    except Damaged as error:
        print_line(error)
        return 1
    except KeyboardInterrupt:
        print_plain("interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast ckpt",
        description=f"Inspect, check and convert a job's checkpoints. STORE is {FORM}.",
    )
    commands = found.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(command=command)
        sub.add_argument("store", metavar="STORE")
        return sub

    sub = add("list", list_all, "list all checkpoints")
    sub.add_argument("--json", action="store_true", help="print JSON, for scripts")
    sub = add("show", show, "show what is in a checkpoint")
    sub.add_argument("step", type=_step, nargs="?", help="default: the newest")
    sub.add_argument("--json", action="store_true", help="print JSON, for scripts")
    sub = add("verify", verify, "read every byte of a checkpoint and verify it")
    sub.add_argument("step", type=_step, nargs="?", help="default: all of them")
    sub.add_argument(
        "--rate",
        type=float,
        metavar="MB/S",
        help="limit the reading rate, to leave the disk to others",
    )
    sub.add_argument("--json", action="store_true", help="print JSON, for scripts")
    sub = add("diff", diff, "list entries in which two checkpoints differ; exit status 1 if any do")
    sub.add_argument("step", type=_step)
    sub.add_argument("other", type=_step)
    sub.add_argument("--json", action="store_true", help="print JSON, for scripts")
    _add_export(add("export", export, "write a checkpoint's tensors to a file of another format"))
    sub = add("import", import_file, "make a checkpoint of a safetensors file")
    sub.add_argument("file", type=Path)
    sub.add_argument("--step", type=_step, default=0, help="step of the new checkpoint (default 0)")
    add("repair", repair, "restore lost or damaged volumes of an ec: store")
    sub = add("gc", collect, "remove checkpoints beyond those to keep, and unused packs")
    sub.add_argument("--keep-last", type=int, default=0, metavar="N", help="keep the newest N")
    sub.add_argument(
        "--keep-every", type=int, default=0, metavar="K", help="keep steps that are multiples of K"
    )
    sub.add_argument(
        "--keep-age-s",
        type=float,
        default=0.0,
        metavar="S",
        help="keep those younger than S seconds",
    )
    return found


def _add_export(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("step", type=_step)
    sub.add_argument("file", type=Path)
    kinds = ("safetensors", "torch", "dcp", "huggingface")
    sub.add_argument("--format", choices=kinds, default="safetensors")
    sub.add_argument(
        "--only", default="", metavar="TEXT", help="only entries whose name contains TEXT"
    )
    sub.add_argument(
        "--prefix",
        metavar="TEXT",
        help="only entries whose name begins with TEXT, which is cut off "
        "(default for huggingface: model.)",
    )
    sub.add_argument(
        "--beside",
        type=Path,
        metavar="FOLDER",
        help="for huggingface: has config.json and the tokenizer, to be copied",
    )
    sub.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="for huggingface: the largest file of weights, such as 200MB (default 5GB)",
    )


def _size_in_bytes(text: str) -> int:
    """Read a size in the form of Hugging Face: a number of bytes, or of KB, MB, GB or TB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", text.strip().upper(), re.ASCII)
    size = int(float(found[1]) * 1000 ** " KMGT".index(found[2] or " ")) if found else 0
    if size < 1:
        raise UserError(f"--max-shard-size {text!r} is no size: give one such as 200MB or 5GB")
    return size


def _step(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: give a number such as 1000")
    return int(text)


def _open(options: argparse.Namespace) -> Checkpoints:
    """Open the store, which must be there unless something is imported into it. UserError."""
    storage = open_storage(options.store, _warn)
    if options.command is not import_file:
        check_exists(options.store)
    return Checkpoints(storage, _warn)


def _warn(line: str) -> None:
    print_line(line)


def _check_not_empty(store: Checkpoints) -> None:
    if not store.steps():
        raise UserError("there are no checkpoints: is this the right store?")


def _manifest(store: Checkpoints, step: int | None) -> Manifest:
    """Read the manifest of a step, or the newest. UserError if there is none."""
    _check_not_empty(store)
    steps = store.steps()
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps[-10:]))
        raise UserError(f"there is no checkpoint of step {step}: the newest are {known}")
    return store.manifest(steps[-1] if step is None else step)


# ---------------------------------------------------------------- looking


def list_all(options: argparse.Namespace) -> int:
    store, code = _open(options), 0
    rows: list[dict[str, Any]] = []
    for step in store.steps():
        try:
            found = store.manifest(step)
            new = [p for p in found.packs if found.token in p]
            written = sum(store.storage.size(pack) or 0 for pack in new)
            rows.append(
                {
                    "step": step,
                    "time": found.time,
                    "entries": len(found.entries),
                    "bytes": found.size,
                    "written_bytes": written,
                    "about": found.about,
                    "damage": "",
                }
            )
        except WorldError as error:
            code = 1
            rows.append({"step": step, "damage": str(error)})
    if options.json:
        print_plain(json.dumps(rows, indent=2))
        return code
    table = Table("step", "saved", "entries", "size", "written", "about")
    for row in rows:
        if row["damage"]:
            damage = row["damage"]
            table.add_row(str(row["step"]), "", "", "", "", damage, style="bold red")
            continue
        about = " ".join(f"{k}={v}" for k, v in sorted(row["about"].items()))
        sizes = str(row["entries"]), _size(row["bytes"]), _size(row["written_bytes"])
        table.add_row(str(row["step"]), format_clock(row["time"], DATE_AND_TIME), *sizes, about)
    PlainConsole().print(table if rows else "no checkpoints")
    return code


def show(options: argparse.Namespace) -> int:
    found = _manifest(_open(options), options.step)
    if options.json:
        entries = [
            {"name": e.label, "dtype": e.dtype, "shape": e.shape, "bytes": e.size}
            for e in found.entries
        ]
        print_plain(
            json.dumps({"step": found.step, "about": found.about, "entries": entries}, indent=2)
        )
        return 0
    table = Table(
        "name",
        "dtype",
        "shape",
        "size",
        title=f"step {found.step}, {format_clock(found.time, DATE_AND_TIME)}",
    )
    for entry in found.entries:
        shape = "x".join(map(str, entry.shape)) if entry.dtype else ""
        table.add_row(entry.label, entry.dtype or "bytes", shape, _size(entry.size))
    PlainConsole().print(table)
    return 0


def diff(options: argparse.Namespace) -> int:
    store = _open(options)
    old, new = (
        {e.label: e for e in _manifest(store, step).entries}
        for step in (options.step, options.other)
    )
    found = {
        "removed": [name for name in old if name not in new],
        "added": [name for name in new if name not in old],
        "changed": [
            name for name in old if name in new and not _is_same_entry(old[name], new[name])
        ],
    }
    equal = sum(name in new for name in old) - len(found["changed"])
    if options.json:
        print_plain(json.dumps(found | {"equal": equal}, indent=2))
    else:
        for what, names in found.items():
            for name in names:
                print_plain(f"{what:8} {name}{_change(old, new, name)}")
        print_plain(f"{equal} entries are equal")
    return 1 if any(found.values()) else 0


def _is_same_entry(old: Entry, new: Entry) -> bool:
    what = (old.dtype, old.shape, old.digests)
    return what == (new.dtype, new.shape, new.digests)


def _change(old: dict[str, Entry], new: dict[str, Entry], name: str) -> str:
    if name not in old or name not in new:
        return ""
    before, after = old[name], new[name]
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return f": {before.dtype} {list(before.shape)} to {after.dtype} {list(after.shape)}"
    pairs = zip(_digests(before), _digests(after), strict=True)
    chunks = sum(a != b for a, b in pairs)
    return f": {chunks} of {len(_digests(after))} chunks"


def _digests(entry: Entry) -> list[bytes]:
    size = DIGEST_BYTES
    return [entry.digests[i : i + size] for i in range(0, len(entry.digests), size)]


# ---------------------------------------------------------------- proving and mending


def verify(options: argparse.Namespace) -> int:
    if options.rate is not None and not options.rate > 0:
        raise UserError(f"--rate {options.rate:g} must be positive")
    store = _open(options)
    _check_not_empty(store)
    steps = [_manifest(store, options.step).step] if options.step is not None else store.steps()
    findings: dict[int, list[str]] = {}
    for step in steps:
        try:
            manifest = store.manifest(step)
            with _progress(f"step {step}", manifest.size) as advance:
                damage = _verify_step(store, manifest, options, advance)
            findings[step] = [*map(str, damage), *_find_unknown(manifest)]
        except WorldError as error:
            findings[step] = [str(error)]
    if options.json:
        print_plain(
            json.dumps([{"step": s, "damage": bad} for s, bad in findings.items()], indent=2)
        )
    else:
        for step, bad in findings.items():
            print_plain(
                f"step {step}: {'every byte is right' if not bad else f'{len(bad)} damaged'}"
            )
            for line in bad:
                print_plain(f"  {line}")
    return 1 if any(findings.values()) else 0


def _find_unknown(manifest: Manifest) -> list[str]:
    """Return a sentence on each tensor of a type that this PyTorch does not know."""
    odd = [entry for entry in manifest.entries if entry.dtype and entry.dtype not in ITEM_BYTES]
    if not odd:
        return []
    from holdfast.engine.train.checkpoint.formats import find_unknown

    return find_unknown(odd)


def _verify_step(
    store: Checkpoints,
    manifest: Manifest,
    options: argparse.Namespace,
    advance: Callable[[int], None],
) -> list[Bad]:
    pacer = Pacer(options.rate * 1e6) if options.rate is not None else None

    def progress(count: int) -> None:
        advance(count)
        if pacer is not None:
            pacer(count)

    return store.verify(manifest.step, progress)


def repair(options: argparse.Namespace) -> int:
    store = _open(options)
    volumes = store.storage
    if not isinstance(volumes, VolumeStorage):
        raise UserError(f"{options.store} has no parity to repair from: only ec: stores do")
    code = mended = 0
    names = volumes.all_names()
    if not names:
        raise UserError("there is nothing to repair: is this the right store?")
    with _progress("objects", len(names), bytes_=False) as advance:
        for name in names:
            try:
                for line in volumes.repair(name):
                    mended += 1
                    print_plain(f"repaired: {line}")
            except WorldError as error:
                code = 1
                print_plain(f"lost: {error}")
            advance(1)
    print_plain(f"{len(names)} objects, {mended} repairs")
    return code


def collect(options: argparse.Namespace) -> int:
    if not min(options.keep_last, options.keep_every) >= 0 <= options.keep_age_s:
        raise UserError("--keep-last, --keep-every and --keep-age-s must not be negative")
    wanted = options.keep_last or options.keep_every or options.keep_age_s
    policy = Retention(last=options.keep_last, every=options.keep_every, age_s=options.keep_age_s)
    done = _open(options).collect(policy if wanted else None)
    steps = (
        f"checkpoints of steps {', '.join(map(str, done.steps))}" if done.steps else "no checkpoint"
    )
    print_plain(f"removed {steps}, and {done.packs} packs of {_size(done.freed_bytes)}")
    return 0


# ---------------------------------------------------------------- other formats


def export(options: argparse.Namespace) -> int:
    from holdfast.engine.train.checkpoint.formats import read_tensors, write_file, write_folder

    is_folder, shard_bytes = options.format == "huggingface", _size_in_bytes(options.max_shard_size)
    if is_folder and options.beside is None:
        raise UserError("--format huggingface needs --beside FOLDER with the model's config.json")
    prefix = options.prefix if options.prefix is not None else "model." if is_folder else ""
    store = _open(options)
    step = _manifest(store, options.step).step
    found = read_tensors(store, step, options.only, prefix)
    if not found:
        begin = f", and none begins with {prefix!r}" if prefix else ""
        raise UserError(f"no tensor of step {step} has {options.only!r} in its name{begin}")
    tensors = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    if is_folder:
        write_folder(tensors, options.file, shard_bytes, options.beside)
    else:
        write_file(tensors, options.file, options.format)
    size = sum(t.nbytes for t in tensors.values())
    print_plain(f"{len(tensors)} tensors of {_size(size)} are in {options.file}")
    return 0


def import_file(options: argparse.Namespace) -> int:
    from holdfast.engine.train.checkpoint.formats import read_file

    store = _open(options)
    if options.step in store.steps():
        raise UserError(f"there is a checkpoint of step {options.step} already: choose another")
    items = read_file(options.file)
    found = store.save(options.step, items, {"from": options.file.name})
    print_plain(
        f"{len(items)} tensors of {_size(found.size)} are the checkpoint of step {found.step}"
    )
    return 0


# ---------------------------------------------------------------- for people


@contextlib.contextmanager
def _progress(what: str, total: int, *, bytes_: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, if a person watches."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    shown = (DownloadColumn(), TransferSpeedColumn()) if bytes_ else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *shown)
    with Progress(*columns, console=PlainConsole(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.update(task, advance=count)


def _size(count: object) -> str:
    size = float(str(count))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
