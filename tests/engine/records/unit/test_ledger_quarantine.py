"""What the ledger proves of records that were left out: exactly the records that were reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from test_ledger import PLAN, entry, header

from holdfast.engine.commands.ledger_command import render
from holdfast.engine.core.errors import UserError, WireError
from holdfast.engine.records.ledger import LedgerEntry, LedgerWriter, Place, Uses, ledger_path
from holdfast.engine.records.ledger_audit import LedgerReport, verify
from holdfast.engine.train.data.quarantine import Quarantine, encode_bad, replace_bad
from holdfast.engine.train.data.sampling import SamplePlan, plan_of

STEPS = 10  # two epochs
Told = Mapping[int, Mapping[int, Sequence[int]]]  # by step and virtual rank


def record_of(step: int, vrank: int, place: int = 0) -> int:
    """Return a record that a task reads."""
    return int(PLAN.indices(step, vrank)[place])


BAD = record_of(1, 2)
NEXT = int(replace_bad(np.array([BAD]), {BAD}, PLAN.length)[0][0])
TOLD: Told = {1: {2: (BAD,)}}


def steps_of(told: Told, used: Told | None = None) -> list[LedgerEntry]:
    """Entries whose tasks reported this, and used other records as if they had reported `used`."""
    entries, before = [], set()
    used = told if used is None else used
    for step in range(STEPS):
        plain = entry(step)
        tasks = [
            replace_bad(task, before | set(used.get(step, {}).get(v, ())), PLAN.length)[0]
            for v, task in enumerate(PLAN.step_tasks(step))
        ]
        digests = tuple(map(PLAN.digest_of, tasks))
        entries.append(dataclasses.replace(plain, digests=digests, bad=told.get(step, {})))
        before.update(*used.get(step, {}).values())
    return entries


def proof(run: Path, entries: Sequence[LedgerEntry], dataset: int = 1) -> LedgerReport:
    for worker in (0, 1):
        writer = LedgerWriter(ledger_path(run, worker, 1))
        writer.begin(msgspec.structs.replace(header(worker), dataset=dataset))
        for each in entries:
            writer.append(each)
        writer.close()
    return verify(run, plan_of)


def test_told_substitutions_are_proved(tmp_path: Path) -> None:
    report = proof(tmp_path, steps_of(TOLD))
    assert report.ok, report.findings
    assert (report.quarantined, report.replaced, report.lost, report.repeated) == (1, 2, 0, 0)
    assert "1 records were quarantined as bad, and others were used in their place 2 times" in (
        render(report)
    )


def test_a_substitute_that_is_bad_is_told_of_as_well(tmp_path: Path) -> None:
    report = proof(tmp_path, steps_of({1: {2: (BAD, NEXT)}}))
    assert report.ok, report.findings
    assert report.quarantined == 2


@pytest.mark.parametrize(
    ("told", "used", "words"),
    [
        ({}, TOLD, "used other samples"),  # replaced, and not reported
        (TOLD, {}, "used other samples"),  # reported, and used all the same
        (TOLD, {1: {2: (BAD, NEXT)}}, "used other samples"),  # more than was reported
        ({1: {2: (BAD,)}, 6: {3: (BAD,)}}, TOLD, "left out before"),
        ({1: {3: (BAD,)}}, {1: {3: (BAD,)}}, "no reason to read"),
        ({1: {2: tuple(range(PLAN.length))}}, {}, "all 50 records"),
        ({1: {9: (BAD,)}}, {}, "of virtual ranks [9]"),
    ],
)
def test_other_substitutions_are_found(tmp_path: Path, told: Told, used: Told, words: str) -> None:
    report = proof(tmp_path, steps_of(told, used))
    assert not report.ok
    assert any(words in finding for finding in report.findings), report.findings


def test_records_are_left_out_only_of_datasets_that_allow_it(tmp_path: Path) -> None:
    report = proof(tmp_path, steps_of(TOLD), dataset=0)
    assert any("which its header does not allow" in each for each in report.findings)


def test_copies_agree_on_what_was_left_out(tmp_path: Path) -> None:
    entries = steps_of(TOLD)
    proof(tmp_path, entries)
    writer = LedgerWriter(ledger_path(tmp_path, 2, 1))
    writer.begin(msgspec.structs.replace(header(2), dataset=1))
    writer.append(dataclasses.replace(entries[1], bad={}))
    writer.close()
    assert any(
        "differs from" in each and "bad" in each for each in verify(tmp_path, plan_of).findings
    )


def test_a_round_repeats_what_its_step_has_told(tmp_path: Path) -> None:
    """The second round's tasks use the same samples, and record it."""
    entries = []
    for each in steps_of(TOLD):
        index = each.place.index
        first = dataclasses.replace(each, place=Place(2 * index, index))
        again = Place(2 * index + 1, index, Uses.SAME_SAMPLES)
        entries += [first, dataclasses.replace(each, place=again)]
    report = proof(tmp_path, entries)
    assert report.ok, report.findings
    assert (report.quarantined, report.replaced) == (1, 2)
    entries[3] = dataclasses.replace(entries[3], bad={})
    assert not proof(tmp_path / "other", entries).ok


# ---------------------------------------------------------------- the rule itself


@pytest.mark.parametrize("length", [1, 2, 3, 50, 64, 97, 1000])
def test_a_substitute_is_found_as_long_as_there_is_one(length: int) -> None:
    for good in {0, length // 2, length - 1}:
        bad = frozenset(range(length)) - {good}
        used, met = replace_bad(np.arange(length), bad, length)
        assert used.tolist() == [good] * length
        assert met == bad
    with pytest.raises(UserError, match=f"all {length} records"):
        replace_bad(np.arange(length), frozenset(range(length)), length)


def test_neighbours_have_different_substitutes() -> None:
    used, _ = replace_bad(np.arange(100, 200), frozenset(range(100, 200)), 10_000)
    assert len(set(used.tolist())) == 100


def test_a_reported_record_is_left_out_from_the_next_step_on() -> None:
    one = Quarantine(1, 50, {}, most=9)
    assert one.take_reports({2: encode_bad({7: "why"})}) == {2: {7: "why"}}
    assert one.take_reports({2: encode_bad({7: "why"}), 3: b"\x80"}) == {}  # the step's next round
    assert (one.known_records(2), one.known_records(3), one.waiting) == ({7}, set(), {7})
    one.settle(4)
    assert (one.known_records(3), one.records, one.turn) == ({7}, {7: 4}, {})
    for junk in (b"", b"\x81", encode_bad({50: "x"}), encode_bad({-1: "x"})):
        with pytest.raises(WireError):
            one.take_reports({0: junk})


def test_plans_say_what_is_used_in_place_of_bad_records() -> None:
    plan = SamplePlan(length=50, batch_size=3, virtual_ranks=4, seed=1)
    assert plan.replace_bad(np.array([1]), {1})[0].tolist() == [1 + 31]
