"""A coordinator's events are recorded, and its decisions are made again from them."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from holdfast.cli.main import main
from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.membership import decision_loop
from holdfast.engine.core.membership.coordinator import CoordinatorMachine
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorEvent,
    SendDirective,
    StopRequested,
)
from holdfast.engine.core.types import Tick, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.records.recordings import (
    DecisionDigest,
    Recording,
    digest_effects,
    encode_record,
    freeze,
    make_heard,
    open_recording,
    read_recording,
    thaw,
)
from holdfast.engine.runtime.coordinate import black_box
from holdfast.engine.runtime.coordinate.black_box import Recorder
from holdfast.lab.sim.swarm import run_seed
from holdfast.reports.commands.incident_command import replay
from mutation_kit import COMBINED
from recordings_kit import handle, record, report
from support import SPEC


class Shadows:
    """Follows each simulated coordinator with a copy that was made from bytes now and then."""

    def __init__(self) -> None:
        self.copies = 0
        self._random = random.Random(1)
        self._shadows: dict[int, tuple[Any, Any]] = {}
        self._is_busy = False

    def handle(
        self, machine: Any, event: CoordinatorEvent, now: float
    ) -> Sequence[CoordinatorEffect]:
        if self._is_busy:
            return handle(machine, event, now)
        self._is_busy = True
        try:
            known, shadow = self._shadows.get(id(machine), (None, None))
            if known is not machine or self._random.random() < 0.03:
                self.copies += 1
                shadow = thaw(freeze(machine))
                self._shadows[id(machine)] = machine, shadow
            theirs = handle(shadow, event, now)
            ours = handle(machine, event, now)
            assert digest_effects(ours) == digest_effects(theirs), (ours, theirs)
            assert machine.deadline() == shadow.deadline()
            return ours
        finally:
            self._is_busy = False


def follow(monkeypatch: pytest.MonkeyPatch) -> Shadows:
    """Follow all coordinators from now on."""
    found = Shadows()

    def handle_both(machine: Any, event: CoordinatorEvent, now: float) -> Any:
        return found.handle(machine, event, now)

    monkeypatch.setattr(decision_loop.DecisionLoop, "handle", handle_both)
    return found


@pytest.mark.parametrize("small", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_copy_of_a_coordinator_decides_as_it_does(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadows = follow(monkeypatch)
    for seed in range(4 if small else 2):
        result = run_seed(seed, small=small)
        assert not result.failure, result.failure
    assert shadows.copies > 10


@pytest.mark.slow
@pytest.mark.parametrize("swarm", COMBINED)
def test_copies_decide_the_same_in_all_kinds_of_jobs(
    swarm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadows = follow(monkeypatch)
    for seed in range(10):
        result = run_seed(seed, small=True, tuned=COMBINED[swarm])
        assert not result.failure, result.failure
    assert shadows.copies > 10


def recorded(folder: Path) -> Path:
    (path,) = (folder / "recordings").iterdir()
    return path


def test_a_recording_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path)
    recording = open_recording(recorded(tmp_path))
    assert recording.header.term == 3
    found = replay(recording)
    assert (found.events, found.seconds, found.difference) == (5, 1.0, None)
    assert [told.announce.kind for told in found.told][-1] == "stop"
    assert main(["incident", "replay", str(tmp_path)]) == 0
    assert "5 events were told to the coordinator again; all" in capsys.readouterr().out
    assert main(["incident", "replay", str(recorded(tmp_path)), "--json"]) == 0
    assert '"difference": null' in capsys.readouterr().out


def test_another_decision_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path)

    def obey(machine: Any, order: StopRequested, now: float) -> list[Announce]:
        return [Announce("stop", "changed code says this")]

    monkeypatch.setattr(CoordinatorMachine, "_obey", obey)
    assert main(["incident", "replay", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "event 5, a request to stop (enough): another decision than recorded" in told
    assert "says (stop): changed code says this" in told

    def fail(machine: Any, request: StopRequested, now: float) -> Announce:
        raise KeyError(7)

    monkeypatch.setattr(CoordinatorMachine, "_obey", fail)
    assert main(["incident", "replay", str(tmp_path), "--json"]) == 1
    assert '"error": "KeyError: 7"' in capsys.readouterr().out


def test_a_decision_that_was_altered_is_found(tmp_path: Path) -> None:
    record(tmp_path)
    whole = open_recording(recorded(tmp_path))
    for at, each in enumerate(whole.records):
        if isinstance(each, DecisionDigest):
            before, after = whole.records[:at], whole.records[at + 1 :]
            altered = (*before, DecisionDigest(each.digest ^ 1), *after)
            found = replay(Recording(whole.header, altered)).difference
            assert found is not None
            assert not found.error
            left_out = Recording(whole.header, (*before, *after))
            assert not after or replay(left_out).difference is not None


def test_the_digest_of_a_decision_depends_on_every_view_in_it() -> None:
    plain = CoordinatorMachine(SPEC.policy(), 3, None, 0.0).orders()

    def view(step: int) -> View:
        number, leader = ViewNumber(1), WorkerId(0)
        return View(number=number, members=(), owners=(), resume_step=step, leader=leader)

    def digest(*steps: int | None) -> int:
        views = [None if step is None else view(step) for step in steps]
        return digest_effects([SendDirective(dataclasses.replace(plain, view=v)) for v in views])

    assert digest(3, 4) == digest(3, 4)
    every = [digest(*steps) for steps in [(), (None,), (3,), (4,), (3, 3), (3, 4), (4, 3)]]
    assert len(set(every)) == len(every)


def test_the_last_event_of_a_killed_coordinator_may_have_no_decision(tmp_path: Path) -> None:
    record(tmp_path)
    whole = open_recording(recorded(tmp_path))
    assert isinstance(whole.records[-1], DecisionDigest)
    assert replay(Recording(whole.header, whole.records[:-1])).difference is None


def test_a_recording_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    record(tmp_path, 40)
    data = recorded(tmp_path).read_bytes()
    whole = read_recording(io.BytesIO(data))
    lengths = set()
    for size in range(len(data)):
        try:
            found = read_recording(io.BytesIO(data[:size]))
        except Damaged:
            continue
        assert found.records == whole.records[: len(found.records)]
        assert replay(found).difference is None
        lengths.add(len(found.records))
    assert lengths
    for at in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        try:
            found = read_recording(io.BytesIO(bytes(flipped)))
            replay(found)
        except Damaged:
            continue


@pytest.mark.parametrize("data", [b"", b"x", *map(zstandard.compress, (b"", b"ab" * 9))])
def test_other_files_are_refused_in_one_sentence(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.zst"
    path.write_bytes(data)
    assert main(["incident", "replay", str(path)]) == 2
    told = capsys.readouterr().err
    assert str(path) in told
    assert told.count("\n") == 1


def test_a_damaged_bundle_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path)
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.write(recorded(tmp_path), "recordings/coordinator-3-1.zst")
    data = path.read_bytes()
    statuses = set()
    for at in range(0, len(data), 3):
        flipped = bytearray(data)
        flipped[at] ^= 0x21
        path.write_bytes(flipped)
        statuses.add(main(["incident", "replay", str(path)]))
        assert capsys.readouterr().err.count("\n") <= 1
    assert 2 in statuses


def test_a_directory_without_recordings_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["incident", "replay", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"holdfast: {tmp_path} holds no recording of a coordinator\n"
    assert main(["incident", "replay", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_long_term_makes_several_recordings_and_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(black_box, "RECORDING_BYTES", 300)
    monkeypatch.setattr(black_box, "BEGINNINGS", 0)
    monkeypatch.setattr(black_box, "FILES_MAX", 3)
    (tmp_path / "recordings").mkdir()
    for number in range(3):  # from an earlier term, whose machine's clock was ahead
        older = tmp_path / "recordings" / f"coordinator-2-{number}.zst"
        older.write_bytes(b"")
        os.utime(older, (1e10, 1e10))
    record(tmp_path, 60)
    paths = sorted(
        (tmp_path / "recordings").iterdir(), key=lambda path: int(path.stem.rpartition("-")[2])
    )
    assert len(paths) == 3
    found = [replay(open_recording(path)) for path in paths]
    assert all(each.difference is None for each in found)
    assert "stop" in [told.announce.kind for each in found for told in each.told]
    clocks = [open_recording(path).header.clock for path in paths]
    assert clocks == sorted(clocks)


def test_a_disk_that_is_too_slow_costs_a_part_of_the_recording_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(black_box, "WAITING_BYTES_MAX", 0)
    told: list[str] = []
    machine = CoordinatorMachine(SPEC.policy(), 3, None, 10.0)
    it = Recorder(tmp_path, 3, told.append)
    it.begin(machine, 10.0)
    for seq in range(1, 4):
        it.hear(report(seq), 10.0)
        it.note(machine, handle(machine, report(seq), 10.0), 10.0)
    it.close()
    assert told == ["the disk is slow: a part of what the coordinator hears is not recorded"]


def test_a_full_disk_is_told_once_and_tried_again_a_while_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    machine = CoordinatorMachine(SPEC.policy(), 3, None, 10.0)
    paths: list[Path] = []

    def create(path: Path) -> int:
        paths.append(path)
        return os.open("/dev/full" if len(paths) == 1 else path, os.O_WRONLY | os.O_CREAT)

    monkeypatch.setattr(black_box, "create_regular", create)
    it = Recorder(tmp_path, 3, told.append)
    it.begin(machine, 10.0)

    def speak(seq: int, now: float) -> None:
        it.hear(report(seq), now)
        it.note(machine, handle(machine, report(seq), now), now)

    sent = itertools.count(1)
    while not told:
        speak(next(sent), 10.0)
    (line,) = told
    assert line.startswith("what the coordinator hears is not recorded: ")
    assert "No space left" in line
    speak(next(sent), 10.0 + black_box.AGAIN_S - 0.1)
    assert len(paths) == 1
    speak(next(sent), 10.0 + black_box.AGAIN_S)
    speak(next(sent), 10.0 + black_box.AGAIN_S)
    it.close()
    assert len(told) == 1
    assert replay(open_recording(paths[1])).difference is None


def test_a_directory_that_cannot_be_written_costs_the_recording_only(tmp_path: Path) -> None:
    (tmp_path / "recordings").write_text("a file")
    record(tmp_path)


def test_records_of_other_lengths_are_damage(tmp_path: Path) -> None:
    record(tmp_path)
    whole = open_recording(recorded(tmp_path))
    data = encode_record(whole.header) + b"\xff\xff\xff\xff" + b"x" * 100
    found = read_recording(io.BytesIO(zstandard.compress(data)))
    assert found.records == ()
    assert "cannot be right" in found.problem


def test_an_event_of_an_unknown_kind_is_damage(tmp_path: Path) -> None:
    record(tmp_path)
    whole = open_recording(recorded(tmp_path))
    odd = dataclasses.replace(whole, records=(make_heard(Tick(), 10.0),))
    assert replay(odd).events == 1
    changed = msgspec.structs.replace(make_heard(Tick(), 10.0), kind="poke")
    with pytest.raises(Damaged):
        replay(dataclasses.replace(whole, records=(changed,)))
