"""Imports what nearly every worker imports in its first second, for processes that fork workers.

Importing is all that it does: no thread is started, no device touched, no random number drawn.
"""

import torch._dynamo
import torch.distributed  # noqa: F401

import holdfast.train.compose
import holdfast.train.job  # noqa: F401
