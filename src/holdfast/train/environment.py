"""What the launcher tells a worker process through its environment, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.errors import UserError
from holdfast.core.step.backup import BackupPolicy
from holdfast.core.step.save_interval import PacePolicy
from holdfast.core.types import Incarnation, WorkerId

VARIABLES = (
    "HOLDFAST_FD",
    "HOLDFAST_WORKER",
    "HOLDFAST_INCARNATION",
    "HOLDFAST_VIRTUAL",
    "HOLDFAST_SEED",
    "HOLDFAST_RUN_DIR",
    "HOLDFAST_HOST",
    "HOLDFAST_PEER_KEY",
    "HOLDFAST_JOB",
    "HOLDFAST_STORE",
    "HOLDFAST_SAVE_EVERY",
    "HOLDFAST_SAVE_BETWEEN",
    "HOLDFAST_ORDERS_FD",
    "HOLDFAST_COPIES",
    "HOLDFAST_REBALANCE",
    "HOLDFAST_AUDIT",
    "HOLDFAST_AUDIT_TOLERANCE",
    "HOLDFAST_BACKUP",
    "HOLDFAST_RESULTS_MIN",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """`channel_fd` is None without a launcher."""

    channel_fd: int | None = None
    worker: WorkerId = WorkerId(0)
    incarnation: Incarnation = Incarnation(1)
    virtual_ranks: int = 1
    seed: int = 0
    run_dir: Path | None = None
    host: str = "127.0.0.1"
    store: str = ""  # where checkpoints are; empty: there are none
    save_every: int = 0  # steps; 0: as often as pays
    pace: PacePolicy = field(default_factory=PacePolicy)
    audit: float = 0.0  # share of tasks that are computed twice; the same on all workers of a job
    copies: float = 0.0  # share of tasks that may be computed again before a late one is suspended
    audit_tolerance: float = 0.0  # of a gradient's norm, where hardware is not deterministic
    fingerprint_steps: int = 0  # in which all of the state is compared; 0: it is not
    backup: BackupPolicy = field(default_factory=BackupPolicy)  # the same on all workers of a job
    rebalance: bool = True  # the same on all workers of a job
    orders_fd: int | None = None  # to the node's checkpoint writer
    job: str = ""
    peer_key: bytes = field(default=b"", repr=False)  # proves to other workers whose we are

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> WorkerEnvironment:
        def number(name: str, default: int) -> int:
            text = environ.get(name, str(default))
            try:
                return int(text)
            except ValueError:
                raise UserError(f"{name}={text!r} is not a whole number: unset it") from None

        def share(name: str) -> float:
            text = environ.get(name, "0")
            try:
                return float(text)
            except ValueError:
                raise UserError(f"{name}={text!r} is not a number: unset it") from None

        fd, orders_fd = number("HOLDFAST_FD", -1), number("HOLDFAST_ORDERS_FD", -1)
        run_dir = environ.get("HOLDFAST_RUN_DIR")
        between = environ.get("HOLDFAST_SAVE_BETWEEN", "")
        try:
            pace = PacePolicy(*map(float, between.split())) if between else PacePolicy()
        except (ValueError, TypeError):
            text = f"HOLDFAST_SAVE_BETWEEN={between!r} is not two numbers of seconds: unset it"
            raise UserError(text) from None
        try:
            peer_key = bytes.fromhex(environ.get("HOLDFAST_PEER_KEY", ""))
        except ValueError:
            raise UserError("HOLDFAST_PEER_KEY is not hexadecimal: unset it") from None
        return cls(
            channel_fd=fd if fd >= 0 else None,
            worker=WorkerId(number("HOLDFAST_WORKER", 0)),
            incarnation=Incarnation(number("HOLDFAST_INCARNATION", 1)),
            virtual_ranks=number("HOLDFAST_VIRTUAL", 1),
            seed=number("HOLDFAST_SEED", 0),
            run_dir=Path(run_dir) if run_dir else None,
            host=environ.get("HOLDFAST_HOST", "127.0.0.1"),
            store=environ.get("HOLDFAST_STORE", ""),
            save_every=number("HOLDFAST_SAVE_EVERY", 0),
            pace=pace,
            audit=share("HOLDFAST_AUDIT"),
            audit_tolerance=share("HOLDFAST_AUDIT_TOLERANCE"),
            copies=share("HOLDFAST_COPIES"),
            fingerprint_steps=number("HOLDFAST_FINGERPRINT_STEPS", 0),
            backup=BackupPolicy(
                workers=number("HOLDFAST_BACKUP", 0), results_min=number("HOLDFAST_RESULTS_MIN", 1)
            ),
            rebalance=bool(number("HOLDFAST_REBALANCE", 1)),
            orders_fd=orders_fd if orders_fd >= 0 else None,
            job=environ.get("HOLDFAST_JOB", ""),
            peer_key=peer_key,
        )


def take_channel(environment: WorkerEnvironment) -> int | None:
    """The channel's descriptor, once: children of this process must not inherit or reuse it.

    Nor the way to the checkpoint writer, nor the peer key, which `environment` holds by now.
    """
    for name in ("HOLDFAST_FD", "HOLDFAST_ORDERS_FD", "HOLDFAST_PEER_KEY"):
        os.environ.pop(name, None)
    for descriptor in (environment.channel_fd, environment.orders_fd):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    return environment.channel_fd
