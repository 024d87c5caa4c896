"""Train a graph network on the whole graph with DistributedDataParallel: ranks share the labels."""

import torch
import torch.distributed as dist
from model import GCN, digest, graph, parse_options
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    features, adjacency, groups = graph(options.graph_nodes)
    train_nodes = torch.arange(0, options.graph_nodes // 3)
    test_nodes = torch.arange(options.graph_nodes // 3, options.graph_nodes)
    mine = train_nodes[rank::ranks]
    model = DistributedDataParallel(GCN())
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    torch.manual_seed(rank)
    for step in range(options.steps):
        model.train()
        optimizer.zero_grad()
        found = model(features, adjacency)
        loss = F.cross_entropy(found[mine], groups[mine], reduction="sum")
        loss = loss * ranks / len(train_nodes)
        loss.backward()
        optimizer.step()
        if (step + 1) % options.print_every == 0:
            model.eval()
            with torch.no_grad():
                found = model.module(features, adjacency)[test_nodes].argmax(1)
            accuracy = (found == groups[test_nodes]).float().mean()
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean:.4f}, accuracy {accuracy:.3f}")
    if rank == 0:
        print(digest(model.module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
