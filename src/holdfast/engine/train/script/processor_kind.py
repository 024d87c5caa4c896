"""Stands for the kind of this machine's processor by a number: others may compute other bits."""

from __future__ import annotations

import glob
import platform

import torch
import xxhash

_KEYS = ("model name", "CPU part")
_FLAG_KEYS = ("flags", "Features")
_VECTORS = ("avx", "amx", "fma", "sve", "bf16", "i8mm")  # instructions by which libraries choose
_GPU_FILES = ("/proc/driver/nvidia/version", "/proc/driver/nvidia/gpus/*/information")
_GPU_KEYS = ("NVRM version", "Model:")


def kind_of_processor() -> int:
    """Return 52 bits of whatever decides the bits of the same computation, as far as is known.

    That is the processor with its vector instructions, the GPUs with their driver, and the version
    of torch. The number of threads is not: it is the same on all machines unless a script sets it.
    """
    found = [platform.machine(), torch.__version__, str(torch.version.cuda)]
    found.append(torch.backends.cpu.get_cpu_capability())
    found += _lines("/proc/cpuinfo", _KEYS)
    flags = {flag for line in _lines("/proc/cpuinfo", _FLAG_KEYS) for flag in line.split()}
    found += sorted(flag for flag in flags if flag.startswith(_VECTORS))
    for pattern in _GPU_FILES:
        for path in sorted(glob.glob(pattern)):
            found += _lines(path, _GPU_KEYS)
    return xxhash.xxh3_64_intdigest("\n".join(dict.fromkeys(found)).encode()) >> 12


def _lines(path: str, keys: tuple[str, ...]) -> list[str]:
    """Return those lines of a file that begin with one of these words, each once."""
    try:
        with open(path) as file:
            return list(dict.fromkeys(line.strip() for line in file if line.startswith(keys)))
    except OSError:
        return []
