"""Layers of tiny models as they are measured on meshes that are not there."""

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.profile import MeshProfile, Traffic
from pipetransformer.mesh import StageMesh
from pipetransformer.profiling import meshes, timing
from pipetransformer.profiling.meshes import profile_mesh
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.runtime.rng import sample_keys
from support.cases import OPTIMIZERS, SEED, Case
from support.trainings import _read

CPU = torch.device("cpu")


def mesh_profile(case: Case, mesh: StageMesh) -> MeshProfile:
    """Every rank calls it."""
    small, large = (batch_of(case, size * mesh.rows_multiple) for size in (1, 2))
    cluster = Cluster(dist.get_world_size(), None, Link(0.0, inf))
    about = OPTIMIZERS[case.optimizer], CPU, PRECISIONS[case.precision], cluster
    return profile_mesh(case.stack(), case.task.loss, mesh, (small, large), *about)


def exchange_by_a_clock(case: Case, mesh: StageMesh, wait_s: float) -> tuple[float, int]:
    """Returns an exchange by a clock on which ranks wait for each other, and the process groups that are left over."""
    meet, now, num_groups = meshes._meet, [0.0], len(dist.distributed_c10d._world.pg_map)

    def waits(*arguments: Any) -> None:
        meet(*arguments)
        now[0] += wait_s

    def timed(function: Callable[[], object], _: torch.device) -> tuple[float, object]:
        before, result = now[0], function()
        return now[0] - before + 1.0, result

    with mock.patch.object(meshes, "_meet", waits), mock.patch.object(timing, "timed", timed):
        exchange = mesh_profile(case, mesh).exchange
    seconds = 0.0 if exchange is None else exchange.at(2)
    return seconds, len(dist.distributed_c10d._world.pg_map) - num_groups


class Received(NamedTuple):
    """Bytes that a rank receives."""

    forward: float
    backward: float


def received(profile: MeshProfile, num_samples: int) -> Received:
    """Bytes of a step with so many samples of those that each rank computes."""
    layers = profile.layers
    forward = sum(_bytes(layer.forward, num_samples) for layer in layers)
    of_inputs = sum(_bytes(layer.input_grad, num_samples) for layer in layers[1:])
    return Received(forward, of_inputs + sum(_bytes(layer.weight_grad, num_samples) for layer in layers))


def _bytes(traffic: Traffic, num_samples: int) -> float:
    return sum(volume.fixed_bytes + volume.sample_bytes * num_samples for volume in traffic)


def batch_of(case: Case, size: int) -> Batch:
    ids = np.arange(size)
    inputs, context, targets = _read(case.split(), ids, PRECISIONS[case.precision].param_dtype)
    shape: tuple[int, ...] = tuple(case.stack().hidden_shape(inputs))
    own: dict[str, Tensor] = dict(context)
    return Batch(ids, inputs, own, targets, torch.ones(size), sample_keys(SEED, 0, ids), shape, size)
