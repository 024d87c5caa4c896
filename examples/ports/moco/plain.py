"""Train an encoder by momentum contrast in one process."""

import torch
from model import Encoder, Queue, digest, images_of, parse_options, view
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    encoder, teacher = Encoder(), Encoder().requires_grad_(False)
    teacher.load_state_dict(encoder.state_dict())
    queue = Queue(options.queue)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    known, held_out = images_of(512, seed=2), images_of(512, seed=3)
    dataset = images_of(options.images, seed=1)
    loader = DataLoader(dataset, options.batch_size, shuffle=True, drop_last=True)
    for epoch in range(options.epochs):
        for images, _ in loader:
            queries, keys = encoder(view(images)), teacher(view(images))
            same = (queries * keys).sum(dim=1, keepdim=True)
            likeness = torch.cat([same, queries @ queue.keys.t()], dim=1) / 0.2
            loss = F.cross_entropy(likeness, torch.zeros(len(images)).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue.put(keys)
            with torch.no_grad():
                for mine, learnt in zip(teacher.parameters(), encoder.parameters(), strict=True):
                    mine.lerp_(learnt, 1 - options.momentum)
        with torch.no_grad():
            images, classes = held_out.tensors
            nearest = (encoder(images) @ encoder(known.tensors[0]).t()).argmax(1)
            found = (known.tensors[1][nearest] == classes).float().mean()
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {found:.3f}")
    print(digest(encoder, teacher, queue))


if __name__ == "__main__":
    main()
