"""Files that strangers wrote or damaged: a sentence, a status, and no control characters."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard
from rich.table import Table
from test_recordings import record, recorded

import strangers_kit as kit
from conftest import RUN_S
from holdfast.clusters.kubernetes.launch_k8s import read_pod
from holdfast.engine.commands.plain_console import PlainConsole
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.plain_text import escape_controls, escape_values
from holdfast.engine.faults.fault_script import parse
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.net.tls import client_of
from holdfast.engine.records.recordings import (
    Header,
    HeardEvent,
    encode_record,
    open_recording,
    thaw,
)
from holdfast.engine.state.store import regular_files
from holdfast.engine.state.store.regular_files import read_named
from holdfast.reports.dashboard.feed import encode_message

SEEDS = 60  # one changed file for each
MEMORY_BYTES_MAX = 6 << 30  # address space; torch alone takes two GiB
SPOOF = "\x1b]0;x\x9b31m\x7f\u202e\u2066x\ud800\u2028"
SHOWN = r"\u001b]0;x\u009b31m\u007f\u202e\u2066x\ud800\u2028"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(params=["utf-8", "ascii", "latin-1"])
def encoding(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def commands_about(world: Path, path: Path) -> list[list[str]]:
    """Return the commands that read the part of the world in which a file is."""
    part = str(world / path.relative_to(world).parts[0])
    return [argv for argv in kit.list_commands(world) if any(part in word for word in argv)]


def restore(path: Path, data: bytes, mode: int) -> None:
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    path.write_bytes(data)
    path.chmod(mode)


def test_the_commands_succeed_on_sound_files(world: Path) -> None:
    """Otherwise the tests below would begin from files that are refused at once."""
    done = {" ".join(argv[:2]): kit.run_command(argv, "utf-8") for argv in kit.list_commands(world)}
    refused = {name: said for name, (code, said) in done.items() if code not in (0, 1)}
    reasons = ["is over: ", "no step 999", "is not under", "are runs of two jobs"]
    assert all(any(each in said for each in reasons) for said in refused.values()), refused


@pytest.mark.slow_with("latin-1-binary", "latin-1-text")
@pytest.mark.parametrize("kind", ["text", "binary"])
def test_changed_files_are_answered_in_plain_words(kind: str, encoding: str, world: Path) -> None:
    change = kit.change_text if kind == "text" else kit.change_bytes
    paths = [path for path in kit.list_files(world) if kit.is_text(path) == (kind == "text")]
    for seed in range(SEEDS):
        chance = random.Random(f"{kind} {encoding} {seed}")
        path = chance.choice(paths)
        data, mode = path.read_bytes(), path.stat().st_mode
        path.write_bytes(change(data, chance))
        known = commands_about(world, path)
        for argv in chance.sample(known, min(len(known), 6)):
            assert kit.find_fault(argv, encoding) == "", (seed, path, argv)
        restore(path, data, mode)


@pytest.mark.parametrize("kind", kit.ODD)
def test_other_things_in_the_place_of_files_are_not_waited_for(
    kind: str, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regular_files, "WRITER_S_MAX", 0.1)
    for path in kit.list_files(world):
        data, mode = path.read_bytes(), path.stat().st_mode
        path.unlink()
        kit.ODD[kind](path)
        for argv in commands_about(world, path):
            if "--json" not in argv and kit.is_about(argv, path):
                assert kit.find_fault(argv) == "", (path, argv)
        restore(path, data, mode)


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "0x1p99999"},
        {"loss": "one"},
        {"hosts": []},
        {"counts": [1]},
        {"digests": []},
        {"losses": "00" * 8},
        {"gradients": "ab" * 24},
    ],
)
def test_a_step_whose_lists_do_not_fit_together_is_left_out(
    change: dict[str, object], tmp_path: Path
) -> None:
    """Ledgers of two runs are compared, and the first differs in each of its lines."""
    world = kit.make_world(tmp_path)
    shutil.copytree(world / "kept", world / "out" / "kept")
    for path in (world / "kept" / "ledger").iterdir():
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        changed = [each | change if each["kind"] == "step" else each for each in lines]
        path.write_text("".join(json.dumps(each) + "\n" for each in changed))
    for argv in (
        ["compare", str(world / "kept"), str(world / "out" / "kept")],
        ["ledger", "verify", str(world / "kept")],
        ["report", str(world / "kept"), "--output", str(tmp_path / "page")],
        ["top", "--once", str(world / "kept")],
        ["metrics", "--once", str(world / "kept")],
    ):
        assert kit.find_fault(argv) == "", argv


def test_a_recording_whose_numbers_are_absurd_ends_in_a_sentence(tmp_path: Path) -> None:
    record(tmp_path, 20)
    source = recorded(tmp_path)
    whole = open_recording(source)
    assert thaw(whole.header.machine) is not None
    for seed in range(150):
        chance = random.Random(seed)
        graph = kit.change_tree(msgspec.msgpack.decode(whole.header.machine), chance)
        header = msgspec.structs.replace(whole.header, machine=msgspec.msgpack.encode(graph))
        plain = b"".join(encode_record(each) for each in (header, *whole.records))
        source.write_bytes(zstandard.compress(plain))
        for options in ([], ["--json"]):
            argv = ["incident", "replay", str(source), *options]
            assert kit.find_fault(argv) == "", seed


@pytest.mark.slow
def test_a_coordinator_that_never_stops_deciding_is_stopped(tmp_path: Path) -> None:
    """A node claims to have room for 2^47 workers, and the coordinator gives it all of them."""
    record(tmp_path)
    source = recorded(tmp_path)
    whole = open_recording(source)
    events = []
    for each in whole.records:
        if isinstance(each, HeardEvent) and each.kind == "report":
            event = msgspec.msgpack.decode(each.body)
            event["report"]["slots"] = 1 << 47
            each = HeardEvent(each.at, each.kind, msgspec.msgpack.encode(event))
        events.append(each)
    plain = b"".join(encode_record(each) for each in (whole.header, *events))
    source.write_bytes(zstandard.compress(plain))
    code, said = kit.run_command(["incident", "replay", str(source)], "utf-8")
    assert code == 2
    assert "which no coordinator does" in said
    assert said.count("\n") == 1


# ---------------------------------------------------------------- bombs


def write_bomb_of_zeros(path: Path, header: Header) -> None:
    path.write_bytes(zstandard.compress(bytes(1 << 30)))


def write_bomb_of_records(path: Path, header: Header) -> None:
    """Write records that are right, and take 2.4 GB."""
    heard = encode_record(HeardEvent(header.clock, "tick", bytes(200 << 20)))
    with zstandard.ZstdCompressor().stream_writer(open(path, "wb")) as stream:
        stream.write(encode_record(header))
        for _ in range(12):
            stream.write(heard)


def write_bomb_of_lists(path: Path, header: Header) -> None:
    """Write a state that is one list of 100 million empty lists."""
    count = 100 << 20
    state = b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    changed = msgspec.structs.replace(header, machine=state)
    path.write_bytes(zstandard.compress(encode_record(changed)))


def write_zip_bomb(path: Path, header: Header) -> None:
    """Write a bundle whose member claims to be small."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("recordings/../../x.zst", zstandard.compress(bytes(1 << 30)))
        bundle.writestr("/etc/passwd", b"x")
        bundle.writestr("recordings/\x1b[2J.zst", encode_record(header))


def write_lzma_bundle(path: Path, header: Header) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as bundle:
        bundle.writestr("recordings/coordinator-1-1.zst", bytes(1 << 20))


@pytest.mark.parametrize(
    "write",
    [
        write_bomb_of_zeros,
        pytest.param(write_bomb_of_records, marks=pytest.mark.slow),
        pytest.param(write_bomb_of_lists, marks=pytest.mark.slow),
        write_zip_bomb,
        write_lzma_bundle,
    ],
)
def test_a_bomb_is_refused_in_a_sentence(
    write: Callable[[Path, Header], None], tmp_path: Path
) -> None:
    record(tmp_path)
    bomb = tmp_path / "bomb"
    write(bomb, open_recording(recorded(tmp_path)).header)
    assert bomb.stat().st_size < 4 << 20
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES_MAX},) * 2)"
    program = f"{limited}; from holdfast.cli.main import main; raise SystemExit(main())"
    found = subprocess.run(
        [sys.executable, "-c", program, "incident", "replay", str(bomb)],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert found.returncode == 2, found
    assert found.stderr.startswith(f"holdfast: {bomb} cannot be "), found.stderr
    assert found.stderr.count("\n") == 1


# ---------------------------------------------------------------- files that the command line names


def test_a_pipe_that_a_shell_makes_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"x" * 300_000,))
    writer.start()
    assert read_named(pipe) == b"x" * 300_000
    writer.join()


def test_a_named_file_without_an_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regular_files, "WRITER_S_MAX", 0.05)
    os.mkfifo(tmp_path / "pipe")
    _, terminal = os.openpty()
    cases = {
        tmp_path / "pipe": "nothing came through this pipe in 0.05 s",
        Path("/dev/zero"): "not a regular file",
        Path(os.ttyname(terminal)): "not a regular file",
        tmp_path: "not a regular file",
    }
    for path, words in cases.items():
        with pytest.raises(OSError, match=words):
            read_named(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)), "a0"),
        ("a: &a [*a, *a]", "more than 10000 values"),
        (
            "a0: &a0 [x]\n"
            + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)),
            "more than 10000 values",
        ),
        ("[" * 50_000, "cannot be read"),
        ("a: " + "9" * 5000, "cannot be read"),
        ("a: 9999-99-99", "cannot be read"),
        ("\x00", "cannot be read"),
    ],
)
def test_a_pod_template_that_grows_without_end_is_refused(
    text: str, words: str, tmp_path: Path
) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "pod.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        read_pod(tmp_path / "pod.yaml")


@pytest.mark.parametrize(
    "line",
    [
        f"worker {'9' * 5000} step 1 kill",
        f"worker 1 step {'9' * 30} kill",
        "worker 1 step 1 slow 1e400",
        "worker 1 step 1 stall nan",
        "worker 1 step ٣ kill",
    ],
)
def test_a_fault_with_an_absurd_number_is_refused(line: str) -> None:
    with pytest.raises(UserError, match=r"faults\.txt, line 1: 'worker") as refused:
        parse(line, "faults.txt")
    assert len(str(refused.value)) < 1000


def test_certificates_and_reports_that_are_pipes_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regular_files, "WRITER_S_MAX", 0.05)
    for name in ("tls.crt", "tls.key", "ca.crt"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=r"tls\.crt cannot be read: it is not a regular file"):
        client_of(tmp_path)
    argv = ["doctor", "--against", str(tmp_path / "ca.crt")]
    code, said = kit.run_command(argv, "utf-8")
    assert (code, said.count("\n")) == (2, 1)
    assert "nothing came through this pipe" in said


# ---------------------------------------------------------------- what a terminal shows


def test_what_a_terminal_obeys_is_escaped() -> None:
    assert escape_controls(SPOOF) == SHOWN
    assert escape_controls("\0\x07\b\r\v") == r"\u0000\u0007\u0008\u000d\u000b"
    kept = "a\tb\nc é 日本 👩\u200d💻"
    assert escape_controls(kept) == kept
    assert json.loads(escape_controls(json.dumps("\x7f\x9b", ensure_ascii=False))) == "\x7f\x9b"
    assert escape_values({SPOOF: [SPOOF, 1, None]}) == {SHOWN: [SHOWN, 1, None]}


def test_every_way_out_escapes(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    print_plain(f"{SPOOF} é", file=stream, flush=True)
    console = PlainConsole(file=stream, force_terminal=True, width=200)
    table = Table("[bold]x[/nope]")
    table.add_row(f"{SPOOF} é")
    console.print(table, SPOOF, style="bold")
    stream.seek(0)
    said = re.sub(r"\x1b\[[\d;]*m", "", stream.read())  # the codes of rich's own styles
    assert said.count(SHOWN) == 3
    assert "[bold]x[/nope]" in said
    assert not kit.UNSAFE.search(said)
    message = encode_message("nodes", [{"name": SPOOF}])
    assert json.loads(message.partition("data: ")[2])[0]["name"] == SHOWN


def test_a_spoofing_event_is_escaped_in_every_report(tmp_path: Path, encoding: str) -> None:
    world = kit.make_world(tmp_path)
    log = world / "run" / "events.jsonl"
    log.write_text(log.read_text().replace("<img", json.dumps(SPOOF)[1:-1] + "<img"))
    shown = SHOWN.encode(encoding, "backslashreplace").decode(encoding)
    for argv in (["events"], ["explain"], ["explain", "1.2"], ["top", "--once"]):
        code, said = kit.run_command([argv[0], str(world / "run"), *argv[1:]], encoding)
        assert code == 0
        assert shown in "".join(said.splitlines()), said
        assert not kit.UNSAFE.search(said)
    for argv in (["report"], ["dump"]):
        out = tmp_path / argv[0]
        assert kit.run_command([*argv, str(world / "run"), "--output", str(out)], encoding)[0] == 0
    with zipfile.ZipFile(tmp_path / "dump") as bundle:
        texts = [(tmp_path / "report").read_text(), bundle.read("README.txt").decode()]
    assert all(shown in text and not kit.UNSAFE.search(text) for text in texts)
