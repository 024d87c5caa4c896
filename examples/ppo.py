"""Train a policy by PPO to balance a pole, with an environment for each virtual rank.

    python examples/ppo.py                      alone
    holdfast run --nproc 4 examples/ppo.py      on four workers; kill any: the same result

Only the worker that hosts a virtual rank plays its environment, so that slow simulators
(`--simulate-ms 2`) run in parallel. The environment's state travels with the step: if the worker
dies, another one plays on from the same move. The last line printed is the SHA-256 of the policy
and the environments, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import holdfast

PASSES = 4  # updates with each rollout
MOVES_MAX = 200  # an episode ends after this number of moves


class CartPole:
    """Balances a pole on a cart that is pushed to either side (Barto, Sutton and Anderson 1983)."""

    def __init__(self, seed: int, simulate_ms: float) -> None:
        self.random = np.random.default_rng(seed)
        self.simulate_s = simulate_ms / 1000
        self.start()

    def start(self) -> None:
        self.at = self.random.uniform(-0.05, 0.05, size=4)
        self.moves = 0

    def move(self, action: int) -> bool:
        """Push for 0.02 s; return whether the episode is over."""
        time.sleep(self.simulate_s)  # the work of a slow simulator
        x, speed, angle, turning = self.at
        cos, sin = math.cos(angle), math.sin(angle)
        pulled = ((10.0 if action else -10.0) + 0.05 * turning**2 * sin) / 1.1
        bend = (9.8 * sin - cos * pulled) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        shift = pulled - 0.05 * bend * cos / 1.1
        self.at = self.at + 0.02 * np.array([speed, shift, turning, bend])
        self.moves += 1
        return abs(x) > 2.4 or abs(angle) > 0.2095 or self.moves >= MOVES_MAX

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.bit_generator.state, "at": self.at, "moves": self.moves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.bit_generator.state = state["random"]
        self.at, self.moves = state["at"], state["moves"]


class Policy(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, states: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        """Return the odds of the actions, and the values, of states [count, 4]."""
        return Categorical(logits=self.actor(states)), self.critic(states).squeeze(1)


@torch.no_grad()
def play(env: CartPole, policy: Policy, moves: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Play on; return the rollout, and the lengths of the episodes that have ended in it."""
    states, actions, odds, values, ends, lengths = [], [], [], [], [], []
    for _ in range(moves):
        state = torch.tensor(env.at, dtype=torch.float32)
        choice, value = policy(state[None])
        action = choice.sample()
        states.append(state)
        actions.append(action)
        odds.append(choice.log_prob(action))
        values.append(value)
        ends.append(env.move(int(action)))
        if ends[-1]:
            lengths.append(env.moves)
            env.start()
    _, after = policy(torch.tensor(env.at, dtype=torch.float32)[None])
    advantages, ahead = [], torch.zeros(1)
    for value, is_over in zip(reversed(values), reversed(ends), strict=True):
        goes_on = 0.0 if is_over else 1.0
        surprise = 1.0 + 0.99 * goes_on * after - value  # each move has a reward of 1
        ahead = surprise + 0.99 * 0.95 * goes_on * ahead
        advantages.insert(0, ahead)
        after = value
    advantage, value = torch.cat(advantages), torch.cat(values)
    rollout = {
        "states": torch.stack(states),
        "actions": torch.cat(actions),
        "odds": torch.cat(odds),
        "returns": advantage + value,
        "advantages": (advantage - advantage.mean()) / (advantage.std() + 1e-8),
    }
    return rollout, lengths


def loss_of(policy: Policy, rollout: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of PPO's clipped loss, the critic's loss and the entropy bonus."""
    choice, values = policy(rollout["states"])
    ratio = (choice.log_prob(rollout["actions"]) - rollout["odds"]).exp()
    clipped = ratio.clamp(0.8, 1.2)
    gain = torch.minimum(ratio * rollout["advantages"], clipped * rollout["advantages"])
    wrong = (values - rollout["returns"]).square()
    return (0.5 * 0.01 * wrong - gain - 0.01 * choice.entropy()).mean()


def digest(state: object) -> str:
    """Compute SHA-256 over every name, number and tensor in nested lists and dictionaries."""
    if isinstance(state, torch.Tensor):
        state = state.detach().numpy()
    if isinstance(state, np.ndarray):
        return hashlib.sha256(state.tobytes()).hexdigest()
    if isinstance(state, dict):
        state = list(state.items())
    text = str([digest(s) for s in state]) if isinstance(state, list | tuple) else repr(state)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--moves", type=int, default=128, help="moves in a rollout")
    parser.add_argument("--simulate-ms", type=float, default=0.0, help="extra time for each move")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    job.protect(policy=policy, optimizer=optimizer)
    job.values["length"] = 0.0
    envs = job.rank_state("environment", lambda vrank: CartPole(vrank, options.simulate_ms))
    rollouts = job.rank_state("rollout", lambda vrank: None)
    for step in job.steps(until=options.rollouts * PASSES):
        is_new = step.index % PASSES == 0
        began_s = time.perf_counter()
        for _ in step:
            if is_new:
                rollouts.value, lengths = play(envs.value, policy, options.moves)
                step.gather("lengths", lengths)
            step.backward(loss_of(policy, rollouts.value))
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if is_new:
            took_s = time.perf_counter() - began_s
            for length in itertools.chain(*step.gathered["lengths"]):
                job.values["length"] += 0.1 * (length - job.values["length"])
            if job.is_leader:
                mean, number = job.values["length"], step.index // PASSES
                print(f"rollout {number}: mean length {mean:.0f}, {took_s:.3f} s", flush=True)
    if job.is_leader:
        states = [envs[vrank] for vrank in range(job.virtual_ranks)]
        print(digest([policy.state_dict(), states]), flush=True)


if __name__ == "__main__":
    main()
