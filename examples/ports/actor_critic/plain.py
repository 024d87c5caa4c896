"""Train an actor and a critic in one process, an episode for each update."""

import torch
from model import CartPole, Policy, digest, finish_episode, parse_options, play
from torch.optim import Adam


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    env = CartPole()
    policy = Policy()
    optimizer = Adam(policy.parameters(), lr=3e-2)
    running = 10.0
    for step in range(options.steps):
        reward = play(env, policy, options.episode, policy.rewards)
        loss = finish_episode(policy, options.gamma)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running = 0.05 * reward + 0.95 * running
        if step % 10 == 9:
            print(f"step {step}: last reward {reward:.0f}, average {running:.1f}")
        if running > options.solved:
            print(f"solved after {step} steps")
            break
    print(digest(policy))


if __name__ == "__main__":
    main()
