"""Contains the protocol as pure machines: no clocks, chance, sockets, threads or tensors.

Each machine has one mutator, `handle(event, now)`, which returns effects as values. A driver stands
around it: the real ones are in runtime and train, the simulated ones in lab/sim. Every driver owes
its machine the same:

- `handle` gets one event at a time, in the order of their arrival. `now` are seconds of any one
  clock, and never decrease.
- Effects are carried out in the order in which they were returned, before those of a later event.
  Where an effect says that an event follows, it follows, also if the act fails.
- At `deadline()` the machine gets a Tick, or soon after. None: it waits for another event.
- An exception from a machine is a bug of ours. The process ends, and is started again.

There are four machines. Each room is described in its own package:

    membership   the coordinator of the job, and the agent of a node
    worker       a worker: its membership, its replica and its steps, put together
    fleet        the nodes that a job asks a cluster manager for

and the parts that they are made of:

    ground       shared by all: events, effects, the standing of a worker, votes
    replica      the state that a member holds, and its exchange with members
    step         what a member does between two boundaries

The modules next to these are the ground of all: types, errors, the canonical tree, the plans for
sums, the job document with its settings and policies.
"""
