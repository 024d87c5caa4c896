"""A policy with a critic, and a pole on a cart, as in PyTorch's reinforcement_learning (BSD-3)."""

from __future__ import annotations

import argparse
import hashlib
import math

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--episode", type=int, default=100, help="moves at most")
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--solved", type=float, default=90.0, help="mean reward at which to stop")
    return parser.parse_args()


class CartPole:
    """Balances a pole on a cart that is pushed to either side (Barto, Sutton and Anderson 1983)."""

    def reset(self) -> torch.Tensor:
        self.state = 0.1 * torch.rand(4) - 0.05
        return self.state

    def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        """Push for 0.02 s; return the new observation, the reward, and whether the pole fell."""
        x, speed, angle, turning = self.state.tolist()
        push = 10.0 if action else -10.0
        cos, sin = math.cos(angle), math.sin(angle)
        pulled = (push + 0.05 * turning**2 * sin) / 1.1
        bend = (9.8 * sin - cos * pulled) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        shift = pulled - 0.05 * bend * cos / 1.1
        self.state = self.state + 0.02 * torch.tensor([speed, shift, turning, bend])
        fell = abs(x) > 2.4 or abs(angle) > 0.2095
        return self.state, 1.0, fell


class Policy(nn.Module):
    """Chooses moves, and keeps its opinion of each until the episode is over."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 64)
        self.action, self.value = nn.Linear(64, 2), nn.Linear(64, 1)
        self.saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.rewards: list[float] = []

    def forward(self, state: torch.Tensor) -> int:
        hidden = F.relu(self.hidden(state))
        choice = Categorical(logits=self.action(hidden))
        action = choice.sample()
        self.saved.append((choice.log_prob(action), self.value(hidden)))
        return int(action)


def play(env: CartPole, policy: nn.Module, moves: int, rewards: list[float]) -> float:
    """Play an episode; return the sum of its rewards, which are added to a list as well."""
    state = env.reset()
    for _ in range(moves):
        state, reward, is_over = env.step(policy(state))
        rewards.append(reward)
        if is_over:
            break
    return sum(rewards)


def finish_episode(policy: Policy, gamma: float) -> torch.Tensor:
    """Return the loss of the episode that a policy has played, and forget it."""
    returns: list[float] = []
    for reward in reversed(policy.rewards):
        returns.insert(0, reward + gamma * (returns[0] if returns else 0.0))
    gains = torch.tensor(returns)
    gains = (gains - gains.mean()) / (gains.std() + 1e-6)
    losses = [
        -log_prob * (gain - value.item()) + F.smooth_l1_loss(value, gain[None])
        for (log_prob, value), gain in zip(policy.saved, gains, strict=True)
    ]
    policy.saved.clear()
    policy.rewards.clear()
    return torch.stack(losses).sum()


def digest(*modules: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers."""
    found = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()
