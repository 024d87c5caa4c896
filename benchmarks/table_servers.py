"""Servers of tables alone: reads, updates, and the pause of a reader whose server is lost.

Servers are processes on this machine, and this process is the only worker. Batches have
the shape of examples/recommender.py's: 26 tables, one id of each for each sample, by Zipf's law.
The limit is a copy of the rows that are read, in memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.core.job_spec import JobSpec, ServerSettings
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.runtime.node import service_process
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.train.script.service_link import ServiceLink
from holdfast.tables import RowWiseAdagrad
from holdfast.tables.row_client import RowClient
from holdfast.tables.row_optimizers import TableOptimizer
from holdfast.tables.server_access import ServerAccess
from holdfast.tables.server_rows import RowUpdate
from holdfast.tables.server_wire import TableGroup, describe_rule
from holdfast.tables.table_shape import TableShape

TABLES, DIM, KEY = 26, 16, b"k" * 32
COPY_S = 3.0  # enough for a server that starts again to copy its rows
RULE = RowWiseAdagrad(lr=0.05)
SPEC = JobSpec(job="benchmark", script="none", cwd="/")


class Server:
    """Runs one server's process."""

    def __init__(self, run_dir: str) -> None:
        read, write = os.pipe()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_PARENT": str(os.getpid()),
            "HOLDFAST_HOST": "127.0.0.1",
            "HOLDFAST_PEER_KEY": KEY.hex(),
            "HOLDFAST_TLS": "",
            "HOLDFAST_RUN_DIR": run_dir,
            service_process.ADDRESS_FD: str(write),
        }
        command = [sys.executable, "-m", service_process.MODULE]
        self.process = subprocess.Popen(command, env=environment, pass_fds=(write,))
        os.close(write)
        with os.fdopen(read) as pipe:
            self.address = pipe.readline().strip()


class Cluster:
    """Runs servers, and one client of all of them."""

    def __init__(self, run_dir: str, servers: int, replicas: int, rows: int) -> None:
        self.run_dir = run_dir
        self.servers = [Server(run_dir) for _ in range(servers)]
        name, settings = describe_rule(RULE)
        shapes = [
            TableShape(name=f"c{i}", count=rows, dim=DIM, seed=i, limits=(-0.01, 0.01))
            for i in range(TABLES)
        ]
        group = TableGroup(name="all", tables=tuple(shapes), rule=name, settings=settings)
        link = ServiceLink(
            settings=ServerSettings(count=servers, replicas=replicas),
            identity=PeerIdentity(key=KEY),
            layout=ServerLayout(count=servers, goal=servers),
            find_address=lambda number: self.servers[number].address,
            find_heir=lambda _: "",
            find_part=lambda: (0, 1),
            report=lambda *_: None,
            lose=sys.exit,
            note=print,
        )
        self.client = RowClient(group, ServerAccess(link))

    def strike(self, number: int, how: signal.Signals) -> None:
        self.servers[number].process.send_signal(how)

    def start_again(self, number: int) -> None:
        self.servers[number].process.kill()
        self.servers[number].process.wait()
        self.servers[number] = Server(self.run_dir)

    def end(self) -> None:
        for each in self.servers:
            each.process.kill()
            each.process.wait()


def batches(rows: int, batch: int, count: int) -> list[list[torch.Tensor]]:
    """Return the distinct keys of each table for some batches."""
    dice = torch.Generator().manual_seed(1)
    shares = 1 / torch.arange(1, rows + 1).double() ** 1.1
    return [
        [
            torch.multinomial(shares, batch, replacement=True, generator=dice).unique()
            for _ in range(TABLES)
        ]
        for _ in range(count)
    ]


def step(client: RowClient, version: int, keys: list[torch.Tensor]) -> float:
    """Read rows as of a version, and send the next update; return the seconds of the read."""
    began = time.perf_counter()
    rows = client.read(version, keys)
    took_s = time.perf_counter() - began
    steps, rates = [version + 1] * TABLES, [RULE.lr] * TABLES
    grads = [torch.ones_like(each) for each in rows]
    client.push(version + 1, RowUpdate(keys=keys, grads=grads, steps=steps, rates=rates))
    return took_s


def speed(run_dir: str, servers: int, rows: int, given: list[list[torch.Tensor]]) -> None:
    """Print the time of a step's read, with the update before it, next to a worker's own tables."""
    cluster = Cluster(run_dir, servers, 1, rows)
    weights = [torch.nn.Parameter(torch.zeros(rows, DIM)) for _ in range(TABLES)]
    optimizer = TableOptimizer(weights, RULE)
    ours, own, copies = [], [], []
    for version, keys in enumerate(given):
        began = time.perf_counter()
        step(cluster.client, version, keys)
        cluster.client.read(version + 1, [each[:1] for each in keys])  # the update is applied
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        found = [w.detach().index_select(0, k) for w, k in zip(weights, keys, strict=True)]
        copies.append(time.perf_counter() - began)
        for weight, k, row in zip(weights, keys, found, strict=True):
            weight.grad = torch.sparse_coo_tensor(
                k[None], torch.ones_like(row), weight.shape, is_coalesced=True
            )
        optimizer.step()
        own.append(time.perf_counter() - began)
    cluster.end()
    count = sum(map(len, given[0]))
    parts = [1e3 * statistics.median(each[2:]) for each in (ours, own, copies)]
    print(
        f"{servers} servers, {count:,} rows a step: read and update {parts[0]:.1f} ms; in the "
        f"worker {parts[1]:.1f} ms; rows copied in memory {parts[2]:.2f} ms"
    )


def losses(
    run_dir: str, rows: int, given: list[list[torch.Tensor]], how: signal.Signals, times: int
) -> None:
    """Print how long a reader waits whose server has just been lost."""
    cluster = Cluster(run_dir, 3, 2, rows)
    version, usual, found = 0, [], []

    def go_on(count: int) -> list[float]:
        nonlocal version
        took = []
        for _ in range(count):
            took.append(step(cluster.client, version, given[version % len(given)]))
            version += 1
        return took

    go_on(5)
    for i in range(times):
        usual += go_on(5)
        cluster.strike(i % 3, how)
        found += go_on(1)
        cluster.start_again(i % 3)
        until = time.monotonic() + COPY_S
        while time.monotonic() < until:  # it copies its rows in this time
            go_on(5)
    cluster.end()
    pauses = [1e3 * each for each in found]
    print(
        f"{times} x {how.name}: the next read took {statistics.median(pauses):.0f} ms "
        f"({min(pauses):.0f} to {max(pauses):.0f}), usually "
        f"{1e3 * statistics.median(usual):.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as run_dir:
        RunDir(Path(run_dir)).create(SPEC, os.urandom(32))
        given = batches(options.rows, options.batch_size, 30)
        for servers in (1, 2, 3):
            speed(run_dir, servers, options.rows, given)
        losses(run_dir, options.rows, given, signal.SIGKILL, 20)
        losses(run_dir, options.rows, given, signal.SIGSTOP, 5)


if __name__ == "__main__":
    main()
