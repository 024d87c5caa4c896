"""Train an actor and a critic with DistributedDataParallel, an episode of each rank an update."""

import torch
import torch.distributed as dist
from model import CartPole, Policy, digest, finish_episode, parse_options, play
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    env = CartPole()
    policy = Policy()
    shared = DistributedDataParallel(policy)
    optimizer = Adam(policy.parameters(), lr=3e-2)
    running = 10.0
    torch.manual_seed(dist.get_rank())
    for step in range(options.steps):
        reward = play(env, shared, options.episode, policy.rewards)
        loss = finish_episode(policy, options.gamma)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = torch.tensor(reward) / dist.get_world_size()
        dist.all_reduce(mean)
        running = 0.05 * mean.item() + 0.95 * running
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step}: last reward {mean:.0f}, average {running:.1f}")
        if running > options.solved:
            if dist.get_rank() == 0:
                print(f"solved after {step} steps")
            break
    if dist.get_rank() == 0:
        print(digest(policy))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
