"""The stories in tests/stories: the machines of the core do as these stories describe."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

import story_kit
from holdfast.engine.core.ground.effects import Abort, Commit, Tell, WorkerEffect
from holdfast.engine.core.ground.events import WorkerEvent
from holdfast.engine.core.membership import facts, formation, protection, teams
from holdfast.engine.core.membership.agent import AgentEffect, AgentEvent, AgentMachine
from holdfast.engine.core.membership.coordinator import CoordinatorMachine
from holdfast.engine.core.membership.coordinator_events import (
    CoordinatorEffect,
    CoordinatorEvent,
    Persist,
)
from holdfast.engine.core.membership.reserve import Reserve
from holdfast.engine.core.membership.view_making import Room
from holdfast.engine.core.redundancy import Recall
from holdfast.engine.core.replica.saves import Saves
from holdfast.engine.core.step import audit, step_machine
from holdfast.engine.core.step.shards import ShardEvents
from holdfast.engine.core.types import NO_VIEW, AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.core.worker_status import Phase, WorkerStatus
from places import TESTS
from story_cluster import Machines
from story_faults import ALL_COMMANDS
from story_text import Scribe, merged

FOLDER = TESTS / "stories"
STORIES = sorted(FOLDER.iterdir())


def tell_again(path: Path, *, rewrite: bool) -> None:
    """Make the machines act out a story; compare it with its text, or write the text again."""
    story = story_kit.read(path)
    found = story_kit.told(story)
    if rewrite:
        assert not os.environ.get("CI"), "stories are rewritten by hand, and read again"
        path.write_text(found.text())
        return
    news = story_kit.difference(story, found)
    assert not news, (
        f"{news}\nif this is right: pytest tests/engine/core/unit/test_stories.py --rewrite-stories"
    )


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_the_machines_tell_the_story_as_it_is_written(
    path: Path, request: pytest.FixtureRequest
) -> None:
    tell_again(path, rewrite=request.config.getoption("rewrite_stories"))


def test_every_story_is_told_and_is_a_page_that_can_be_read() -> None:
    assert len(STORIES) >= 30
    page = (FOLDER.parents[1] / "docs" / "protocol.md").read_text()
    for path in STORIES:
        lines = path.read_text().splitlines()
        assert path.suffix == ".txt"
        assert len(lines) <= 600, path.name
        assert [line for line in lines if len(line) > 100] == [], path.name
        assert f"(../tests/stories/{path.name})" in page, f"{path.name} is not linked"


def test_every_command_is_used_by_a_story() -> None:
    used = [c for path in STORIES for part in story_kit.read(path).parts for c in part.commands]
    unused = [p for p in ALL_COMMANDS if not any(re.fullmatch(p, command) for command in used)]
    assert unused == []


# ---------------------------------------------------------------- stories that cannot be


START = "What it shows,\nin two lines.\n\nworkers 2 virtual 2\n----\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("One line.\n\nworkers 2 virtual 2\n----\n", "bad.txt:1: a story begins with two lines"),
        ("What it shows,\nin two lines.\n", "bad.txt:1: nothing happens in this story"),
        (START + "\nall: dance\n----\n", "bad.txt:7: all: dance: unknown command"),
        (START.replace("virtual 2", "virtual 2, at sea"), "bad.txt:4: .*unknown option: at sea"),
        (START.replace("----\n", ""), "bad.txt:4: a part is remarks, commands, ---- and effects"),
        (START + "\nshow\nworker 7 dies\n----\n", "bad.txt:8: worker 7 dies: there is no worker 7"),
        (START + "\nall: votes are here\n----\n", "bad.txt:7: .*: nobody cannot hear that yet"),
        (START.replace("workers 2 virtual 2", "show"), "bad.txt:4: .*first command is: workers N"),
    ],
)
def test_a_story_that_cannot_be_fails_with_file_and_line(text: str, complaint: str) -> None:
    with pytest.raises(story_kit.StoryError, match=complaint):
        story_kit.told(story_kit.parse(text, "bad.txt"))


def test_a_story_without_any_output_is_none() -> None:
    silent = Machines(coordinator=_SilentCoordinator, agent=_SilentAgent)
    with pytest.raises(story_kit.StoryError, match=r"bad.txt:4: no machine does anything"):
        story_kit.told(story_kit.parse(START, "bad.txt"), silent)


class _SilentCoordinator(CoordinatorMachine):
    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorEffect]:
        super().handle(event, now)
        return []


class _SilentAgent(AgentMachine):
    def handle(self, event: AgentEvent, now: float) -> list[AgentEffect]:
        super().handle(event, now)
        return []


def test_a_story_is_written_as_it_is_read() -> None:
    text = START.rstrip("\n") + "\n(nothing)\n\n# A remark.\nshow\n1 s pass\n----\nnow: or never\n"
    story = story_kit.parse(text, "good.txt")
    assert story.text() == text
    assert story.parts[1].remarks == ("# A remark.",)
    assert story.parts[1].line == 9


def test_neighbours_that_do_the_same_are_written_as_one() -> None:
    blocks = [("worker 0", ("a",)), ("worker 2", ("a",)), ("node1", ("a",)), ("worker 1", ("b",))]
    assert merged([*blocks[:2], blocks[3]]) == ["workers 0, 2: a", "worker 1: b"]
    assert merged(blocks[1:3]) == ["worker 2, node1: a"]
    assert merged([("worker 0", ())]) == []
    long = merged([("node0", ("word " * 30,))])
    assert len(long) == 2
    assert all(len(row) <= 100 for row in long)


def test_only_news_is_written() -> None:
    scribe = Scribe()
    status = WorkerStatus(worker=WorkerId(1), incarnation=Incarnation(1), seq=3)
    assert scribe.worker([Tell(status)], 1) == ()
    further = dataclasses.replace(status, seq=4, committed=2, phase=Phase.WAITING)
    assert scribe.worker([Tell(further)], 1) == ("tell 2 committed, waiting",)
    assert scribe.worker([Tell(dataclasses.replace(further, seq=5, proved_at=1.0))], 1) == ()
    assert scribe.worker([Commit(2), Abort(ViewNumber(3))], 1) == ("commit step 2", "abort view 3")


# ---------------------------------------------------------------- stories can fail


def change_in(story: story_kit.Story, machines: Machines | None = None) -> str:
    """Return the change that these machines make to the story; they may not even reach its end."""
    try:
        return story_kit.difference(story, story_kit.told(story, machines))
    except story_kit.StoryError as error:
        return str(error)


class _VotesAgain(WorkerMachine):
    """Forgets that it has promised, once its group has broken."""

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerEffect]:
        self._membership.promise = lambda number: False  # type: ignore[method-assign]
        return super().handle(event, now)


class _SpeaksFirst(CoordinatorMachine):
    """Sends agents a view before the journal has it."""

    def _review(self, reply_to: AgentId | None, now: float) -> list[CoordinatorEffect]:
        effects = super()._review(reply_to, now)
        return sorted(effects, key=lambda effect: isinstance(effect, Persist))


class _NeverPauses(AgentMachine):
    """Does not stop workers that have lost the right to act."""

    def _acting_deadline(self, process: object, alone: bool, now: float) -> float:
        return now + 100.0


class _Stubborn(WorkerMachine):
    """Never reports in its votes that a change is pending."""

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerEffect]:
        self._standing.pending_view = NO_VIEW
        return super().handle(event, now)


@pytest.mark.parametrize(
    ("name", "machines"),
    [
        ("break_after_sum", Machines(worker=_VotesAgain)),
        ("death_before_sum", Machines(worker=_VotesAgain)),
        ("start", Machines(coordinator=_SpeaksFirst)),
        ("frozen_node", Machines(agent=_NeverPauses)),
        ("cut_off_node", Machines(agent=_NeverPauses)),
        ("joiner", Machines(worker=_Stubborn)),
        ("drain", Machines(worker=_Stubborn)),
    ],
)
def test_a_planted_mistake_changes_the_story(name: str, machines: Machines) -> None:
    story = story_kit.read(FOLDER / f"{name}.txt")
    assert not story_kit.difference(story, story_kit.told(story))
    assert change_in(story, machines)


@pytest.mark.parametrize(
    ("name", "where", "what", "instead"),
    [
        ("somebody_committed", formation, "resume_step", lambda *_: (2, "all is redone")),
        ("death_after_sum", formation, "resume_step", lambda *_: (3, "all commit it")),
        ("frozen_node", facts, "fence_time", lambda heard_at, *_: heard_at),
        ("link_lost", formation, "choose_unreachable", lambda _: []),
        ("wrong_gradient", audit, "audit_by_all", lambda one, _: one),
        ("not_finite", step_machine.Audits, "audit_all", lambda *_: ()),
        ("late_suspended", formation, "workers_to_suspend", lambda _: []),
        ("saving", Saves, "count_compared", lambda *_: []),
        ("spare", Reserve, "room", lambda self: Room(hosts=4)),
        ("hot_spare", Reserve, "room", lambda self: Room(hosts=4)),
        ("move", formation, "find_leaving", lambda *_: {}),
        ("memory", protection, "find_recall", lambda *_: Recall(base=0, view=0, sources=())),
        ("shards", ShardEvents, "hear", lambda _, shard, event: [] if shard else [event]),
        ("spread", teams, "_is_lost", lambda *_: False),
    ],
)
def test_a_planted_change_of_a_decision_changes_the_story(
    name: str, where: object, what: str, instead: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = story_kit.read(FOLDER / f"{name}.txt")
    monkeypatch.setattr(where, what, instead)
    assert change_in(story)


def test_stories_are_not_rewritten_where_nobody_reads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "start.txt"
    path.write_text(START)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match="rewritten by hand"):
        tell_again(path, rewrite=True)
    assert path.read_text() == START
    monkeypatch.delenv("CI")
    tell_again(path, rewrite=True)
    assert "report 1 place" in path.read_text()
    tell_again(path, rewrite=False)
