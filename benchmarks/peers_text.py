"""The words of the sheet of `make bench-peers`: the set-up of each framework, and its effects.

The sheet takes all figures from the results; none of them is written here.
"""

from __future__ import annotations

RUNS = """\
All train the same perceptron (0.5 million parameters, AdamW) on 3 workers with gloo for one epoch
of 100 steps; a step rests for 0.2 s besides its arithmetic, so that the times show recovery
and not arithmetic. Each run is one launch with at most one fault: in a step between
12 and 25, at a random moment, a random worker is struck. The frameworks take turns and meet the
same faults. Each figure is the median, with the worst in parentheses.

- **pause**: the longest gap between two commits until all work again, less a usual step. Work that
  is computed again counts as a pause, and so does the return of the third worker.
- **next new step late by**: how much later than usual the step after the struck one is committed.
  After a return to a checkpoint this includes the steps that are computed again.
- **all at work again after**: from the fault until three processes have each computed a part of
  one step that was committed.
- **the epoch's end later by**: what the fault cost the whole training. torchft gains here from
  steps that it does with fewer samples."""

FROZEN = """\
The process stays as it is, with its sockets, and no program wakes it up. So time-outs decide:
those of each framework are named below."""

MODEL = """\
Of the runs with a kill. A batch has 8 samples, a step 3 batches, the epoch 2,400 samples. Wasted:
computed, and not in the model; in brackets the same for undisturbed runs, where Holdfast computes
batches of the first steps again to check that the script repeats its results. torchrun and Ray
Train use each sample once; their bits differ after a return to a checkpoint. The reason, and how to
avoid it, are named below. A run that goes back to step 0 has the undisturbed bits."""

PARTIAL = {
    "torchft, own hook": """\
torchft as it is, without our change to its hook: in {ended} of {count} runs the processes of the
survivors ended with an AssertionError, too, and in {again} the training went back to step 0 (a
script that also writes checkpoints of the model would have gone back to one of these).""",
    "torchrun, shared store": """\
torchrun without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: in {failed} of {count} runs the training had
not ended 90 s after the kill; the new processes look for each other at addresses of the old ones
("Gloo connectFullMesh failed ... Connection refused").""",
}

PEERS = """
## Each framework, and how it was set up

**Holdfast** runs with its defaults, and with a checkpoint every 10 steps. The survivors redo the
lost third of the step and continue with two workers, until the third has come back; it joins
between two steps. Workers are forked from a process that has imported torch, so that a busy machine
slows their start less than the start of the other frameworks' workers.

**torchft 0.2.0** is set up as its [README](https://github.com/meta-pytorch/torchft) and its
`train_ddp.py` show: a lighthouse with `--min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms
10000`, one replica group per worker under its own torchrun with restarts, `ProcessGroupGloo` with
5 s, `Manager` with 30 s, `PGTransport`, torchft's `DistributedSampler` and optimizer. The
position of a loader is saved after each step, as the comments there advise; `init_sync=False`, as
the Manager's docstring advises for equal first parameters. Replica groups wait for each other
before the first step. *torchft, short* has `--join_timeout_ms 1000 --heartbeat_timeout_ms 1000`:
the lighthouse's default for a heartbeat is 5 s, and that is most of the pause. We changed one
thing: with gloo the hook of its DistributedDataParallel fails an assertion (`assert fut._fut`)
after a broken allreduce; ours returns there, and the manager does the rest. Survivors continue
without a checkpoint, and the returned replica gets the state from them. The samples of the failed
step, and the samples that the lost replica would have used, are not in the model: the documentation
of its sampler calls it "inherently lossy". No part of torchft kills a frozen process, so it never
comes back here.

**torchrun** of torch 2.13 follows PyTorch's
[tutorial](https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html): DDP, a
checkpoint every 10 steps by rank 0 (with the loader's state, by torchdata), `--max-restarts 100`.
gloo's time-out is 10 s (default: 30 min). A frozen process is killed 30 s later: torchrun grants
these to each process that it ends before a group starts again, also with `--shutdown-timeout 5`.
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` is the way round [a
fault](https://github.com/pytorch/pytorch/issues/135712) of groups that start again. All processes
start again and import torch, which is most of its time; the steps since the checkpoint are
computed again, and no sample is lost. The bits differ because DDP puts gradients into other
buckets after its first step, and so sums them in another order in the first step after a return:
with DDP's `find_unused_parameters=True`, which keeps the first buckets, a training that we
stopped and continued had the bits of an undisturbed one.

**Ray Train** follows its guides on [fault
tolerance](https://docs.ray.io/en/latest/train/user-guides/fault-tolerance.html) and checkpoints:
`TorchTrainer` with `FailureConfig(max_failures=-1)`, a reported checkpoint every 10 steps,
`TorchConfig(timeout_s=10)` (default: 30 min), `RAY_worker_niceness=0` (default: 15), on a cluster
that the driver starts on this machine. As with torchrun, all workers start again from the
checkpoint; its actors import more than plain processes do, so that its restart suffers most from
a busy machine: by the controller's log most of the pause is the start of the new group. The
controller asks its workers for their reports every 2 s, so that a fault soon after a report loses
that checkpoint: with checkpoints every 2 s, as here, some runs go back two of them, or to the
beginning.

## Not compared

GPUs and NCCL, several machines, lost networks, loss of all workers at once, sharded models
(torchft's HSDP), LocalSGD and DiLoCo of torchft, elastic sizes of torchrun and Ray, torchrun's
timers for hung processes (which a script must set), large models (where a checkpoint and a
transfer of the state take long), and launchers that keep processes waiting.
""".splitlines()
