"""Training with tables on servers: a job next to torch.distributed.rpc and TorchRec, in turns.

Two workers train examples/recommender.py's model, and two other processes have its tables. The
rival has the shape of PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC
Framework" (https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html): the dense part is a
DistributedDataParallel, distributed autograd carries the gradients of rows to the servers, and a
DistributedOptimizer updates them there. One call looks up all tables of a server, so that a step
has few messages. TorchRec has no servers: its two workers hold half of each table's rows each
(benchmarks/table_torchrec.py, if torchrec and fbgemm-gpu-cpu are installed). The limit is the same
model on rows without lookups and updates, in two processes that do not communicate. Each side
counts the samples of its steps after the first ten.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from whole_batches import WholeBatches, as_is

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from recommender import FEATURES, Recommender, clicks, look_up

DIM, WARM, LR = 16, 10, 0.05
WORKERS = 2
RUN_S = 300.0
SIDE = "TABLE_RPC_SIDE"


class TableShard(nn.Module):
    """Keeps some of the tables on one of the rival's servers."""

    def __init__(self, names: list[str], rows: int) -> None:
        super().__init__()
        self.names = names
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for _ in names
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids [batch, tables]: [batch, tables, dim]."""
        starts = torch.arange(len(ids))
        found = [table(ids[:, i], starts) for i, table in enumerate(self.tables)]
        return torch.stack(found, dim=1)


class Clock:
    """Measures the seconds of each step after the first ones."""

    def __init__(self) -> None:
        self._took: list[float] = []
        self._last = time.perf_counter()

    def step(self) -> None:
        now = time.perf_counter()
        self._took.append(now - self._last)
        self._last = now

    def rate(self, batch: int) -> float:
        """Return the samples a second of all workers together."""
        return WORKERS * batch / statistics.fmean(self._took[WARM:])


def train_rival(options: argparse.Namespace) -> None:
    """Be one of the rival's processes: the first ones are workers, the other ones servers."""
    from torch.distributed import rpc
    from torch.distributed.nn import RemoteModule

    rank, world = int(os.environ["RANK"]), WORKERS + options.servers
    backend = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{os.environ['MEETING']}-rpc", num_worker_threads=8
    )
    name = f"worker{rank}" if rank < WORKERS else f"server{rank - WORKERS}"
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=backend)
    if rank < WORKERS:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{os.environ['MEETING']}-gloo",
            rank=rank,
            world_size=WORKERS,
            timeout=timedelta(seconds=60),
        )
        if rank == 0:
            shards = []
            for number in range(options.servers):
                names = FEATURES[number :: options.servers]
                args = (names, options.rows)
                shards.append(RemoteModule(f"server{number}", TableShard, args=args))
            rpc.rpc_sync("worker1", keep_shards, args=(shards,))
            keep_shards(shards)
        dist.barrier()
        train_with(SHARDS, options, rank)
        dist.destroy_process_group()
    rpc.shutdown()


def batches_of(options: argparse.Namespace, rank: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the numbers, ids and clicks of each step of one of the rivals' workers."""
    count = options.batch_size
    data = clicks((options.steps + 2) * WORKERS * count, options.rows, seed=1).tensors
    for step in range(options.steps):
        first = (step * WORKERS + rank) * count
        yield tuple(each[first : first + count] for each in data)


SHARDS: list[nn.Module] = []


def keep_shards(shards: list[nn.Module]) -> None:
    """Keep what worker 0 has made, for worker 1, which calls this by rpc."""
    SHARDS.extend(shards)


def train_with(shards: list[nn.Module], options: argparse.Namespace, rank: int) -> None:
    """Train one of the rival's workers."""
    from torch.distributed import autograd
    from torch.distributed.optim import DistributedOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(3)
    model = DistributedDataParallel(Recommender(DIM))
    adam = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    remote = [p for each in shards for p in each.remote_parameters()]
    rows = DistributedOptimizer(torch.optim.Adagrad, remote, lr=LR)
    clock = Clock()
    for dense, ids, clicked in batches_of(options, rank):
        with autograd.context() as context:
            asked = [
                shard.forward_async(ids[:, number :: len(shards)].contiguous())
                for number, shard in enumerate(shards)
            ]
            found = torch.cat([each.wait() for each in asked], dim=1)
            logits = model(dense, found)
            loss = F.binary_cross_entropy_with_logits(logits, clicked)
            autograd.backward(context, [loss])
            # As in the tutorial, the gradients of the dense part lie in the context.
            for parameter, grad in autograd.get_gradients(context).items():
                parameter.grad = grad
            adam.step()
            rows.step(context)
            adam.zero_grad()
        clock.step()
    if rank == 0:
        print(f"rate {clock.rate(options.batch_size):.1f}", flush=True)


def train_alone(options: argparse.Namespace) -> None:
    """Train the dense part alone, on the same rows in each step."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(3)
    model = Recommender(DIM)
    adam = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    rows = torch.randn(options.batch_size, len(FEATURES), DIM, requires_grad=True)
    clock = Clock()
    for dense, _, clicked in batches_of(options, rank):
        F.binary_cross_entropy_with_logits(model(dense, rows), clicked).backward()
        adam.step()
        adam.zero_grad()
        clock.step()
    if rank == 0:
        print(f"rate {clock.rate(options.batch_size):.1f}", flush=True)


def train_torchrec(options: argparse.Namespace) -> None:
    """Be a worker of TorchRec's."""
    from table_torchrec import build, features_of

    rank = int(os.environ["RANK"])
    model = build(FEATURES, options.rows, DIM, LR)
    dense_params = [p for name, p in model.named_parameters() if "tables" not in name]
    adam = torch.optim.Adam(dense_params, lr=2e-3, foreach=False)
    clock = Clock()
    for dense, ids, clicked in batches_of(options, rank):
        model(dense, features_of(FEATURES, ids), clicked).backward()
        adam.step()
        adam.zero_grad()
        clock.step()
    if rank == 0:
        print(f"rate {clock.rate(options.batch_size):.1f}", flush=True)
    dist.destroy_process_group()


def train_ours(options: argparse.Namespace) -> None:
    """Be a worker of the job."""
    import holdfast
    from holdfast import tables as servers

    job = holdfast.join(seed=3)
    configs = [
        servers.EmbeddingBagConfig(name=n, num_embeddings=options.rows, embedding_dim=DIM)
        for n in FEATURES
    ]
    tables = servers.EmbeddingBagCollection(configs, servers.Adagrad(lr=LR))
    model = Recommender(DIM)
    adam = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    job.protect(model=model, adam=adam, tables=tables)
    count = (options.steps + 2) * WORKERS * options.batch_size
    dataset = WholeBatches(*clicks(count, options.rows, seed=1).tensors)
    data = job.batches(dataset, options.batch_size, drop_last=True, collate_fn=as_is)
    clock = Clock()
    for step in job.steps(data, until=options.steps):
        for dense, ids, clicked in step:
            logits = model(dense, look_up(tables, ids))
            step.backward(F.binary_cross_entropy_with_logits(logits, clicked))
        adam.step()
        adam.zero_grad()
        clock.step()
    if job.is_leader:
        print(f"rate {clock.rate(options.batch_size):.1f}", flush=True)


def rate_of(outputs: list[str]) -> float:
    """Find the rate that one of the processes has printed."""
    lines = [line for text in outputs for line in text.splitlines() if line.startswith("rate ")]
    if len(lines) != 1:
        sys.exit(f"a run has told {len(lines)} rates:\n" + "\n".join(outputs))
    return float(lines[0].split()[1])


def measure_ours(words: list[str], servers: int, replicas: int) -> float:
    """Run one job on two workers; return its samples a second."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "holdfast.cli.main", "run", "--nproc", str(WORKERS)]
        command += ["--servers", str(servers), "--replicas", str(replicas)]
        command += ["--virtual", str(WORKERS), "--run-dir", f"{folder}/run", __file__, *words]
        environment = {**os.environ, SIDE: "ours", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
        )
        return rate_of([done.stdout] if done.returncode == 0 else [done.stderr])


def measure_rival(words: list[str], side: str, servers: int) -> float:
    """Run a rival on two workers, and processes of servers; return its samples a second."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, *words],
                env={
                    **os.environ,
                    SIDE: side,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(WORKERS + servers),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(WORKERS + servers),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "MEETING": f"{folder}/meeting",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(WORKERS + servers)
        ]
        return rate_of([each.communicate(timeout=RUN_S)[0] for each in processes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=512, help="samples of a worker's step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if side := os.environ.get(SIDE):
        trainers = {
            "ours": train_ours,
            "rpc": train_rival,
            "torchrec": train_torchrec,
            "alone": train_alone,
        }
        trainers[side](options)
        return
    words = sys.argv[1:]
    sides = {
        "Holdfast": lambda: measure_ours(words, options.servers, 1),
        "Holdfast, 2 replicas": lambda: measure_ours(words, options.servers, 2),
        "Holdfast, no servers": lambda: measure_ours(words, 0, 1),
        "torch.distributed.rpc": lambda: measure_rival(words, "rpc", options.servers),
        "The model alone": lambda: measure_rival(words, "alone", 0),
    }
    if importlib.util.find_spec("torchrec"):
        sides["TorchRec, no servers"] = lambda: measure_rival(words, "torchrec", 0)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(options.runs):
        for name, measure in sides.items():
            found[name].append(measure())
            print(f"run {run}: {name}: {found[name][-1]:,.0f} samples a second", flush=True)
    base = found["torch.distributed.rpc"]
    for name, rates in found.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(rates, base, strict=True))
        print(
            f"{name}: {statistics.median(rates):,.0f} samples a second, "
            f"{statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f}) rpc's"
        )


if __name__ == "__main__":
    main()
