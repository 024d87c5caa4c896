"""Composes a training script from habits, all from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from script_search import handmade, kept_state
from script_search.habit import Habit, Truth

STEPS = 40
IMPORTS = (
    "import collections, contextlib, contextvars, functools, gc, itertools, logging, math, os\n"
    "import random, re, secrets, sqlite3, time, uuid, warnings\n"
    "from types import SimpleNamespace\n"
    "import numpy as np\nimport torch\nfrom torch import nn\n"
    "from torch.utils.data import TensorDataset\n"
)
FRAME = '''{imports}
SHOWN = collections.deque(maxlen=10)

def like(module, scale, seed=3):
    """Fill a module with numbers that no global generator gives."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3 * scale)
        p.requires_grad_(next(iter(module.parameters())).requires_grad)
    return module

{top}

class Samples(TensorDataset):
    def __init__(self, *tensors):
        super().__init__(*tensors)
        {data_init}
    {samples}

def collate(samples):
    x, y = (torch.stack(each) for each in zip(*samples))
    {collate}
    return x, y

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = like(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)), 1.0)
        self.teacher = like(nn.Linear(6, 2), 1.0, seed=4).requires_grad_(False)
        {init}
    def forward(self, x):
        found = self.inner(x) + 0.1 * self.teacher(x)
        {forward}
        return found

def main():
    global job, model, optimizer
    {main}
    job = join()
    model, more = Model(), {}
    optimizer = {optimizer}
    {before_protect}
    job.protect(model=model, optimizer=optimizer, **more)
    inputs = torch.randn(70, 6, generator=torch.Generator().manual_seed(5))
    data = job.batches(Samples(inputs, inputs[:, :2].sin()), 3{collate_fn})
    {setup}
    for step in job.steps(data, until={steps}):
        for x, y in step:
            {task}
            loss = nn.functional.mse_loss(model(x), y)
            {loss}
            step.backward(loss)
            {backward}
        {after}
        optimizer.step()
        optimizer.zero_grad()
        {between}
        boundary(step.index)
    report(model)

main()
'''
_OPTIMIZERS = (
    "torch.optim.SGD(model.inner.parameters(), lr=0.05, momentum=0.9)",
    "torch.optim.AdamW(model.inner.parameters(), lr=1e-2)",
)
_HARMFUL = (
    (kept_state.in_tasks, 5),
    (kept_state.between_steps, 3),
    (handmade.weights, 4),
    (handmade.coins, 3),
    (handmade.more, 3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script of one seed. `kill_step`: in this one worker 1 dies, in the run with a death."""

    seed: int
    text: str
    habits: tuple[Habit, ...]
    kill_step: int

    @property
    def truth(self) -> Truth:
        """Return the worst truth among its habits."""
        return max((each.truth for each in self.habits), key=list(Truth).index)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names by which a message may refuse it."""
        return tuple(
            name for each in self.habits if each.truth is self.truth for name in each.names
        )

    @property
    def needs_processes(self) -> bool:
        return any(each.needs_processes for each in self.habits)


def compose(seed: int) -> Script:
    """Compose the script of a seed: at most one habit that may do harm, and some that do none."""
    dice = random.Random(seed)
    habits = []
    if dice.random() < 0.75:
        kinds, weights = zip(*_HARMFUL, strict=True)
        habits.append(dice.choices(kinds, weights)[0](dice))
    wanted = dice.choice([0, 1, 1, 2]) if habits else dice.choice([1, 2, 3])
    for _ in range(wanted):
        found = handmade.calm(dice)
        if found not in habits:
            habits.append(found)
    optimizer = dice.choice(_OPTIMIZERS)
    return Script(
        seed=seed,
        text=_text(habits, optimizer),
        habits=tuple(habits),
        kill_step=dice.randrange(6, 13),
    )


def _text(habits: Sequence[Habit], optimizer: str) -> str:
    slots: dict[str, list[str]] = {}
    for each in reversed(habits):  # harmless ones first, so that what harms has the last word
        for slot, lines in each.slots.items():
            slots.setdefault(slot, []).extend(lines)
    if body := slots.get("getitem"):
        slots["samples"] = [
            "def __getitem__(self, index):",
            "    x, y = super().__getitem__(index)",
            *(f"    {line}" for line in body),
            "    return x, y",
        ]
    frame = FRAME.replace("{collate_fn}", ", collate_fn=collate" if "collate" in slots else "")
    frame = frame.replace("{optimizer}", optimizer).replace("{steps}", str(STEPS))
    out: list[str] = []
    for line in frame.replace("{imports}", IMPORTS).split("\n"):
        slot = line.strip().removeprefix("{").removesuffix("}")
        if line.strip() == f"{{{slot}}}":
            indent = line[: len(line) - len(line.lstrip())]
            out += [indent + each for each in slots.get(slot, ())]
        else:
            out.append(line)
    return "\n".join(out)
