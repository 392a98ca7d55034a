"""Watches what a rank reads and holds of a model that no rank shall hold whole."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autopipe.plan import Plan
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.lazy_checkpoint import Checkpoint
from pipetransformer.models.stack import Layer
from pipetransformer.profiling.layers import profile
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.runtime.rng import sample_keys
from support.cases import OPTIMIZERS, SEED, Case

CPU = torch.device("cpu")
_read, _fill = Checkpoint.read, Layer.fill


@dataclass
class Started:
    """A rank that went to its first plan.

    Attributes:
        held: The layers that it holds.
        read: The names of the tensors that it read from the file to get there.
        most_bytes_measuring: The most bytes of layers that lived at a time while the layers were measured.
        most_bytes: The same from then on.
    """

    held: list[int] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    most_bytes_measuring: int = 0
    most_bytes: int = 0


def start(case: Case, folder: Path, num_outputs: int, plan: Plan) -> Started:
    """Measures the layers of the encoder in ``folder`` and goes to a plan; every rank calls it."""
    seen, spec, precision = Started(), OPTIMIZERS[case.optimizer], PRECISIONS["float32"]
    stack = HuggingFaceModel(name=str(folder)).build_meta(Head("sequence", num_outputs), (), SEED)
    with _watched(seen):
        profile(stack, case.task.loss, (_batch(1), _batch(2)), spec, CPU, precision)
        seen.most_bytes_measuring, seen.most_bytes = seen.most_bytes, 0
        seen.read.clear()
        with ElasticRuntime(stack, case.task, spec, RankContext.create(CPU, precision, 60)) as runtime:
            runtime.apply_plan(plan)
    seen.held = runtime.resident.held()
    return seen


def _batch(size: int) -> Batch:
    ids = np.arange(size)
    keys = sample_keys(SEED, 0, ids)
    return Batch(ids, torch.ones(size, 4, dtype=torch.int64), {}, torch.zeros(size), torch.ones(size), keys, (), size)


@contextmanager
def _watched(seen: Started) -> Iterator[None]:
    living: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def read(self: Checkpoint, keys: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
        seen.read |= keys.keys()
        return _read(self, keys)

    def fill(self: Layer, values: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
        _fill(self, values, device)
        for _, tensor in self.tensors():
            living.add(tensor)
        seen.most_bytes = max(seen.most_bytes, sum(t.nbytes for t in living if not t.is_meta))

    with mock.patch.object(Checkpoint, "read", read), mock.patch.object(Layer, "fill", fill):
        yield
