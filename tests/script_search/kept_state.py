"""Makes habits that keep a value from one call to the next: where, how it changes, its effect.

The word `kept` is the variable's name everywhere; a message that refuses such a script names it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from script_search.habit import Habit, Truth

NAME = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A place to keep a value. `{}` in `put` stands for the new value."""

    what: str
    get: str
    put: str
    top: str = ""  # lines above the model
    setup: str = ""  # lines before the loop
    declares: str = ""  # the first line of a function that writes it
    is_mended: bool = False  # Holdfast sets it back before the next task
    hits: tuple[str, ...] = (NAME,)


_ANY = (
    Storage(
        what="a global",
        top="kept = FIRST",
        get="kept",
        put="kept = {}",
        declares="global kept",
    ),
    Storage(
        what="an attribute of an object",
        top="keeper = SimpleNamespace(kept=FIRST)",
        get="keeper.kept",
        put="keeper.kept = {}",
    ),
    Storage(
        what="an item of a dictionary",
        top="state = {'kept': FIRST}",
        get="state['kept']",
        put="state['kept'] = {}",
    ),
    Storage(what="an item of a list", top="kept = [FIRST]", get="kept[0]", put="kept[0] = {}"),
    Storage(
        what="a class attribute",
        top="class Registry:\n    kept = FIRST",
        get="Registry.kept",
        put="Registry.kept = {}",
    ),
    Storage(
        what="a closure's cell",
        top="def make_kept():\n    kept = FIRST\n    def get():\n        return kept\n"
        "    def put(value):\n        nonlocal kept\n        kept = value\n"
        "    return get, put\nget_kept, put_kept = make_kept()",
        get="get_kept()",
        put="put_kept({})",
    ),
    Storage(
        what="a default argument",
        top="def kept_one(*new, kept=[FIRST]):\n    if new:\n        kept[0] = new[0]\n"
        "    return kept[0]",
        get="kept_one()",
        put="kept_one({})",
    ),
    Storage(
        what="an attribute of a function",
        top="def scaled():\n    return scaled.kept\nscaled.kept = FIRST",
        get="scaled()",
        put="scaled.kept = {}",
    ),
    Storage(
        what="a file",
        top="kept_file = FOLDER / 'kept.txt'\n"
        "def read_kept():\n"
        "    return eval(kept_file.read_text()) if kept_file.exists() else FIRST\n"
        "def write_kept(value):\n    new = kept_file.with_suffix(f'.{os.urandom(4).hex()}')\n"
        "    new.write_text(repr(value))\n    new.replace(kept_file)",
        get="read_kept()",
        put="write_kept({})",
    ),
    Storage(
        what="a database",
        top="def kept_table():\n"
        "    found = sqlite3.connect(FOLDER / 'kept.db', timeout=30)\n"
        "    found.execute('create table if not exists kept (value text)')\n"
        "    return found\n"
        "def read_kept():\n    with contextlib.closing(kept_table()) as table:\n"
        "        rows = table.execute('select value from kept').fetchall()\n"
        "    return eval(rows[-1][0]) if rows else FIRST\n"
        "def write_kept(value):\n    with contextlib.closing(kept_table()) as table, table:\n"
        "        table.execute('insert into kept values (?)', [repr(value)])",
        get="read_kept()",
        put="write_kept({})",
    ),
    Storage(
        what="the environment",
        top="kept_name = f'KEPT_{os.urandom(4).hex()}'\nos.environ[kept_name] = repr(FIRST)",
        get="eval(os.environ[kept_name])",
        put="os.environ[kept_name] = repr({})",
    ),
    Storage(
        what="a context variable",
        top="kept = contextvars.ContextVar('kept', default=FIRST)",
        get="kept.get()",
        put="kept.set({})",
    ),
    Storage(
        what="an attribute of a parameter",
        setup="model.inner[0].weight.kept = FIRST",
        get="model.inner[0].weight.kept",
        put="model.inner[0].weight.kept = {}",
    ),
    Storage(
        what="an item of a list of the model's",
        setup="model.kept = [FIRST]",
        get="model.kept[0]",
        put="model.kept[0] = {}",
    ),
    Storage(
        what="an attribute of the model",
        setup="model.kept = FIRST",
        get="model.kept",
        put="model.kept = {}",
        is_mended=True,
    ),
    Storage(
        what="an attribute of an object that the model has",
        setup="model.keeper = SimpleNamespace(kept=FIRST)",
        get="model.keeper.kept",
        put="model.keeper.kept = {}",
    ),
    Storage(
        what="an attribute of the optimizer",
        setup="optimizer.kept = FIRST",
        get="optimizer.kept",
        put="optimizer.kept = {}",
    ),
    Storage(
        what="an item of the optimizer's group",
        setup="optimizer.param_groups[0]['kept'] = FIRST",
        get="optimizer.param_groups[0]['kept']",
        put="optimizer.param_groups[0]['kept'] = {}",
    ),
    Storage(
        what="job.values",
        setup="job.values['kept'] = FIRST",
        get="job.values['kept']",
        put="job.values['kept'] = {}",
    ),
    Storage(
        what="a bound method's object",
        top="class Meter:\n    def __init__(self):\n        self.kept = FIRST\n"
        "    def put(self, value):\n        self.kept = value\n"
        "    def get(self):\n        return self.kept\nmeter = Meter()",
        get="meter.get()",
        put="meter.put({})",
    ),
)
_NUMERIC = (
    Storage(
        what="a NumPy array",
        top="kept = np.array([float(FIRST)])",
        get="float(kept[0])",
        put="kept[0] = {}",
    ),
    Storage(
        what="a tensor",
        top="kept = torch.tensor([float(FIRST)])",
        get="kept.item()",
        put="kept.fill_({})",
    ),
    Storage(
        what="a tensor of the model's that is no buffer",
        setup="model.kept = torch.tensor([float(FIRST)])",
        get="model.kept.item()",
        put="model.kept.fill_({})",
    ),
    Storage(
        what="NumPy on a tensor's memory",
        top="kept = torch.tensor([float(FIRST)])\nview_of_kept = kept.numpy()",
        get="kept.item()",
        put="view_of_kept[0] = {}",
    ),
    Storage(
        what="a buffer of the model",
        setup="",
        get="model.kept.item()",
        put="model.kept.fill_({})",
        is_mended=True,
    ),
    Storage(
        what="a buffer that is registered again",
        setup="",
        get="model.kept.item()",
        put="model.register_buffer('kept', torch.tensor([float({})]))",
        is_mended=True,
    ),
    Storage(
        what="a queue in the memory of a library's object",
        top="kept = collections.deque([FIRST], maxlen=3)",
        get="kept[-1]",
        put="kept.append({})",
    ),
)


def storages(first: str, *, numeric: bool) -> list[Storage]:
    """List the places where a script may keep a value that is `first` at the beginning.

    `numeric`: it is a number all the time.
    """
    return [
        replace(
            each,
            top=each.top.replace("FIRST", first),
            setup=each.setup.replace("FIRST", first),
        )
        for each in (*_ANY, *(_NUMERIC if numeric else ()))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place of lines within a task, with a variable to change and a number to read."""

    what: str
    slot: str
    target: str
    seen: str  # a number that differs from batch to batch
    before: str = ""  # a function's head, and where it is registered
    setup: str = ""
    end: str = ""
    is_function: bool = True
    is_data: bool = False


PLACES = (
    Place(what="in the loop", slot="loss", target="loss", seen="loss.item()", is_function=False),
    Place(
        what="at the loop's head",
        slot="task",
        target="x",
        seen="float(x.mean())",
        is_function=False,
    ),
    Place(what="in forward", slot="forward", target="found", seen="float(x.mean())"),
    Place(what="in the dataset", slot="getitem", target="x", seen="float(x.mean())", is_data=True),
    Place(what="in collate_fn", slot="collate", target="x", seen="float(x.mean())", is_data=True),
    Place(
        what="in a forward hook",
        slot="top",
        target="output",
        seen="float(output.detach().mean())",
        before="def after_forward(module, inputs, output):",
        end="return output",
        setup="model.register_forward_hook(after_forward)",
    ),
    Place(
        what="in a forward pre-hook",
        slot="top",
        target="x",
        seen="float(x.detach().mean())",
        before="def before_forward(module, inputs):\n    (x,) = inputs",
        end="return (x,)",
        setup="model.inner.register_forward_pre_hook(before_forward)",
    ),
    Place(
        what="in a gradient's hook",
        slot="top",
        target="gradient",
        seen="float(gradient.mean())",
        before="def on_gradient(gradient):",
        end="return gradient",
        setup="model.inner[0].weight.register_hook(on_gradient)",
    ),
)


def in_tasks(random: Random) -> Habit:
    """Draw a habit of keeping something from task to task."""
    place = random.choice(PLACES)
    change = random.choice(["counts", "averages", "keeps the last", "keeps the first"])
    counts = change == "counts"
    first = {"counts": "0", "keeps the first": "None"}.get(change, "1.0")
    choices = storages(first, numeric=first != "None")
    storage = random.choice(choices)
    if random.random() < 0.2 and not place.is_function:
        storage = Storage(what="a variable", setup=f"kept = {first}", get="kept", put="kept = {}")
    value = {
        "counts": f"{storage.get} + 1",
        "averages": f"0.9 * {storage.get} + 0.1 * {place.seen}",
        "keeps the last": place.seen,
        "keeps the first": place.seen,
    }[change]
    put = storage.put.format(value)
    update = f"if {storage.get} is None:\n    {put}" if change == "keeps the first" else put
    use, effect = _use(random, storage.get, place.target, counts=counts)
    after = random.random() < 0.5 or change == "keeps the first"
    used = bool(effect)
    body = [update, *use] if after else [*use, update]
    slots = _slots(storage, place, [line for text in body for line in text.split("\n")])
    truth = Truth.TASKS if used and not _is_mended(storage, place) else Truth.HARMLESS
    state = storage.what in ("job.values", "an item of the optimizer's group")
    if not used and (state or (place.is_data and storage.get.startswith("model.kept"))):
        truth = Truth.TASKS  # this is a part of the job's state, which then depends on the workers
    what = f"{storage.what} {change} {place.what}, {effect or 'for printing only'}"
    hits = (*storage.hits, *(("derive a sample from its index",) if place.is_data else ()))
    return Habit(what=what, truth=truth, slots=slots, names=hits, family="kept in tasks")


def _is_mended(storage: Storage, place: Place) -> bool:
    """Return whether Holdfast sets it back; a batch is made before its task begins."""
    return storage.is_mended and not place.is_data


def _use(random: Random, get: str, target: str, *, counts: bool) -> tuple[list[str], str]:
    """Return lines that use the kept value, and their effect; "" if they change no result."""
    period = random.choice([2, 3, 4, 7])
    if random.random() < 0.25:
        if counts:
            return [f"if {get} % {period} == 0:\n    SHOWN.append(str({get}))"], ""
        return [f"SHOWN.append(str({get}))"], ""
    if not counts:
        return [f"{target} = {target} * (1 + 0.1 * math.tanh({get}))"], "as a factor"
    kind = random.choice(["factor", "every", "from"])
    if kind == "factor":
        factor = f"(1 + 0.1 * ({get} % {period + 1}))"
        return [f"{target} = {target} * {factor}"], "as a factor"
    if kind == "every":
        lines = f"if {get} % {period} == 0:\n    {target} = {target} * 1.5"
        return [lines], f"every {period} calls"
    start = random.choice([3, 9, 30])
    return [f"if {get} > {start}:\n    {target} = {target} * 1.5"], f"from call {start} on"


def _slots(storage: Storage, place: Place, body: list[str]) -> dict[str, tuple[str, ...]]:
    slots: dict[str, list[str]] = {"top": [], "setup": []}
    if "buffer of the model" in storage.what or "buffer that is" in storage.what:
        slots["init"] = ["self.register_buffer('kept', torch.tensor([1.0]))"]
    if storage.declares:
        if place.is_function:
            body = [storage.declares, *body]
        else:
            slots["main"] = [storage.declares]
    if "model" in storage.get + storage.put and place.slot == "forward":
        body = [line.replace("model.", "self.") for line in body]
    slots["top"] += storage.top.split("\n") if storage.top else []
    slots["setup"] += storage.setup.split("\n") if storage.setup else []
    if place.slot == "top":
        lines = [*place.before.split("\n"), *(f"    {line}" for line in (*body, place.end))]
        slots["setup"] += [*lines, place.setup]
    else:
        slots[place.slot] = body
    return {slot: tuple(lines) for slot, lines in slots.items() if lines}


BETWEEN_USES = (
    ("a rate", "optimizer.param_groups[0]['lr'] = 0.02 / (1 + {})", "after", ("['lr']",)),
    ("a factor of the loss", "loss = loss * (1 + 0.1 * math.tanh({}))", "loss", ()),
    ("a factor of gradients", "for p in model.inner.parameters():\n"
     "    p.grad.mul_(1 + 0.1 * math.tanh({}))", "after", ()),
    ("a limit", "nn.utils.clip_grad_norm_(model.parameters(), 0.05 * (1 + {} % 3))", "after", ()),
    ("nothing", "SHOWN.append(str({}))", "between", ()),
)  # fmt: skip


def between_steps(random: Random) -> Habit:
    """Draw a habit of keeping something from step to step, alike on all workers."""
    change = random.choice(["counts", "averages", "keeps the first"])
    first = {"counts": "0", "keeps the first": "None"}.get(change, "1.0")
    choices = storages(first, numeric=first != "None")
    storage = random.choice([s for s in choices if s.what not in ("a file", "a database")])
    use, line, slot, hits = random.choice(BETWEEN_USES)
    value = {
        "counts": f"{storage.get} + 1",
        "averages": f"0.9 * {storage.get} + 0.1 * step.loss",
        "keeps the first": "step.loss",
    }[change]
    put = storage.put.format(value)
    update = f"if {storage.get} is None:\n    {put}" if change == "keeps the first" else put
    lines = line.format(f"({storage.get} or 0)" if first == "None" else storage.get).split("\n")
    slots: dict[str, tuple[str, ...]] = {
        "top": tuple(storage.top.split("\n")) if storage.top else (),
        "setup": tuple(storage.setup.split("\n")) if storage.setup else (),
        slot: tuple(lines),
    }
    slots["between"] = (*slots.get("between", ()), *update.split("\n"))
    if storage.declares:
        slots["main"] = (storage.declares,)
    if "buffer" in storage.what:
        slots["init"] = ("self.register_buffer('kept', torch.tensor([1.0]))",)
    state = "model." in storage.get or "param_groups" in storage.get or "values" in storage.get
    state = state and "weight.kept" not in storage.get and "keeper" not in storage.get
    truth = Truth.HARMLESS if use == "nothing" or state else Truth.JOINS
    return Habit(
        what=f"{storage.what} {change} between steps, for {use}",
        truth=truth,
        slots={name: each for name, each in slots.items() if each},
        names=(*storage.hits, *hits),
        family="kept between steps",
    )
