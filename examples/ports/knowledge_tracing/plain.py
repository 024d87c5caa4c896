"""Train a knowledge tracer in one process, until its AUC gets no better."""

import copy

import torch
from model import Students, Tracer, auc, digest, pad, parse_options, summed_loss
from torch.optim import Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    students = Students(options.students, seed=1)
    loader = DataLoader(students, options.batch_size, shuffle=True, collate_fn=pad)
    held_out = Students(options.students // 3, seed=2)
    model = Tracer()
    optimizer = Adam(model.parameters(), lr=1e-2)
    scheduler = ReduceLROnPlateau(optimizer, mode="max", patience=1)
    best, waited = 0.0, 0
    best_weights = copy.deepcopy(model.state_dict())
    for epoch in range(options.epochs):
        for skills, answers in loader:
            optimizer.zero_grad()
            loss, count = summed_loss(model(skills, answers), answers)
            loss = loss / count
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        score = auc(model, held_out)
        scheduler.step(score)
        print(f"epoch {epoch}: loss {loss:.4f}, AUC {score:.3f}")
        if score > best:
            best, waited = score, 0
            best_weights = copy.deepcopy(model.state_dict())
        else:
            waited += 1
            if waited == options.patience:
                break
    model.load_state_dict(best_weights)
    print(f"best AUC {best:.3f}")
    print(digest(model))


if __name__ == "__main__":
    main()
