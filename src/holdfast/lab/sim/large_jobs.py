"""Draws the parameters of a simulated job on very many nodes."""

from __future__ import annotations

from random import Random

from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.lab.sim.run_options import RACK_KINDS, Options

LARGE_KINDS = (*RACK_KINDS, "worker_crash", "agent_crash", "coordinator_crash", "partition")


def draw_large(seed: int, nodes: int) -> Options:
    """Draw a job with one worker on each of many nodes; racks, nodes and coordinator fail."""
    rng = Random(f"large {seed} {nodes}")
    steps = rng.randint(6, 10)
    return Options(
        seed=seed,
        agents=nodes,
        agents_late=0,
        slots=1,
        vranks=nodes,
        loops=(steps,),
        nodes_min=nodes,
        nodes_max=nodes,
        workers_min=1,
        task_s=rng.uniform(0.5, 1.0),
        optimizer_s=0.1,
        boot_s=1.0,
        load_s=0.3,
        build_s=0.2,
        build_timeout_s=20.0,
        link_s=2.0,
        control_s=0.002,
        channel_s=0.0002,
        data_s=0.002,
        heartbeat_s=1.0,
        lease_s=4.0,
        lease_margin_s=0.8,
        suspect_s=2.0,
        abandon_s=30.0,
        late_s=0.1,
        settle_s=10.0,
        hang_s=60.0,
        loss=0.0,
        duplicate=0.0,
        drift=0.005,
        cut_in_flight=rng.choice((0.0, 0.5)),
        unheard_break=rng.choice((0.0, 0.5)),
        faults=tuple(kind for kind in LARGE_KINDS if rng.random() < 0.7) or RACK_KINDS,
        crash_inside=0.0,
        fault_every_s=2.0,
        faults_end_s=15.0,
        save_every=rng.choice((0, 2)),
        balance=BalancePolicy(warm_up=0, window=2),
    )
