"""Decisions of the coordinators are plans: deciding changes nothing, applying does."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from types import MappingProxyType
from typing import Any

import pytest
from test_roster import AT_MOST_TWO

from holdfast.engine.core.membership import (
    changes,
    coordinator,
    decision_loop,
    decisions,
    group,
    group_decisions,
    job_changes,
)
from holdfast.engine.core.membership.admission import admit, drain, welcome
from holdfast.engine.core.membership.changes import PutSlot
from holdfast.engine.core.membership.facts import Facts, LatestFacts
from holdfast.engine.core.membership.followers import Followers
from holdfast.engine.core.membership.formation import candidates, survivors_of
from holdfast.engine.core.membership.last_saves import LastSaves
from holdfast.engine.core.membership.restart import quarantine, replace_lost
from holdfast.engine.core.membership.roster import NodeState, SlotState
from holdfast.engine.core.policies import RestartPolicy
from holdfast.engine.core.types import AgentId, Incarnation, WorkerId
from holdfast.engine.core.worker_status import Stage
from roster_kit import Cluster, member, status, view_of

DECISIONS = (decisions, group_decisions)
MACHINES = (coordinator, group, decision_loop)
FACTS = {"handle", "_hear", "_note_step", "_learn", "_obey"}
FACTS |= {"_decide", "_is_due", "_review", "_end_review"}
APPLIES = {"__init__", "_apply", "_carry_out", "_install_view", "_count_loss", "check", "remember"}
MUTATORS = {"apply", "change", "count_loss", "count_standstill", "go_back", "hear", "judge", "mark"}
MUTATORS |= {"note_view", "record_end", "record_review", "record_step", "record_trial"}
MUTATORS |= {"record_words", "remember", "settle", "spend", "stir", "take_in"}


def changing_functions(source: str) -> dict[str, list[int]]:
    """Find the functions that assign to an attribute, or call what changes a part of something."""
    found: dict[str, list[int]] = {}
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if _assigns(node) or _calls_a_mutator(node):
                found.setdefault(function.name, []).append(node.lineno)
    return found


def _assigns(node: ast.AST) -> bool:
    is_place = isinstance(node, ast.Attribute | ast.Subscript)
    return is_place and isinstance(node.ctx, ast.Store | ast.Del)


def _calls_a_mutator(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    return isinstance(node.func.value, ast.Attribute) and node.func.attr in MUTATORS


@pytest.mark.parametrize("module", [*MACHINES, *DECISIONS], ids=lambda module: module.__name__)
def test_only_methods_that_hear_facts_or_apply_decisions_change_anything(module: Any) -> None:
    found = changing_functions(inspect.getsource(module))
    wrong = {name: lines for name, lines in found.items() if name not in FACTS | APPLIES}
    assert not wrong, f"{module.__name__}: a decision changes something: {wrong}"
    assert ("__init__" in found) is (module in MACHINES)


def test_a_decision_that_changes_something_is_found() -> None:
    text = (
        "def decide(facts, job):\n job.seen = 1\ndef other(self):\n self._job.agenda.stir(2)\n"
        "def third(facts):\n facts.slots[1] = 2\ndef sound(facts):\n found = facts.known"
    )
    assert set(changing_functions(text)) == {"decide", "other", "third"}


@pytest.mark.parametrize("module", [changes, job_changes], ids=lambda module: module.__name__)
def test_changes_are_frozen(module: Any) -> None:
    found = [each for each in vars(module).values() if dataclasses.is_dataclass(each)]
    assert len(found) > 5
    for each in [*found, Facts, NodeState, SlotState]:
        assert each.__dataclass_params__.frozen, each.__name__  # type: ignore[union-attr]


def test_facts_cannot_be_changed() -> None:
    facts = Cluster(member(0)).facts(view_of(0))
    for table in (facts.roster.nodes, facts.roster.slots, facts.roster.newest):
        assert isinstance(table, MappingProxyType)
    slots: Any = facts.roster.slots
    with pytest.raises(TypeError):
        slots[WorkerId(0)] = SlotState(AgentId("n0"), Incarnation(2))


def test_decisions_leave_the_facts_as_they_are() -> None:
    cluster = Cluster(member(0), status(1, stage=Stage.LOST, detail="signal 9"), member(2))
    cluster.hear("n2", member(2), draining="disk: bad", failing="disk")
    cluster.hear("n3", slots=2)
    facts = cluster.facts(view_of(0, 2), 0)
    known = [dict(facts.roster.nodes), dict(facts.roster.slots), dict(facts.roster.newest)]
    policy = RestartPolicy()
    plans = [
        welcome(facts, recall=True),
        admit(facts, AT_MOST_TWO)[1],
        drain(facts)[1],
        replace_lost(facts, policy),
        quarantine(facts, WorkerId(2), policy),
    ]
    assert all(plans)
    followers, saves = Followers(enabled=True, newest=7), LastSaves(last=7)
    for _ in range(2):  # the same facts give the same plan
        assert followers.review(facts, 3, may_order=True) == followers.review(
            facts, 3, may_order=True
        )
        assert saves.review(facts, 0) == saves.review(facts, 0)
    assert plans[3] == replace_lost(facts, policy)
    assert known == [dict(facts.roster.nodes), dict(facts.roster.slots), dict(facts.roster.newest)]


def test_findings_in_facts_are_computed_once_until_something_changes() -> None:
    """A review of a large job would take too long: each decision asks for the survivors again."""
    cluster, latest, looks = Cluster(member(0)), LatestFacts(), list[Facts]()

    def update(version: int, now: float = 1.0) -> Facts:
        plain = cluster.facts(view_of(0), now)
        return latest.update(plain, version, lambda facts: dataclasses.replace(facts, feeding=True))

    def find(facts: Facts) -> int:
        looks.append(facts)
        return len(looks)

    first = update(1)
    assert first.feeding
    assert [update(1).find_once(find), update(1).find_once(find)] == [1, 1]
    assert update(1) is first
    for found, changed in enumerate((update(2), update(2, now=2.0)), start=2):
        assert changed is not first
        assert changed.find_once(find) == found
    assert survivors_of(first) is survivors_of(first)
    assert candidates(first) is candidates(first)


def test_a_roster_has_another_version_after_each_report_and_each_change() -> None:
    cluster = Cluster(member(0))
    versions = [cluster.roster.version]
    cluster.hear("n0", member(0))
    versions.append(cluster.roster.version)
    cluster.change(PutSlot(WorkerId(0), dataclasses.replace(cluster.roster.slots[WorkerId(0)])))
    versions.append(cluster.roster.version)
    assert versions == sorted(set(versions))


def test_a_change_takes_effect_once_it_is_applied() -> None:
    cluster = Cluster(member(0))
    before = cluster.roster.slots[WorkerId(0)]
    changed = dataclasses.replace(before, strikes=3)
    cluster.change(PutSlot(WorkerId(0), changed))
    assert cluster.roster.slots[WorkerId(0)] is changed
    assert before.strikes == 0
