"""Decides a worker's acts between two step boundaries: vote, commit, audits, saves. Pure.

step_machine.py orders the sums of a step, and votes. It returns the outcome of the votes as a
verdict (verdicts.py), on which the machine of the worker acts. Two parts work for it: script_tasks
chooses what the script computes, judging whether the results may be used; all three share course,
which has the view and how far its members are. Each other module is about one thing: open_step
(tasks), audits and sum_trial (wrong results), late_watch and speculation (copies of late tasks),
balance and speeds (the hosts of virtual ranks from the next step on), backup (steps that do not
wait for all members), newcomers (whose results count), rulings (wrong workers, and the
consequences).

The rule behind all of it: a member votes only for sums that all members have judged alike. So a
step that one member commits is a step that every member can commit.
"""
