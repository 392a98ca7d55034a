"""What the workers of the pool need: imported once, which takes longer than most tests, before they are forked."""

import atexit
import gc
import os

import timm
import torch.distributed.pipelining
import transformers.models.bert.modeling_bert

from support import faults, jobs, observations, trainings

__all__ = ["faults", "jobs", "observations", "timm", "torch", "trainings", "transformers"]

gc.freeze()
atexit.register(os._exit, 0)  # without the report of a library on what it does not tidy up
