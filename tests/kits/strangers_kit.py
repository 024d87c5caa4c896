"""A run directory with all its files, and the ways in which a stranger may have written them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dashboard_kit import write_crashed_run
from holdfast.cli.main import main
from holdfast.engine.records.time_lines import CLOCKS_DIR
from holdfast.engine.runtime.coordinate.black_box import keep_bundle
from holdfast.engine.runtime.rundir import RunDir
from recordings_kit import record

KEPT = Path(__file__).resolve().parents[1] / "fixtures" / "formats" / "0.2.0"
# What no terminal, page or log may receive from a stranger. Line breaks and tabs are layout.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
COMMAND_CPU_S_MAX = 8.0
DEEP = "[" * 100_000
HUGE = "9" * 5000
SPOOF = "\\u001b[2J\\u0007\\u009b31m\\u007f\\u202e\\u2066x\\ud800\\r"
# Each stands where a value of a JSON file stood.
VALUES = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1", "0", "1e308", "-1e308", "1e18", "5e-324"),
    *(str(10**30), str(-(10**30)), str(2**63), str(2**31), HUGE, "253402300800", "-62135596801"),
    *("true", "false", "null", '""', "[]", "{}", "[[]]", '{"a": 1}', '[null, true, "x"]'),
    *('"\\ud800"', f'"{SPOOF}"', '"\\u0000"', '"../../etc/passwd"', '"/etc/passwd"', '"x"'),
    *(
        '"nan"',
        '"0x1p99999"',
        '"99999999999"',
        '"-5"',
        '"[bold]x[/nope]"',
        '"</script><script>"',
        DEEP,
        '{"a":' * 50_000,
    ),
)
PACKED = (
    *(-1, 0, 1, 1 << 31, (1 << 64) - 1, 1e300, -1e300, float("nan"), float("inf"), True, None),
    *("", "\x1b[2J\u202e", b"x", [], {}, ["l"], ["r", 0], ["i", "1" * 4000], ["d"], ["t"]),
    *(["e", "types:Stage", "LOST"], ["o", "types:View"], ["n", 0], "9" * 50),
)
# The commands that read a file, by its name, its kind or its folder.
READERS = {
    "events.jsonl": ("events", "top", "metrics", "dump", "report", "trace"),
    "job.json": ("compare", "resume", "dump"),
    "result.json": ("explain", "status", "ledger verify"),
    "coordinator.json": ("dump",),
    "journal": ("resume", "ledger verify"),
    "secret": ("status",),
    "job.toml": ("run",),
    "ledger": ("compare", "ledger verify", "report"),
    "times": ("report", "trace", "top"),
    "clocks": ("report",),
    ".zip": ("incident replay",),
    "recordings": ("incident replay", "dump"),
    "logs": ("dump",),
    "stacks": ("dump",),
}
LINES = (DEEP, "{}", "[]", "null", "1", "x" * (1 << 20))
SPANS = re.compile(r'-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|"(?:[^"\\]|\\.)*"|true|false|null')


def make_world(folder: Path) -> Path:
    """Write a run that was killed, another one, a bundle, a store and indexed data; returns it."""
    run = folder / "run"
    write_crashed_run(run)
    record(run)
    clock = {"host": "127.0.0.1", "at": 1.8e9, "ahead_s": 3.0, "error_s": 0.1}
    (run / CLOCKS_DIR).mkdir()
    (run / CLOCKS_DIR / "node1.jsonl").write_text(json.dumps(clock) + "\n")
    (run / "result.json").write_text(json.dumps({"outcome": "worker 1: it failed"}))
    (run / "coordinator.json").write_text(json.dumps({"host": "127.0.0.1", "port": 9}))
    shutil.copy(KEPT / "run" / "journal", run / "journal")
    (run / "stacks").mkdir()
    (run / "stacks" / "worker-0.txt").write_text("a stack\n")
    keep_bundle(RunDir(run), "1.2")
    shutil.copytree(KEPT / "run", folder / "kept")
    shutil.copytree(KEPT / "store", folder / "store")
    shutil.copytree(KEPT / "volumes", folder / "volumes")
    shutil.copytree(KEPT / "data", folder / "data")
    shutil.copy(KEPT / "data.hfindex", folder / "data.hfindex")
    (folder / "job.toml").write_text('script = "x.py"\n[workers]\nnproc = 2\n')
    (folder / "out").mkdir()
    return folder


def list_files(world: Path) -> list[Path]:
    """Return a file of each kind that commands read, in a fixed order."""
    kinds = {}
    for path in sorted(world.rglob("*")):
        if path.is_file():
            kinds.setdefault((path.parent, re.split(r"[-.\d]", path.name)[0], path.suffix), path)
    return list(kinds.values())


def is_text(path: Path) -> bool:
    return path.suffix in (".json", ".jsonl", ".toml", ".log", ".txt")


def change_text(data: bytes, chance: random.Random) -> bytes:
    """Return a text file as a stranger might have written it."""
    text = data.decode()
    spans = list(SPANS.finditer(text))
    if spans and chance.random() < 0.6:
        chosen = chance.sample(spans, min(len(spans), chance.choice((1, 1, 3))))
        for span in sorted(chosen, key=lambda each: -each.start()):
            text = text[: span.start()] + chance.choice(VALUES) + text[span.end() :]
        return text.encode()
    at = chance.randrange(len(data) + 1)
    lines = text.splitlines(keepends=True)
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(LINES) + "\n")
    doubled = re.sub(r'"(\w+)": ?([^,}]+)', r'"\1": \2, "\1": -1', text, count=3)
    junk = chance.choice((b"\xff\xfe", b"\x00", b"\x1b[2J", b"\xed\xa0\x80", b"\r"))
    ways = (b"", data[:at], data[:at] + junk + data[at:], b"\xef\xbb\xbf" + data)
    return chance.choice((*ways, doubled.encode(), "".join(lines).encode()))


def change_bytes(data: bytes, chance: random.Random) -> bytes:
    """Return a binary file with some bytes altered, or cut short."""
    changed = bytearray(data)
    if chance.random() < 0.3:
        return bytes(changed[: chance.randrange(len(data) + 1)])
    for _ in range(chance.choice((1, 2, 8))):
        if changed:
            at = chance.randrange(len(changed))
            changed[at : at + chance.choice((1, 1, 4))] = chance.randbytes(chance.choice((1, 1, 4)))
    return bytes(changed)


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def put_loop(path: Path) -> None:
    path.symlink_to(path.name)


def put_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_directory(path: Path) -> None:
    path.mkdir()


def put_sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


ODD: dict[str, Callable[[Path], None]] = {
    "pipe": put_pipe,
    "socket": put_socket,
    "loop": put_loop,
    "endless": put_endless,
    "directory": put_directory,
    "sparse": put_sparse,
}


def list_commands(world: Path) -> Iterator[list[str]]:
    """Yield commands that read these files and change none of them."""
    run, kept, store = str(world / "run"), str(world / "kept"), str(world / "store")
    out = world / "out"
    for options in ([], ["--json"]):
        yield ["events", run, *options]
        yield ["explain", run, *options]
        yield ["explain", run, "1.2", *options]
        yield ["report", run, *(options or ["--output", str(out / "report.html")])]
        yield ["compare", kept, run, *options]
        yield ["compare", kept, kept, *options]
        yield ["ledger", "verify", run, *options]
        yield ["ledger", "verify", kept, *options]
        yield ["incident", "replay", run, *options]
        yield ["incident", "replay", str(next((world / "run" / "post-mortem").iterdir())), *options]
        yield ["status", run, *options]
        yield ["ckpt", "list", store, *options]
        yield ["ckpt", "show", store, *options]
        yield ["ckpt", "verify", store, *options]
        yield ["ckpt", "diff", store, "5", "10", *options]
        yield ["data", "verify", str(world / "data"), str(world / "data.hfindex"), *options]
    yield ["trace", run, "--output", str(out / "trace.json")]
    yield ["top", "--once", run]
    yield ["metrics", "--once", run]
    yield ["dump", run, "--output", str(out / "dump.zip")]
    yield ["resume", run]
    yield ["replay", run, "--step", "999"]
    volumes = ",".join(str(world / "volumes" / name) for name in ("v1", "v2", "v3"))
    yield ["ckpt", "verify", f"ec:2+1:{volumes}"]
    yield ["run", "--config", str(world / "job.toml"), "--write-config", "-", "x.py"]


def is_about(argv: list[str], path: Path) -> bool:
    """Return whether a command is the first to read such a file by its own code."""
    which = " ".join(argv[:2]) if argv[0] in ("ckpt", "data", "ledger", "incident") else argv[0]
    readers = READERS.get(path.name) or READERS.get(path.suffix) or READERS.get(path.parent.name)
    return which in (readers or ("ckpt verify", "data verify", "explain"))


def change_tree(tree: Any, chance: random.Random) -> Any:
    """Return lists in lists of values with one of these replaced by an absurd one."""
    spots = list(_find_spots(tree))
    where = chance.choice(spots)
    if not where:
        return chance.choice(PACKED)
    inner = tree
    for step in where[:-1]:
        inner = inner[step]
    inner[where[-1]] = chance.choice(PACKED)
    return tree


def _find_spots(tree: Any, where: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    if isinstance(tree, list):
        for number, each in enumerate(tree):
            yield from _find_spots(each, (*where, number))
    yield where


def run_command(argv: list[str], encoding: str) -> tuple[int, str]:
    """Run a command in this process, its streams in this encoding; returns the status and all."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            code = main(argv)
        except SystemExit as end:  # argparse's way
            code = int(end.code or 0)
    said = ""
    for stream in streams:
        stream.flush()
        stream.seek(0)
        said += stream.read()
    return code, said


def find_fault(argv: list[str], encoding: str = "utf-8") -> str:
    """Run a command; return a description of its first fault, or an empty text."""
    began = time.process_time()
    code, said = run_command(argv, encoding)
    took_s = time.process_time() - began
    if code not in (0, 1, 2):
        return f"status {code}: {said}"
    if took_s > COMMAND_CPU_S_MAX:
        return f"it took {took_s:.1f} s: {said}"
    if "Traceback" in said:
        return said
    if (unsafe := UNSAFE.search(said)) is not None:
        return f"{unsafe[0]!r} is not escaped: {said!r}"
    return ""
