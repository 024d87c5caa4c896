"""Train a policy by PPO with DistributedDataParallel, an environment for each rank."""

import itertools
import time

import torch
import torch.distributed as dist
from model import PASSES, CartPole, Policy, digest, loss_of, parse_options, play
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = Policy()
    shared = DistributedDataParallel(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    mean = 0.0
    env = CartPole(rank, options.simulate_ms)
    torch.manual_seed(rank)
    for number in range(options.rollouts):
        began_s = time.perf_counter()
        rollout, lengths = play(env, policy, options.moves)
        took_s = time.perf_counter() - began_s
        for _ in range(PASSES):
            optimizer.zero_grad()
            loss_of(shared, rollout).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
        gathered = [None] * ranks
        dist.all_gather_object(gathered, lengths)
        for length in itertools.chain(*gathered):
            mean += 0.1 * (length - mean)
        if rank == 0:
            print(f"rollout {number}: mean length {mean:.0f}, {took_s:.3f} s")
    states = [None] * ranks
    dist.all_gather_object(states, env.state_dict())
    if rank == 0:
        print(digest([policy.state_dict(), states]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
