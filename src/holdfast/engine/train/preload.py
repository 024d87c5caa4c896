"""Imports the modules that nearly every worker needs, for processes that fork workers.

It only imports: it starts no thread, touches no device and draws no random number.
"""

import torch._dynamo
import torch.distributed  # noqa: F401

import holdfast.engine.train.compose
import holdfast.engine.train.job  # noqa: F401
