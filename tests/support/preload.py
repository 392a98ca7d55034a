"""What the workers of the pool need, imported and made once before they are forked: it takes longer than most tests."""

import atexit
import gc
import importlib
import os

import torch

from support import cases

LIBRARIES = (
    "support.faults",
    "support.jobs",
    "support.observations",
    "support.trainings",
    "datasets",
    "peft",
    "scipy.stats",
    "sklearn.datasets",
    "sklearn.metrics",
    "sklearn.model_selection",
    "timm",
    "torch.distributed.pipelining",
    "transformers.models.bert.modeling_bert",
)

gc.disable()  # it takes a fifth of the time of imports and finds nothing
torch.set_num_threads(1)  # a process that has started threads cannot be forked
for library in LIBRARIES:
    importlib.import_module(library)
cases.make_stacks()
gc.freeze()
gc.enable()
atexit.register(os._exit, 0)  # without the report of a library on what it does not tidy up
