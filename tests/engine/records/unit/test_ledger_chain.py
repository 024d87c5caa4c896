"""The lines of a ledger are chained: lines that were changed, left out or added are found."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from test_ledger import STEPS, audit, entry, header, write_run

from holdfast.engine.core.errors import WorldError
from holdfast.engine.records.ledger import ChainCheck, DoubtLine, LedgerWriter, ledger_path

Lines = list[bytes]


def cut(lines: Lines) -> Lines:
    return [*lines[:5], *lines[6:]]


def change(lines: Lines) -> Lines:
    found = json.loads(lines[5])
    found["view"] = 2
    return [*lines[:5], json.dumps(found, separators=(",", ":")).encode() + b"\n", *lines[6:]]


def unchain(lines: Lines) -> Lines:
    found = json.loads(lines[5])
    del found["chain"]
    return [*lines[:5], json.dumps(found, separators=(",", ":")).encode() + b"\n", *lines[6:]]


@pytest.mark.parametrize(
    ("alter", "line", "told"),
    [
        (cut, 6, "was changed, or lines before it were changed, left out or put in"),
        (change, 6, "was changed, or lines before it"),
        (lambda lines: [*lines[:5], lines[4], *lines[5:]], 6, "was changed, or lines before it"),
        (unchain, 6, "has no digest of the lines before it"),
    ],
)
def test_an_altered_file_is_found(
    alter: Callable[[Lines], Lines], line: int, told: str, tmp_path: Path
) -> None:
    path, _ = write_run(tmp_path)
    assert audit(tmp_path).ok
    path.write_bytes(b"".join(alter(path.read_bytes().splitlines(keepends=True))))
    report = audit(tmp_path)
    assert not report.ok
    assert any(f"{path.name}:{line}: {told}" in each for each in report.findings)


def test_doubts_are_no_part_of_the_chain_and_it_goes_on_when_a_file_is_opened_again(
    tmp_path: Path,
) -> None:
    path = ledger_path(tmp_path, 0, 1)
    writer, other = LedgerWriter(path), LedgerWriter(path)
    writer.begin(header())
    writer.append(entry(0))
    other.doubt(DoubtLine(step=50, view=1, again=True))
    other.close()
    writer.append(entry(1))
    writer.close()
    again = LedgerWriter(path)
    again.begin(header())
    again.append(entry(2))
    again.close()
    check = ChainCheck()
    lines = path.read_bytes().splitlines(keepends=True)
    assert [check.find_problem(line) for line in lines if b"doubt" not in line] == [""] * 5
    assert audit(tmp_path).findings == ()


def test_copies_of_an_older_release_are_compared_in_what_they_have(tmp_path: Path) -> None:
    new, old = write_run(tmp_path)
    lines = []
    for line in old.read_bytes().splitlines():
        found = json.loads(line)
        for name in ("chain", "format", "losses", "state", "gradients", "sum", "digest_steps"):
            found.pop(name, None)
        lines.append(json.dumps(found) + "\n")
    old.write_text("".join(lines))
    assert audit(tmp_path).ok
    found = [json.loads(line) for line in new.read_bytes().splitlines()]
    assert len(found) == STEPS + 1
    assert found[0]["format"] == 3


def test_the_chain_goes_on_after_a_line_that_the_disk_had_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ledger_path(tmp_path, 0, 1)
    writer, write = LedgerWriter(path), os.write
    writer.begin(header())
    writer.append(entry(0))

    def half(descriptor: int, data: memoryview) -> int:
        write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", half)
        with pytest.raises(WorldError, match="cannot grow"):
            writer.append(entry(1))
    writer.append(entry(1))
    writer.close()
    assert audit(tmp_path).findings == ()
    assert audit(tmp_path).steps == 2
