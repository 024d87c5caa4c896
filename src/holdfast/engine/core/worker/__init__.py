"""Puts together the machines that decide for one worker: membership, replica and step.

machine.py hands each event to the machine that it concerns. All three write to one Standing
(ground/standing.py): the status of the worker, and the effects in the order in which they were
decided. The driver carries them out in three places (ground/effects.py):

    by the thread of the script   Begin, Compute, CopyState, Commit, Release: one after the other.
                                  The script has applied a step before the next one begins
    by the owner of the group     Install, SyncState, Gather, Reduce, CheckSum, ...: one after the
                                  other, each with all members. If the group breaks,
                                  GroupBroken follows, and the rest of that view is dropped
    at once                       `Tell`, Abort, Redo, Adopt, Exit, GiveUp, ...

    `Tell`         the agent gets every status, in order: a promise not to act any more is one
    Abort          the connections of this view and of older ones are shut down. No thread waits in
                   them any longer, and every other member learns it
    MarkCommitted  it is in the node's memory before the status reports it, because a recall of the
                   state depends on it
    Exit           the process ends at once: its state or its results are wrong
"""
