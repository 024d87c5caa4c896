"""Train a graph network on the whole graph in one process."""

import torch
from model import GCN, digest, graph, parse_options
from torch.nn import functional as F
from torch.optim import Adam


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    features, adjacency, groups = graph(options.graph_nodes)
    train_nodes = torch.arange(0, options.graph_nodes // 3)
    test_nodes = torch.arange(options.graph_nodes // 3, options.graph_nodes)
    model = GCN()
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for step in range(options.steps):
        model.train()
        optimizer.zero_grad()
        found = model(features, adjacency)
        loss = F.cross_entropy(found[train_nodes], groups[train_nodes])
        loss.backward()
        optimizer.step()
        if (step + 1) % options.print_every == 0:
            model.eval()
            with torch.no_grad():
                found = model(features, adjacency)[test_nodes].argmax(1)
            accuracy = (found == groups[test_nodes]).float().mean()
            print(f"step {step}: loss {loss:.4f}, accuracy {accuracy:.3f}")
    print(digest(model))


if __name__ == "__main__":
    main()
