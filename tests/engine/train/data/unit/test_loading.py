"""Loading: the same bits on every path, with real data workers that are killed and outlived."""

import collections
import glob
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import signal_handling

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.train.data import batch_loading as loading
from holdfast.engine.train.data import data_workers
from holdfast.engine.train.data.batch_loading import BatchSource
from holdfast.engine.train.data.batch_tasks import LoadOptions
from holdfast.engine.train.data.data_workers import protect_data_workers
from holdfast.engine.train.data.datasets import dataset_length
from holdfast.engine.train.data.sampling import SamplePlan

SRC = str(Path(loading.__file__).parents[4])
STEPS = 12


class Noisy:
    """Items that use every global generator, and a sum whose bits depend on torch's threads."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        noise = torch.rand(100_000)
        return torch.tensor([index]), noise.sum(), noise[:3], np.random.rand(), random.random()


class Plain:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.tensor([index])


class Batched(Plain):
    def __getitems__(self, indices):
        assert all(type(i) is int for i in indices)
        return [torch.tensor([i, len(indices)]) for i in indices]


class Raising(Plain):
    def __getitem__(self, index):
        if index == self.bad:
            raise LookupError(f"no picture {index}")
        return super().__getitem__(index)


class Deadly(Plain):
    """Kills every data worker that reads the bad index, but not the training process."""

    def __getitem__(self, index):
        if index == self.bad and multiprocessing.parent_process():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Gated(Plain):
    """Blocks data workers at every item until the gate opens."""

    def __init__(self, gate):
        self.gate = gate

    def __getitem__(self, index):
        if multiprocessing.parent_process():
            self.gate.wait()
        return super().__getitem__(index)


def plan(**changes):
    values = {"length": 100, "batch_size": 3, "virtual_ranks": 4, "seed": 5, **changes}
    return SamplePlan(**values)


def same(one, other):
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other is None or torch.equal(one, other)


@pytest.fixture
def source():
    """Makes sources, closes them, and checks that no part of them is left."""
    made = []

    def make(dataset, num_workers=2, plan_=None, **options):
        made.append(
            BatchSource(dataset, plan_ or plan(), LoadOptions(num_workers=num_workers, **options))
        )
        return made[-1]

    yield make
    pids = [p.pid for s in made for p in s._pipeline.processes]
    for one in made:
        one.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not glob.glob(f"/dev/shm/torch_{os.getpid()}_*")


def reference(dataset, plan_=None):
    """Return every batch of the first steps, by the plainest path."""
    one = BatchSource(dataset, plan_ or plan())
    one.follow(range(4), 0, STEPS)
    return {(s, v): one.batch(s, v) for s in range(STEPS) for v in range(4)}


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_workers_give_the_bits_of_inline_loading(source, context):
    expected = reference(Noisy())
    one = source(
        Noisy(), num_workers=2 if context == "fork" else 1, multiprocessing_context=context
    )
    one.follow(range(4), 0, STEPS)
    for task, batch in expected.items():
        assert same(one.batch(*task), batch)
    assert one.stats.ahead == len(expected)
    assert one.stats.inline == 0


def test_a_batch_has_the_plans_samples_in_order(source):
    for dataset in (Plain(), Batched()):
        one = source(dataset, num_workers=1)
        one.follow([1], 0, 3)
        for step in range(3):
            assert one.batch(step, 1)[:, 0].tolist() == plan().indices(step, 1).tolist()


def test_an_empty_share_has_no_batch(source):
    small = plan(batch_size=40, virtual_ranks=4, length=100)
    tiny = plan(batch_size=33, virtual_ranks=3, length=100)  # 99 + 1
    assert small.steps_per_epoch == 1
    for workers in (0, 1):
        one = source(Plain(), num_workers=workers, plan_=tiny)
        one.follow(range(3), 0, 2)
        for vrank in range(3):
            assert len(one.batch(0, vrank)) == 33
        assert len(one.batch(1, 0)) == 1
        assert one.batch(1, 1) is None
        assert one.batch(1, 2) is None


def test_batches_loaded_ahead_survive_a_change_of_assignment(source):
    expected = reference(Noisy())
    one = source(Noisy(), prefetch_factor=4)
    one.follow([0, 1], 0, STEPS)
    for vrank in (0, 1):
        assert same(one.batch(0, vrank), expected[0, vrank])
    pids = [p.pid for p in one._pipeline.processes]
    one.follow([0, 1, 3], 0, STEPS)  # another worker died: its vrank is ours, from this very step
    for step in range(STEPS):
        for vrank in (3,) if step == 0 else (0, 1, 3):
            assert same(one.batch(step, vrank), expected[step, vrank])
    assert one.stats.discarded == 0
    # Only tasks that were wanted before the data workers could learn of them were loaded here.
    assert one.stats.inline <= 1 + 4
    assert [p.pid for p in one._pipeline.processes] == pids


def test_batches_of_ranks_that_are_no_longer_hosted_are_discarded(source):
    expected = reference(Noisy())
    one = source(Noisy())
    one.follow([0, 1], 0, STEPS)
    one.batch(0, 0)
    one.follow([2, 3], 0, STEPS)
    for step in range(STEPS):
        for vrank in (2, 3):
            assert same(one.batch(step, vrank), expected[step, vrank])
    assert one.stats.discarded > 0
    assert one.stats.ahead > one.stats.inline  # the data workers caught up
    assert not one._ready


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_going_back_gives_the_same_batches_again(source, workers):
    expected = reference(Noisy())
    one = source(Noisy(), num_workers=workers)
    one.follow(range(4), 0, 6)
    for first in (0, 2):  # to its end; then the job falls back to a snapshot, and continues
        for step in range(first, 6):
            for vrank in range(4):
                assert same(one.batch(step, vrank), expected[step, vrank])
        one.follow(range(4), 2, 6)
    if workers:
        assert one.stats.inline <= 12  # loading ahead goes back too
    one.follow(range(4), 6, STEPS)
    for step in range(6, STEPS):
        for vrank in range(4):
            assert same(one.batch(step, vrank), expected[step, vrank])


def test_any_order_and_any_stranger_may_be_asked_for(source):
    expected = reference(Noisy())
    one = source(Noisy())
    one.follow([0, 1], 0, STEPS)
    for task in [(0, 1), (0, 3), (0, 0), (3, 1), (3, 0), (4, 2), (9, 0), (9, 1), (11, 3)]:
        assert same(one.batch(*task), expected[task])
    assert len(one._ready) + len(one._feed.held) < 20


def test_random_assignments_never_change_a_bit(source):
    expected = reference(Noisy())
    rng = random.Random(4)
    one = source(Noisy())
    step, vranks = 0, [0]
    for _ in range(40):
        if rng.random() < 0.4:
            step = max(0, step - rng.randrange(3))
            vranks = sorted(rng.sample(range(4), rng.randint(0, 4)))
            one.follow(vranks, step, rng.choice([STEPS, step + 1]))
        for vrank in vranks:
            assert same(one.batch(step, vrank), expected[step, vrank])
        step = (step + 1) % STEPS
        if step == 0:
            one.follow(vranks, 0, STEPS)


def test_the_models_generators_are_not_touched_by_data_workers(source):
    one = source(Noisy(), num_workers=1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    one.follow(range(4), 0, 3)
    for vrank in range(4):
        one.batch(0, vrank)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()


def test_inline_loading_leaves_torchs_threads_alone(source):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    one = source(Plain(), num_workers=0)
    one.follow([0], 0, 1)
    one.batch(0, 0)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)


@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_data_worker_costs_nothing_but_time(source, which):
    expected = reference(Noisy())
    one = source(Noisy())
    one.follow(range(4), 0, STEPS)
    for task, batch in expected.items():
        if task == (5, 1):
            victim = one._pipeline.processes[which]
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()  # PyTorch's own handler would have raised here by now
        assert same(one.batch(*task), batch)
    assert one.stats.restarts == 1


@pytest.mark.slow
def test_all_data_workers_may_be_killed_again_and_again(source):
    expected = reference(Plain())
    one = source(Plain())
    one.follow(range(4), 0, STEPS)
    for (step, vrank), batch in expected.items():
        if vrank == 0 and step % 2:
            for process in one._pipeline.processes:
                process.kill()
        assert same(one.batch(step, vrank), batch)
    assert one.stats.restarts > loading.RESTARTS_MAX


@pytest.mark.slow
def test_a_sample_that_kills_data_workers_ends_in_an_error(source):
    dataset = Deadly()
    dataset.bad = int(plan().indices(1, 2)[0])
    one = source(dataset)
    one.follow(range(4), 0, STEPS)
    tasks = iter([(step, vrank) for step in range(STEPS) for vrank in range(4)])
    with pytest.raises(WorldError, match=r"lost 4 times in a row.*code -9"):
        collections.deque(one.batch(*task) for task in tasks)
    assert next(tasks) <= (1, 3)  # no later than when its batch was asked for
    assert not one._pipeline.processes


class Stuck:
    """A batch that cannot be handed over; what that raises is `text`."""

    def __init__(self, batch):
        self.batch = batch

    def __reduce__(self):
        raise RuntimeError(self.text)


class NoRoom(Stuck):
    text = "unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)"


class NoPickle(Stuck):
    text = "a lambda cannot be pickled"


def test_data_workers_without_shared_memory_cost_time_and_one_sentence():
    expected, told = reference(Plain()), []
    options = LoadOptions(num_workers=2, collate_fn=NoRoom)
    one = BatchSource(Plain(), plan(), options, log=told.append)
    one.follow(range(4), 0, STEPS)
    for task, batch in expected.items():
        found = one.batch(*task)
        assert found is batch is None or same(torch.stack(found.batch), batch)
    one.close()
    (sentence,) = told
    assert "/dev/shm has " in sentence
    assert "make it larger (docker run --shm-size=8g" in sentence


def test_a_batch_that_cannot_be_pickled_is_loaded_here(source):
    one = source(Plain(), collate_fn=NoPickle)
    one.follow(range(4), 0, 1)
    with pytest.warns(RuntimeWarning, match="a lambda cannot be pickled"):
        assert isinstance(one.batch(0, 0), NoPickle)


class BusError(Plain):
    def __getitem__(self, index):
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGBUS)
        return super().__getitem__(index)


def test_a_bus_error_of_data_workers_names_the_shared_memory():
    told = []
    one = BatchSource(BusError(), plan(), LoadOptions(num_workers=1), log=told.append)
    one.follow(range(4), 0, STEPS)
    with pytest.raises(WorldError, match="code -7"):
        one.batch(0, 0)
    one.close()
    (sentence,) = told
    assert "/dev/shm has " in sentence


def test_a_small_shared_memory_is_met_for_real(tmp_path):
    """Tensors in a list are handed over by a thread, whose errors Python only prints."""
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    mount = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} {script}"
    command = ["unshare", "-m", "sh", "-c"]
    allowed = subprocess.run([*command, "mount -t tmpfs tmpfs /dev/shm"], check=False, timeout=60)
    if allowed.returncode:
        pytest.skip("no file system can be mounted here")
    done = subprocess.run(
        [*command, mount],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": SRC},
    )
    assert done.stdout == "loaded\n"
    assert "/dev/shm has 1 MiB in all: make it larger" in done.stderr
    assert "Traceback" not in done.stderr


LOADS = """
import torch
from holdfast.engine.train.data.batch_loading import BatchSource
from holdfast.engine.train.data.batch_tasks import LoadOptions
from holdfast.engine.train.data.sampling import SamplePlan

class Large:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(1 << 20)

plan = SamplePlan(length=8, batch_size=2, virtual_ranks=2, seed=1)
source = BatchSource(Large(), plan, LoadOptions(num_workers=1, collate_fn=list))
source.follow([0, 1], 0, 2)
for task in ((0, 0), (0, 1), (1, 0), (1, 1)):
    assert len(source.batch(*task)) == 2
source.close()
print("loaded")
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_that_a_dataset_raises_comes_through_as_it_is(source, workers):
    dataset = Raising()
    dataset.bad = int(plan().indices(2, 1)[1])
    one = source(dataset, num_workers=workers)
    one.follow(range(4), 0, STEPS)
    for step, vrank in [(s, v) for s in range(3) for v in range(4)]:
        if (step, vrank) == (2, 1):
            break
        one.batch(step, vrank)
    with pytest.raises(LookupError, match=f"^'no picture {dataset.bad}'$|^no picture") as caught:
        one.batch(2, 1)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "__getitem__"
    assert frames[-1].filename == __file__
    assert one.batch(2, 2) is not None  # the data workers are still in step


def test_trouble_in_data_workers_only_is_survived_and_said(source):
    class Picky(Plain):
        def __getitem__(self, index):
            if multiprocessing.parent_process():
                raise OSError("too many open files")
            return super().__getitem__(index)

    one = source(Picky(), num_workers=1, multiprocessing_context="fork")
    one.follow([0], 0, 2)
    with pytest.warns(RuntimeWarning, match="too many open files"):
        assert same(one.batch(0, 0), reference(Plain())[0, 0])


def test_a_slow_sample_is_waited_for(source, monkeypatch):
    monkeypatch.setattr(data_workers, "POLL_S", 0.01)
    gate = multiprocessing.get_context("fork").Event()
    one = source(Gated(gate), num_workers=1, multiprocessing_context="fork")
    polls = []
    receive = one._pipeline.__class__.processes.fget

    def counted(pipeline):
        polls.append(1)
        if len(polls) == 3:  # the poll ran out three times: it did wait
            gate.set()
        return receive(pipeline)

    one.follow([0], 0, 2)
    monkeypatch.setattr(one._pipeline.__class__, "processes", property(counted))
    assert same(one.batch(0, 0), reference(Plain())[0, 0])
    assert one.stats.restarts == 0
    assert len(polls) >= 3


@pytest.mark.slow
def test_close_ends_data_workers_and_follow_starts_new_ones(source):
    expected = reference(Plain())
    one = source(Plain())
    one.follow([0], 0, STEPS)
    assert same(one.batch(0, 0), expected[0, 0])
    processes = one._pipeline.processes
    one.close()
    assert not any(p.is_alive() for p in processes)
    one.close()
    one.follow([0], 1, STEPS)
    assert same(one.batch(1, 0), expected[1, 0])
    assert one.stats.inline == 0


@pytest.mark.slow
def test_nothing_is_leaked_over_many_changes_and_kills(source):
    one = source(Plain())
    one.follow([0], 0, STEPS)
    one.batch(0, 0)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        one.follow([0, 1], 0, STEPS)
        one._pipeline.processes[0].kill()
        for step in range(6):
            one.batch(step, 0)
            one.batch(step, 1)
    assert one.stats.restarts == 5
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 8  # a batch or two on their way
    assert threading.active_count() < threads + 10


PARENT = """
import sys, torch
from holdfast.engine.train.data.batch_loading import BatchSource
from holdfast.engine.train.data.batch_tasks import LoadOptions
from holdfast.engine.train.data.datasets import dataset_length
from holdfast.engine.train.data.sampling import SamplePlan
sys.path[:0] = {path!r}
from test_loading import Plain
plan = SamplePlan(length=100, batch_size=3, virtual_ranks=4, seed=5)
source = BatchSource(Plain(), plan, LoadOptions(num_workers=2, multiprocessing_context="fork"))
source.follow(range(4), 0, 9)
source.batch(0, 0), source.batch(0, 1)  # one from each: both are past their start
print(*(p.pid for p in source._pipeline.processes), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent():
    code = PARENT.format(path=sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SRC},
    ) as process:
        yield process, [int(pid) for pid in process.stdout.readline().split()]
        process.kill()


@pytest.mark.slow
def test_data_workers_ignore_ctrl_c_and_die_with_the_training_process(parent):
    process, pids = parent
    assert len(pids) == 2
    handles = [os.pidfd_open(pid) for pid in pids]
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = int(status.split("SigIgn:")[1].split()[0], 16)
        assert ignored >> (signal.SIGINT - 1) & 1
    assert not wait_readable(handles, 0)
    process.kill()
    for handle in handles:
        assert wait_readable([handle], 10)  # readable once the process has ended
        os.close(handle)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class Lengthless:
    def __getitem__(self, index):
        return index


class Itemless:
    def __len__(self):
        return 3


@pytest.mark.parametrize("kind", [Endless, Lengthless, Itemless])
def test_a_dataset_without_length_or_items_is_the_users_error(kind, source):
    with pytest.raises(UserError, match=kind.__name__):
        dataset_length(kind())
    with pytest.raises(UserError, match=kind.__name__):
        source(kind()).follow([0], 0, 1)


def test_a_dataset_of_another_length_than_the_plans_is_refused(source):
    with pytest.raises(UserError, match=r"100 samples .* 99"):
        source(Plain(), plan_=plan(length=99)).follow([0], 0, 1)


@pytest.mark.parametrize("options", [{"num_workers": -1}, {"prefetch_factor": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        LoadOptions(**options)


def test_data_workers_of_any_loader_leave_ending_signals_to_their_process(monkeypatch):
    plain = signal_handling._set_worker_signal_handlers
    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", plain)
    protect_data_workers()
    batches = iter(DataLoader(range(100), num_workers=1, persistent_workers=True, timeout=60))
    next(batches)
    (worker,) = batches._workers
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        send = f"import os; os.kill({worker.pid}, {int(number)})"
        subprocess.run([sys.executable, "-c", send], check=True)
    assert sum(1 for _ in batches) == 99
    assert worker.is_alive()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
