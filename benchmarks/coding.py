"""Erasure coding by the method of Plank et al. (FAST 2009), next to other libraries.

They encode a buffer that is much larger than any cache with codes of k data and m parity pieces, in
packets of many sizes, then erase m data pieces and decode. Speeds count bytes of data; next to them
stand those of numpy's copy and XOR of the same data, in one thread, in turns with the codes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from holdfast.engine.state.coding.reed_solomon import ReedSolomon

CODES = ((6, 2), (14, 2), (12, 4), (10, 6))
PACKETS = tuple(1 << power for power in range(12, 23, 2))  # bytes of each piece
BEST = 1 << 20
ROUNDS = 5
DATA_BYTES = 96 << 20

Work = Callable[[], object]


def timed(works: dict[str, Work], rounds: int = ROUNDS) -> dict[str, float]:
    """Run all in turns; return the median seconds of each."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()  # touches its memory
    for _ in range(rounds):
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in found.items()}


class Pieces:
    """Random data in k pieces, with room for m pieces of parity."""

    def __init__(self, k: int, m: int) -> None:
        self.k, self.m = k, m
        self.size = DATA_BYTES // k // PACKETS[-1] * PACKETS[-1]
        self.code = ReedSolomon(k, m)
        memory = np.random.default_rng(k).integers(0, 256, (k + m, self.size), np.uint8)
        self.all = [row.data for row in memory]
        self.code.encode(self.all[:k], self.all[k:])
        self.out = [row.data for row in np.zeros((m, self.size), np.uint8)]
        self.copy = np.zeros((k, self.size), np.uint8)
        self.data = memory[:k]

    def encode(self, packet: int) -> None:
        for start in range(0, self.size, packet):
            part = slice(start, start + packet)
            data = [piece[part] for piece in self.all[: self.k]]
            self.code.encode(data, [piece[part] for piece in self.out])

    def decode(self, packet: int) -> None:
        for start in range(0, self.size, packet):
            part = slice(start, start + packet)
            there = {i: self.all[i][part] for i in range(self.m, self.k + self.m)}
            self.code.rebuild(there, {i: self.out[i][part] for i in range(self.m)})

    def memory(self) -> dict[str, Work]:
        """Time two limits of the memory: copying the data, and XORing all data pieces into one."""

        def copy() -> None:
            np.copyto(self.copy, self.data)

        def xor() -> None:
            for piece in self.data:
                np.bitwise_xor(self.copy[0], piece, out=self.copy[0])

        return {"copy": copy, "xor": xor}


def others(p: Pieces) -> Iterator[tuple[str, Work, Work]]:
    """Yield the installed other libraries: name, encoding and decoding."""
    data = [bytes(piece) for piece in p.all[: p.k]]
    numbers = list(range(p.m, p.k + p.m))
    for name in ("zfec", "zfex"):
        try:
            module = __import__(name)
        except ImportError:
            continue
        encoder, decoder = module.Encoder(p.k, p.k + p.m), module.Decoder(p.k, p.k + p.m)
        there = [*data, *encoder.encode(data, list(range(p.k, p.k + p.m)))][p.m :]
        # Its decoder wants each surviving data piece at its own place.
        order = sorted(range(p.k), key=lambda i: numbers[i] if numbers[i] < p.k else i % p.m)
        blocks = [there[i] for i in order]
        which = [numbers[i] for i in order]
        yield (
            name,
            lambda e=encoder: e.encode(data, list(range(p.k, p.k + p.m))),
            lambda d=decoder, b=blocks, w=which: d.decode(b, w),
        )
    from pyeclib.ec_iface import ECDriver

    whole = b"".join(data)
    for kind in ("isa_l_rs_cauchy", "liberasurecode_rs_vand"):
        driver = ECDriver(k=p.k, m=p.m, ec_type=kind)
        fragments = driver.encode(whole)
        kept = fragments[p.m :]
        yield (
            f"PyECLib, {kind}",
            lambda d=driver: d.encode(whole),
            lambda d=driver, f=kept: d.decode(f),
        )


HEAD = f"""\
## Erasure coding

{DATA_BYTES >> 20} MiB of data, one thread, medians of {ROUNDS}, in turns. `[k, m]`: k pieces of
data and m of parity. Decoding restores m lost pieces of data. Speeds in bytes of data; GB: 10^9
bytes. Packet: bytes of each piece in one call. The method comes from Plank et al., A Performance
Evaluation and Examination of Open-Source Erasure Coding Libraries for Storage, FAST 2009.

| code | packet | encode GB/s | of copy | of XOR | decode GB/s | of copy | of XOR |
|---|---|---|---|---|---|---|---|"""
BESIDE = f"""
Next to other libraries, which take and return whole pieces as new objects; ours in packets of
{BEST >> 10} KiB, in turns.

| code | library | encode: ours is faster by | decode: ours is faster by |
|---|---|---|---|"""


def lines() -> Iterator[str]:
    """Yield the lines of all tables."""
    yield from HEAD.splitlines()
    for k, m in CODES:
        pieces = Pieces(k, m)
        for packet in PACKETS:
            yield speeds(pieces, packet)
    yield from BESIDE.splitlines()
    for k, m in CODES:
        pieces = Pieces(k, m)
        for name, encode, decode in others(pieces):
            yield beside(pieces, name, encode, decode)


def speeds(p: Pieces, packet: int) -> str:
    """Return one row of the first table."""
    ours = {"encode": lambda: p.encode(packet), "decode": lambda: p.decode(packet)}
    found, cells = timed({**p.memory(), **ours}), ""
    for name in ours:
        cells += f" {p.k * p.size / found[name] / 1e9:.2f} |"
        cells += f" {found['copy'] / found[name]:.2f} | {found['xor'] / found[name]:.2f} |"
    return f"| [{p.k}, {p.m}] | {packet >> 10} KiB |{cells}"


def beside(p: Pieces, name: str, encode: Work, decode: Work) -> str:
    """Return one row of the second table."""
    ours = {"encode": lambda: p.encode(BEST), "decode": lambda: p.decode(BEST)}
    found = timed({**ours, "theirs": encode, "their decode": decode})
    by = found["theirs"] / found["encode"], found["their decode"] / found["decode"]
    return f"| [{p.k}, {p.m}] | {name} | {by[0]:.1f} | {by[1]:.1f} |"
