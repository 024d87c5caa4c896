"""Defines the ways to plant bugs: a registry of mutations, and swarms aimed at rare situations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.engine.core.policies import BackupPolicy
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.speculation import Patience
from holdfast.lab.sim.swarm import run_seed
from holdfast.lab.sim.world import Machines

EVENTS_MAX = 600_000  # a planted bug must be caught within this many simulated events
GOES_ON = {  # each job runs to its end, so that mistakes which show late are seen
    "losses_max": 10_000,
    "fails_in": -1,
    "stop_s": 0.0,
    "stop_again_s": 0.0,
    "counts_from": 0,
    "wrong_stays": False,
    "exact_bits": False,
    "wrong_together": False,
    "backup": BackupPolicy(),
    "rounds": 1,
    "tells_values": False,
    "forgetful": False,
    "feeds": False,
    "spares": 0,
    "pieces": (0, 0),
    "procs": 1,
    "spread": 1,
    "servers": 0,
    "racks": 0,
}
SHARDS = {
    "agents": 2,
    "slots": 2,
    "agents_late": 0,
    "vranks": 4,
    "nodes_min": 2,
    "nodes_max": 2,
    "workers_min": 1,
    "procs": 3,
    "spread": 1,
    "shard_lag_s": 0.2,
    "faults": ("worker_crash", "link_break", "slow"),
}
# Mistakes that only show in a rare situation: their swarms are aimed at it.
PARTITIONS = {
    "agents": 2,
    "slots": 1,
    "agents_late": 0,
    "vranks": 2,
    "loops": (40,),
    "nodes_min": 2,
    "nodes_max": 3,
    "workers_min": 1,
    "task_s": 0.3,
    "faults": ("partition",),
    "faults_end_s": 20.0,
    "fault_every_s": 1.0,
    "unheard_break": 1.0,
    "optimizer_s": 0.01,
}
JOINS = {
    "agents": 3,
    "slots": 1,
    "agents_late": 1,
    "vranks": 3,
    "loops": (40,),
    "nodes_min": 2,
    "nodes_max": 3,
    "workers_min": 1,
    "task_s": 0.1,
    "load_s": 1.0,
    "faults_end_s": 15.0,
    "boot_s": 0.1,
    "fault_every_s": 0.7,
    "faults": ("worker_crash",),
}
SLOW = {
    "agents": 2,
    "slots": 2,
    "agents_late": 0,
    "vranks": 12,
    "loops": (40,),
    "nodes_min": 2,
    "nodes_max": 2,
    "workers_min": 1,
    "task_s": 0.02,
    "boot_s": 0.1,
    "optimizer_s": 0.0,
    "faults": ("worker_crash", "slow"),
    "faults_end_s": 15.0,
    "fault_every_s": 0.5,
    "balance": BalancePolicy(warm_up=0, window=1, gain=0, retry=1),
}
_THIRTY_STEPS = {  # jobs of a few workers on three nodes
    "agents": 3,
    "agents_late": 0,
    "vranks": 6,
    "loops": (30,),
    "nodes_min": 1,
    "nodes_max": 3,
    "workers_min": 1,
    "task_s": 0.05,
    "optimizer_s": 0.01,
    "data_s": 0.002,
    "control_s": 0.005,
    "faults_end_s": 20.0,
}
QUIET = {  # quiet for long, after some workers were lost
    **_THIRTY_STEPS,
    "slots": 2,
    "loops": (300,),
    "boot_s": 0.1,
    "load_s": 0.01,
    "settle_s": 1.0,
    "build_s": 0.005,
    "build_timeout_s": 3.0,
    "save_every": 0,
    "faults": ("worker_crash",),
    "fault_every_s": 0.5,
    "faults_end_s": 4.0,
}
COMBINED: dict[str, dict[str, object]] = {  # faults at the same time, in jobs of thirty steps
    name: {**_THIRTY_STEPS, "slots": 1, "boot_s": 0.2, "fault_every_s": 1.0, **faults}
    for name, faults in {
        "partitions and frozen nodes": {"faults": ("partition", "node_freeze")},
        "partitions and coordinators": {"faults": ("partition", "coordinator_crash")},
        "agents on lossy links": {
            "faults": ("agent_crash", "lossy"),
            "loss": 0.15,
            "duplicate": 0.1,
        },
        "full disks and lost workers": {
            "faults": ("no_room", "worker_crash", "link_break", "drain"),
            "save_every": 1000,
        },
    }.items()
}
LATE = {
    **_THIRTY_STEPS,
    "slots": 1,
    "boot_s": 0.2,
    "faults": ("busy", "slow", "worker_crash", "link_break"),
    "fault_every_s": 0.7,
    "speculation": 1.0,
    "patience": Patience(steps=2, times=1.5, least_s=0.01),
}
WRONG = {
    **_THIRTY_STEPS,
    "slots": 2,
    "boot_s": 0.1,
    "faults": ("flip", "liar", "worker_crash"),
    "fault_every_s": 1.0,
    "audit": 0.3,
    "cycle": 3,
    "save_every": 3,
}
FORGETFUL = {  # workers are lost, and joiners lack the script's own state
    **_THIRTY_STEPS,
    "slots": 1,
    "boot_s": 0.1,
    "faults": ("worker_crash", "link_break"),
    "fault_every_s": 1.0,
    "cycle": 3,
    "forgetful": True,
}
FED = {  # workers are lost, and new ones fed in their place
    **_THIRTY_STEPS,
    "slots": 1,
    "boot_s": 0.1,
    "faults": ("worker_crash",),
    "fault_every_s": 1.0,
    "cycle": 2,
    "feeds": True,
    "feed_fails": 0.0,
}
WRONG_TOGETHER = WRONG | {  # two of five machines, each in its own way
    "agents": 5,
    "slots": 1,
    "vranks": 5,
    "nodes_min": 5,
    "nodes_max": 5,
    "loops": (40,),
    "audit": 1.0,
    "exact_bits": True,
    "wrong_together": True,
    "faults": ("liar", "lie_once"),
    "fault_every_s": 0.3,
}
FED_WRONG = FED | {  # one member may hold a wrong state
    "faults": ("flip", "worker_crash"),
    "fault_every_s": 0.7,
    "loops": (60,),
    "cycle": 8,
    "save_every": 3,
}
MEMORY = {  # all workers are lost at once, with the most nodes possible, or more
    **_THIRTY_STEPS,
    "slots": 1,
    "boot_s": 0.1,
    "load_s": 0.01,
    "settle_s": 1.0,
    "faults": ("all_lost", "worker_crash"),
    "fault_every_s": 2.0,
    "faults_end_s": 30.0,
    "pieces": (2, 1),
    "protect_every": 5,
    "save_every": 0,
    "feed_fails": 0.0,
}
SPREAD = MEMORY | {  # one worker on three nodes; a fourth one waits
    "agents": 4,
    "vranks": 4,
    "nodes_min": 3,
    "nodes_max": 3,
    "procs": 3,
    "spread": 3,
    "shard_lag_s": 0.001,
    "pieces": (1, 1),
    "abandon_s": 8.0,
    "faults": ("agent_crash", "worker_crash"),
}
SERVERS = {  # nodes are drained and come back, and journals are lost
    **_THIRTY_STEPS,
    "slots": 1,
    "loops": (80,),
    "boot_s": 0.1,
    "settle_s": 1.0,
    "faults": ("drain", "leave", "coordinator_crash", "journal_lost"),
    "fault_every_s": 1.0,
    "servers": 3,
}
EXCHANGES = {  # members die, freeze and are cut off within sums and gathers
    **_THIRTY_STEPS,
    "slots": 2,
    "boot_s": 0.1,
    "data_s": 0.02,
    "crash_inside": 0.01,
    "repeats": 0.05,
    "faults": ("exchange_inside", "link_break"),
    "fault_every_s": 1.0,
}
SCALES = SERVERS | {  # other numbers of servers are asked for, and workers die
    "faults": ("scale", "worker_crash", "partition"),
    "fault_every_s": 0.7,
}
LOST_ROWS = MEMORY | {  # servers lose the rows of all states that there are
    "servers": 2,
    "save_every": 3,
    "boot_s": 2.0,
    "faults": ("rows_lost", "all_lost"),
    "faults_end_s": 10.0,
}
SPARES = {"slots": 3, "spares": 1, "hot_spares": True, "vranks": 12, "workers_min": 1}
FLIPS = {  # most bits flip while an update runs, so that the next checkpoint is wrong
    "slots": 1,
    "loops": (20,),
    "faults": ("flip",),
    "fault_every_s": 2.0,
    "faults_end_s": 30.0,
    "audit": 1.0,
    "save_every": 1,
    "load_s": 0.01,
    "task_s": 0.15,
    "optimizer_s": 1.0,
}
TAKEN_AWAY = {"faults": ("flip", "notice"), "fault_every_s": 0.4, "agents": 2}
LOST = {  # a worker is lost with its only node
    "agents": 1,
    "slots": 2,
    "agents_late": 0,
    "vranks": 4,
    "nodes_min": 1,
    "nodes_max": 1,
    "workers_min": 1,
}
SAVES = LOST | {"save_every": 2, "faults": ("worker_crash", "rot")}
SUMS = {
    **_THIRTY_STEPS,
    "slots": 1,
    "boot_s": 0.1,
    "fault_every_s": 0.3,
    "data_s": 0.02,
    "cut_in_flight": 1.0,
    "backup": BackupPolicy(),
}
STOPS = LOST | {
    "slots": 1,
    "vranks": 2,
    "loops": (30,),
    "control_s": 0.2,
    "boot_s": 0.1,
    "save_every": 0,
    "faults": ("worker_crash",),
    "fault_every_s": 0.4,
    "faults_end_s": 12.0,
    "stop_s": 3.0,
}
LAST_SAVES = STOPS | {"loops": (400,), "save_every": 100, "faults": (), "faults_end_s": 4.0}
BACKUP = {
    **_THIRTY_STEPS,
    "slots": 2,
    "boot_s": 0.1,
    "faults": ("slow", "busy", "worker_crash"),
    "fault_every_s": 0.7,
    "backup": BackupPolicy(workers=1, results_min=2),
}
COPIES = LATE | {
    "backup": BackupPolicy(),
    "patience": Patience(steps=1, times=1.2, least_s=0.01, copies=1.0),
}
LEFT_BEHIND = {"agents": 2, "agents_late": 0, "nodes_min": 1, "nodes_max": 6, "left_behind_s": 4.0}
LATE_COMERS = {"agents": 3, "agents_late": 2, "nodes_min": 1}
TUNED: dict[str, dict[str, object]] = {
    "a_level_of_a_sum_is_skipped": EXCHANGES,
    "a_level_on_the_way_down_is_skipped": EXCHANGES,
    "an_owner_forgets_its_piece": EXCHANGES,
    "the_operands_of_an_addition_are_exchanged": EXCHANGES,
    "a_piece_of_an_older_view_is_taken": EXCHANGES,
    "a_piece_of_an_older_step_is_taken": EXCHANGES,
    "a_gather_ends_one_turn_early": EXCHANGES,
    "a_member_gets_records_from_the_wrong_side": EXCHANGES,
    "missing_votes_are_taken_for_granted": EXCHANGES,
    "whoever_is_at_the_address_is_obeyed": LEFT_BEHIND,
    "a_node_of_another_job_keeps_its_workers": LEFT_BEHIND,
    "the_word_that_the_job_is_over_is_not_believed": {
        "agents": 3,
        "agents_late": 2,
        "nodes_min": 1,
    },
    "servers_of_drained_nodes_move_at_once": SERVERS,
    "any_heir_takes_over": SERVERS,
    "a_node_leaves_before_its_servers_have_moved": SERVERS,
    "servers_are_placed_anew_after_the_journal_was_lost": SERVERS,
    "former_servers_are_let_go_at_once": SCALES,
    "a_layout_is_left_before_everybody_knows_it": SCALES,
    "rows_of_an_earlier_layout_count": SCALES | {"faults": ("scale", "drain")},
    "the_first_layout_is_back_after_the_journal_was_lost": SCALES
    | {"faults": ("scale", "coordinator_crash", "journal_lost")},
    "states_whose_rows_are_lost_are_recalled": LOST_ROWS,
    "rows_that_are_lost_once_are_lost_for_ever": LOST_ROWS,
    "nobody_is_asked_to_join": QUIET,
    "views_follow_each_other_for_no_reason": QUIET,
    "nobody_fences_without_a_lease": PARTITIONS,
    "nobody_waits_for_a_silent_holder_of_the_state": PARTITIONS
    | {"faults": ("partition", "worker_crash"), "settle_s": 0.2, "abandon_s": 15.0},
    "a_node_acts_beyond_the_end_that_it_has_announced": PARTITIONS
    | {"faults": ("partition", "notice"), "fault_every_s": 0.5, "agents": 2, "nodes_max": 2},
    "what_was_not_reported_does_not_run": STOPS,
    "a_stop_waits_although_its_checkpoint_is_durable": LAST_SAVES,
    "nobody_makes_the_last_checkpoint_of_a_stop": LAST_SAVES,
    "lease_runs_from_when_the_answer_came": PARTITIONS,
    "proof_is_dated_by_the_vote": PARTITIONS,
    "witness_is_ignored": PARTITIONS,
    "what_the_members_agreed_on_since_is_forgotten": SLOW,
    "who_is_behind_is_believed_about_assignments": SLOW | {"data_s": 0.02, "cut_in_flight": 1.0},
    "members_hear_different_times": SLOW,
    "what_is_missed_is_counted_from_the_next_step": LATE,
    "what_died_with_a_member_is_taken_for_kept": LATE
    | {
        "agents": 4,
        "nodes_max": 4,
        "vranks": 8,
        "loops": (80,),
        "faults": ("busy", "worker_crash"),
        "fault_every_s": 1.0,
        "faults_end_s": 40.0,
        "control_s": 0.2,
        "patience": Patience(steps=2, times=0.5, least_s=0.01),
    },
    "nobody_knows_who_is_behind": LATE,
    "who_catches_up_holds_the_state_already": LATE,
    "the_late_one_goes_on_in_the_old_view": LATE,
    "who_stays_away_is_forgotten": LATE | {"loops": (250,), "faults": ("stuck",), "task_s": 0.01},
    "whoever_ends_with_status_0_has_come_to_its_end": JOINS | {"faults": ("quit",)},
    "a_full_disk_is_the_scripts_fault": JOINS | {"faults": ("machine_error",)},
    "one_full_disk_ends_the_job": JOINS | {"faults": ("machine_error",)},
    "audits_prove_nothing": WRONG,
    "the_owner_is_always_right": WRONG,
    "each_member_plans_comparisons_of_its_own": {"exact_bits": True},
    "two_workers_that_contradict_themselves_are_the_scripts_doing": WRONG_TOGETHER,
    "two_machines_that_are_steadily_wrong_are_the_scripts_doing": WRONG_TOGETHER,
    "a_refused_joiner_is_the_scripts_doing_the_second_time": WRONG_TOGETHER | {"wrong_stays": True},
    "a_joiner_vouches_for_all": WRONG,
    "wrong_sums_are_kept": WRONG,
    "joiners_are_believed": FORGETFUL,
    "spares_are_given_tasks_to_balance": SPARES,
    "who_is_lost_gives_its_place_up": SPARES | {"faults": ("worker_crash",)},
    "who_is_last_hosts_tasks_in_mid_step": SPARES
    | {"agents": 2, "agents_late": 0, "nodes_min": 1, "nodes_max": 2}
    | {"faults": ("worker_crash",)},
    "everyone_may_be_a_member": SPARES,
    "hot_spares_are_not_brought_up_to_date": SPARES
    | {"faults": ("worker_crash",), "loops": (400,), "faults_end_s": 2.0},
    "the_first_step_is_not_fed": FED | {"loops": (400,), "faults_end_s": 8.0},
    "a_follower_that_is_too_slow_is_fed_on": FED | {"data_s": 0.1, "feed_fails": 0.5},
    "members_copy_at_different_boundaries": FED,
    "who_is_fed_joins_before_it_has_every_step": FED | {"data_s": 0.1},
    "who_is_fed_is_not_waited_for_until_all_was_compared": FED_WRONG,
    "copies_count_as_compared_although_they_differ": FED_WRONG
    | {"agents": 4, "nodes_max": 4, "vranks": 8, "task_s": 0.02, "load_s": 0.01, "save_every": 0}
    | {"loops": (120,), "cycle": 60, "faults": ("flip", "flip", "worker_crash")}
    | {"fault_every_s": 0.8},
    "who_was_fed_is_proved_before_its_first_task": FED | {"forgetful": True},
    "a_view_without_tasks_for_who_was_fed_proves_it": FED
    | {"forgetful": True, "faults": ("worker_crash", "link_break")},
    "who_has_yet_to_take_the_last_step_counts_as_a_survivor": FED,
    "all_wait_while_who_is_fed_receives_the_state_again": FED
    | {"loops": (400,), "faults_end_s": 8.0},
    "who_was_unproven_is_proved_by_a_new_view": FORGETFUL
    | {"fault_every_s": 0.4, "task_s": 0.2, "data_s": 0.05},
    "nothing_is_recalled": MEMORY,
    "gradients_are_not_recalled": MEMORY,
    "a_part_with_too_few_pieces_counts": MEMORY | {"abandon_s": 1000.0},
    "what_nobody_has_committed_is_recalled": MEMORY | {"faults": ("all_lost", "poison")},
    "it_votes_before_its_pieces_are_in_memory": MEMORY,
    "both_pieces_are_kept_on_one_node": MEMORY,
    "a_state_counts_before_all_have_put_it_there": MEMORY | {"feed_fails": 0.3},
    "what_is_older_goes_at_once": MEMORY | {"load_s": 1.0},
    "commits_are_not_marked": MEMORY,
    "older_pieces_go_before_the_commit_is_marked": MEMORY
    | {
        "faults": ("all_lost", "worker_crash_inside"),
        "crash_inside": 0.03,
        "pieces": (1, 1),
        "protect_every": 1,
    },
    "a_discarded_state_is_begun_from": WRONG
    | {"control_s": 0.2, "channel_s": 0.02, "cut_in_flight": 1.0},
    "the_checkpoint_with_the_latest_time_is_the_newest": SAVES
    | {"faults": ("clock_set",), "keep_last": 1},
    "the_checkpoint_of_the_highest_step_is_the_newest": SAVES
    | {"faults": ("worker_crash", "rot"), "keep_last": 2, "loops": (30,)},
    "a_committed_step_counts_as_saved": SAVES,
    "an_unreadable_checkpoint_is_tried_again": SAVES,
    "commits_although_a_member_was_lost_before_its_vote": SUMS
    | {"faults": ("poison", "worker_crash"), "data_s": 0.2, "fault_every_s": 0.2},
    "a_checkpoint_counts_although_a_share_is_lost": SAVES
    | {"faults": ("worker_crash", "writer_crash"), "fault_every_s": 0.5},
    "a_checkpoint_counts_before_its_state_was_compared": WRONG | FLIPS,
    "a_checkpoint_counts_although_who_saved_it_left_uncompared": WRONG
    | FLIPS
    | {"faults": ("flip", "worker_crash"), "fault_every_s": 0.8},
    "a_last_checkpoint_is_not_checked": WRONG | FLIPS | TAKEN_AWAY,
    "a_step_does_not_wait_for_enough": BACKUP,
    "two_members_read_the_settlement_differently": BACKUP,
    "who_is_dropped_adds_its_tasks": BACKUP,
    "blocks_are_cut_without_regard_to_racks": JOINS | {"agents": 6, "nodes_max": 6, "racks": 3},
    "a_sum_that_is_not_finite_is_committed": SUMS | {"faults": ("poison",)},
    "a_lone_worker_believes_what_is_not_finite": SUMS | LOST | {"slots": 1, "faults": ("poison",)},
    "a_wrong_sum_is_not_put_right": SUMS | {"faults": ("sum_wrongly",), "audit": 1.0},
    "the_redo_is_forgotten_when_a_task_is_under_way": COPIES
    | {"faults": ("poison", "slow", "busy")},
    "a_contradicted_speculative_task_is_ignored": COPIES
    | {"faults": ("lie_once", "slow", "busy"), "fault_every_s": 0.3, "save_every": 0},
    "a_speculative_task_is_adopted_twice": COPIES,
    "a_speculative_task_is_adopted_by_who_does_not_host_it": COPIES,
    "what_was_looked_for_in_an_old_view_is_copied_in_a_new_one": COPIES,
    "a_store_that_refuses_for_ever_is_asked_for_ever": SAVES
    | {"faults": ("agent_crash", "store_lost"), "restore_s": 5.0, "loops": (30,)},
    "agent_obeys_an_older_term": JOINS
    | {"faults": ("coordinator_crash", "lossy"), "loss": 0.1, "duplicate": 0.3},
    # Votes take long, and a member that has received them breaks off unheard.
    "planned_stop_is_awaited_for_ever": JOINS
    | {
        "loops": (60,),
        "faults": ("link_break", "drain"),
        "fault_every_s": 0.3,
        "unheard_break": 1.0,
        "hang_s": 60.0,
        "task_s": 0.02,
        "load_s": 0.01,
        "data_s": 0.2,
        "control_s": 0.005,
    },
    "dirty_worker_counts_as_fresh": JOINS,
    "joiner_never_says_that_it_loads": JOINS,
    "pending_change_is_read_from_the_own_vote": JOINS
    | {
        "control_s": 0.2,
        "data_s": 0.02,
        "unheard_break": 1.0,
        "optimizer_s": 0.0,
        "fault_every_s": 3.0,
        "load_s": 0.01,
        "loops": (150,),
        "boot_s": 2.0,
    },
    "stale_reports_are_believed": JOINS
    | {"faults": ("worker_crash", "lossy"), "loss": 0.1, "duplicate": 0.4, "control_s": 0.2},
    "deposed_agent_is_believed": JOINS
    | {"faults": ("agent_crash", "lossy"), "loss": 0.1, "duplicate": 0.3, "control_s": 0.05},
    "who_has_room_again_goes_on_in_a_view_that_has_ended": COMBINED["full disks and lost workers"],
    "worker_installs_a_view_it_gave_up": JOINS
    | {"faults": ("link_break", "lossy"), "loss": 0.3, "duplicate": 0.2},
}
Patch = Callable[[pytest.MonkeyPatch], Machines]
MUTATIONS: dict[str, Patch] = {}


def mutation(plant: Patch) -> Patch:
    MUTATIONS[plant.__name__] = plant
    return plant


_UNCHANGED: dict[str, str] = {}


def swarm_for(name: str) -> dict[str, object]:
    """Return the options that are fixed, not drawn, in the search for a mutation."""
    return GOES_ON | TUNED.get(name, {})


def failure_of_unchanged_code(seed: int, tuned: dict[str, object]) -> str:
    """Return the failure of the unchanged machines; several mutations look at the same seeds."""
    what = repr((seed, tuned))
    if what not in _UNCHANGED:
        _UNCHANGED[what] = run_seed(seed, small=True, tuned=tuned).failure
    return _UNCHANGED[what]
