"""The training script of `make bench-peers` for torchft: one replica group of one process.

It follows torchft's train_ddp.py: the same process group, time-outs, transport, sampler and
optimizer. As the comments there advise, it saves the position of the loader after each step.

With gloo, where waiting for a broken allreduce raises an error at once, the hook of torchft 0.2.0's
DistributedDataParallel fails an assertion in the survivors (`assert fut._fut` in ddp.py), and they
end. `MendedDDP` has a hook that returns instead; without PEERS_MENDED=1 torchft's own is used.
"""

import logging
import os
import time
from datetime import timedelta
from typing import Any

import peers_task
import torch
import torch.distributed as dist
import torchft
from torchdata.stateful_dataloader import StatefulDataLoader
from torchft.checkpointing.pg_transport import PGTransport

REPLICA = int(os.environ.get("REPLICA_GROUP_ID", "0"))
MEET_S = 60.0


class RecordingManager(torchft.Manager):  # type: ignore[misc]
    """Remembers the verdict on the newest step, which torchft's optimizer keeps to itself."""

    committed = False

    def should_commit(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether the step is part of the model, as torchft decides it."""
        self.committed = super().should_commit(*args, **kwargs)
        return self.committed


class MendedDDP(torchft.DistributedDataParallel):  # type: ignore[misc]
    """Lets the manager deal with an error in an allreduce, as its documentation promises."""

    @staticmethod
    def _comm_hook(
        state: torchft.Manager, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()  # the manager remembers an error
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def make_manager(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> RecordingManager:
    """Return the manager of this replica group; it is connected to the lighthouse from now on."""

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=5))
    return RecordingManager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"peers_{REPLICA}",
        init_sync=False,  # as its docstring advises where all start with the same parameters
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
    )


def meet_others() -> None:
    """Wait until all replica groups have started, so that the first step has all of them."""
    (peers_task.folder() / f"there-{REPLICA}").touch()
    deadline = time.monotonic() + MEET_S
    while len(list(peers_task.folder().glob("there-*"))) < peers_task.WORKERS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all replica groups have started after {MEET_S:g} s")
        time.sleep(0.01)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    plain, inner = peers_task.make_model()
    steps, data = peers_task.step_count(), peers_task.make_data(peers_task.step_count())
    sampler = torchft.DistributedSampler(
        data,
        replica_rank=REPLICA,
        num_replica_groups=peers_task.WORKERS,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
        seed=peers_task.SEED,
    )
    loader: Any = StatefulDataLoader(data, peers_task.BATCH, sampler=sampler)
    position = peers_task.folder() / f"loader-{REPLICA}.pt"
    if position.exists():
        loader.load_state_dict(torch.load(position, weights_only=True))
    manager = make_manager(plain, inner)
    is_mended = os.environ.get("PEERS_MENDED") == "1"
    model = (MendedDDP if is_mended else torchft.DistributedDataParallel)(manager, plain)
    optimizer = torchft.Optimizer(manager, inner)
    records = peers_task.Records(REPLICA)
    meet_others()
    while manager.current_step() < steps:
        for samples, values in loader:
            records.begin(manager.current_step(), samples)
            optimizer.zero_grad()
            peers_task.paced_loss(model, values).backward()
            optimizer.step()
            if manager.committed:
                taken = manager.is_participating()
                records.commit(manager.current_step() - 1, manager.num_participants(), taken)
            else:
                records.drop(manager.current_step())
            peers_task.save_whole(loader.state_dict(), position)
            if manager.current_step() >= steps:
                break
    records.end(manager.current_step(), plain)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
