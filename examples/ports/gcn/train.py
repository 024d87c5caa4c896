"""Train a graph network on the whole graph with Holdfast: virtual ranks share the labels."""

import torch
from model import GCN, digest, graph, parse_options
from torch.nn import functional as F
from torch.optim import Adam

import holdfast


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    features, adjacency, groups = graph(options.graph_nodes)
    train_nodes = torch.arange(0, options.graph_nodes // 3)
    test_nodes = torch.arange(options.graph_nodes // 3, options.graph_nodes)
    model = GCN()
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(until=options.steps):
        model.train()
        optimizer.zero_grad()
        for task in step:
            mine = train_nodes[task.vrank :: job.virtual_ranks]
            found = model(features, adjacency)
            loss = F.cross_entropy(found[mine], groups[mine], reduction="sum")
            step.backward(loss, weight=len(mine))
        optimizer.step()
        if (step.index + 1) % options.print_every == 0:
            model.eval()
            with torch.no_grad():
                found = model(features, adjacency)[test_nodes].argmax(1)
            accuracy = (found == groups[test_nodes]).float().mean()
            if job.is_leader:
                print(f"step {step.index}: loss {step.loss:.4f}, accuracy {accuracy:.3f}")
    if job.is_leader:
        print(digest(model))


if __name__ == "__main__":
    main()
