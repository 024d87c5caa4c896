"""Trains examples/recommender.py's model with TorchRec, its tables cut by rows over the workers.

benchmarks/table_rpc.py runs it as one of its sides, if torchrec and fbgemm are installed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from recommender import Recommender
from torch import nn
from torch.nn import functional as F
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

CPU = torch.device("cpu")


class WithTables(nn.Module):
    """Looks up the rows of a batch, and returns its losses' mean."""

    def __init__(self, tables: nn.Module, dim: int) -> None:
        super().__init__()
        self.tables, self.model = tables, Recommender(dim)

    def forward(
        self, dense: torch.Tensor, features: torchrec.KeyedJaggedTensor, clicked: torch.Tensor
    ) -> torch.Tensor:
        """`dense`: [batch, 13]; `clicked`: [batch]; `features`: one id of each table a sample."""
        rows = self.tables(features).values().view(len(dense), len(features.keys()), -1)
        return F.binary_cross_entropy_with_logits(self.model(dense, rows), clicked)


def build(names: Sequence[str], rows: int, dim: int, lr: float) -> DistributedModelParallel:
    """Join the other workers, and return the model with this worker's part of the tables."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['MEETING']}-torchrec",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name]
        )
        for name in names
    ]
    tables = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    settings = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": lr, "eps": 1e-10}
    sharder = EmbeddingBagCollectionSharder(fused_params=settings)
    plan = construct_module_sharding_plan(
        tables,
        {name: row_wise(compute_kernel="fused") for name in names},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    torch.manual_seed(3)
    return DistributedModelParallel(
        WithTables(tables, dim),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan(plan={"tables": plan}),
        sharders=[sharder],
    )


def features_of(names: Sequence[str], ids: torch.Tensor) -> torchrec.KeyedJaggedTensor:
    """Return ids [batch, tables] in TorchRec's form, one for each sample and table."""
    lengths = torch.ones(ids.numel(), dtype=torch.int32)
    return torchrec.KeyedJaggedTensor(list(names), ids.T.reshape(-1), lengths=lengths)
