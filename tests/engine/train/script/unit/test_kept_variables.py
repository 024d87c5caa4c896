"""Tests that what a script keeps in variables is named, and that a best model is saved right."""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.train.job import Job
from holdfast.engine.train.script.kept_variables import find_leader_state, find_step_state
from loop_kit import dataset, net
from places import ROOT
from script_search.compose import compose
from script_search.habit import Truth
from support import SPEC
from thread_cluster import Killed, ThreadCluster, ThreadWorker

STEPS = "for step in job.steps(data, until=60):\n    for x, y in step:\n        work(x)\n"


def find(*lines: str, top: str = "", after: str = "") -> list[str]:
    """Look at a script in whose loop over steps these lines stand after the batches."""
    loop = STEPS + "".join(f"    {line}\n" for line in lines)
    return find_leader_state(ast.parse(f"{top}\n{loop}{after}\n"))


BEST = ("    score = evaluate()", "    if score < best:", "        best = score")


@pytest.mark.parametrize(
    ("condition", "top"),
    [
        ("job.is_leader", ""),
        ("job.is_leader and step.index % 5 == 4", ""),
        ("step.index % 5 == 4 and self.job.is_leader", ""),
        ("job.worker == 0", ""),
        ("not job.worker", ""),
        ("rank == 0", ""),
        ("not rank", "rank = dist.get_rank()"),
        ("dist.get_rank() in (0, 1)", ""),
        ("main", "main = int(os.environ['LOCAL_RANK']) == 0"),
        ("main", "where = os.getenv('RANK')\nmain = where == '0'"),
        ("trainer.is_world_process_zero()", ""),
        ("accelerator.is_main_process", ""),
        ("socket.gethostname() == 'node0'", ""),
    ],
)
def test_a_best_score_under_a_condition_that_differs_between_workers_is_named(
    condition: str, top: str
) -> None:
    (found,) = find(f"if {condition}:", *BEST, top=top)
    assert found.startswith("best in line ")
    assert found.endswith(f" only if {condition}")


@pytest.mark.parametrize("condition", ["step.index % 5 == 4", "score < 3", "job.virtual_ranks > 1"])
def test_the_same_on_all_workers_is_not_named(condition: str) -> None:
    assert find(f"if {condition}:", *BEST) == []


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["if not job.is_leader:", "    continue", *(each[4:] for each in BEST)], "best"),
        (["if not job.is_leader:", "    pass", "else:", *BEST], "best"),
        (["if job.is_leader:", "    bad += 1", "    if bad > 5:", "        job.stop()"], "bad"),
        (["if job.is_leader:", "    self.best = f(self.best)", "    g(self.best)"], "self.best"),
        (["if job.is_leader:", "    if s < kept['best']:", "        kept['best'] = s"], "kept['b"),
        (["if job.is_leader:", "    kept.append(s)", "    json.dump(kept, file)"], "kept"),
        (["if job.is_leader:", "    kept[step.index] = s", "    plot(kept)"], "kept"),
        (["if job.is_leader:", "    best, at = (s, 1) if s < best else (best, 2)", "    f(best)"],
         "best"),
        (["if job.is_leader:", "    better = s < best", "    best = s"], "best"),
    ],
)  # fmt: skip
def test_other_ways_to_keep_something_are_named(lines: list[str], name: str) -> None:
    found = find(*lines, top="kept = []")
    assert [each.startswith(name) for each in found] == [True], found


def test_what_is_collected_for_the_end_is_named() -> None:
    lines = "if job.is_leader:", "    losses.append(step.loss)"
    saves = "if job.is_leader:\n    torch.save(losses, 'losses.pt')"
    (found,) = find(*lines, top="losses = []", after=saves)
    assert found == "losses in line 6 only if job.is_leader"


FUNCTIONS = """
best = 9.0
class Keeper:
    def __init__(self):
        self.best = 9.0
    def look(self, score):
        if score < self.best:
            self.best = score
            torch.save(model, "best.pt")
@rank_zero_only
def first(score):
    global best
    if score < best:
        best = score
def second(score):
    global best
    if not job.is_leader:
        return
    if score < best:
        best = score
def third(step):
    global best
    if step.loss < best:
        best = step.loss
def text(length):
    found = ""
    for i in range(length):
        found = found + choose(found)
    return found
"""


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("if job.is_leader: keeper.look(score)", "self.best in line 8 only if job.is_leader"),
        ("keeper.look(score)", None),
        ("if job.is_leader: third(step)", "best in line 24 only if job.is_leader"),
        ("third(step)", None),
        ("job.on_step_end(third)", "best in line 24 only if job.on_step_end calls it"),
        ("if job.is_leader: print(text(20))", None),
    ],
)
def test_functions_that_one_worker_calls_are_searched(line: str, named: str | None) -> None:
    always = {"best in line 14 only if @rank_zero_only", "best in line 20 only if job.is_leader"}
    found = find_leader_state(ast.parse(f"{FUNCTIONS}\n{STEPS}    {line}\n"))
    assert set(found) - always == ({named} if named else set())


def find_needed(*lines: str, task: str = "work(x)", top: str = "") -> list[str]:
    """Look at the same script for what steps change and a worker that joins lacks."""
    loop = STEPS.replace("work(x)", task) + "".join(f"    {line}\n" for line in lines)
    module = ast.parse(f"{top}\njob.protect(model=model, opt=opt)\n{loop}\n")
    loops = (each for each in ast.walk(module) if isinstance(each, ast.For))
    return find_step_state(module, next(n for n in loops if ast.unparse(n.iter) == "step"))


@pytest.mark.parametrize(
    ("task", "lines", "name"),
    [
        ("step.backward(scale * f(x))", ["scale *= 0.9"], "scale"),
        ("step.backward(f(x) / norm)", ["norm = g(model)"], "norm"),
        ("work(x, kept['n'])", ["kept['n'] += 1"], "kept['n']"),
        ("work(x)", ["if step.loss < best:", "    best = step.loss"], "best"),
        ("work(x)", ["clip(model, limit(kept.n))", "kept.n += 1"], "kept.n"),
        ("work(x)", ["bad = bad + 1 if worse() else 0", "if bad > 5:", "    job.stop()"], "bad"),
        ("work(x, queue)", ["queue.append(step.loss)"], "queue"),
    ],
)
def test_what_steps_change_and_later_ones_need_is_named(
    task: str, lines: list[str], name: str
) -> None:
    (found,) = find_needed(*lines, task=task, top="queue = []")
    assert found.startswith(f"{name} in line ")


@pytest.mark.parametrize(
    ("task", "lines"),
    [
        ("step.backward(scale * f(x))", ["job.values['scale'] *= 0.9"]),
        ("work(x); print(total)", ["total += step.loss"]),
        ("work(x, model.temperature)", ["model.temperature *= 0.9"]),
        ("work(x)", ["score = f(model)", "if score > 3:", "    job.stop()"]),
        ("work(x)", ["losses.append(step.loss)"]),
        ("work(x)", ["if not warned:", "    warn()", "    warned = True"]),
        ("work(x)", ["if time.time() - last > 3:", "    last = time.time()"]),
        ("last = x; work(last)", []),
    ],
)
def test_what_a_joiner_does_not_need_is_calm(task: str, lines: list[str]) -> None:
    assert find_needed(*lines, task=task, top="losses = []") == []


@pytest.mark.parametrize(
    "lines",
    [
        ["if job.is_leader:", "    print(step.index, step.loss)"],
        ["if job.is_leader and time.time() - last > 30:", "    last = time.time()"],
        ["if job.is_leader:", "    total += step.loss", "    print(f'{total / 10}')"],
        ["if job.is_leader:", "    seen += 1", "    writer.add_scalar('seen', seen)"],
        ["if job.is_leader:", "    total = 0", "    for v in data:", "        total += v",
         "    save(total)"],
        ["if job.is_leader:", "    if log is None:", "        log = open('l')", "    log.write(1)"],
        ["stop = False", "if job.is_leader:", "    stop = late()", "if job.agree(stop):",
         "    job.stop()"],
        ["best = None", "if job.is_leader:", "    best = find(best)", "best = job.agree(best)",
         "use(best)"],
        ["if job.is_leader:", "    bar.update(1)"],
        ["if job.is_leader:", "    score = evaluate()", "    if score < 3:", "        save(score)"],
        ["score = job.evaluate(f, test)", "if score < job.values['best']:",
         "    job.values['best'] = score", "    if job.is_leader:", "        save(score)"],
        ["if job.is_leader:", "    stats = {}", "    stats['loss'] = 1", "    json.dump(stats)"],
    ],
)  # fmt: skip
def test_what_people_look_at_and_what_is_set_again_is_calm(lines: list[str]) -> None:
    assert find(*lines) == []


# ---------------------------------------------------------------- a best model, in jobs

BEST_STEP, LAST_STEP = 4, 12  # from BEST_STEP on the model becomes worse


class Saver:
    """Saves a worker's model, and dies at a step, or while it saves after that step."""

    def __init__(self, me: ThreadWorker, path: Path, dies_at: int, *, saving: bool) -> None:
        self._me = me
        self._path = path
        self._dies_at = dies_at if (me.worker, me.incarnation) == (0, 1) else LAST_STEP
        self._saving = saving

    def end_step(self, step: int) -> None:
        self._die_if(step == self._dies_at and not self._saving)

    def save(self, model: nn.Module, step: int) -> None:
        part = self._path.with_suffix(f".{self._me.worker}")
        torch.save(model.state_dict(), part)
        self._die_if(step >= self._dies_at and self._saving)
        part.replace(self._path)

    def _die_if(self, dies: bool) -> None:
        if dies:
            self._me.die()
            raise Killed


def prepared(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def trains(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.5 if step.index < BEST_STEP else -0.5
    # Not by a kit: a script's files are those of one folder.
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


def keeps_a_variable(job: Job, saver: Saver) -> None:
    model, optimizer = prepared(job)
    job.protect(model=model, optimizer=optimizer)
    inputs, targets = dataset().tensors
    best = math.inf
    for step in job.steps(job.batches(dataset(), 3), until=LAST_STEP):
        trains(step, model, optimizer)
        if job.is_leader:
            score = nn.functional.mse_loss(model(inputs), targets).item()
            if score < best:
                best = score
                saver.save(model, step.index)
        saver.end_step(step.index)


def keeps_a_module(job: Job, saver: Saver) -> None:
    """Save the best model as the documentation shows."""
    model, optimizer = prepared(job)
    best = copy.deepcopy(model).requires_grad_(False)
    job.protect(model=model, optimizer=optimizer, best=best)
    job.values["score"] = math.inf
    for step in job.steps(job.batches(dataset(), 3), until=LAST_STEP):
        trains(step, model, optimizer)
        score = job.evaluate(lambda b: nn.functional.mse_loss(model(b[0]), b[1]), dataset(), 16)
        if score < job.values["score"]:
            job.values["score"] = score
            best.load_state_dict(model.state_dict())
        if job.is_leader:
            saver.save(best, step.index)
        saver.end_step(step.index)
    if job.is_leader:
        saver.save(best, LAST_STEP - 1)


def run(
    script: Callable[[Job, Saver], None],
    path: Path,
    workers: int,
    dies_at: int = LAST_STEP,
    *,
    saving: bool = False,
) -> list[str]:
    """Run a script that saves its best model; return the event log's lines about the script."""

    def body(job: Job, me: ThreadWorker) -> None:
        script(job, Saver(me, path, dies_at, saving=saving))
        job._loops.end_open_loop()
        job._loops.wait_for_others()

    given = {"workers.nproc": workers, "workers.virtual": 4}
    cluster = ThreadCluster(with_settings(SPEC, given), body)
    assert cluster.run() == "", cluster.errors
    assert (dies_at < LAST_STEP) == bool(cluster.ended), "the leader has died"
    return cluster.told("script")


def saved(path: Path) -> list[float]:
    return torch.load(path, weights_only=True)["0.weight"].flatten().tolist()


def test_a_best_score_in_a_variable_is_named_at_the_first_step(tmp_path: Path) -> None:
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    texts = run(keeps_a_variable, calm, 1)
    assert sum("one worker alone sets best in line " in text for text in texts) == 1, texts
    run(keeps_a_variable, struck, 2, BEST_STEP + 2)
    assert saved(struck) != saved(calm), "a worse model has replaced the best one"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    path = tmp_path_factory.mktemp("undisturbed") / "best.pt"
    run(keeps_a_module, path, 1)
    return saved(path)


@pytest.mark.parametrize(
    ("dies_at", "saving"),
    [
        (1, True),
        (BEST_STEP - 1, False),
        (BEST_STEP - 1, True),
        (BEST_STEP + 2, False),
        (LAST_STEP - 1, True),
    ],
)
def test_the_best_model_is_saved_right_though_the_leader_dies(
    dies_at: int, saving: bool, tmp_path: Path, undisturbed: list[float]
) -> None:
    run(keeps_a_module, tmp_path / "best.pt", 2, dies_at, saving=saving)
    assert saved(tmp_path / "best.pt") == undisturbed


def test_no_script_of_ours_is_named() -> None:
    texts = {str(path): path.read_text() for path in (ROOT / "examples").rglob("*.py")}
    texts |= {str(path): path.read_text() for path in (ROOT / "tests" / "scripts").glob("*.py")}
    for script in map(compose, range(300)):
        if script.truth is Truth.HARMLESS:
            texts[f"seed {script.seed}"] = script.text
    found = {name: list(find_all(ast.parse(text))) for name, text in texts.items()}
    assert {name: names for name, names in found.items() if names} == {}


def find_all(module: ast.Module) -> Iterator[str]:
    """Yield the variables of both kinds, around each loop over batches."""
    yield from find_leader_state(module)
    for each in ast.walk(module):
        if isinstance(each, ast.For) and ast.unparse(each.iter) == "step":
            yield from find_step_state(module, each)
