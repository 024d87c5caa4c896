"""Reads a worker process's identity and job from its environment and run directory.

The variables contain the differences of this process from other ones of the job. All other settings
are in the job document of the run directory. Without a launcher there is neither, and the process
is a job of its own. The kind of this machine's processor is a number: other kinds may compute other
bits.
"""

from __future__ import annotations

import glob
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from holdfast.engine.core.errors import Damaged, UserError
from holdfast.engine.core.job_spec import JobSpec, SilentErrors, Stragglers
from holdfast.engine.core.types import Incarnation, ProcessRole, WorkerId
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.store.regular_files import DOCUMENT_BYTES_MAX, read_regular
from holdfast.engine.wire.job_document import JOB_FILE, decode_job

# The job of a script that is started without a launcher: the default settings with one worker,
# without copies and fingerprints, since there is no second worker to copy for or to compare with.
ALONE = JobSpec(
    job="",
    cwd="",
    script="",
    stragglers=Stragglers(speculation_budget=0.0),
    silent_errors=SilentErrors(fingerprint_steps=0),
)
_KEYS = ("model name", "CPU part")
_FLAG_KEYS = ("flags", "Features")
_VECTORS = ("avx", "amx", "fma", "sve", "bf16", "i8mm")  # instructions by which libraries choose
_GPU_FILES = ("/proc/driver/nvidia/version", "/proc/driver/nvidia/gpus/*/information")
_GPU_KEYS = ("NVRM version", "Model:")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """Is a worker process's identity, with the whole job document.

    `channel_fd` and `run_dir` are None without a launcher.
    """

    spec: JobSpec = ALONE
    role: ProcessRole = ProcessRole.WORKER
    channel_fd: int | None = None
    worker: WorkerId = WorkerId(0)
    incarnation: Incarnation = Incarnation(1)
    run_dir: Path | None = None
    host: str = "127.0.0.1"
    #: The connection to the node's checkpoint writer.
    orders_fd: int | None = None
    #: Files for pieces of the state, by shard.
    memory_fds: tuple[int, ...] = ()
    #: Budget for the pieces of all workers on this node.
    memory_bytes: int = 0
    #: Number of this process in its worker.
    shard: int = 0
    #: Connections to the worker's other processes from shard 0; else to shard 0.
    shard_fds: tuple[int, ...] = ()
    # proves to other workers that this process is of the job
    peer_key: bytes = field(default=b"", repr=False)
    #: Directory of this process's certificates.
    tls: Path | None = None
    #: The job computes steps of another one again.
    replays: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> WorkerEnvironment:
        """Read the variables of a process. UserError names a wrong one."""
        if "HOLDFAST_GROUP" in environ:
            raise UserError(
                "this script calls holdfast.join(), so it needs no torchrun: run it without "
                "--compat"
            )
        run_dir = environ.get("HOLDFAST_RUN_DIR")
        role = environ.get("HOLDFAST_ROLE", ProcessRole.WORKER.value)
        if role not in [each.value for each in ProcessRole]:
            raise UserError(f"HOLDFAST_ROLE={role!r} is no role of a process: unset it")
        try:
            peer_key = bytes.fromhex(environ.get("HOLDFAST_PEER_KEY", ""))
        except ValueError:
            raise UserError("HOLDFAST_PEER_KEY is not hexadecimal: unset it") from None
        return cls(
            spec=_read_job(Path(run_dir)) if run_dir else ALONE,
            role=ProcessRole(role),
            channel_fd=_descriptor(environ, "HOLDFAST_FD"),
            worker=WorkerId(_read_number(environ, "HOLDFAST_WORKER", 0)),
            incarnation=Incarnation(_read_number(environ, "HOLDFAST_INCARNATION", 1)),
            run_dir=Path(run_dir) if run_dir else None,
            host=environ.get("HOLDFAST_HOST", "127.0.0.1"),
            orders_fd=_descriptor(environ, "HOLDFAST_ORDERS_FD"),
            memory_fds=_read_numbers(environ, "HOLDFAST_MEMORY_FDS"),
            memory_bytes=_read_number(environ, "HOLDFAST_MEMORY_BYTES", 0),
            shard=_read_number(environ, "HOLDFAST_SHARD", 0),
            shard_fds=_read_numbers(environ, "HOLDFAST_SHARD_FDS"),
            peer_key=peer_key,
            replays=environ.get("HOLDFAST_REPLAY", "") == "1",
            tls=Path(tls) if (tls := environ.get("HOLDFAST_TLS")) else None,
        )

    def identity(self) -> PeerIdentity:
        """Return the identity of this process for other workers. UserError: bad certificates."""
        return PeerIdentity.of(self.peer_key, self.tls)


def _read_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text!r} is not a whole number: unset it") from None


def _read_numbers(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    text = environ.get(name, "")
    if not all(each.isascii() and each.isdecimal() for each in text.split()):
        raise UserError(f"{name}={text!r} are no whole numbers: unset it")
    return tuple(int(each) for each in text.split())


def _descriptor(environ: Mapping[str, str], name: str) -> int | None:
    found = _read_number(environ, name, -1)
    return found if found >= 0 else None


def _read_job(run_dir: Path) -> JobSpec:
    path = run_dir / JOB_FILE
    try:
        return decode_job(read_regular(path, DOCUMENT_BYTES_MAX))
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except Damaged as error:
        reason = f"is damaged, or of another release of Holdfast: {error}"
    raise UserError(f"{path} {reason}; to run without a launcher, unset HOLDFAST_RUN_DIR")


def take_channel(environment: WorkerEnvironment) -> int | None:
    """Return the channel's descriptor, once: children of this process must not inherit it.

    Nor do they inherit the descriptors of the checkpoint writer and of the memory for pieces, or
    the peer key; `environment` keeps them all.
    """
    for name in ("FD", "ORDERS_FD", "MEMORY_FDS", "SHARD_FDS", "PEER_KEY"):
        os.environ.pop(f"HOLDFAST_{name}", None)
    me = environment
    for descriptor in (me.channel_fd, me.orders_fd, *me.memory_fds, *me.shard_fds):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    return environment.channel_fd


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
