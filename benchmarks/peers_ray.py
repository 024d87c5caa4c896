"""The training script of `make bench-peers` for Ray Train: TorchTrainer with checkpoints.

It follows Ray's user guides on fault tolerance and on saving and loading checkpoints, and trains
with the loop of peers_torchrun.py.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import peers_task
import peers_torchrun
import ray
import ray.train
import ray.train.torch
import torch


def train_one_worker() -> None:
    """Train as one worker of the group, from the newest checkpoint if there is one."""
    rank = ray.train.get_context().get_world_rank()
    model, optimizer = peers_task.make_model()
    loader = peers_torchrun.make_loader(peers_task.step_count(), rank)
    first, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as name:
            found = torch.load(Path(name) / "state.pt", weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        loader.load_state_dict(found["loader"])
        first = found["step"]
    wrapped: Any = ray.train.torch.prepare_model(model)

    def save(step: int) -> None:
        if step % peers_task.CHECKPOINT_STEPS:
            return
        with tempfile.TemporaryDirectory() as name:
            made = None
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"loader": loader.state_dict(), "step": step}
                torch.save(state, Path(name) / "state.pt")
                made = ray.train.Checkpoint.from_directory(name)
            ray.train.report({"step": step}, checkpoint=made)

    peers_torchrun.train(wrapped, optimizer, iter(loader), first, save)


def main() -> None:
    here = str(Path(__file__).parent)
    passed = {name: os.environ[name] for name in ("PEERS_FOLDER", "PEERS_STEPS")}
    passed |= {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    # Ray gives workers a lower priority (15) than other processes, which counts on a busy machine.
    os.environ.update(RAY_worker_niceness="0")
    ray.init(
        num_cpus=peers_task.WORKERS + 1,
        include_dashboard=False,
        runtime_env={"env_vars": passed},
        _temp_dir=os.environ.get("PEERS_RAY_TEMP"),
    )
    trainer = ray.train.torch.TorchTrainer(
        train_one_worker,
        scaling_config=ray.train.ScalingConfig(num_workers=peers_task.WORKERS),
        torch_config=ray.train.torch.TorchConfig(
            backend="gloo", timeout_s=int(peers_task.COLLECTIVE_S)
        ),
        run_config=ray.train.RunConfig(
            name="peers",
            storage_path=str(peers_task.folder() / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
