"""Train an actor and a critic with Holdfast, an episode of each virtual rank for each update."""

from model import CartPole, Policy, digest, finish_episode, parse_options, play
from torch.optim import Adam

import holdfast


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    env = CartPole()
    policy = Policy()
    optimizer = Adam(policy.parameters(), lr=3e-2)
    job.protect(policy=policy, optimizer=optimizer)
    job.values["running"] = 10.0

    def reward_of(_: object) -> float:
        reward = play(env, policy, options.episode, [])
        policy.saved.clear()
        return reward

    for step in job.steps(until=options.steps):
        for _ in step:
            play(env, policy, options.episode, policy.rewards)
            loss = finish_episode(policy, options.gamma)
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        reward = job.evaluate(reward_of, range(job.virtual_ranks), 1)
        job.values["running"] = 0.05 * reward + 0.95 * job.values["running"]
        if step.index % 10 == 9 and job.is_leader:
            print(f"step {step.index}: reward {reward:.0f}, average {job.values['running']:.1f}")
        if job.values["running"] > options.solved:
            break
    if job.is_leader:
        print(digest(policy))


if __name__ == "__main__":
    main()
