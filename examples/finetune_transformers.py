"""Train a small GPT-2 to add numbers with Hugging Face's Trainer: one import is Holdfast's.

    python examples/finetune_transformers.py                      alone
    holdfast run --nproc 4 examples/finetune_transformers.py      on four workers; kill any

No file is downloaded: the model begins with random parameters. Its best parameters are taken at the
end. The last line printed is the SHA-256 of the model, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile

import torch
from torch import nn

import holdfast

try:
    from transformers import (
        EarlyStoppingCallback,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        TrainingArguments,
    )
except ImportError:
    sys.exit("finetune_transformers.py needs transformers: pip install 'holdfast[transformers]'")

from holdfast.trainers.transformers import Trainer

LETTERS = "0123456789+=."
IGNORED = -100  # a label that does not count


def sums(count: int, seed: int) -> list[list[int]]:
    """Return lines like 12+7=19. of different lengths, as numbers of letters."""
    pairs = torch.randint(0, 100, (count, 2), generator=torch.Generator().manual_seed(seed))
    lines = [f"{a}+{b}={a + b}." for a, b in pairs.tolist()]
    return [[LETTERS.index(letter) for letter in line] for line in lines]


def collate(lines: list[list[int]]) -> dict[str, torch.Tensor]:
    """Fill up to the longest line; the added tokens do not count."""
    longest = max(map(len, lines))
    filled = torch.tensor([line + [0] * (longest - len(line)) for line in lines])
    real = torch.tensor([[1] * len(line) + [0] * (longest - len(line)) for line in lines])
    labels = filled.masked_fill(real == 0, IGNORED)
    return {"input_ids": filled, "attention_mask": real, "labels": labels}


def make_model(kind: str, width: int) -> nn.Module:
    """Return a causal language model with random parameters."""
    if kind == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(LETTERS), hidden_size=width, intermediate_size=2 * width,
                num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(LETTERS), n_positions=16, n_embd=width, n_layer=2, n_head=2,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="lines per virtual rank")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--evaluate-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--output", help="directory of checkpoints in Hugging Face's layout")
    parser.add_argument("--resume", metavar="CHECKPOINT", help="one of these to begin with")
    options = parser.parse_args()

    holdfast.join()  # before the model: so that it begins with the same parameters everywhere
    training = TrainingArguments(
        output_dir=options.output or tempfile.mkdtemp(),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=3e-3,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        logging_steps=options.evaluate_every,
        eval_strategy="steps",
        eval_steps=options.evaluate_every,
        save_steps=options.evaluate_every,
        save_strategy="steps" if options.output else "no",
        load_best_model_at_end=bool(options.output),
        metric_for_best_model="eval_loss",
        report_to=[],
        use_cpu=True,
    )
    model = make_model(options.model, options.width)
    trainer = Trainer(
        model=model,
        args=training,
        data_collator=collate,
        train_dataset=sums(2000, seed=1),
        eval_dataset=sums(200, seed=2),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=4)] if options.output else [],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    found = trainer.evaluate()
    if trainer.job.is_leader:
        print(f"step {trainer.state.global_step}: loss {found['eval_loss']:.4f}")
        print(digest(model), flush=True)


if __name__ == "__main__":
    main()
