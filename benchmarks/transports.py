"""What messages between workers cost: `python benchmarks/transports.py [RANKS...]`.

Each case runs in real processes, with several transports in turn: gloo, ours (tcp), and ours with
TLS. Ratios are to the first one. A vote is an all-gather of 200
bytes; a bucket is exchanged as a step does it: every rank sends each other one its piece of it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import trustme

from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.train.exchange.seam import Message, Rendezvous, Waits
from holdfast.engine.train.exchange.tcp_transport import TcpListener, TcpTransport
from holdfast.lab.contracts.transports import GroupMember, MakeTransport, run_contract

VOTE_BYTES = 200
SIZES_MB = (0.5, 1, 25, 100)
MOVED_MB = 400  # in each measurement of buckets
GROUPS = 20
KINDS = ("gloo", "tcp", "tls")
FOREVER = timedelta(days=1)


class _Store(dist.Store):
    """Lets gloo find its members by a rendezvous of ours."""

    def __init__(self, rank: int, rendezvous: Rendezvous) -> None:
        super().__init__()
        self._rank, self._rendezvous = rank, rendezvous

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._rendezvous.publish(bytes(value))

    def get(self, key: str) -> bytes:
        return self._rendezvous.lookup(int(key.rpartition("/")[2]))

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class _Works:
    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self, waits: Waits | None = None) -> None:
        for work in self._works:
            work.wait(FOREVER)


class GlooTransport:
    """Implements as much of `Transport` as is measured."""

    ordered = False
    _device: object = None

    def open(self, rank: int, size: int, rendezvous: Rendezvous) -> None:
        cls = type(self)
        if cls._device is None:
            cls._device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [cls._device]
        options._timeout = timedelta(seconds=30)
        self._group = dist.ProcessGroupGloo(_Store(rank, rendezvous), rank, size, options)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> _Works:
        works = [self._group.recv([tensor], peer, tag) for peer, tensor in receives]
        return _Works(works + [self._group.send([tensor], peer, tag) for peer, tensor in sends])

    def lost_ranks(self) -> Sequence[int]:
        return ()

    def abort(self) -> None:
        return

    def close(self) -> None:
        return


def gloo(rank: int) -> MakeTransport:
    return GlooTransport


def tls(folder: Path, rank: int) -> MakeTransport:
    listener = TcpListener("127.0.0.1", PeerIdentity.of(b"k" * 32, folder))
    return lambda: TcpTransport(listener)


def make_certificates(folder: Path) -> None:
    """Make what `--tls` expects in a folder."""
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    leaf.private_key_pem.write_to_path(folder / "tls.key")
    authority.cert_pem.write_to_path(folder / "ca.crt")


def tcp(rank: int) -> MakeTransport:
    listener = TcpListener("127.0.0.1", PeerIdentity(key=b"k" * 32))
    return lambda: TcpTransport(listener)


@dataclass(frozen=True, slots=True)
class Case:
    """Is one measurement. Rank 0 writes wall and CPU time, in ms, to the file `out`."""

    name: str
    piece_bytes: int  # sent by each rank to each other one; 0: the opening of a group
    rounds: int
    out: Path

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, member: GroupMember) -> None:
        found = self._exchange(member) if self.piece_bytes else self._open(member)
        member.addresses[f"found/{member.rank}"] = found
        member.meet("found")
        if member.rank == 0:
            all_found = [member.addresses[f"found/{r}"] for r in range(member.size)]
            self.out.write_text(
                json.dumps([statistics.mean(v) for v in zip(*all_found, strict=True)])
            )
        member.meet("written")

    def _open(self, member: GroupMember) -> tuple[float, float]:
        took_ms, spent = [], Spent()
        for i in range(self.rounds):
            member.meet(f"open{i}")
            began = time.perf_counter()
            transport = member.open(f"group{i}")
            took_ms.append((time.perf_counter() - began) * 1e3)
            member.meet(f"opened{i}")
            transport.close()
        return statistics.median(took_ms), spent.cpu_ms() / self.rounds

    def _exchange(self, member: GroupMember) -> tuple[float, float]:
        transport = member.open("group")
        sends = [(p, torch.ones(self.piece_bytes, dtype=torch.uint8)) for p in member.peers()]
        receives = [(p, torch.zeros(self.piece_bytes, dtype=torch.uint8)) for p in member.peers()]
        for i in range(self.rounds // 5 + 3):
            transport.exchange(sends, receives, i).wait()
        member.meet("begin")
        spent, began = Spent(), time.perf_counter()
        for i in range(self.rounds):
            transport.exchange(sends, receives, i).wait()
        found = (time.perf_counter() - began) * 1e3 / self.rounds, spent.cpu_ms() / self.rounds
        member.meet("end")
        transport.close()
        return found


class Spent:
    """Reads the CPU time of this process, all its threads, from its creation on."""

    def __init__(self) -> None:
        self._began_ms = self._now_ms()

    def cpu_ms(self) -> float:
        return self._now_ms() - self._began_ms

    def _now_ms(self) -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return (used.ru_utime + used.ru_stime) * 1e3


def measure(
    case: Case, size: int, repeats: int, kinds: Mapping[str, Callable[[int], MakeTransport]]
) -> str:
    """Measure the transports in turn; returns the row of the table."""
    found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, make_of in kinds.items():
            complaints = run_contract(case, make_of, size)
            if complaints:
                raise RuntimeError("\n".join(complaints))
            found[kind].append(json.loads(case.out.read_text()))
    medians = [[statistics.median(v) for v in zip(*found[kind], strict=True)] for kind in found]
    cells = [case.name, str(size)]
    for first, *others in zip(*medians, strict=True):
        cells.append(f"{first:.3f}")
        cells += [f"{each:.3f} (**{each / first:.2f}**)" for each in others]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes-mb", nargs="*", type=float, default=SIZES_MB)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    kinds = list(options.kinds)
    heads = ["case", "ranks", *(f"{k}, ms" for k in kinds), *(f"{k}, CPU ms" for k in kinds)]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder))
        known = {"gloo": gloo, "tcp": tcp, "tls": partial(tls, Path(folder))}
        measured = {kind: known[kind] for kind in kinds}
        out = Path(folder) / "found"
        for size in options.ranks:
            cases = [Case("a group opens", 0, GROUPS, out), Case("a vote", VOTE_BYTES, 1000, out)]
            for megabytes in options.sizes_mb:
                piece, rounds = int(megabytes * 1e6 / size), int(MOVED_MB / megabytes / size)
                cases.append(Case(f"a bucket of {megabytes:g} MB", piece, max(rounds, 3), out))
            for case in cases:
                print(measure(case, size, options.repeats, measured), flush=True)


if __name__ == "__main__":
    main()
