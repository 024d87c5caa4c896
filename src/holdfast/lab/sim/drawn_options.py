"""Draws the parameters of a simulated run from its seed, also those of a job on very many nodes.

Swarm testing: each seed switches on only some kinds of faults, because a run with every kind at
once spends its life in the same few recovery paths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any

from holdfast.engine.core.policies import BackupPolicy
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.speculation import Patience
from holdfast.lab.sim.run_options import (
    CLOCK_KIND,
    EXCHANGE_KIND,
    FAULT_KINDS,
    LATER_KINDS,
    RACK_KINDS,
    SAVE_KINDS,
    WRONG_KINDS,
    Options,
)

More = Callable[[Options, Random], Options]
LARGE_KINDS = (*RACK_KINDS, "worker_crash", "agent_crash", "coordinator_crash", "partition")


def draw(seed: int, small: bool = False) -> Options:
    """Draw the options of a seed; `small` keeps runs short, for tests that need many of them."""
    rng = Random(seed * 2 + small)
    agents = rng.randint(1, 3 if small else 4)
    slots = rng.randint(1 if agents > 1 else 2, 2 if small else 4)
    late = rng.randint(1, agents - 1) if agents > 1 and rng.random() < 0.3 else 0
    workers = (agents - late) * slots
    most = 6 if small else 16
    fewest = rng.randint(1, workers) if rng.random() < 0.15 else min(workers, most)
    steps = rng.randint(5, 10) if small else rng.randint(6, 15)
    loops = (rng.randint(1, steps - 1), steps) if rng.random() < 0.25 else (steps,)
    kinds = [kind for kind in FAULT_KINDS if rng.random() < 0.35]
    later = Random(f"later {seed} {small}")  # drawn apart: older seeds stay the same
    kinds += [kind for kind in LATER_KINDS if agents > 1 and later.random() < 0.2]
    vranks = rng.randint(fewest, max(most, fewest))
    nodes_max = agents if rng.random() < 0.7 else max(agents - 1, 1)
    # One node always remains.
    most_needed = slots if "agent_lost" in kinds else min(workers, nodes_max * slots)
    options = Options(
        seed=seed,
        agents=agents,
        agents_late=late,
        slots=slots,
        vranks=vranks,
        loops=loops,
        nodes_min=1 if "agent_lost" in kinds else rng.randint(1, min(agents - late, nodes_max)),
        nodes_max=nodes_max,
        workers_min=1 if rng.random() < 0.8 else min(rng.randint(1, most_needed), vranks),
        task_s=rng.choice((0.02, 0.1, 0.5)) * rng.uniform(0.5, 2) * workers / vranks,
        optimizer_s=rng.choice((0.0, 0.01, 0.2)),
        boot_s=rng.choice((0.1, 0.3, 2.0)) * rng.uniform(0.5, 1.0),
        load_s=rng.choice((0.01, 0.3, 1.0)),
        build_s=rng.choice((0.005, 0.1)),
        build_timeout_s=rng.uniform(3.0, 10.0),
        link_s=rng.uniform(0.5, 2.0),
        control_s=rng.choice((0.0005, 0.005, 0.05, 0.2)),
        channel_s=rng.choice((0.0002, 0.002, 0.02)),
        data_s=rng.choice((0.0002, 0.002, 0.02, 0.2)),
        heartbeat_s=0.5,
        lease_s=rng.uniform(1.2, 3.0) if small else rng.uniform(2.0, 6.0),
        lease_margin_s=0.5,
        suspect_s=rng.uniform(0.8, 1.2),
        abandon_s=rng.uniform(8.0, 15.0),
        late_s=rng.choice((0.0, 0.3)),
        settle_s=rng.uniform(3.0, 10.0),
        hang_s=rng.uniform(8.0, 20.0),
        loss=rng.uniform(0.02, 0.3) if "lossy" in kinds else 0.0,
        duplicate=rng.uniform(0.0, 0.2) if "lossy" in kinds else 0.0,
        drift=rng.choice((0.0, 0.005)),
        cut_in_flight=rng.choice((0.0, 0.5, 1.0)),
        unheard_break=rng.choice((0.0, 0.3, 1.0)),
        faults=tuple(kinds),
        crash_inside=rng.choice((0.002, 0.01)),
        fault_every_s=rng.choice((0.2, 0.5, 2.0)) * rng.uniform(0.5, 1.5),
        faults_end_s=rng.uniform(4.0, 20.0) if small else rng.uniform(8.0, 40.0),
        save_every=later.choice((0, 1, 2, 3)),
        balance=_draw_balance(Random(f"balance {seed} {small}")),
        **_draw_patience(Random(f"patience {seed} {small}")),
    )
    for name, more in _MORE.items():
        options = more(options, Random(f"{name} {seed} {small}"))
    return options


def _with_sharded_optimizer(options: Options, rng: Random) -> Options:
    """Shard the state among the workers, in some runs that protect it."""
    unfit = options.procs > 1 or options.hot_spares or options.forgetful
    if not options.redundancy.data or unfit or rng.random() < 0.6:
        return options
    return dataclasses.replace(options, shard_optimizer=True, feeds=False, speculation=0.0)


def _with_shards(options: Options, rng: Random) -> Options:
    """Give each worker several processes, in some runs; such workers are not fed."""
    if options.feeds or rng.random() < 0.7:
        return options
    lag_s = options.data_s * rng.choice((0.1, 1.0, 5.0))
    return dataclasses.replace(options, procs=rng.randint(2, 3), shard_lag_s=lag_s)


def _with_fault(kind: str, left_out: float, agents: int = 1) -> More:
    """Add a further kind of fault, in a share of the runs with this number of nodes."""

    def add(options: Options, rng: Random) -> Options:
        if options.agents < agents or not options.faults or rng.random() < left_out:
            return options
        return dataclasses.replace(options, faults=(*options.faults, kind))

    return add


def _with_nodes_left_behind(options: Options, rng: Random) -> Options:
    """Make nodes of an earlier job with the same secret wait at the address, in some runs."""
    if options.agents < 2 or rng.random() < 0.9:
        return options
    return dataclasses.replace(options, left_behind_s=rng.uniform(2.0, 8.0))


def _with_racks(options: Options, rng: Random) -> Options:
    """Label nodes with their racks and zones, in some runs."""
    if options.agents < 2 or rng.random() < 0.7:
        return options
    return dataclasses.replace(options, racks=rng.randint(1, 4))


def _with_timed_protection(options: Options, rng: Random) -> Options:
    """Protect a state once the log would take longer to apply than that takes, in some runs."""
    if not options.redundancy.data or rng.random() < 0.7:
        return options
    return dataclasses.replace(options, protect_every=0)


def _with_spread(options: Options, rng: Random) -> Options:
    """Spread the processes of each worker over several nodes, in some runs."""
    unfit = options.spares or options.backup.workers or options.feeds
    if options.agents < 2 or unfit or rng.random() < 0.75:
        return options
    spread = rng.randint(2, min(options.agents, 3))
    most = max(options.nodes_max // spread, 1)
    at_start = max((options.agents - options.agents_late) // spread, 1)
    return dataclasses.replace(
        options,
        procs=spread * rng.randint(1, 2),
        shard_lag_s=options.data_s / 10,
        spread=spread,
        nodes_min=spread * rng.randint(1, min(most, at_start)),
        nodes_max=spread * most,
        workers_min=1,
        faults=tuple(kind for kind in options.faults if kind not in ("agent_lost", "move")),
    )


def _with_servers(options: Options, rng: Random) -> Options:
    """Run servers of tables, drain nodes and change their number, in runs with several nodes."""
    if options.agents < 2 or rng.random() < 0.75:
        return options
    drains = ("drain",) if options.redundancy.data else ("drain", "leave")
    faults = (*options.faults, *(k for k in drains if options.faults and k not in options.faults))
    servers, scales = rng.randint(1, 3), rng.random() < 0.7
    faults += ("scale",) if options.faults and scales else ()
    return dataclasses.replace(options, servers=servers, faults=faults)


def _with_leaves(options: Options, rng: Random) -> Options:
    """Remove nodes with pieces of the state for good, in some runs, a few without other faults."""
    if not options.faults or not options.redundancy.data or rng.random() < 0.5:
        return options
    kinds = rng.choice(((*options.faults, "leave"), ("leave", "notice"), ("leave",)))
    return dataclasses.replace(options, faults=kinds)


def _with_lost_rows(options: Options, rng: Random) -> Options:
    """Lose all rows that servers hold, in some runs."""
    if not options.servers or not options.faults or rng.random() < 0.5:
        return options
    return dataclasses.replace(options, faults=(*options.faults, "rows_lost"))


def _with_spares(options: Options, rng: Random) -> Options:
    """Hold workers back on each node, in some runs."""
    if options.slots < 2 or options.backup.workers or rng.random() < 0.6:
        return options
    spares, hot = rng.randint(1, options.slots - 1), rng.random() < 0.5
    fewest = min(options.workers_min, options.slots - spares)
    return dataclasses.replace(options, spares=spares, hot_spares=hot, workers_min=fewest)


def _with_redundancy(options: Options, rng: Random) -> Options:
    """Keep pieces of the state in the nodes' memory, in half of the runs with several nodes."""
    nodes = min(options.agents, options.nodes_max)
    if nodes < 2 or options.backup.workers or options.forgetful or rng.random() < 0.5:
        return options
    pieces = rng.randint(2, nodes)
    data = rng.randint(1, pieces - 1)
    every = rng.randint(1, 5)
    options = dataclasses.replace(options, pieces=(data, pieces - data), protect_every=every)
    if rng.random() < 0.2:
        return options
    # So seldom, and in jobs so long, that there is something to recall.
    steps = rng.randint(12, 30)
    first = rng.randint(1, steps - 1)
    return dataclasses.replace(
        options,
        faults=(*rng.sample(options.faults, min(len(options.faults), 3)), "all_lost"),
        loops=(steps,) if len(options.loops) == 1 else (first, steps),
        data_s=min(options.data_s, 0.02),
        fault_every_s=max(options.fault_every_s, 2.0),
        fails_in=-1,
    )


def _with_notices(options: Options, rng: Random) -> Options:
    """Take machines away after a notice, in some runs."""
    if rng.random() < 0.8:
        return options
    return dataclasses.replace(options, faults=(*options.faults, "notice"))


def _with_feeds(options: Options, rng: Random) -> Options:
    """Feed workers that join while the members train, in half of the runs."""
    feeds, fails = rng.random() < 0.5, rng.choice((0.0, 0.0, 0.1))
    moves = ("move",) if rng.random() < 0.2 else ()
    faults = (*options.faults, *moves)
    return dataclasses.replace(options, feeds=feeds, feed_fails=fails, faults=faults)


def _with_forgetful_scripts(options: Options, rng: Random) -> Options:
    """Make some scripts keep state that joiners lack, unless machines may be wrong, too."""
    wrong = (*WRONG_KINDS, "poison", "sum_wrongly")
    if options.backup.workers or set(wrong) & set(options.faults) or rng.random() < 0.8:
        return options
    return dataclasses.replace(options, forgetful=True, cycle=options.cycle or rng.randint(1, 4))


def _with_rounds(options: Options, rng: Random) -> Options:
    """Make scripts open some steps right after the ones before, to train or to exchange values."""
    if rng.random() < 0.7:
        return options
    return dataclasses.replace(options, rounds=rng.randint(2, 4), tells_values=rng.random() < 0.5)


def _with_ends(options: Options, rng: Random) -> Options:
    """Make some jobs end otherwise: stopped amid faults, given up, failed; some count high."""
    stop_s, again_s = options.stop_s, 0.0
    if not stop_s and rng.random() < 0.06:
        stop_s = rng.uniform(0.5, options.faults_end_s)
    if stop_s and rng.random() < 0.3:
        again_s = stop_s + rng.uniform(0.0, 1.0)
    return dataclasses.replace(
        options,
        stop_s=stop_s,
        stop_again_s=again_s,
        losses_max=rng.randint(2, 8) if rng.random() < 0.1 else options.losses_max,
        fails_in=rng.randrange(options.steps) if rng.random() < 0.04 else -1,
        counts_from=1 << 31 if "journal_lost" not in options.faults and rng.random() < 0.1 else 0,
        wrong_stays=options.audit == 1.0 and rng.random() < 0.5,
    )


def _with_stores(options: Options, rng: Random) -> Options:
    """Writers and stores fail, gradients are not finite, late results are dropped."""
    kinds = [kind for kind in SAVE_KINDS if options.save_every and rng.random() < 0.25]
    if rng.random() < 0.2:
        kinds.append("poison")
    if options.audit == 1.0 and rng.random() < 0.5:
        kinds.append("sum_wrongly")
    stop_s = options.faults_end_s + rng.uniform(0.0, 2.0) if rng.random() < 0.1 else 0.0
    options = dataclasses.replace(options, faults=(*options.faults, *kinds), stop_s=stop_s)
    if options.audit or options.slots * options.agents < 3 or rng.random() < 0.85:
        return options
    patience = dataclasses.replace(options.patience, copies=0.0)
    backup = BackupPolicy(workers=1, results_min=rng.randint(1, 2))
    # With backup workers sums that are not finite are not computed again.
    left = tuple(kind for kind in options.faults if kind != "poison")
    return dataclasses.replace(options, backup=backup, patience=patience, faults=left)


def _with_wrong_bits(options: Options, rng: Random) -> Options:
    """Make some machines compute wrongly, or forget, in a third of the runs."""
    if rng.random() < 0.67:
        return options
    audit = rng.choice((1.0, 0.3))
    kinds = [k for k in WRONG_KINDS if rng.random() < 0.6 and (audit == 1.0 or k != "lie_once")]
    return dataclasses.replace(
        options,
        faults=(*options.faults, *kinds),
        audit=audit,
        cycle=rng.randint(1, 4),
        save_every=rng.randint(1, 4),
    )


def _with_exact_bits(options: Options, rng: Random) -> Options:
    """Make most jobs compute exactly; in some of those, several machines are wrong at once."""
    if rng.random() < 0.3:
        return options
    options = dataclasses.replace(options, exact_bits=True)
    workers = (options.agents - options.agents_late) * options.slots
    unfit = options.audit != 1.0 or options.forgetful or options.backup.workers
    if workers < 3 or unfit or rng.random() < 0.5:
        return options
    # What else befalls sound workers would leave the wrong ones with a majority.
    return dataclasses.replace(options, wrong_together=True, faults=("liar", "lie_once"))


def _with_clocks(options: Options, rng: Random) -> Options:
    """Keep few checkpoints, and set the clocks of nodes, in half of the runs that save any."""
    if not options.save_every or rng.random() < 0.5:
        return options
    faults = (*options.faults, CLOCK_KIND)
    return dataclasses.replace(options, faults=faults, keep_last=rng.randint(1, 3))


def _with_struck_exchanges(options: Options, rng: Random) -> Options:
    """Aim faults at sums and gathers, in half of the runs.

    Where several machines are wrong at once, the loss of sound ones would leave no majority.
    """
    if options.wrong_together:
        return options
    return _with_fault(EXCHANGE_KIND, 0.5)(options, rng)


def _draw_balance(rng: Random) -> BalancePolicy | None:
    """Hastier than in a real job, so that short runs see many changes."""
    if rng.random() < 0.3:
        return None
    window, gain, retry = rng.randint(1, 3), rng.choice((0, 8, 30)), rng.choice((1, 4))
    return BalancePolicy(warm_up=rng.randint(0, 1), window=window, gain=gain, retry=retry)


def _draw_patience(rng: Random) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {}
    steps, times = rng.randint(1, 3), rng.uniform(1.2, 3.0)
    share = rng.choice((0.02, 1.0))
    copies = share if rng.random() < 0.7 else 0.0
    patience = Patience(steps=steps, times=times, least_s=0.01, copies=copies)
    return {"patience": patience, "speculation": share}


# Options added later; each is drawn apart, so that older seeds give the same runs.
_MORE: dict[str, More] = {
    "wrong": _with_wrong_bits,
    "stores": _with_stores,
    "ends": _with_ends,
    "rounds": _with_rounds,
    "forgetful": _with_forgetful_scripts,
    "feeds": _with_feeds,
    "spares": _with_spares,
    "notices": _with_notices,
    "redundancy": _with_redundancy,
    "shards": _with_shards,
    "spread": _with_spread,
    "optimizer": _with_sharded_optimizer,
    "protecting": _with_timed_protection,
    # Nodes are cut off from all other nodes.
    "isolation": _with_fault("isolation", 0.7, agents=2),
    "quits": _with_fault("quit", 0.8),  # a process ends with status 0 before its script has ended
    "left behind": _with_nodes_left_behind,
    "exact": _with_exact_bits,
    "servers": _with_servers,
    "rows": _with_lost_rows,
    "machine errors": _with_fault("machine_error", 0.8),  # one worker meets them again and again
    "failing machines": lambda o, rng: dataclasses.replace(o, fails_by_machine=rng.random() < 0.5),
    "clocks": _with_clocks,
    "leaves": _with_leaves,
    "exchanges": _with_struck_exchanges,
    "repeats": lambda o, rng: dataclasses.replace(o, repeats=rng.choice((0.0, 0.02))),
    "racks": _with_racks,
}


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
