"""Decides which workers take part in a job: coordinator, agent, views, leases, restarts. Pure.

**The coordinator** (coordinator.py) goes round one loop: facts, plan, apply. Its driver owes it:

    Persist        the record is durable before any later effect is carried out. If it cannot be
                   written, this coordinator ends: it may not act without its record
    SendDirective  the newest directive reaches its agent if that can be reached; older ones may be
                   dropped, since each holds all of the node's orders
    Announce       a line in the event log, at least once
    Finish         the coordinator ends

**The agent** (agent.py) starts and ends the processes of a node, and holds the lease that lets them
act. Its driver owes it:

    SendReport     the newest report reaches the coordinator if that can be reached
    SendWorker     the worker gets its directives in order
    Spawn          Spawned follows once the process runs, or ProcessExited if it cannot
    Kill           the process ends, with all its children; ProcessExited follows after that, never
                   before: a worker that is reported lost cannot act any more
    AskToEnd       a signal, by which a script may save; ProcessExited or Kill follows
    Pause, Resume  the process and its children stop, and continue
    Quit           the agent ends

A worker may act only until its lease ends (lease.py). So an agent that cannot reach the
coordinator pauses its workers by itself, before the coordinator gives their virtual ranks away.
"""
