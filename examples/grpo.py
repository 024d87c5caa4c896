"""Train a policy by GRPO to write the sums of two numbers; an interrupted rollout is made again.

    python examples/grpo.py                                    alone
    holdfast run --nproc 2 --virtual 4 examples/grpo.py        on two workers; kill any: same result

GRPO is group relative policy optimization (DeepSeekMath, arXiv:2402.03300). The policy is a small
recurrent network that reads and writes characters. It is first trained on the written sums, for too
short a time. Then it samples a group of answers to each prompt, for example `7+5=`. The reward is 1
for the right answer, `12.`, and 0 for any other, and the advantage is the reward relative to the
group.

It shows that a rollout can be a part of a task. If a worker dies in the middle of one, another
worker samples all answers of its prompts again, from the same weights and with the same random
numbers. So no answer is dropped, cut short or counted twice, and long answers are no rarer than
in a run without failures. A finished rollout is a state of its virtual rank, so the other workers
still have it if its worker dies in the second update. The last line printed is the SHA-256 of both
policies and the rollouts, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

ALPHABET = "0123456789+=."
END = ALPHABET.index(".")
# Characters of an answer. An answer that has not ended by then is wrong.
ANSWER_MAX = 6
# Updates with each rollout.
UPDATES = 2
# An update that changes the odds of a character by a larger share gains no more.
CLIP = 0.2
KL_WEIGHT = 0.02


class Policy(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(
        self, text: torch.Tensor, hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of each next character, and the hidden state, of text [count, n]."""
        outputs, hidden = self.gru(self.characters(text), hidden)
        return self.head(outputs), hidden


def encode(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def make_sums() -> TensorDataset:
    """Return 100 prompts [100, 4] with their right answers [100, ANSWER_MAX]."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    prompts = [encode(f"{a}+{b}=") for a, b in pairs]
    answers = [encode(str(a + b).ljust(ANSWER_MAX, ".")) for a, b in pairs]
    return TensorDataset(torch.tensor(prompts), torch.tensor(answers))


def choose(scores: torch.Tensor) -> torch.Tensor:
    """Sample a character for each answer, from scores [count, characters]."""
    return Categorical(logits=scores).sample()


@torch.no_grad()
def write(policy: Policy, prompts: torch.Tensor, *, greedily: bool) -> torch.Tensor:
    """Answer each prompt; return characters [count, ANSWER_MAX], ends after the first end."""
    scores, hidden = policy(prompts)
    answers: list[torch.Tensor] = []
    for _ in range(ANSWER_MAX):
        found = scores[:, -1].argmax(dim=1) if greedily else choose(scores[:, -1])
        if answers:
            found = found.masked_fill(answers[-1] == END, END)
        answers.append(found)
        scores, hidden = policy(found[:, None], hidden)
    return torch.stack(answers, dim=1)


def odds_of(policy: Policy, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the odds of each character of the answers [count, ANSWER_MAX]."""
    scores, _ = policy(torch.cat([prompts, answers[:, :-1]], dim=1))
    odds = F.log_softmax(scores[:, prompts.shape[1] - 1 :], dim=2)
    return odds.gather(2, answers[:, :, None]).squeeze(2)


def written(answers: torch.Tensor) -> torch.Tensor:
    """Return 1 for each character that the policy wrote, its first end included, else 0."""
    ends = (answers == END).cumsum(dim=1)
    return (ends - (answers == END).long() == 0).float()


@torch.no_grad()
def roll_out(
    step: holdfast.Step, policies: tuple[Policy, Policy], batch: list[torch.Tensor], group: int
) -> dict[str, torch.Tensor]:
    """Sample a group of answers to each prompt of a batch; all workers receive their rewards."""
    policy, reference = policies
    prompts, rights = (part.repeat_interleave(group, dim=0) for part in batch)
    answers = write(policy, prompts, greedily=False)
    rewards = (answers == rights).all(dim=1).float()
    step.gather("rewards", rewards)
    step.gather("lengths", written(answers).sum(dim=1))
    groups = rewards.view(-1, group)
    spread = groups.std(dim=1, keepdim=True)
    advantages = (groups - groups.mean(dim=1, keepdim=True)) / (spread + 1e-4)
    return {
        "prompts": prompts,
        "answers": answers,
        "odds": odds_of(policy, prompts, answers),
        "reference": odds_of(reference, prompts, answers),
        "advantages": advantages.view(-1, 1),
    }


def loss_of(policy: Policy, rollout: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return GRPO's loss: the clipped gain, and the distance to the reference policy."""
    odds = odds_of(policy, rollout["prompts"], rollout["answers"])
    ratio = (odds - rollout["odds"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * rollout["advantages"], clipped * rollout["advantages"])
    away = rollout["reference"] - odds
    # Its mean over samples is the KL divergence from the reference policy.
    distance = away.exp() - away - 1
    counts = written(rollout["answers"])
    losses = (KL_WEIGHT * distance - gain) * counts
    return (losses.sum(dim=1) / counts.sum(dim=1)).mean()


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
    parser.add_argument("--warm-up", type=int, default=60, help="steps on written sums")
    parser.add_argument("--steps", type=int, default=120, help="steps of GRPO")
    parser.add_argument("--batch-size", type=int, default=5, help="prompts per virtual rank")
    parser.add_argument("--group", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    policy = Policy(options.width)
    reference = Policy(options.width).requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    job.protect(policy=policy, reference=reference, optimizer=optimizer)
    rollouts = job.rank_state("rollout", lambda vrank: None)
    sums = make_sums()
    data = job.batches(sums, options.batch_size)

    def right(batch: list[torch.Tensor]) -> float:
        answers = write(policy, batch[0], greedily=True)
        return (answers == batch[1]).all(dim=1).float().mean().item()

    for step in job.steps(data, until=options.warm_up):
        for prompts, answers in step:
            step.backward(-(odds_of(policy, prompts, answers) * written(answers)).mean())
        optimizer.step()
        optimizer.zero_grad()
    reference.load_state_dict(policy.state_dict())
    score = job.evaluate(right, sums, batch_size=100)
    if job.is_leader:
        print(f"before GRPO: {score:.0%} of the sums are right", flush=True)

    for step in job.steps(data, until=options.warm_up + options.steps):
        began_s = time.perf_counter()
        for update in range(UPDATES):
            for batch in step.round("policy"):
                if update == 0:
                    rollouts.value = roll_out(step, (policy, reference), batch, options.group)
                step.backward(loss_of(policy, rollouts.value))
            if update == 0:
                rewards = torch.cat(step.gathered["rewards"])
                lengths = torch.cat(step.gathered["lengths"])
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        number = step.index - options.warm_up + 1
        if job.is_leader and number % options.print_every == 0:
            took_s = time.perf_counter() - began_s
            print(
                f"step {number}: {len(rewards)} answers of {lengths.mean():.3f} characters, "
                f"reward {rewards.mean():.3f}, {took_s:.3f} s",
                flush=True,
            )
    score = job.evaluate(right, sums, batch_size=100)
    if job.is_leader:
        print(f"after GRPO: {score:.0%} of the sums are right")
        states = [rollouts[vrank] for vrank in range(job.virtual_ranks)]
        print(digest([policy.state_dict(), reference.state_dict(), states]), flush=True)


if __name__ == "__main__":
    main()
