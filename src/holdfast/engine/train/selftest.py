"""Tests torch for the doctor, in a process of its own: versions, and exact products on devices.

    python -m holdfast.engine.train.selftest PARENT_PID BUDGET_S

It prints JSON lines, and the name of each device before it tries it, so that a device that hangs is
known. The products have one exact result (core/exact_products.py), also with TF32 and on tensor
cores.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from statistics import median

import msgspec
import torch
import torch.distributed as dist

from holdfast.engine.core.exact_products import NARROW, WIDE, ExactProduct, digest_of
from holdfast.engine.host.checks_trials import ArithmeticSample, TorchLine

PR_SET_PDEATHSIG = 1
CPU_NAME = "processors (torch)"
REPEATS_MIN, REPEATS_MAX = 3, 500
TILES = 8  # copies of the narrow product each way: enough to use all of a GPU


def facts() -> dict[str, str]:
    """Collect versions of torch and its backends; `no` for a backend that torch lacks."""
    nccl = dist.is_nccl_available() if dist.is_available() else False
    gloo = dist.is_gloo_available() if dist.is_available() else False
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "no",
        "cudnn": str(cudnn or "no"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "no",
        "gloo": "yes" if gloo else "no",
    }


def operands(
    product: ExactProduct, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    left = torch.frombuffer(bytearray(product.left_entries()), dtype=torch.int8)
    right = torch.frombuffer(bytearray(product.right_entries()), dtype=torch.int8)
    shaped = left.view(product.rows, -1), right.view(product.inner, -1)
    return shaped[0].to(device, dtype), shaped[1].to(device, dtype)


def is_right(product: ExactProduct, result: torch.Tensor) -> bool:
    """Check a result on the CPU, whatever device computed it."""
    exact = result.detach().to("cpu", torch.float64)
    whole = exact.to(torch.int32)
    data = bytes(whole.contiguous().view(torch.uint8).numpy().data)
    return digest_of(data) == product.digest and bool((whole == exact).all())


def precisions(device: torch.device) -> Iterator[tuple[ExactProduct, torch.dtype, bool]]:
    """List (product, format of its entries, TF32) that this device should compute exactly."""
    yield WIDE, torch.float32, False
    yield NARROW, torch.bfloat16, False
    if device.type == "cuda":
        yield WIDE, torch.float32, True
        yield NARROW, torch.float16, False


def count_wrong(device: torch.device) -> tuple[int, int, str]:
    """Return (products computed, wrong ones, names of the wrong ones)."""
    count, wrong, where = 0, 0, ""
    previous = torch.backends.cuda.matmul.allow_tf32
    try:
        for product, dtype, tf32 in precisions(device):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            left, right = operands(product, device, dtype)
            count += 1
            if not is_right(product, left @ right):
                wrong += 1
                where = where or f"{'tf32' if tf32 else str(dtype).removeprefix('torch.')} products"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous
    return count, wrong, where


def make_tiled(device: torch.device, tiles: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (left, right, their exact product) in bfloat16, many times the narrow product.

    The left matrix is block-diagonal, so that each sum has as few terms as in the narrow product.
    """
    left, right = operands(NARROW, torch.device("cpu"), torch.bfloat16)
    wanted = (left.to(torch.float64) @ right.to(torch.float64)).to(torch.bfloat16)
    big_left = torch.block_diag(*[left] * tiles)
    return (
        big_left.to(device),
        right.repeat(tiles, tiles).to(device),
        wanted.repeat(tiles, tiles).to(device),
    )


def try_device(device: torch.device, budget_s: float) -> ArithmeticSample:
    """Compute exact products for `budget_s` seconds, and measure their speed."""
    count, wrong, where = count_wrong(device)
    if device.type == "cuda":
        left, right, wanted = make_tiled(device, TILES)
    else:
        left, right = operands(WIDE, device, torch.float32)
        wanted = left.to(torch.float64) @ right.to(torch.float64)
    operations = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    out = torch.empty(wanted.shape, dtype=left.dtype, device=device)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < REPEATS_MIN or (len(times) < REPEATS_MAX and time.perf_counter() < end):
        _finish(device)
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        _finish(device)
        times.append(time.perf_counter() - started)
        if not bool((out == wanted).all()):
            wrong += 1
            where = where or "repeated products"
    return ArithmeticSample(
        device=name_of(device),
        repeats=count + len(times),
        wrong=wrong,
        where=where,
        operations_per_s=operations / max(median(times), 1e-9),
    )


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: list[str]) -> int:
    parent, budget_s = int(argv[0]), float(argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1
    _print(TorchLine(facts=facts(), trying=CPU_NAME))
    _print(TorchLine(run=attempt(torch.device("cpu"), budget_s), trying="the CUDA driver"))
    for index in range(torch.cuda.device_count()):
        _print(TorchLine(trying=f"GPU {index}"))
        _print(TorchLine(run=attempt(torch.device("cuda", index), budget_s)))
    return 0


def attempt(device: torch.device, budget_s: float) -> ArithmeticSample:
    """Try one device; if it cannot compute, further ones are still tried."""
    try:
        return try_device(device, budget_s)
    except RuntimeError as error:
        said = str(error).strip().partition("\n")[0]
        return ArithmeticSample(device=name_of(device), repeats=0, wrong=0, failure=said)


def name_of(device: torch.device) -> str:
    return f"GPU {device.index}" if device.type == "cuda" else CPU_NAME


def _print(line: TorchLine) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
