"""What tasks hand over to all workers, and states that virtual ranks keep, in jobs of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.engine.core.errors import StateMismatch, UserError, WireError
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.train.job import Job, RankState
from holdfast.engine.train.script.rank_states import RankStates
from holdfast.engine.train.step.values import TaskReport, pack, read_report, unpack
from loop_kit import dataset, digest, everywhere, protected, results
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

STEPS = 8


@pytest.mark.slow
def test_values_that_tasks_gather_are_known_to_all_in_order() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        job.values["hardest"] = [0.0] * 4
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                losses = (model(x) - y).square().mean(dim=1)
                step.gather("losses", losses)
                if step.virtual_rank % 2:
                    step.gather("odd", {"rank": step.virtual_rank, "most": losses.max().item()})
                step.backward(losses.mean())
            every = torch.cat(step.gathered["losses"])
            hardest = torch.cat([torch.tensor(job.values["hardest"]), every]).topk(4).values
            assert step.loss == pytest.approx(every.mean().item(), rel=1e-5)
            optimizer.step()
            optimizer.zero_grad()
            job.values["hardest"] = hardest.tolist()
        ranks = [each["rank"] for each in step.gathered["odd"]]
        return digest(model), job.values["hardest"], ranks

    _, hardest, ranks = everywhere(script)
    assert len(set(hardest)) == 4
    assert ranks == [1, 3]


def recurrent(job: Job, me: ThreadWorker) -> Any:
    """Train with a hidden state that continues from batch to batch."""
    model, optimizer = protected(job)
    hidden = job.rank_state("hidden", lambda vrank: torch.full((2,), float(vrank)))
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for x, y in step:
            out = model(x) + 0.3 * hidden.value
            hidden.value = out[-1]
            step.backward((out - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), [hidden[vrank].tolist() for vrank in range(len(hidden))]


class Walk:
    """Is a simulator with a state and a generator of its own."""

    made = 0

    def __init__(self, vrank: int) -> None:
        self.random = np.random.default_rng(vrank)
        self.at = np.zeros(6)
        self.moves = 0
        Walk.made += 1

    def move(self) -> torch.Tensor:
        self.moves += 1
        self.at = 0.9 * self.at + self.random.normal(size=6)
        return torch.from_numpy(self.at).float()

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.bit_generator.state, "at": self.at, "moves": self.moves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.bit_generator.state = state["random"]
        self.at, self.moves = state["at"].copy(), state["moves"]


def simulated(job: Job, me: ThreadWorker) -> Any:
    """Train on what simulators give, one for each virtual rank."""
    model, optimizer = protected(job)
    walks = job.rank_state("walk", Walk)
    for step in job.steps(until=STEPS):
        for _ in step:
            x = torch.stack([walks.value.move() for _ in range(3)])
            step.gather("mean", x.mean().item())
            step.backward((model(x) - x[:, :2]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    moves = [walks[vrank]["moves"] for vrank in range(len(walks))]
    return digest(model), moves, step.gathered["mean"]


@pytest.mark.slow
def test_a_hidden_state_goes_with_its_virtual_rank() -> None:
    _, hidden = everywhere(recurrent)
    assert len({tuple(each) for each in hidden}) == 4


@pytest.mark.slow
def test_a_simulator_goes_with_its_virtual_rank() -> None:
    _, moves, _ = everywhere(simulated)
    assert moves == [3 * STEPS] * 4


@pytest.mark.parametrize("script", [recurrent, simulated])
def test_states_are_right_where_tasks_are_audited(
    script: Callable[[Job, ThreadWorker], Any],
) -> None:
    audited = {"silent_errors.audit": 1.0, "silent_errors.repeat_steps": 2}
    assert results(script, 3, settings=audited) == results(script, 1) * 3


def test_a_simulator_is_made_only_where_it_is_used() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        before = Walk.made
        simulated(job, me)
        return Walk.made - before

    assert results(script, 1) == [4], "once each"


def replays(job: Job, me: ThreadWorker) -> Any:
    """Train on a replay buffer of few large tensors, as the documentation shows."""
    model, optimizer = protected(job)
    made: list[int] = []

    def empty(vrank: int) -> dict[str, Any]:
        made.append(vrank)
        return {"seen": torch.zeros(16, 6), "reward": torch.zeros(16), "next": 0}

    buffer = job.rank_state("buffer", empty)
    for step in job.steps(job.batches(dataset(200), 3), until=STEPS):
        for batch, _ in step:
            kept = buffer.value
            for seen in batch:
                row = kept["next"] % len(kept["reward"])
                kept["seen"][row], kept["reward"][row] = seen, seen.sum()
                kept["next"] += 1
            filled = min(kept["next"], len(kept["reward"]))
            rows = torch.randint(filled, (5,), generator=torch.Generator().manual_seed(filled))
            errors = model(kept["seen"][rows])[:, 0] - kept["reward"][rows]
            step.backward(errors.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), [buffer[v]["next"] for v in range(len(buffer))], len(made)


@pytest.mark.slow
def test_a_replay_buffer_goes_with_its_virtual_rank() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        return replays(job, me)[:2]

    assert results(script, 2) == results(script, 1) * 2
    assert results(script, 3, {1: 12})[0] == results(script, 1)[0]


def test_a_first_state_is_made_once_for_each_virtual_rank() -> None:
    ((_, filled, made),) = results(replays, 1, settings={"silent_errors.repeat_steps": 0})
    assert filled == [3 * STEPS] * 4
    assert made == 4


@pytest.mark.parametrize("rows", [0, 100])
def test_a_state_that_takes_longer_than_its_tasks_is_named_once(rows: int) -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        state = job.rank_state("buffer", lambda vrank: [[torch.zeros(4)] * 4] * rows)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                assert len(state.value) == rows
                step.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    spec = with_settings(SPEC, {"workers.nproc": 1, "workers.virtual": 4})
    cluster = ThreadCluster(spec, script)
    assert cluster.run() == ""
    named = [text for text in cluster.told("script") if "the rank state 'buffer' takes" in text]
    assert len(named) == bool(rows)
    assert all("its 400 tensors" in text and "one tensor for each field" in text for text in named)


def test_states_that_are_not_used_are_not_sent() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        state = job.rank_state("rare", lambda vrank: torch.zeros(1000))
        sent = []
        for step in job.steps(job.batches(dataset(), 3), until=4):
            for x, y in step:
                if step.index == 1:
                    state.value += 1
                if step.index == 2:
                    assert state.value[0] == 1
                step.backward((model(x) - y).square().mean())
            sent.append(len(job._loops.script.steps.reports))
            optimizer.step()
            optimizer.zero_grad()
        return sent

    assert results(script, 2) == [[0, 4, 0, 0]] * 2


def refused(use: Callable[[Job, RankState, Any], None], within: bool) -> str:
    """Return the refusal of a script that does this in a task, or between two steps."""

    def script(job: Job, me: ThreadWorker) -> str:
        model, _ = protected(job)
        state = job.rank_state("walk", Walk)
        try:
            for step in job.steps(job.batches(dataset(), 3), until=2):
                for x, y in step:
                    if within:
                        use(job, state, step)
                    step.backward((model(x) - y).square().mean())
                if not within:
                    use(job, state, step)
        except UserError as error:
            return str(error)
        return ""

    found: list[str] = []

    def run(job: Job, me: ThreadWorker) -> None:
        found.append(script(job, me))
        raise UserError("over")

    with pytest.raises(AssertionError):
        results(run, 1)
    return found[0]


def twice(job: Job, state: RankState, step: Any) -> None:
    step.gather("x", 1)
    step.gather("x", 2)


@pytest.mark.parametrize(
    ("use", "within", "said"),
    [
        (lambda job, state, step: step.gather("x", 1), False, "called without a batch"),
        (twice, True, "twice in one task"),
        (lambda job, state, step: step.gather("x", lambda: 0), True, "'x' of step.gather is a"),
        (lambda job, state, step: step.gathered["y"], False, "no task of step 0 has called"),
        (lambda job, state, step: step.virtual_rank, False, "loop over a step's batches only"),
        (lambda job, state, step: state.value, False, "outside of a task"),
        (lambda job, state, step: setattr(state, "value", 1), False, "outside of a task"),
        (
            lambda job, state, step: setattr(state, "value", Walk(0)),
            True,
            "cannot be set to a Walk",
        ),
        (lambda job, state, step: state[4], False, "no virtual rank 4: there are 4"),
        (lambda job, state, step: job.rank_state("walk", Walk), False, "was called before"),
    ],
)
def test_a_wrong_use_is_refused(
    use: Callable[[Job, RankState, Any], None], within: bool, said: str
) -> None:
    assert said in refused(use, within)


def test_a_value_of_a_state_that_is_carried_in_a_variable_is_named() -> None:
    """What tasks hand over is compared when they are repeated, like their gradients."""
    count = [0]

    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=4):
            for x, y in step:
                count[0] += 1
                step.gather("count", count[0])
                step.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(AssertionError, match=r"other values for step\.gather or for rank states"):
        results(script, 2)


def test_trees_are_packed_whole() -> None:
    tree = {
        "t": torch.arange(6, dtype=torch.int16).view(2, 3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "a": np.arange(3.0),
        "n": [1 << 100, -0.0, None, True, "x", b"y", (1, 2)],
        3: {"nested": torch.ones(2, requires_grad=True)},
    }
    found = unpack(pack(tree, "tree"))
    assert pack(found, "tree") == pack(tree, "tree")
    assert found["t"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["n"] == tree["n"]
    assert str(found["n"][1]) == "-0.0"
    assert not found[3]["nested"].requires_grad


@pytest.mark.parametrize("cut", [0, 1, 5, -1])
def test_damaged_trees_are_told(cut: int) -> None:
    with pytest.raises(WireError):
        unpack(pack({"t": torch.zeros(3)}, "tree")[:cut])
    with pytest.raises(WireError):
        read_report(TaskReport(values={"x": b"1"}).encode()[: cut or 1])


def test_states_have_fingerprints_and_travel_with_the_jobs() -> None:
    held, other = RankStates(), RankStates()
    assert held.fingerprint() == held.fingerprint(3) == 0
    held.commit({v: TaskReport(states={"a": pack(v, "a"), "b": pack([v], "b")}) for v in range(3)})
    other.load_state_dict(held.state_dict())
    assert [other.fingerprint(step) for step in range(3)] == [held.fingerprint(s) for s in range(3)]
    assert other.describe_states() == held.describe_states()
    assert len(held.describe_states()) == 6
    other.commit({1: TaskReport(states={"a": pack(7, "a")})})
    differ = [step for step in range(3) if other.fingerprint(step) != held.fingerprint(step)]
    assert differ == [1]
    assert other.fingerprint() != held.fingerprint()
    with pytest.raises(StateMismatch):
        other.load_state_dict({"a": {0: torch.zeros(3)}})


def test_a_state_that_is_new_starts_from_its_own_random_numbers() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        noise = job.rank_state("noise", lambda vrank: torch.randn(2))
        for step in job.steps(job.batches(dataset(), 3), until=2):
            for x, y in step:
                step.backward((model(x) + noise.value - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return digest(model), [noise[vrank].tolist() for vrank in range(4)]

    # One worker each time: the workers of a thread cluster would share the global generators.
    torch.manual_seed(1)
    (found,) = results(script, 1)
    assert len({tuple(each) for each in found[1]}) == 4
    torch.manual_seed(2)
    assert results(script, 1) == [found]
