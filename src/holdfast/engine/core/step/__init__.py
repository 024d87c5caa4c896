"""Decides what a worker does between two step boundaries: vote, commit, audits, saves. Pure.

step_machine.py opens a step, has the script compute the tasks that this worker hosts, has the sums
made, judges them, and votes. It returns the outcome of the votes as a verdict (verdicts.py), on
which the machine of the worker acts. Each other module is about one thing: open_step (tasks),
audits and sum_trial (wrong results), speculation (copies of late tasks), balance and speeds (the
hosts of virtual ranks from the next step on), backup (steps that do not wait for all members),
newcomers (whose results count).

The rule behind all of it: a member votes only for sums that all members have judged alike. So a
step that one member commits is a step that every member can commit.
"""
