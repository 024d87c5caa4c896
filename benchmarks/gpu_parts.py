"""Runs the parts of benchmarks/gpu_evidence.py and keeps their results."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from ddp_launch import STEADY, run_ddp
from gpu_jobs import LARGE, SCRIPT, TINY, Evidence, Row, Size, timed
from step_ends import Ends, durations, read_ends, usual_ms
from struck_worker import SPARES, strike_worker
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh

ROOT = Path(__file__).resolve().parents[1]
SAVED = re.compile(r"step (\d+) is saved")


# ---------------------------------------------------------------- machine and tests

FORK = """
import os, sys, torch
import holdfast.engine.train.preload
pid = os.fork()
if pid == 0:
    torch.ones(3, device=sys.argv[1]).sum().item()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def machine(e: Evidence) -> None:
    e.add("versions", {"found": f"torch {torch.__version__}, Python {sys.version.split()[0]}"})
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), "no C compiler")
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    found = f"{compiler}, {'with' if headers else 'without'} Python's headers"
    e.add("torch.compile needs a C compiler and Python's headers", {"found": found})
    e.add("names that this torch lacks", {"lacking": ", ".join(_lacking()) or "nothing"})
    if e.device == "cuda":
        e.attempt("GPU", _about_gpu)
    for dtype in (torch.float32, torch.bfloat16):
        e.attempt(f"matrix products in {dtype}", functools.partial(_same_product, e, dtype))
    sizes = (1 << 20,) if e.tiny else (1 << 20, 8 << 20, 256 << 20)
    for size in sizes:
        e.attempt(f"copies of {size >> 20} MiB", functools.partial(_copies, e, size))
    e.attempt("CUDA after a fork of what workers import", lambda: _fork(e))


def _lacking() -> list[str]:
    """Return the names that Holdfast uses and this torch lacks."""
    wanted = {
        "torch._inductor.config.deterministic": hasattr(inductor_config, "deterministic"),
        "DeviceMesh._get_root_mesh": hasattr(DeviceMesh, "_get_root_mesh"),
    }
    return [name for name, is_there in wanted.items() if not is_there]


def _about_gpu() -> Row:
    about = torch.cuda.get_device_properties(0)
    return {
        "found": f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, "
        f"{torch.cuda.device_count()} of them",
    }


def _same_product(e: Evidence, dtype: torch.dtype) -> Row:
    """Multiply the same matrices twice, with other work in between."""
    count = 64 if e.tiny else 4096
    dice = torch.Generator().manual_seed(0)
    left, right = (torch.randn(count, count, generator=dice).to(e.device, dtype) for _ in "ab")
    first = left @ right
    torch.randn(count, count, device=e.device).square_()
    return {"ok": torch.equal(first, left @ right)}


def _copies(e: Evidence, size: int) -> Row:
    """Time copies between host and device, from pinned memory and from ordinary memory."""
    there = torch.zeros(size, dtype=torch.uint8, device=e.device)
    row: Row = {}
    for kind in ("pinned", "ordinary"):
        host = torch.ones(size, dtype=torch.uint8)
        if kind == "pinned" and e.device == "cuda":
            host = host.pin_memory()
        for way, to, from_ in (("to the host", host, there), ("to the device", there, host)):
            seconds = timed(e.device, lambda to=to, from_=from_: to.copy_(from_, non_blocking=True))
            row[f"{kind}, {way}, GB/s"] = size / seconds / 1e9
    return row


def _fork(e: Evidence) -> Row:
    done = subprocess.run([sys.executable, "-c", FORK, e.device], check=False, timeout=120)
    return {"ok": done.returncode == 0}


TESTS = ("test_gpu", "test_gpu_streams", "test_tensor_coding", "test_snapshot", "test_transports")
ON_A_GPU = "real_gpu or from_a_gpu or cuda or nccl"  # the other tests need none, or a fake one


def tests(e: Evidence) -> None:
    names = TESTS[:1] if e.tiny else TESTS
    for name in names:
        e.attempt(name, functools.partial(_pytest, e, name), least_s=60.0)


def _pytest(e: Evidence, name: str) -> Row:
    (found,) = (ROOT / "tests").rglob(f"{name}.py")
    words = ["-q", "-rs", "-m", "not clusters", "-p", "no:cacheprovider", str(found)]
    words += ["-k", ON_A_GPU]
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=e.left_s()
    )
    (e.out / f"{name}.txt").write_text(done.stdout + done.stderr)
    if "No module named pytest" in done.stderr:
        return {"ok": False, "error": "pytest is missing: carry its wheel"}
    lines = done.stdout.splitlines()
    skipped = "; ".join(line for line in lines if line.startswith("SKIPPED"))
    return {"ok": done.returncode == 0, "told": lines[-1] if lines else "", "skipped": skipped}


# ---------------------------------------------------------------- equal bits


def bits(e: Evidence, *words: str) -> None:
    """Train with 1, 2 and 4 workers, then with kills and a freeze, and compare the digests."""
    first = _whole(e, "1 worker", words)
    for workers in (2,) if e.tiny else (2, 4):
        row = functools.partial(_bits, e, workers, words, first)
        e.attempt(f"{workers} workers", row)
    workers = 3 if e.tiny else 4
    kill, freeze, lead = (e.size.steps * part // 8 for part in (2, 3, 5))
    struck = {
        "kills, and spares that join": [*_kill(workers, kill), f"worker 0 step {lead} kill"],
        "a freeze": [f"worker 1 step {freeze} freeze"],
    }
    for what, faults in struck.items():
        row = functools.partial(_bits, e, workers, words, first, faults)
        e.attempt(f"{workers} workers, {what}", row)


def _kill(workers: int, step: int) -> list[str]:
    """Return faults that kill one or two of three or more workers, which have one spare.

    Any of them may be the spare, because the workers that are ready first begin to train.
    """
    return [f"worker {worker} step {step} kill" for worker in (1, workers)]


def _whole(e: Evidence, name: str, words: Sequence[str]) -> str:
    """Train undisturbed on one worker; return the digest that other runs need, "" if it failed."""
    return str(e.attempt(name, lambda: _bits(e, 1, words, None)).get("digest", ""))


def _bits(
    e: Evidence, workers: int, words: Sequence[str], wanted: str | None, faults: Sequence[str] = ()
) -> Row:
    """Train and compare the digest with `wanted`; None: there is no digest to compare it with."""
    kills = len({line.split()[3] for line in faults if line.endswith("kill")})  # at these steps
    options = ["--spares", "1"] if kills else []  # a new process would come when all is over
    found = e.job(workers, words, options, faults)
    lost, joined = len(found.kinds("lost")), count_joined(found.ends)
    # A small job may be over before its spare is ready.
    is_struck = lost >= kills and (joined > 0 or not kills or e.tiny)
    return {
        "ok": _is_as(found.digest, wanted) and is_struck and not found.leftovers,
        "digest": found.digest[:16],
        "seconds": found.seconds,
        "ms of a step": usual_ms(found.ends, 3),
        "processes lost": lost,
        "steps of later workers": joined,
        "processes left behind": found.leftovers,
    }


def _is_as(digest: str, wanted: str | None) -> bool:
    """Return whether a digest begins as the wanted one, which is "" if that was not found."""
    return wanted is None or (bool(wanted) and digest.startswith(wanted))


def count_joined(ends: Ends) -> int:
    """Return the number of steps that ended on workers that joined later, or came back."""
    steps: dict[int, list[int]] = {}
    for step, worker, _ in ends:
        steps.setdefault(worker, []).append(step)
    first = min((step for step, _, _ in ends), default=0)
    later = 0
    for each in steps.values():
        whole = range(first, max(each) + 1)
        missed = max((step for step in whole if step not in each), default=first - 1)
        later += sum(step > missed for step in each) if missed >= first else 0
    return later


# ---------------------------------------------------------------- cost


def cost(e: Evidence) -> None:
    for workers in (1, 2) if e.tiny else (1, 2, 4):
        name = f"{workers} worker{'s' if workers > 1 else ''}"
        e.attempt(name, functools.partial(_cost, e, workers))


def _cost(e: Evidence, workers: int) -> Row:
    """Time the steps of both libraries, each in launches of its own, in turn."""
    found: dict[str, list[float]] = {"ddp": [], "holdfast": []}
    warm_up = e.size.steps // 4
    for _ in range(1 if e.tiny else 2):
        found["ddp"].append(usual_ms(_run_ddp(e, workers), warm_up))
        options = ["--virtual", str(workers), *STEADY]
        found["holdfast"].append(usual_ms(e.job(workers, options=options).ends, warm_up))
    ddp, holdfast = (statistics.median(each) for each in found.values())
    return {
        "parameters": e.size.parameters(),
        "DDP, ms of a step": ddp,
        "Holdfast, ms of a step": holdfast,
        "ratio": holdfast / ddp,
    }


def _run_ddp(e: Evidence, workers: int) -> Ends:
    with tempfile.TemporaryDirectory() as name:
        told = Path(name) / "told.txt"
        words = ["--library", "ddp", "--device", e.device, *e.size.words(), "--told", str(told)]
        run_ddp(SCRIPT, [*words, "--steps", str(e.size.steps)], workers, max(e.left_s(), 1.0))
        return read_ends(told)


# ---------------------------------------------------------------- checkpoints


def snapshot(e: Evidence) -> None:
    # Long enough for several saves, though none begins while the writer is busy.
    size, every = (dataclasses.replace(TINY, steps=150), 4) if e.tiny else (LARGE, 20)
    e.attempt("one worker", lambda: _snapshot(e, size, every))


def _snapshot(e: Evidence, size: Size, every: int) -> Row:
    """Compare the steps just after a save with later ones, when its copy is complete."""
    options = ["--store", "FOLDER/store", "--save-every", str(every), "--keep-last", "1"]
    options += ["--virtual", "1", *STEADY]
    found = e.job(1, options=options, size=size)
    took = durations(found.ends)
    saved = [SAVED.match(event["text"]) for event in found.kinds("save")]
    stalls = stalls_s(took, [int(each[1]) for each in saved if each is not None], every)
    state = size.parameters() * 4 * 3  # with AdamW's two numbers for each parameter
    copied_s = state / 1e9 / _to_host(e)
    return {
        "state, MB": state / 1e6,
        "ms of a step": usual_ms(found.ends, every),
        "stall, ms": statistics.median(stalls) * 1e3,
        "longest stall, ms": max(stalls) * 1e3,
        "a plain copy to pinned memory, ms": copied_s * 1e3,
        "saves": len(stalls),
    }


def stalls_s(took: dict[int, float], saved: Sequence[int], every: int) -> list[float]:
    """Return for each save, but the first, by how much the steps around its copy were longer.

    `saved`: the steps whose state before them was saved, `every` or more apart. The first save also
    finds the memory for the copy.
    """
    beside = every // 2
    found = []
    for start in sorted(saved)[1:]:
        steps = [took[s] for s in range(start, start + every) if s in took]
        if len(steps) == every:
            quiet = statistics.median(steps[beside:])
            found.append(sum(steps[:beside]) - beside * quiet)
    return found


def _to_host(e: Evidence) -> float:
    """Return the GB/s at which this machine copies from the device to pinned memory."""
    size = (1 if e.tiny else 256) << 20
    there = torch.zeros(size, dtype=torch.uint8, device=e.device)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=e.device == "cuda")
    return size / 1e9 / timed(e.device, lambda: host.copy_(there, non_blocking=True))


# ---------------------------------------------------------------- recovery

STEPS_AFTER = 10  # a kill


def recovery(e: Evidence) -> None:
    for kind in SPARES:
        for number in range(1 if e.tiny else 3):
            name = f"the only worker, {kind} spare, kill {number + 1}"
            e.attempt(name, functools.partial(_recovery, e, kind, 1), least_s=45.0)
    for number in range(1 if e.tiny else 3):
        name = f"one of two workers, no spare, kill {number + 1}"
        e.attempt(name, functools.partial(_recovery, e, "no", 2), least_s=45.0)


def _recovery(e: Evidence, kind: str, workers: int) -> Row:
    """Kill a worker once all train and its spare is there; time how long no step ends."""
    options = [*SPARES[kind], "--store", "FOLDER/store", "--save-every", "5", "--join-pause", "0"]
    with e.running(workers, ["--steps", "1000000"], options) as (run, told):
        # The step that was under way may still end as if the worker were well.
        found = strike_worker(run, told, kind, workers, limit_s=e.left_s(), steps=STEPS_AFTER)
    ends = [found.at, *(at for _, _, at in found.ends)]
    gaps = [now - then for then, now in itertools.pairwise(ends)]
    return {
        "longest time without a step, s": max(gaps),
        "usual step, s": statistics.median(gaps),
        "steps again": found.steps_again if workers == 1 else 0,
    }


# ---------------------------------------------------------------- coding


def coding(e: Evidence) -> None:
    for k, m in ((2, 1), (6, 2), (12, 4)):
        e.attempt(f"{k} data, {m} parity", functools.partial(_coding, e, k, m))


def _coding(e: Evidence, k: int, m: int) -> Row:
    """Encode on the device: the bytes are the host's, and how many a second."""
    from holdfast.engine.state.coding.reed_solomon import ReedSolomon
    from holdfast.engine.train.state.gpu_pieces import TensorCode

    words = (1 << 12) if e.tiny else (4 << 20)
    dice = torch.Generator().manual_seed(k)
    host = [torch.randint(-(1 << 62), 1 << 62, (words,), generator=dice) for _ in range(k)]
    there = [each.to(e.device) for each in host]
    code, fast = TensorCode(k, m), ReedSolomon(k, m)
    parity = [torch.zeros(words, dtype=torch.int64) for _ in range(m)]
    buffers = [[memoryview(t.view(torch.uint8).numpy()) for t in each] for each in (host, parity)]
    on_host_s = timed("cpu", lambda: fast.encode(*buffers), rounds=3)
    right = all(torch.equal(code.make(k + i, there).cpu(), parity[i]) for i in range(m))
    on_device_s = timed(e.device, lambda: [code.make(k + i, there) for i in range(m)])
    data = k * words * 8 / 1e9
    return {
        "ok": right,
        "data, MB": data * 1e3,
        "on the device, GB/s of data": data / on_device_s,
        "ISA-L in one thread, GB/s": data / on_host_s,
    }


# ---------------------------------------------------------------- sharded models, wrong bits


def sharded(e: Evidence) -> None:
    words = ("--sharded",)
    first = _whole(e, "1 worker", words)
    e.attempt("2 workers", lambda: _bits(e, 2, words, first))
    faults = _kill(3, e.size.steps // 3)
    e.attempt("3 workers, a kill", lambda: _bits(e, 3, words, first, faults))


KINDS = {
    "gradient": "flip gradient",
    "what was received": "flip received",
    "parameter": "flip parameter",
    "optimizer": "flip optimizer",
    "NaN": "poison nan",
    "arithmetic": "multiply wrongly",
}


def audits(e: Evidence) -> None:
    first = _whole(e, "undisturbed", ())
    kinds = list(KINDS)[:1] if e.tiny else KINDS
    for kind in kinds:
        e.attempt(f"a wrong {kind}", functools.partial(_audit, e, KINDS[kind], first))


def _audit(e: Evidence, action: str, wanted: str) -> Row:
    """Compute everything twice, and have one bit go wrong: it is found, and the bits are right."""
    step = e.size.steps // 3
    options = ["--audit", "1.0", "--fingerprint-steps", "8"]
    found = e.job(3, options=options, faults=[f"worker 1 step {step} {action}"])
    told = [event["text"] for event in found.kinds("wrong")]
    return {
        "ok": bool(told) and _is_as(found.digest, wanted),
        "named": any("worker 1" in text for text in told),
        "told": told[0] if told else "",
    }


# ---------------------------------------------------------------- all of them

COMPILED, BF16 = "--compile", "--autocast"
RUNS: dict[str, Callable[[Evidence], None]] = {
    "machine": machine,
    "tests": tests,
    "bits": bits,
    "bits_compiled": lambda e: bits(e, COMPILED),
    "bits_bf16": lambda e: bits(e, BF16),
    "bits_compiled_bf16": lambda e: bits(e, COMPILED, BF16),
    "cost": cost,
    "snapshot": snapshot,
    "recovery": recovery,
    "coding": coding,
    "sharded": sharded,
    "audits": audits,
}


def run(part: str, device: str, out: Path, limit_s: float) -> int:
    """Run one part; return 0 if all of its results are as they should be."""
    if device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU here: use --device cpu to try the script", file=sys.stderr)
        return 2
    # Workers that compile the same model later find it compiled.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(out.resolve() / "compiled"))
    evidence = Evidence(part, device, out, limit_s)
    RUNS[part](evidence)
    evidence.end()
    return int(evidence.failed)
