"""Train a policy by PPO in one process."""

import time

import torch
from model import PASSES, CartPole, Policy, digest, loss_of, parse_options, play
from torch import nn


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    mean = 0.0
    env = CartPole(0, options.simulate_ms)
    for number in range(options.rollouts):
        began_s = time.perf_counter()
        rollout, lengths = play(env, policy, options.moves)
        took_s = time.perf_counter() - began_s
        for _ in range(PASSES):
            optimizer.zero_grad()
            loss_of(policy, rollout).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
        for length in lengths:
            mean += 0.1 * (length - mean)
        print(f"rollout {number}: mean length {mean:.0f}, {took_s:.3f} s")
    print(digest([policy.state_dict(), env.state_dict()]))


if __name__ == "__main__":
    main()
