"""Trains a LightningModule, and logs every step to a CSV file: csv_logged.py DIRECTORY.

The last line printed is the SHA-256 of the model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from lightning_module import AutoEncoder, digest, images

import holdfast
from holdfast.reports.lightning_loggers import CSVLogger
from holdfast.trainers.lightning import Strategy

job = holdfast.join()
model = AutoEncoder()
trainer = L.Trainer(
    strategy=Strategy(),
    accelerator="cpu",
    devices=1,
    max_epochs=3,
    log_every_n_steps=1,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=CSVLogger(sys.argv[1], name="csv", version="one"),
)
train = DataLoader(images(200, seed=1), 16, shuffle=True)
trainer.fit(model, train, DataLoader(images(200, seed=2), batch_size=100))
if job.is_leader:
    print(digest(model), flush=True)
