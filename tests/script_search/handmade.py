"""Habits that are no plain state: weights that tasks change, coins, and much that is harmless."""

from __future__ import annotations

import re
from random import Random

from script_search.habit import Habit, Truth, habit

HARMLESS, TASKS, WORKERS, JOINS = Truth.HARMLESS, Truth.TASKS, Truth.WORKERS, Truth.JOINS

# ---------------------------------------------------------------- weights that tasks change

_CHANGES = {
    "in place": "with torch.no_grad():\n    {p}.mul_(0.99)",
    "by data in place": "{p}.data.mul_(0.99)",
    "by new data": "{p}.data = {p}.data * 0.99",
    "by detach": "{p}.detach().mul_(0.99)",
    "by set_": "{p}.data.set_({p}.detach() * 0.99)",
    "by NumPy": "{p}.detach().numpy()[...] *= 0.99",
    "by a view kept before": "{v}.mul_(0.99)",
    "by a new parameter": "{m}.weight = nn.Parameter({p}.detach() * 0.99, "
    "requires_grad={p}.requires_grad)",
    "by loading a state": "{m}.load_state_dict({{k: v * 0.99 for k, v in "
    "{m}.state_dict().items()}})",
    "by swap_tensors": "torch.utils.swap_tensors({p}, nn.Parameter({p}.detach() * 0.99, "
    "requires_grad={p}.requires_grad))",
    "by copying in place": "{p}.data.copy_({p}.data * 0.99)",
    "by an index": "{p}.data[0] *= 0.99",
    "by a replaced module": "{owner} = like({m}, 0.99)",
    "by nn.init": "nn.init.constant_({m}.bias, float(x.mean()))",
    "by parametrized memory": "np.asarray({p}.detach())[0, 0] *= 0.99",
}
_WHENS = {
    "each time": "{}",
    "every 3rd call": "calls.append(0)\nif len(calls) % 3 == 0:\n    {}",
    "in virtual rank 1's first task": "if float(x.sum()) > 0 and not calls:\n    calls.append(0)\n"
    "    {}",
    "on a coin": "if dice.random() < 0.3:\n    {}",
}


def weights(random: Random) -> Habit:
    """Draw a way to change weights within a task."""
    frozen = random.random() < 0.6
    module = "teacher" if frozen else "inner[2]"
    how, when = random.choice(list(_CHANGES)), random.choice(list(_WHENS))
    place = random.choice(["forward", "task", "loss", "backward", "hook"])
    if not frozen and how in ("in place", "by detach", "by a view kept before"):
        place = "task"  # PyTorch itself refuses these between forward and backward
    root = "self" if place == "forward" else "model"
    change = _CHANGES[how].format(
        p=f"{root}.{module}.weight", m=f"{root}.{module}", v="seen_weight", owner=f"{root}.{module}"
    )
    if place == "hook":
        change = change.replace("float(x.mean())", "float(inputs[0].mean())")
    text = _WHENS[when].replace("x.sum()", "inputs[0].sum()" if place == "hook" else "x.sum()")
    lines = text.replace("{}", change.replace("\n", "\n    ") if when != "each time" else change)
    slots = {
        "top": ("calls = []", "dice = random.Random(7)"),
        "setup": ("global seen_weight", f"seen_weight = model.{module}.weight.detach()"),
    }
    if place == "hook":
        body = tuple(f"    {line}" for line in lines.split("\n"))
        head = "def at_forward(module, inputs, output):"
        slots["setup"] += (head, *body, "model.register_forward_hook(at_forward)")
    else:
        slots[place] = tuple(lines.split("\n"))
    what = f"{'frozen' if frozen else 'trained'} weights changed {how}, {when}, in {place}"
    hits = (f"model.{module}".replace("[", ".").replace("]", ""), "teacher", "inner")
    return Habit(what=what, truth=TASKS, slots=slots, names=hits, family="weights")


# ---------------------------------------------------------------- coins and what workers are

_SOURCES = (
    ("random.Random of its own", "dice = random.Random(3)", "dice.random()", TASKS),
    ("NumPy's generator of its own", "dice = np.random.default_rng(3)", "dice.random()", TASKS),
    ("torch's generator of its own", "dice = torch.Generator().manual_seed(3)",
     "torch.rand(1, generator=dice).item()", TASKS),
    ("the clock", "dice = None", "time.time_ns() % 1000 / 1000", TASKS),
    ("the time since it began", "began = time.monotonic()",
     "(time.monotonic() - began) % 1.0", TASKS),
    ("os.urandom", "dice = None", "os.urandom(1)[0] / 256", TASKS),
    ("secrets", "dice = random.SystemRandom()", "dice.random()", TASKS),
    ("uuid", "dice = None", "uuid.uuid4().int % 97 / 97", TASKS),
    ("a new object's id", "dice = []", "id(object()) // 16 % 97 / 97", TASKS),
    ("a counter of itertools", "dice = itertools.count()", "next(dice) % 5 / 5", TASKS),
    ("an endless cycle", "dice = itertools.cycle([0.1, 0.2, 0.3])", "next(dice)", TASKS),
    ("a generator of its own",
     "def dice_of():\n    value = 0.5\n    while True:\n        yield value\n"
     "        value = value * 3.7 * (1 - value)\ndice = dice_of()", "next(dice)", TASKS),
    ("a half-read loader",
     "dice = iter(torch.utils.data.DataLoader(torch.rand(5000, generator=torch.Generator()"
     ".manual_seed(1))))", "next(dice).item()", TASKS),
    ("the worker's number", "dice = None", "job.worker / 7", WORKERS),
    ("the process's id and time", "dice = os.urandom(1)[0] / 256", "dice", WORKERS),
    ("a start time", "dice = time.time_ns() % 1000 / 1000", "dice", WORKERS),
    ("an object's address", "dice = object()", "id(dice) // 16 % 97 / 97", WORKERS),
    ("who leads", "dice = None", "float(job.is_leader)", WORKERS),
    ("the number of live objects", "dice = None", "len(gc.get_objects()) % 89 / 89", TASKS),
    ("the process's memory", "dice = None",
     "int(open('/proc/self/statm').read().split()[1]) % 89 / 89", TASKS),
)  # fmt: skip
_TARGETS = (
    ("the loss", "loss", "loss = loss * (1 + 0.1 * COIN)"),
    ("the input", "task", "x = x * (1 + 0.1 * COIN)"),
    ("the output", "forward", "found = found * (1 + 0.1 * COIN)"),
    ("the sample", "getitem", "x = x * (1 + 0.1 * COIN)"),
    ("the batch", "collate", "x = x * (1 + 0.1 * COIN)"),
    ("the loss, now and then", "loss", "if COIN > 0.8:\n    loss = loss * 2"),
    ("a dropout", "forward", "found = found if COIN > 0.3 else 0.5 * found"),
    ("the gradient", "after", "model.inner[0].weight.grad.mul_(1 + 0.1 * COIN)"),
    ("the rate", "after", "optimizer.param_groups[0]['lr'] = 0.01 * (1 + COIN)"),
    ("the weights", "between", "model.inner[0].weight.data.mul_(1 - 0.01 * COIN)"),
    ("the line that is shown", "loss", "SHOWN.append(str(COIN))"),
)


def coins(random: Random) -> Habit:
    """Draw a source of numbers that are not keyed, and a use of them."""
    name, top, value, truth = random.choice(_SOURCES)
    target, slot, text = random.choice(_TARGETS)
    shows = "shown" in target
    if slot in ("after", "between") and truth is TASKS and "own" in name + top:
        truth = JOINS  # alike on all workers until one joins
    lines = text.replace("COIN", f"({value})")
    data = ("derive a sample from its index",) if slot in ("getitem", "collate") else ()
    rate = ("['lr']",) if target == "the rate" else ()
    update = ("the script updates them by something",) if slot in ("after", "between") else ()
    return Habit(
        what=f"{name} for {target}",
        truth=HARMLESS if shows else truth,
        slots={"top": tuple(top.split("\n")), slot: tuple(lines.split("\n"))},
        names=(*_words(top, value), *data, *rate, *update),
        family="coins",
    )


def _words(top: str, value: str) -> tuple[str, ...]:
    first = "dice" if top.startswith("def") else top.split(" ", maxsplit=1)[0]
    used = ("job.worker", "job.is_leader", "gc.get_objects", "/proc/self/statm")
    named = tuple(name for name in used if name in value)
    return named or (first if first in value else re.split(r"[( ]", value, maxsplit=1)[0],)


# ---------------------------------------------------------------- modules, caches, graphs, layers

_MORE = (
    habit("a cache whose value is the first batch's", TASKS, ("scale_of",),
          top="@functools.cache\ndef scale_of(shape):\n    return float(LAST[-1])\nLAST = [1.0]",
          task="LAST.append(float(x.mean()))",
          loss="loss = loss * (1 + 0.1 * math.tanh(scale_of(x.shape[1])))"),
    habit("a normalisation by the first batch", TASKS, ("mean", "first"),
          top="first = {}",
          task="if 'mean' not in first:\n    first['mean'] = x.mean(0)\nx = x - first['mean']"),
    habit("a normalisation by the first batch, in forward, kept in a list", TASKS, ("first",),
          init="self.first = []",
          forward="if not self.first:\n    self.first.append(found.detach().mean())\n"
          "found = found - self.first[0]"),
    habit("a queue of keys in a tensor of the model's", TASKS, ("keys",),
          init="self.keys = torch.zeros(4, 2)",
          forward="found = found + 0.1 * self.keys.mean(0)\n"
          "self.keys.copy_(torch.cat([self.keys[1:], found.detach()[:1]]))"),
    habit("a queue of keys in a buffer", HARMLESS, (),
          init="self.register_buffer('keys', torch.zeros(4, 2))",
          forward="found = found + 0.1 * self.keys.mean(0)\n"
          "self.keys.copy_(torch.cat([self.keys[1:], found.detach()[:1]]))"),
    habit("a queue of keys in a buffer, by NumPy", HARMLESS, (),
          init="self.register_buffer('keys', torch.zeros(4, 2))",
          forward="found = found + 0.1 * self.keys.mean(0)\n"
          "self.keys.numpy()[0] = found.detach()[0].numpy()"),
    habit("a queue of keys in a buffer, by data", HARMLESS, (),
          init="self.register_buffer('keys', torch.zeros(4, 2))",
          forward="found = found + 0.1 * self.keys.mean(0)\n"
          "self.keys.data = torch.cat([self.keys[1:], found.detach()[:1]])"),
    habit("a buffer that forward replaces", HARMLESS, (),
          init="self.register_buffer('keys', torch.zeros(2))",
          forward="found = found + 0.1 * self.keys\nself.keys = found.detach().mean(0)"),
    habit("a hidden state in a deque of the model's", TASKS, ("hidden",),
          init="self.hidden = collections.deque([torch.zeros(2)], maxlen=1)",
          forward="found = found + 0.3 * self.hidden[0]\n"
          "self.hidden.append(found.detach().mean(0))"),
    habit("a hidden state in a plain object of the model's", TASKS, ("hidden", "memory"),
          init="self.memory = SimpleNamespace(hidden=torch.zeros(2))",
          forward="found = found + 0.3 * self.memory.hidden\n"
          "self.memory.hidden = found.detach().mean(0)"),
    habit("a gradient that is kept of a frozen parameter", TASKS, ("teacher",),
          loss="held = model.teacher.weight.grad\n"
          "model.teacher.weight.grad = x.mean() * torch.ones_like(model.teacher.weight)\n"
          "if held is not None:\n    loss = loss * (1 + 0.1 * held.mean().tanh().item())"),
    habit("a frozen module that is no part of the model", TASKS, ("other",),
          top="other = like(nn.Linear(6, 2), 1.0).requires_grad_(False)",
          loss="loss = loss + 0.01 * other(x).square().mean()\nother.weight.data.mul_(0.98)"),
    habit("layers in a plain list, changed between steps", JOINS, ("Linear",),
          top="others = [like(nn.Linear(6, 2), 1.0).requires_grad_(False)]", processes=True,
          loss="loss = loss + 0.01 * others[0](x).square().mean()",
          between="others[0].weight.data.mul_(0.9)"),
    habit("a tensor outside of modules, changed between steps", JOINS, ("target",),
          top="target = torch.ones(2)",
          loss="loss = loss + 0.05 * (model(x) - target).square().mean()",
          between="target.mul_(0.9)"),
    habit("an average of weights in a list, used in the loss", JOINS, ("averages",),
          setup="averages = [p.detach().clone() for p in model.inner.parameters()]",
          loss="loss = loss + 0.05 * sum((p - a).square().sum() "
          "for p, a in zip(model.inner.parameters(), averages))",
          between="for p, a in zip(model.inner.parameters(), averages):\n"
          "    a.lerp_(p.detach(), 0.1)"),
    habit("a layer that is added between steps", JOINS, ("model.inner.3",),
          between="if step.index == 4:\n    model.inner.append(like(nn.Linear(2, 2), 1.0))\n"
          "    optimizer.add_param_group({'params': list(model.inner[-1].parameters())})"),
    habit("a layer that is replaced by one of the same shape", HARMLESS, (),
          between="if step.index == 4:\n    old = model.teacher\n"
          "    model.teacher = like(nn.Linear(6, 2), 0.5).requires_grad_(False)"),
    habit("a frozen layer that thaws", HARMLESS, (),
          setup="model.inner[0].bias.requires_grad_(False)",
          between="if step.index == 4:\n    model.inner[0].bias.requires_grad_(True)"),
    habit("a default dtype that a task changes", TASKS, ("default", "dtype"), processes=True,
          loss="loss = loss * (1 + torch.tensor(0.1).item())\n"
          "torch.set_default_dtype(torch.float64 if float(x.sum()) > 0 else torch.float32)"),
    habit("noise from the global generators", HARMLESS, (), processes=True,
          task="x = x + 0.1 * torch.randn_like(x) + random.random() + np.random.rand()"),
    habit("a dropout", HARMLESS, (), processes=True,
          forward="found = nn.functional.dropout(found)"),
    habit("the global generator, sown again in a task", TASKS, ("seed", "generator"),
          processes=True, task="torch.manual_seed(SEEN[0])\nSEEN[0] += 1",
          top="SEEN = [0]", loss="loss = loss * torch.rand(1).item()"),
    habit("a mode that tasks change by turns", TASKS, ("training",),
          top="turns = itertools.count()", task="model.train(next(turns) % 2 == 0)",
          forward="found = found if self.training else 0.5 * found"),
    habit("a hook that is registered in each task", TASKS, ("hook",),
          task="model.inner.register_forward_hook(lambda m, i, o: o * 1.01)"),
    habit("a method that a task replaces", TASKS, ("forward", "bent"),
          top="bent = []",
          loss="if not bent:\n    bent.append(1)\n    plain = model.inner[1].forward\n"
          "    model.inner[1].forward = lambda v: plain(v) * 0.9"),
    habit("the last loss of a batch, for a rate", WORKERS, ("['lr']",),
          after="optimizer.param_groups[0]['lr'] = 0.01 * (1 + math.tanh(loss.item()))"),
    habit("the last batch, for weights", WORKERS, ("the script updates them by something",),
          between="with torch.no_grad():\n    model.inner[0].bias.add_(0.01 * x.mean())"),
    habit("a list of losses of tasks, for a rate", WORKERS, ("['lr']",),
          top="losses = []", loss="losses.append(loss.item())",
          after="optimizer.param_groups[0]['lr'] = 0.01 * (1 + sum(losses[-4:]))"),
    habit("a graph that grows from task to task", TASKS, ("graph", "total"),
          top="total = []",
          loss="total.append(loss.detach())\nloss = loss + 0.01 * torch.stack(total).mean()"),
    habit("replayed samples", TASKS, ("memory",),
          top="memory = []",
          task="memory.append(x.detach().clone())\nx = torch.cat([x, memory[0][:1]])\n"
          "y = torch.cat([y, y[:1]])"),
    habit("a set of hashes of seen samples", TASKS, ("seen",),
          top="seen = set()",
          task="key = round(float(x.sum()), 4)\nx = x * (0.5 if key in seen else 1.0)\n"
          "seen.add(key)"),
)  # fmt: skip


def more(random: Random) -> Habit:
    """Draw one of the habits that are written out."""
    return random.choice(_MORE)


_CALM = (
    habit("a progress counter", HARMLESS, top="done = 0", main="global done",
          loss="done += 1\nif done % 10 == 0:\n    SHOWN.append(f'{done} batches')"),
    habit("a running mean for the display", HARMLESS, setup="shown_loss = None",
          loss="shown_loss = loss.item() if shown_loss is None else "
          "0.9 * shown_loss + 0.1 * loss.item()\nSHOWN.append(f'{shown_loss:.3f}')"),
    habit("a list for a plot", HARMLESS, top="curve = []", loss="curve.append(loss.item())",
          between="curve.append(step.loss)"),
    habit("a timer", HARMLESS, top="spent = {'forward': 0.0}",
          task="at = time.perf_counter()",
          loss="spent['forward'] += time.perf_counter() - at"),
    habit("a logger", HARMLESS, top="log = logging.getLogger('train')",
          loss="log.debug('loss %s', loss.item())"),
    habit("a lazy mask that is a pure function", HARMLESS, init="self.masks = {}",
          forward="key = x.shape[1]\nif key not in self.masks:\n"
          "    self.masks[key] = torch.linspace(0.5, 1.5, 2)\nfound = found * self.masks[key]"),
    habit("functools.cache of a pure function", HARMLESS,
          top="@functools.cache\ndef pattern(n):\n    return torch.arange(n) / n + 0.5",
          task="x = x * pattern(x.shape[1])"),
    habit("samples that are decoded once", HARMLESS, data_init="self.decoded = {}",
          getitem="if index not in self.decoded:\n    self.decoded[index] = x.sin()\n"
          "x = self.decoded[index]"),
    habit("a file that is read again", HARMLESS,
          top="table = FOLDER / f'table{os.urandom(4).hex()}.txt'\ntable.write_text('0.5')",
          task="x = x * float(table.read_text())"),
    habit("a cache on disk of a pure function", HARMLESS,
          # Not np.load: it parses, and Python 3.11 may fail where several threads parse at once.
          getitem="path = FOLDER / f'{index}-{os.urandom(4).hex()}.raw'\n"
          "x.cos().numpy().tofile(path)\n"
          "x = torch.from_numpy(np.fromfile(path, dtype=np.float32))"),
    habit("a meter of its own", HARMLESS,
          top="class Average:\n    def __init__(self):\n        self.sum = self.n = 0\n"
          "    def update(self, value):\n        self.sum += value\n        self.n += 1\n"
          "meter = Average()", loss="meter.update(loss.item())",
          between="if step.index % 5 == 0:\n    SHOWN.append(meter.sum / meter.n)"),
    habit("a schedule by the step's number", HARMLESS,
          after="optimizer.param_groups[0]['lr'] = 0.02 / (1 + step.index)"),
    habit("a warm-up in job.values", HARMLESS, setup="job.values.setdefault('warm', 0.1)",
          after="optimizer.param_groups[0]['lr'] = 0.02 * job.values['warm']",
          between="job.values['warm'] = min(1.0, job.values['warm'] + 0.1)"),
    habit("a temperature of the model's that cools between steps", HARMLESS,
          init="self.temperature = 1.0", forward="found = found * self.temperature",
          between="model.temperature *= 0.97"),
    habit("a scheduler", HARMLESS,
          before_protect="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)\n"
          "more['scheduler'] = scheduler", between="scheduler.step()"),
    habit("an average of weights", HARMLESS,
          before_protect="average = torch.optim.swa_utils.AveragedModel(model)\n"
          "more['average'] = average", between="average.update_parameters(model)"),
    habit("a batch norm", HARMLESS, init="self.norm = nn.BatchNorm1d(2)",
          forward="found = self.norm(found)"),
    habit("activations that a hook keeps for a look", HARMLESS,
          setup="kept_outputs = {}\ndef keep(module, inputs, output):\n"
          "    kept_outputs['inner'] = output.detach()\n"
          "model.inner.register_forward_hook(keep)"),
    habit("gradient norms for a plot", HARMLESS, top="norms = []",
          between="norms.append(float(sum(p.grad.norm() for p in model.parameters() "
          "if p.grad is not None)))"),
    habit("an auxiliary loss of the last layer that forward keeps", HARMLESS,
          init="self.penalty = None", forward="self.penalty = found.square().mean()",
          loss="loss = loss + 0.01 * model.penalty"),
    habit("a shape that is checked once", HARMLESS, top="checked = []",
          task="if not checked:\n    assert x.shape[1] == 6\n    checked.append(True)"),
    habit("a best loss for the display", HARMLESS, setup="best = float('inf')",
          between="best = min(best, step.loss)\nSHOWN.append(best)"),
    habit("positions that forward extends when they are too few", HARMLESS,
          init="self.positions = torch.zeros(0)",
          forward="if len(self.positions) < x.shape[1]:\n"
          "    self.positions = torch.arange(x.shape[1]) * 0.1\n"
          "found = found + self.positions.mean()"),
    habit("a no_grad look at the teacher", HARMLESS,
          loss="with torch.no_grad():\n    SHOWN.append(float(model.teacher(x).mean()))"),
    habit("weights that are cloned for a comparison", HARMLESS,
          setup="start = [p.detach().clone() for p in model.parameters()]",
          between="SHOWN.append(sum(float((p - s).norm().detach()) for p, s in "
          "zip(model.parameters(), start)))"),
    habit("a clip of gradients", HARMLESS,
          after="nn.utils.clip_grad_norm_(model.parameters(), 0.5)"),
    habit("warnings once", HARMLESS, loss="warnings.warn('slow')",
          top="warnings.simplefilter('ignore')"),
    habit("a compiled pattern and a lazy import", HARMLESS,
          task="import colorsys\nx = x * re.match('a', 'a').end()"),
)  # fmt: skip


def calm(random: Random) -> Habit:
    """Draw a habit that does no harm."""
    return random.choice(_CALM)
